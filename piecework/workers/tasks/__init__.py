"""Tasks on workers: a graph of calls and copies, ordered by the bytes that they touch."""
