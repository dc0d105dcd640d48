// linear: y = x w^T + bias with w [outputs][inputs] as a checkpoint has it, in float32 or half of it.
#include "linear.h"

#include <omp.h>

#include <type_traits>
#include <vector>

namespace piecework {

namespace {

constexpr int ROWS = 48;          // of x in a tile: they and the tile's columns share a core's second cache
constexpr int COLUMNS = 64;       // of a tile at most
constexpr int COLUMNS_OF_MANY = 32;  // of a tile where there are more than FEW_ROWS
constexpr int FEW_ROWS = 16;      // up to so many, tiles are large, and 16-bit weights widened in registers
constexpr int64_t SMALL = 1 << 15;  // products, below which other threads aren't woken

template <typename T>
void grow(std::vector<T>& v, size_t size) {
  if (v.size() < size) v.resize(size);
}

template <typename T>
void widen(const T* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, load(from + i));
  for (; i < size; ++i) to[i] = to_float(from[i]);
}

template <typename T>
void finish(const LinearCall& call, const float* y, int64_t row, int rows, int64_t column, int columns) {
  const T* bias = static_cast<const T*>(call.bias);
  for (int m = 0; m < rows; ++m) {
    T* out = static_cast<T*>(call.out) + (row + m) * call.outputs + column;
    for (int n = 0; n < columns; ++n)
      out[n] = from_float<T>(y[m * COLUMNS + n] + (bias ? to_float(bias[column + n]) : 0));
  }
}

// Columns [column, column + columns) of all rows.
template <typename P, typename T, typename W>
void columns_of(const LinearCall& call, const typename P::X* x, int64_t x_stride, const W* w, int64_t w_stride,
                int64_t column, int columns) {
  float y[ROWS * COLUMNS];
  for (int64_t row = 0; row < call.rows; row += ROWS) {
    const int rows = int(std::min<int64_t>(ROWS, call.rows - row));
    dot_tile<P>(x + row * x_stride, x_stride, rows, w, w_stride, columns, int(call.inputs), y, COLUMNS);
    finish<T>(call, y, row, rows, column, columns);
  }
}

// f(first, columns) for all columns, by all threads.
template <typename F>
void over_columns(const LinearCall& call, F f) {
  const int64_t columns = call.rows <= FEW_ROWS ? COLUMNS : COLUMNS_OF_MANY;
  const int64_t tiles = (call.outputs + columns - 1) / columns;
#pragma omp parallel for schedule(dynamic, 1) if (call.rows * call.outputs * call.inputs > SMALL)
  for (int64_t i = 0; i < tiles; ++i)
    f(i * columns, int(std::min(columns, call.outputs - i * columns)));
}

template <typename T>
void run(const LinearCall& call) {
  const T* x = static_cast<const T*>(call.x);
  const T* w = static_cast<const T*>(call.weight);
  if constexpr (std::is_same_v<T, float>) {
    over_columns(call, [&](int64_t n, int columns) {
      columns_of<Widened<float>, float>(call, x, call.x_stride, w + n * call.weight_stride, call.weight_stride, n,
                                        columns);
    });
    return;
  }
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    over_columns(call, [&](int64_t n, int columns) {
      columns_of<Pairs, bf16>(call, x, call.x_stride, w + n * call.weight_stride, call.weight_stride, n, columns);
    });
    return;
  }
#endif
  thread_local std::vector<float> rows_of_caller;
  std::vector<float>& wide = rows_of_caller;
  const int64_t depth = call.inputs;
  grow(wide, call.rows * depth);
#pragma omp parallel for schedule(static) if (call.rows * depth > SMALL)
  for (int64_t m = 0; m < call.rows; ++m) widen(x + m * call.x_stride, depth, &wide[m * depth]);
  over_columns(call, [&](int64_t n, int columns) {
    if (call.rows <= FEW_ROWS) {
      columns_of<Widened<T>, T>(call, wide.data(), depth, w + n * call.weight_stride, call.weight_stride, n,
                                columns);
      return;
    }
    thread_local std::vector<float> tile;
    grow(tile, COLUMNS * depth);
    for (int i = 0; i < columns; ++i) widen(w + (n + i) * call.weight_stride, depth, &tile[i * depth]);
    columns_of<Widened<float>, T>(call, wide.data(), depth, tile.data(), depth, n, columns);
  });
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_linear(const piecework::LinearCall* call) {
  using namespace piecework;
  if (call->type == BFLOAT16)
    run<bf16>(*call);
  else if (call->type == FLOAT16)
    run<f16>(*call);
  else
    run<float>(*call);
}
