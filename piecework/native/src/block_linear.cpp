// linear_blocks: weights in blocks of 8 rows against activations that are quantised here.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "block_dot.h"

namespace piecework {

namespace {

constexpr int ROWS = 4;             // of x at a time
constexpr int64_t TILE = 16;        // groups of weights that a thread takes
constexpr int STREAMS = 4;          // of them that are read at once
constexpr int64_t SMALL = 1 << 16;  // products, below which other threads aren't woken

// Rows of x as int8, and for each block of 32 channels its scale, its scaled sum, and the sums of both of its
// halves, 16 bits each.
struct Quantised {
  const int8_t* values;
  const float *scales, *sums;
  const int32_t* halves;
  int64_t inputs, blocks;
};

template <typename T>
void quantise_row(const T* x, int64_t blocks, int8_t* values, float* scales, float* sums, int32_t* halves) {
  for (int64_t b = 0; b < blocks; ++b) {
    const T* from = x + b * BLOCK;
    int8_t* to = values + b * BLOCK;
    ints size = size_bits(load(from));  // NaN is larger than any number and so stays
    for (int i = LANES; i < BLOCK; i += LANES) size = largest(size, size_bits(load(from + i)));
    const float most = bits_to_float(uint32_t(largest(size)));
    const float reciprocal = most == 0 ? 0 : 127 / most;
    for (int i = 0; i < BLOCK; i += LANES) store(to + i, load(from + i) * reciprocal);
    int32_t first = 0, last = 0;
    for (int i = 0; i < BLOCK / 2; ++i) first += to[i], last += to[BLOCK / 2 + i];
    scales[b] = most / 127;
    sums[b] = float(first + last) * scales[b];
    halves[b] = int32_t(uint32_t(last) << 16 | uint16_t(first));
  }
}

// y [STREAMS][ROWS_][8] of groups of weights that lie `apart` bytes from one another, for rows of x from m on: a
// processor fetches a few streams of memory faster than one. Not inlined, so that it is compiled once for all types.
template <typename K, int ROWS_, int STREAMS>
__attribute__((noinline)) void group_rows(K, const uint8_t* w, int64_t apart, const Quantised& x, int64_t m0, float* y) {
  constexpr Layout layout = K::layout;
  const int64_t blocks = x.blocks;
  const int8_t* values = x.values + m0 * x.inputs;
  const float *scales = x.scales + m0 * blocks, *sums = x.sums + m0 * blocks;
  const int32_t* halves = x.halves + m0 * blocks;
  Lanes total[STREAMS][ROWS_];
  for (int s = 0; s < STREAMS; ++s)
    for (int m = 0; m < ROWS_; ++m) total[s][m] = no_lanes();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int s = 0; s < STREAMS; ++s) {
      const uint8_t* block = w + s * apart;
      const uint8_t* part = block + layout.head() + b % layout.parts * layout.part();
      Lanes scale = lanes_of(block);
      Integers products[ROWS_];
      if constexpr (layout.bits == 8)
        products_8bit<ROWS_>(part, values + b * BLOCK, x.inputs, products);
      else if constexpr (layout.bits == 6)
        products_scaled<ROWS_>(part, values + b * BLOCK, x.inputs, halves + b, blocks, products);
      else
        products_small<layout.bits, ROWS_>(part + layout.small(), values + b * BLOCK, x.inputs, products);
      Lanes minimum = scale;
      if constexpr (layout.minimum) minimum = lanes_of(block + 2 * GROUP);
      if constexpr (layout.minimum && layout.parts > 1) {
        scale = times(scale, bytes_of(part));
        minimum = times(minimum, bytes_of(part + GROUP));
      }
      // Minimums are subtracted in the K kinds; the weights of 6 bits have their 32 taken off before.
      constexpr int times_sum = !layout.minimum ? (layout.bits == 6 ? 0 : -layout.zero) : layout.parts > 1 ? -1 : 1;
      for (int m = 0; m < ROWS_; ++m) {
        Lanes& sum = total[s][m];
        sum = add_product(sum, to_lanes(products[m]), times(scale, scales[m * blocks + b]));
        if constexpr (times_sum != 0) sum = add_product(sum, minimum, all_lanes(times_sum * sums[m * blocks + b]));
      }
    }
    if ((b + 1) % layout.parts == 0) w += layout.bytes();
  }
  for (int s = 0; s < STREAMS; ++s)
    for (int m = 0; m < ROWS_; ++m) store_lanes(y + (s * ROWS + m) * GROUP, total[s][m]);
}

