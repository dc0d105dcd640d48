// linear_blocks: weights in blocks of 32 channels and 8 rows against activations that are quantised here.
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

// Rows of x as int8, and for each block of 32 channels its scale and its scaled sum.
struct Quantised {
  std::vector<int8_t> values;
  std::vector<float> scales, sums;
};

template <typename T>
void quantise_row(const T* x, int64_t blocks, int8_t* values, float* scales, float* sums) {
  for (int64_t b = 0; b < blocks; ++b) {
    const T* from = x + b * BLOCK;
    int8_t* to = values + b * BLOCK;
    ints size = size_bits(load(from));  // NaN is larger than any number and so stays
    for (int i = LANES; i < BLOCK; i += LANES) size = largest(size, size_bits(load(from + i)));
    const float most = bits_to_float(uint32_t(largest(size)));
    const float reciprocal = most == 0 ? 0 : 127 / most;
    int32_t sum = 0;
    for (int i = 0; i < BLOCK; i += LANES) store(to + i, load(from + i) * reciprocal);
    for (int i = 0; i < BLOCK; ++i) sum += to[i];
    scales[b] = most / 127;
    sums[b] = float(sum) * scales[b];
  }
}

// y [STREAMS][ROWS_][8] of groups of weights that lie `apart` bytes from one another: a processor fetches a few
// streams of memory faster than one.
template <int64_t KIND, int ROWS_, int STREAMS>
void group_rows(const uint8_t* w, int64_t apart, int64_t blocks, const int8_t* x, const float* scales,
                const float* sums, float* y) {
  Lanes total[STREAMS][ROWS_];
  for (int s = 0; s < STREAMS; ++s)
    for (int m = 0; m < ROWS_; ++m) total[s][m] = no_lanes();
  for (int64_t b = 0; b < blocks; ++b, w += KIND)
    for (int s = 0; s < STREAMS; ++s) {
      const uint8_t* block = w + s * apart;
      const Lanes scale = lanes_of(block);
      Integers products[ROWS_];
      if constexpr (KIND == Q8_0)
        products_8bit<ROWS_>(block + 16, x + b * BLOCK, blocks * BLOCK, products);
      else
        products_4bit<ROWS_>(block + (KIND == Q4_1 ? 32 : 16), x + b * BLOCK, blocks * BLOCK, products);
      for (int m = 0; m < ROWS_; ++m) {
        Lanes& sum = total[s][m];
        sum = add_product(sum, to_lanes(products[m]), times(scale, scales[m * blocks + b]));
        if constexpr (KIND == Q4_1) sum = add_product(sum, lanes_of(block + 16), all_lanes(sums[m * blocks + b]));
        if constexpr (KIND == Q4_0) sum = add_product(sum, scale, all_lanes(-8 * sums[m * blocks + b]));
      }
    }
  for (int s = 0; s < STREAMS; ++s)
    for (int m = 0; m < ROWS_; ++m) store_lanes(y + (s * ROWS + m) * GROUP, total[s][m]);
}

template <typename T>
void finish(const BlockLinearCall& call, const float* y, int64_t row, int rows, int64_t column) {
  const int columns = int(std::min<int64_t>(GROUP, call.outputs - column));
  const T* bias = static_cast<const T*>(call.bias);
  for (int m = 0; m < rows; ++m) {
    T* out = static_cast<T*>(call.out) + (row + m) * call.outputs + column;
    for (int n = 0; n < columns; ++n)
      out[n] = from_float<T>(y[m * GROUP + n] + (bias ? to_float(bias[column + n]) : 0));
  }
}

// Groups `first`, `first` + apart, ... for up to ROWS rows of x from `m` on.
template <typename T, int64_t KIND, int STREAMS>
void some_groups(const BlockLinearCall& call, const Quantised& x, int64_t m, int64_t first, int64_t apart) {
  const int64_t blocks = call.inputs / BLOCK;
  const uint8_t* w = call.packed + first * blocks * KIND;
  const int64_t bytes = apart * blocks * KIND;
  const int8_t* values = &x.values[m * call.inputs];
  const float *scales = &x.scales[m * blocks], *sums = &x.sums[m * blocks];
  const int rows = int(std::min<int64_t>(ROWS, call.rows - m));
  float y[STREAMS * ROWS * GROUP];
  switch (rows) {
    case 1: group_rows<KIND, 1, STREAMS>(w, bytes, blocks, values, scales, sums, y); break;
    case 2: group_rows<KIND, 2, STREAMS>(w, bytes, blocks, values, scales, sums, y); break;
    case 3: group_rows<KIND, 3, STREAMS>(w, bytes, blocks, values, scales, sums, y); break;
    default: group_rows<KIND, ROWS, STREAMS>(w, bytes, blocks, values, scales, sums, y);
  }
  for (int s = 0; s < STREAMS; ++s) finish<T>(call, y + s * ROWS * GROUP, m, rows, (first + s * apart) * GROUP);
}

template <typename T, int64_t KIND>
void run_kind(const BlockLinearCall& call, const Quantised& x) {
  const int64_t groups = (call.outputs + GROUP - 1) / GROUP, tiles = (groups + TILE - 1) / TILE;
#pragma omp parallel for schedule(dynamic, 1) if (call.rows * call.outputs * call.inputs > SMALL)
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t from = t * TILE, to = std::min(groups, from + TILE);
    const int64_t apart = (to - from) / STREAMS;
    for (int64_t g = from; g < from + apart; ++g)
      for (int64_t m = 0; m < call.rows; m += ROWS) some_groups<T, KIND, STREAMS>(call, x, m, g, apart);
    for (int64_t g = from + apart * STREAMS; g < to; ++g)
      for (int64_t m = 0; m < call.rows; m += ROWS) some_groups<T, KIND, 1>(call, x, m, g, 0);
  }
}

template <typename T>
void run(const BlockLinearCall& call) {
  thread_local Quantised quantised_of_caller;
  Quantised& x = quantised_of_caller;
  const int64_t blocks = call.inputs / BLOCK;
  if (x.values.size() < size_t(call.rows * call.inputs)) x.values.resize(call.rows * call.inputs);
  if (x.scales.size() < size_t(call.rows * blocks)) {
    x.scales.resize(call.rows * blocks);
    x.sums.resize(call.rows * blocks);
  }
#pragma omp parallel for schedule(static) if (call.rows * call.inputs > SMALL / 4)
  for (int64_t m = 0; m < call.rows; ++m)
    quantise_row(static_cast<const T*>(call.x) + m * call.x_stride, blocks, &x.values[m * call.inputs],
                 &x.scales[m * blocks], &x.sums[m * blocks]);
  if (call.kind == Q4_0)
    run_kind<T, Q4_0>(call, x);
  else if (call.kind == Q4_1)
    run_kind<T, Q4_1>(call, x);
  else
    run_kind<T, Q8_0>(call, x);
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
