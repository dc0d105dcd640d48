"""`paged_attention` on the simulated accelerator, where each row is written where its slot says."""

from __future__ import annotations

from torch import Tensor

from piecework.ops.attention import paged_attention, paged_attention_fake, write_cache
from piecework.ops.sdpa import paged_attention_sdpa
from piecework.ops.sim.kernel import kernel


def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    max_query_length: int,
    scale: float,
    window: int,
) -> None:
    """Padded rows have slots too, which therefore must be those of the dummy page."""
    rows = slots.shape[0]
    write_cache(k_cache, k[:rows], slots)
    write_cache(v_cache, v[:rows], slots)
    live = int((query_starts[1:] > query_starts[:-1]).sum())
    if live == 0:
        out.zero_()
        return
    starts, lengths, table = query_starts[: live + 1], context_lengths[:live], page_table[:live]
    paged_attention_sdpa(
        q, k, v, out, k_cache, v_cache, slots, table, starts, lengths, max_query_length, scale, window
    )


kernel(paged_attention, _paged_attention, paged_attention_fake)
