// Attention over a paged KV cache: what a call has, and the part of it that one thread does at a time.
#pragma once

#include <cstdint>

namespace piecework {

// As the op `paged_attention` of piecework/ops/attention.py. Strides are in elements; each row of q, k, v
// and out has its heads one after the other. The cache has the type of q, or is int8; then it has scales,
// [pages][kv_heads][page_size] of bfloat16. All fields are 8 bytes, so that there are no gaps.
struct AttentionCall {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* k_cache;
  void* v_cache;
  void* k_scales;
  void* v_scales;
  const int32_t* slots;
  const int32_t* page_table;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  int64_t q_stride, k_stride, v_stride, out_stride;
  int64_t rows, sequences, table_stride;
  int64_t heads, kv_heads, head_dim, page_size;
  int64_t window, type, cache_type;
  double scale;
};

// Some query rows of a sequence (tokens [first, first + tokens) of its `queries`, all heads of the group of the cache's
// head kv_head) against its keys [begin, end). With `partial`, the result is not finished: see attend_tile.
struct AttentionTile {
  int32_t sequence, kv_head, first, tokens, begin, end;
  int64_t partial;
};

}  // namespace piecework
