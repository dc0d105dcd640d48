// Products of rows, y[m][n] = x[m] . w[n], of floats or halves, both read along K as they lie in memory.
//
// Each value is summed in the same order however many rows and columns there are: a row of a batch gives
// what it gives alone. Weights need no other layout for this: three rows of x against four of w keep twelve
// sums in registers and load seven vectors for twelve products, as a product of packed tiles would.
#pragma once

#include <algorithm>

#include "linear.h"
#include "matrix.h"
#include "rows.h"

namespace piecework {

// How x and w are multiplied: STEP channels at a time, into the lanes of a vector of sums.
template <typename W>
struct Widened {
  using X = float;
  static constexpr int STEP = LANES;
  using Part = floats;
  static Part x(const float* from) { return load(from); }
  static Part w(const W* from) { return load(from); }
  static floats add(floats sum, Part x, Part w) { return sum + x * w; }
};

constexpr int ROWS_AT_ONCE = 3;
constexpr int COLUMNS_AT_ONCE = 4;

// The first n elements of a part, the others zero.
template <int STEP, typename T>
struct Tail {
  T kept[STEP];
  Tail(const T* from, int n) {
    std::memset(static_cast<void*>(kept), 0, sizeof kept);
    std::memcpy(static_cast<void*>(kept), from, n * sizeof(T));
  }
};

// Four columns of y, `apart` from one another, for ROWS rows over `depth` channels; added to y or in place of it.
template <typename P, typename W, int ROWS>
inline void dot_rows(const typename P::X* x, int64_t x_stride, const W* const* w, int depth, float* y,
                     int y_stride, int apart, bool add) {
  floats sums[ROWS][COLUMNS_AT_ONCE];
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < COLUMNS_AT_ONCE; ++n) sums[m][n] = floats{};
  int k = 0;
  for (; k + P::STEP <= depth; k += P::STEP) {
    typename P::Part part[ROWS];
    for (int m = 0; m < ROWS; ++m) part[m] = P::x(x + m * x_stride + k);
    for (int n = 0; n < COLUMNS_AT_ONCE; ++n) {
      const typename P::Part column = P::w(w[n] + k);
      for (int m = 0; m < ROWS; ++m) sums[m][n] = P::add(sums[m][n], part[m], column);
    }
  }
  if (k < depth) {
    typename P::Part part[ROWS];
    for (int m = 0; m < ROWS; ++m)
      part[m] = P::x(Tail<P::STEP, typename P::X>(x + m * x_stride + k, depth - k).kept);
    for (int n = 0; n < COLUMNS_AT_ONCE; ++n) {
      const typename P::Part column = P::w(Tail<P::STEP, W>(w[n] + k, depth - k).kept);
      for (int m = 0; m < ROWS; ++m) sums[m][n] = P::add(sums[m][n], part[m], column);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    float found[COLUMNS_AT_ONCE];
    store_sums(sums[m], found);
    float* to = y + int64_t(m) * y_stride;
    for (int n = 0; n < COLUMNS_AT_ONCE; ++n) to[n * apart] = add ? to[n * apart] + found[n] : found[n];
  }
}

template <typename P, typename W, int ROWS>
inline void dot_rest(int rows, const typename P::X* x, int64_t x_stride, const W* const* w, int depth, float* y,
                     int y_stride, int apart, bool add) {
  if (rows == ROWS)
    dot_rows<P, W, ROWS>(x, x_stride, w, depth, y, y_stride, apart, add);
  else if constexpr (ROWS > 1)
    dot_rest<P, W, ROWS - 1>(rows, x, x_stride, w, depth, y, y_stride, apart, add);
}

// Channels of a pass: then four rows of w and ROWS_AT_ONCE of x stay in the nearest cache.
constexpr int DEPTH = 1024;

// y [rows][columns] = x w^T; y has room for a multiple of four columns in each row.
// The four columns that are taken at once lie a quarter of the tile apart: so each quarter is read from its
// beginning to its end, and a processor follows four such streams where it loses track of short ones.
template <typename P, typename W>
void dot_tile(const typename P::X* x, int64_t x_stride, int rows, const W* w, int64_t w_stride, int columns,
              int depth, float* y, int y_stride) {
  const int passes = std::max(1, (depth + DEPTH - 1) / DEPTH);
  const int pass = ((depth + passes - 1) / passes + 63) / 64 * 64;
  const int apart = (columns + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
  for (int n = 0; n < apart; ++n) {
    for (int k = 0; k == 0 || k < depth; k += pass) {
      const int part = std::min(pass, depth - k);
      const W* four[COLUMNS_AT_ONCE];  // the last column again where there are fewer
      for (int i = 0; i < COLUMNS_AT_ONCE; ++i) four[i] = w + std::min(n + i * apart, columns - 1) * w_stride + k;
      int m = 0;
      for (; m + ROWS_AT_ONCE <= rows; m += ROWS_AT_ONCE)
        dot_rows<P, W, ROWS_AT_ONCE>(x + m * x_stride + k, x_stride, four, part, y + m * y_stride + n, y_stride,
                                     apart, k > 0);
      dot_rest<P, W, ROWS_AT_ONCE - 1>(rows - m, x + m * x_stride + k, x_stride, four, part, y + m * y_stride + n,
                                       y_stride, apart, k > 0);
    }
  }
}

constexpr int ROWS = 48;          // of x in a tile: they and the tile's columns share a core's second cache
constexpr int COLUMNS = 64;       // of a tile at most
constexpr int COLUMNS_OF_MANY = 32;  // of a tile where there are more than FEW_ROWS
constexpr int FEW_ROWS = 16;      // up to so many, tiles are large, and 16-bit weights widened in registers
constexpr int64_t SMALL = 1 << 15;  // products, below which other threads aren't woken

// Columns [column, column + columns) of all rows.
template <typename P, typename W, typename Finish>
void columns_of(const LinearCall& call, const typename P::X* x, int64_t x_stride, const W* w, int64_t w_stride,
                int64_t column, int columns, const Finish& finish) {
  float y[ROWS * COLUMNS];
  for (int64_t row = 0; row < call.rows; row += ROWS) {
    const int rows = int(std::min<int64_t>(ROWS, call.rows - row));
    dot_tile<P>(x + row * x_stride, x_stride, rows, w, w_stride, columns, int(call.inputs), y, COLUMNS);
    for (int m = 0; m < rows; ++m) finish(row + m, column, columns, y + m * COLUMNS);
  }
}

// Calls finish(row, first column, columns, sums) for each row of x w^T, in parts that all threads share.
template <typename T, typename Finish>
void dots_of(const LinearCall& call, const Finish& finish) {
  const T* w = static_cast<const T*>(call.weight);
  const int64_t depth = call.inputs, stride = call.weight_stride;
  int64_t x_stride = call.x_stride;
  const float* x = rows_as<float>(static_cast<const T*>(call.x), call.rows, depth, &x_stride);
  const int64_t most = call.rows <= FEW_ROWS ? COLUMNS : COLUMNS_OF_MANY;
  const int64_t tiles = (call.outputs + most - 1) / most;
#pragma omp parallel for schedule(dynamic, 1) if (call.rows * call.outputs * depth > SMALL)
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t n = i * most;
    const int columns = int(std::min(most, call.outputs - n));
    if (std::is_same_v<T, float> || call.rows <= FEW_ROWS) {
      columns_of<Widened<T>>(call, x, x_stride, w + n * stride, stride, n, columns, finish);
      continue;
    }
    float* tile = thread_memory<float, PANELS>(COLUMNS_OF_MANY * depth);
    for (int j = 0; j < columns; ++j) widen_row(w + (n + j) * stride, depth, tile + j * depth);
    columns_of<Widened<float>>(call, x, x_stride, tile, depth, n, columns, finish);
  }
}

}  // namespace piecework
