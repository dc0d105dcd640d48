// dequantise_rows and pack_rows: rows of a GGUF file, in the file's own blocks, as floats or as kernels multiply by
// them. Called by several threads at once, each with rows of its own, so they start none.
#include "file_blocks.h"

#include "blocks.h"
#include "rows.h"

namespace piecework {
namespace {

// A product has few enough bits to be exact, so an FMA gives what the formula's two operations give.
template <typename T>
void four_bits(const uint8_t* q, float scale, int offset, float minimum, T* out) {
  for (int i = 0; i < 16; ++i) out[i] = from_float<T>(float((q[i] & 15) + offset) * scale + minimum);
  for (int i = 0; i < 16; ++i) out[16 + i] = from_float<T>(float((q[i] >> 4) + offset) * scale + minimum);
}

template <typename T>
void block_of(const uint8_t* block, int64_t kind, T* out) {
  const float scale = half_at(block, 0);
  if (kind == FILE_Q4_1) return four_bits(block + 4, scale, 0, half_at(block, 1), out);
  // Adding -0 changes nothing, where 0 would turn a -0 into 0.
  if (kind == FILE_Q4_0) return four_bits(block + 2, scale, -8, -0.0f, out);
  const int8_t* q = reinterpret_cast<const int8_t*>(block + 2);
  for (int i = 0; i < BLOCK; ++i) out[i] = from_float<T>(float(q[i]) * scale);
}

// The scales of 8 rows, their minimums where there are some, then four channels of each row after the other.
void pack_block(const uint8_t* block, int64_t kind, int64_t lane, uint8_t* packed) {
  const int64_t head = kind == FILE_Q4_1 ? 4 : 2;
  for (int64_t i = 0; i < head; i += 2) std::memcpy(packed + GROUP * i + 2 * lane, block + i, 2);
  for (int64_t i = head; i < kind; i += 4) std::memcpy(packed + GROUP * i + 4 * lane, block + i, 4);
}

// Where a row goes: row 2 i + half of a head is row i of that half. See `restore_halves` in dequantise.py.
int64_t place_of(int64_t row, int64_t head_dim) {
  if (!head_dim) return row;
  const int64_t within = row % head_dim;
  return row - within + within % 2 * (head_dim / 2) + within / 2;
}

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_dequantise_rows(const DequantiseCall* call) {
  with_type(call->type, [c = *call](auto t) {
    using T = decltype(t);
    const int64_t blocks = c.width / BLOCK;
    for (int64_t r = 0; r < c.rows; ++r) {
      const uint8_t* from = c.from + r * blocks * c.kind;
      T* to = static_cast<T*>(c.out) + place_of(r, c.head_dim) * c.width;
      for (int64_t b = 0; b < blocks; ++b) block_of(from + b * c.kind, c.kind, to + b * BLOCK);
    }
  });
}

void piecework_pack_rows(const PackCall* call) {
  const PackCall c = *call;
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t place = c.first + place_of(r, c.head_dim);
    const uint8_t* from = c.from + r * c.blocks * c.kind;
    uint8_t* to = c.packed + place / GROUP * c.blocks * GROUP * c.kind;
    for (int64_t b = 0; b < c.blocks; ++b)
      pack_block(from + b * c.kind, c.kind, place % GROUP, to + b * GROUP * c.kind);
  }
}

}  // extern "C"
