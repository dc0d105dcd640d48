"""`attention` and `paged_attention` on the CPU."""

from piecework.ops.attention import attention, paged_attention
from piecework.ops.sdpa import attention_sdpa, paged_attention_sdpa

attention.implement("cpu")(attention_sdpa)
paged_attention.implement("cpu")(paged_attention_sdpa)
