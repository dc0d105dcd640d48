// embedding: rows of a table of any float type, of int8 with scales or of weights in blocks, by token id.
// An id that the table doesn't have, which is an error of the caller, gives NaN and reads nothing.
#include <cstring>

#include "blocks.h"
#include "embedding.h"
#include "rows.h"
#include "vector.h"

namespace piecework {
namespace {

// Row r of a block of 8 rows.
template <typename K, typename T>
void block_row(K, const uint8_t* block, int r, T* out) {
  constexpr Layout layout = K::layout;
  const float d = half_at(block, r), m = layout.minimum ? half_at(block, GROUP + r) : 0;
  for (int p = 0; p < layout.parts; ++p) {
    const uint8_t* part = block + layout.head() + p * layout.part();
    for (int i = 0; i < BLOCK; ++i) {
      float scale = d, minimum = m;
      if (layout.bits == 6)
        scale *= int8_t(part[2 * r + i / 16]);
      else if (layout.small())
        scale *= part[r], minimum *= -float(part[GROUP + r]);
      if (layout.zero) minimum = scale * -layout.zero;
      *out++ = from_float<T>(weight_at<layout.bits>(part + layout.small(), r, i) * scale + minimum);
    }
  }
}

// A row of weights that are laid out in panels, in the calling thread's memory.
const int8_t* laid_row(const int8_t* weight, int64_t row, int64_t inputs) {
  constexpr int64_t ROWS = 16, WORD = 4;
  const int64_t channels = (inputs + ROWS * WORD - 1) / (ROWS * WORD) * (ROWS * WORD);
  const int8_t* from = weight + row / ROWS * ROWS * channels + row % ROWS * WORD;
  int8_t* to = thread_memory<int8_t, ROW>(channels);
  for (int64_t k = 0; k < channels; ++k) to[k] = int8_t(from[k / WORD * ROWS * WORD + k % WORD] - 128);
  return to;
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
      const int64_t id = c.ids[r];
      T* to = (T*)c.out + r * c.inputs;
      if (id < 0 || id >= c.groups * GROUP) {
        std::memset((void*)to, 0xff, size_t(c.inputs) * sizeof(T));
        return;
      }
      with_kind(c.kind, [&](auto kind) {
        const int channels = kind.layout.channels();
        const uint8_t* block = c.packed + id / GROUP * (c.inputs / channels) * c.kind;
        for (int64_t k = 0; k < c.inputs; k += channels, block += c.kind) block_row(kind, block, int(id % GROUP), to + k);
      });
    });
  });
}

void piecework_embedding_int8(const Int8EmbeddingCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->rows, call->inputs, [c = *call](int64_t r) {
      const int64_t id = c.ids[r];
      T* to = (T*)c.out + r * c.inputs;
      if (id < 0 || id >= c.vocabulary) {
        std::memset((void*)to, 0xff, size_t(c.inputs) * sizeof(T));
        return;
      }
      const int8_t* row = c.laid ? laid_row(c.weight, id, c.inputs) : c.weight + id * c.inputs;
      const floats by = splat(c.scale[id]);
      each(c.inputs, [&](int64_t i, auto lanes) { store(to + i, load(row + i, lanes) * by, lanes); });
    });
  });
}

}  // extern "C"
