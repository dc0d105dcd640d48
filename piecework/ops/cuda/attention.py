"""`attention` and `paged_attention` on CUDA, in torch.

Decode never waits for the device and has shapes that don't depend on lengths, so that a graph can hold it:
every row reads all pages that its row of the page table has room for, and the mask leaves out what lies
behind its length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.ops.attention import attention, paged_attention, write_cache
from piecework.ops.sdpa import attention_sdpa, paged_attention_sdpa

attention.implement("cuda")(attention_sdpa)


@paged_attention.implement("cuda")
def paged_attention_static(
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
    """Write the step's keys and values, then attend; see the reference for the shapes.

    Where every sequence has one row, sequence b has row b, and a sequence of length 0 is padding.
    """
    if max_query_length > 1:
        paged_attention_sdpa(
            q,
            k,
            v,
            out,
            k_cache,
            v_cache,
            slots,
            page_table,
            query_starts,
            context_lengths,
            max_query_length,
            scale,
            window,
        )
        return
    batch, pages = page_table.shape
    heads, dim = q.shape[1:]
    kv_heads, page_size = k_cache.shape[1:3]
    write_cache(k_cache, k[:batch], slots[:batch])
    write_cache(v_cache, v[:batch], slots[:batch])
    lengths = context_lengths.unsqueeze(1)
    key = torch.arange(pages * page_size, device=q.device)
    seen = key < lengths
    if window > 0:
        seen &= key >= lengths - window
    live = (lengths > 0).view(batch, 1, 1)

    def gather(cache: Tensor) -> Tensor:
        rows = cache.index_select(0, page_table.flatten()).view(batch, pages, kv_heads, page_size, dim)
        return rows.transpose(1, 2).reshape(batch, kv_heads, pages * page_size, dim)

    # A row that sees no key would give NaN; let it see one, and drop what it gives.
    mask = seen | ~live.squeeze(-1)
    grouped = q[:batch].reshape(batch, kv_heads, heads // kv_heads, dim)
    found = F.scaled_dot_product_attention(
        grouped, gather(k_cache), gather(v_cache), attn_mask=mask[:, None, None], scale=scale
    )
    out[:batch] = torch.where(live, found.reshape(batch, heads, dim), 0)
    out[batch:] = 0
