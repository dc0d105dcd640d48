// RMS norm of one row, with the rounding points of piecework/ops/norm.py.
#pragma once

#include <cmath>

#include "rows.h"

namespace piecework {

// row = what `at(i, lanes)` gives for each of its vectors. Returns 1 / sqrt(mean(row^2) + eps).
template <typename F>
inline float fill_row(int64_t size, float eps, float* row, F at) {
  floats squares[4] = {};
  const auto take = [&](int64_t i, floats& sum, auto lanes) {
    const floats x = at(i, lanes);
    store(row + i, x, lanes);
    sum += x * x;
  };
  int64_t i = 0;
  for (; i + STRIDE <= size; i += STRIDE)
    for (int j = 0; j < 4; ++j) take(i + j * LANES, squares[j], AllLanes{});
  int j = 0;
  for (; i + LANES <= size; i += LANES) take(i, squares[j++], AllLanes{});
  if (i < size) take(i, squares[j], size - i);
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1.f / std::sqrt(total / float(size) + eps);
}

// row = x; returns as `fill_row`.
template <typename T>
inline float fill_row(const T* x, int64_t size, float eps, float* row) {
  return fill_row(size, eps, row, [=](int64_t i, auto lanes) { return load(x + i, lanes); });
}

// row = x + residual, rounded to T; returns as `fill_row`.
template <typename T>
inline float fill_sum(const T* x, const T* residual, int64_t size, float eps, float* row) {
  return fill_row(size, eps, row, [=](int64_t i, auto lanes) {
    return rounded<T>(load(x + i, lanes) + load(residual + i, lanes));
  });
}

// out = row * inverse * weight; the first product is rounded to T, and so is the second. `out` may be the row.
// The row, which is rounded to T, goes to `total` where that is not null: here and not where it was made, since
// two streams that are read and one that is written get in each other's way (0.8x to 0.9x as fast).
template <typename T, typename U>
inline void norm_row(const float* row, const T* weight, int64_t size, float inverse, U* out, T* total = nullptr) {
  const floats by = splat(inverse);
  each(size, [&](int64_t i, auto lanes) {
    if (total) store_as_it_is(total + i, load(row + i, lanes), lanes);
    const floats normed = rounded<T>(load(row + i, lanes) * by);
    store_rounded<T>(out + i, normed * load(weight + i, lanes), lanes);
  });
}

}  // namespace piecework
