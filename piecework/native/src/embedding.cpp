// embedding: rows of a table of any float type or of weights in blocks, by token id.
// An id that the table doesn't have, which is an error of the caller, gives NaN and reads nothing.
#include <cstring>

#include "block_dot.h"
#include "embedding.h"
#include "rows.h"

namespace piecework {
namespace {

// Row r of a block of 8 rows: see piecework/ops/block_linear.py.
template <typename T>
void block_row(const uint8_t* block, int64_t kind, int64_t r, T* out) {
  const float scale = half_at(block, int(r));
  const float minimum = kind == Q4_1 ? half_at(block, int(GROUP + r)) : kind == Q4_0 ? -8 * scale : 0;
  const uint8_t* w = block + (kind == Q4_1 ? 32 : 16) + 4 * r;
  for (int i = 0; i < BLOCK; ++i) {
    float q;
    if (kind == Q8_0)
      q = float(int8_t(w[i / 4 * 32 + i % 4]));
    else
      q = float(w[i % 16 / 4 * 32 + i % 4] >> (i < 16 ? 0 : 4) & 15);
    out[i] = from_float<T>(q * scale + minimum);
  }
}

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_embedding(const EmbeddingCall* call) {
  for_rows(call->rows, call->width / 4, [c = *call](int64_t r) {
    const int64_t id = c.ids[r];
    char* to = (char*)c.out + r * c.width;
    if (id >= 0 && id < c.vocabulary)
      std::memcpy(to, (const char*)c.weight + id * c.weight_stride, size_t(c.width));
    else
      std::memset(to, 0xff, size_t(c.width));  // NaN in every float type
  });
}

void piecework_embedding_blocks(const BlockEmbeddingCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->rows, 4 * call->inputs, [c = *call](int64_t r) {
      const int64_t id = c.ids[r], blocks = c.inputs / BLOCK;
      T* to = (T*)c.out + r * c.inputs;
      if (id < 0 || id >= c.groups * GROUP) {
        std::memset((void*)to, 0xff, size_t(c.inputs) * sizeof(T));
        return;
      }
      const uint8_t* group = c.packed + id / GROUP * blocks * c.kind;
      for (int64_t b = 0; b < blocks; ++b) block_row(group + b * c.kind, c.kind, id % GROUP, to + b * BLOCK);
    });
  });
}

}  // extern "C"
