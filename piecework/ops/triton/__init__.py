"""Implementations in Triton, for CUDA. Importing this registers them; the first call imports triton."""

from piecework.ops.triton import attention as attention
from piecework.ops.triton import elementwise as elementwise
from piecework.ops.triton import heads as heads
from piecework.ops.triton import linear as linear
from piecework.ops.triton import norm as norm