template <typename T>
void finish(const BlockLinearCall& call, const float* y, int64_t row, int rows, int64_t column) {
  const int columns = int(std::min<int64_t>(GROUP, call.outputs - column));
  const T* bias = static_cast<const T*>(call.bias);
  for (int m = 0; m < rows; ++m) {
    T* out = static_cast<T*>(call.out) + (row + m) * call.out_stride + column;
    for (int n = 0; n < columns; ++n)
      out[n] = from_float<T>(y[m * GROUP + n] + (bias ? to_float(bias[column + n]) : 0));
  }
}

// Groups `first`, `first` + apart, ... for up to ROWS rows of x from `m` on.
template <typename T, int STREAMS, typename K>
void some_groups(K kind, const BlockLinearCall& call, const Quantised& x, int64_t m, int64_t first, int64_t apart) {
  const int64_t row_bytes = x.blocks / K::layout.parts * K::layout.bytes();
  const uint8_t* w = call.packed + first * row_bytes;
  const int64_t bytes = apart * row_bytes;
  const int rows = int(std::min<int64_t>(ROWS, call.rows - m));
  float y[STREAMS * ROWS * GROUP];
  switch (rows) {
    case 1: group_rows<K, 1, STREAMS>(kind, w, bytes, x, m, y); break;
    case 2: group_rows<K, 2, STREAMS>(kind, w, bytes, x, m, y); break;
    case 3: group_rows<K, 3, STREAMS>(kind, w, bytes, x, m, y); break;
    default: group_rows<K, ROWS, STREAMS>(kind, w, bytes, x, m, y);
  }
  for (int s = 0; s < STREAMS; ++s) finish<T>(call, y + s * ROWS * GROUP, m, rows, (first + s * apart) * GROUP);
}

template <typename T, typename K>
void run_kind(K kind, const BlockLinearCall& call, const Quantised& x) {
  const int64_t groups = (call.outputs + GROUP - 1) / GROUP, tiles = (groups + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic, 1) if (call.rows * call.outputs * call.inputs > SMALL)
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t from = t * TILE, to = std::min(groups, from + TILE);
    const int64_t apart = (to - from) / STREAMS;
    for (int64_t g = from; g < from + apart; ++g)
      for (int64_t m = 0; m < call.rows; m += ROWS) some_groups<T, STREAMS>(kind, call, x, m, g, apart);
    for (int64_t g = from + apart * STREAMS; g < to; ++g)
      for (int64_t m = 0; m < call.rows; m += ROWS) some_groups<T, 1>(kind, call, x, m, g, 0);
  }
}

template <typename T>
void run(const BlockLinearCall& call) {
  thread_local std::vector<int8_t> values_of_caller;
  thread_local std::vector<float> scales_of_caller;
  thread_local std::vector<int32_t> halves_of_caller;
  const int64_t blocks = call.inputs / BLOCK, all = call.rows * blocks;
  if (values_of_caller.size() < size_t(all * BLOCK)) values_of_caller.resize(all * BLOCK);
  if (halves_of_caller.size() < size_t(all)) halves_of_caller.resize(all), scales_of_caller.resize(2 * all);
  int8_t* values = values_of_caller.data();
  float *scales = scales_of_caller.data(), *sums = scales + all;
  int32_t* halves = halves_of_caller.data();
#pragma omp parallel for schedule(static) if (call.rows * call.inputs > SMALL / 4)
  for (int64_t m = 0; m < call.rows; ++m) {
    const int64_t b = m * blocks;
    quantise_row(static_cast<const T*>(call.x) + m * call.x_stride, blocks, values + b * BLOCK, scales + b, sums + b,
                 halves + b);
  }
  const Quantised x{values, scales, sums, halves, call.inputs, blocks};
  with_kind(call.kind, [&](auto kind) { run_kind<T>(kind, call, x); });
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_linear_blocks(const piecework::BlockLinearCall* call) {
  using namespace piecework;
  if (call->type == BFLOAT16)
    run<bf16>(*call);
  else if (call->type == FLOAT16)
    run<f16>(*call);
  else
    run<float>(*call);
}
