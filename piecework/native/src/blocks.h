// How blocks of weights lie in memory: see piecework/ops/block_kinds.py.
#pragma once

#include <cstring>

#include "types.h"

namespace piecework {

// The kinds, by the bytes of a block of 8 rows.
enum Blocks : int64_t {
  Q4_0 = 144,
  Q4_1 = 160,
  Q5_0 = 176,
  Q5_1 = 192,
  Q8_0 = 272,
  Q4_K = 1184,
  Q5_K = 1440,
  Q6_K = 1680,
};

// All fields are 8 bytes, so that there are no gaps.
struct BlockLinearCall {
  const void* x;          // [rows][x_stride]
  const uint8_t* packed;  // [groups][blocks][kind]
  const void* bias;       // or null
  void* out;              // [rows][out_stride], of which `outputs` are written
  int64_t x_stride, out_stride, rows, outputs, inputs;
  int64_t kind;  // Blocks
  int64_t type;  // of x, bias and out
};

constexpr int BLOCK = 32;  // channels of x that share a scale
constexpr int GROUP = 8;   // rows

struct Layout {
  int bits, zero;  // of a weight; the one that stands for 0
  bool minimum;    // whether there are minimums
  int parts;       // times BLOCK channels

  constexpr int channels() const { return parts * BLOCK; }
  constexpr int64_t head() const { return minimum ? 4 * GROUP : 2 * GROUP; }
  constexpr int64_t small() const { return parts > 1 ? 2 * GROUP : 0; }
  constexpr int64_t part() const { return small() + BLOCK * bits; }
  constexpr int64_t bytes() const { return head() + parts * part(); }
};

constexpr Layout layout_of(int64_t kind) {
  switch (kind) {
    case Q4_0: return {4, 8, false, 1};
    case Q4_1: return {4, 0, true, 1};
    case Q5_0: return {5, 16, false, 1};
    case Q5_1: return {5, 0, true, 1};
    case Q4_K: return {4, 0, true, 8};
    case Q5_K: return {5, 0, true, 8};
    case Q6_K: return {6, 32, false, 8};
    default: return {8, 0, false, 1};
  }
}

template <int64_t KIND>
struct Kind {
  static constexpr Layout layout = layout_of(KIND);
  static_assert(layout.bytes() == KIND, "a kind is named by its bytes");
};

// f(Kind<...>) for the kind of a call.
template <typename F>
void with_kind(int64_t kind, F f) {
  switch (kind) {
    case Q4_0: return f(Kind<Q4_0>());
    case Q4_1: return f(Kind<Q4_1>());
    case Q5_0: return f(Kind<Q5_0>());
    case Q5_1: return f(Kind<Q5_1>());
    case Q4_K: return f(Kind<Q4_K>());
    case Q5_K: return f(Kind<Q5_K>());
    case Q6_K: return f(Kind<Q6_K>());
    default: return f(Kind<Q8_0>());
  }
}

inline float half_at(const uint8_t* from, int i) {
  f16 x;
  std::memcpy(&x, from + 2 * i, sizeof x);
  return to_float(x);
}

// Channel `channel` of row `row` of the weights of BLOCK channels.
template <int BITS>
int weight_at(const uint8_t* w, int row, int channel) {
  const int k = channel / 4, at = 4 * row + channel % 4;
  if (BITS == 8) return int8_t(w[32 * k + at]);
  const int low = w[32 * (k % 4) + at] >> (k < 4 ? 0 : 4) & 15;
  if (BITS == 5) return low | (w[128 + at] >> k & 1) << 4;
  if (BITS == 6) return low | (w[128 + 32 * (k / 4) + at] >> 2 * (k % 4) & 3) << 4;
  return low;
}

}  // namespace piecework
