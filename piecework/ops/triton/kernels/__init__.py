"""Triton kernels. Importing a module of this folder imports triton, so only a call that runs one does."""
