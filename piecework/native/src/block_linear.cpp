// linear_blocks: weights in blocks of 32 channels and 8 rows against activations that are quantised here.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "block_dot.h"

namespace piecework {

namespace {

constexpr int ROWS = 4;             // of x at a time
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

// y [ROWS_][8] of one group of weights.
template <int64_t KIND, int ROWS_>
void group_rows(const uint8_t* w, int64_t blocks, const int8_t* x, const float* scales, const float* sums,
                float* y) {
  Lanes total[ROWS_];
  for (int m = 0; m < ROWS_; ++m) total[m] = no_lanes();
  for (int64_t b = 0; b < blocks; ++b, w += KIND) {
    __builtin_prefetch(w + 4 * KIND);
    __builtin_prefetch(w + 4 * KIND + 64);
    if (KIND >= 160) __builtin_prefetch(w + 4 * KIND + 128);
    if (KIND == Q8_0) __builtin_prefetch(w + 4 * KIND + 192);
    const Lanes scale = lanes_of(w);
    Integers products[ROWS_];
    if constexpr (KIND == Q8_0)
      products_8bit<ROWS_>(w + 16, x + b * BLOCK, blocks * BLOCK, products);
    else
      products_4bit<ROWS_>(w + (KIND == Q4_1 ? 32 : 16), x + b * BLOCK, blocks * BLOCK, products);
    for (int m = 0; m < ROWS_; ++m) {
      total[m] = add_product(total[m], to_lanes(products[m]), times(scale, scales[m * blocks + b]));
      if constexpr (KIND == Q4_1)
        total[m] = add_product(total[m], lanes_of(w + 16), all_lanes(sums[m * blocks + b]));
      if constexpr (KIND == Q4_0)
        total[m] = add_product(total[m], scale, all_lanes(-8 * sums[m * blocks + b]));
    }
  }
  for (int m = 0; m < ROWS_; ++m) store_lanes(y + m * GROUP, total[m]);
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

template <typename T, int64_t KIND>
void run_kind(const BlockLinearCall& call, const Quantised& x) {
  const int64_t blocks = call.inputs / BLOCK, groups = (call.outputs + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(dynamic, 4) if (call.rows * call.outputs * call.inputs > SMALL)
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = call.packed + g * blocks * KIND;
    float y[ROWS * GROUP];
    for (int64_t m = 0; m < call.rows; m += ROWS) {
      const int8_t* values = &x.values[m * call.inputs];
      const float *scales = &x.scales[m * blocks], *sums = &x.sums[m * blocks];
      const int rows = int(std::min<int64_t>(ROWS, call.rows - m));
      switch (rows) {
        case 1: group_rows<KIND, 1>(w, blocks, values, scales, sums, y); break;
        case 2: group_rows<KIND, 2>(w, blocks, values, scales, sums, y); break;
        case 3: group_rows<KIND, 3>(w, blocks, values, scales, sums, y); break;
        default: group_rows<KIND, ROWS>(w, blocks, values, scales, sums, y);
      }
      finish<T>(call, y, m, rows, g * GROUP);
    }
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
