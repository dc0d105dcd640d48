// RMS norm of one row, with the rounding points of piecework/ops/norm.py.
#pragma once

#include <cmath>

#include "rows.h"

namespace piecework {

// 1 / sqrt(mean(row^2) + eps) of a row from scratch_row.
inline float inverse_rms(const float* row, int64_t size, float eps) {
  floats squares[4] = {};
  for (int64_t i = 0; i < size; i += STRIDE)
    for (int j = 0; j < 4; ++j) {
      const floats x = load(row + i + j * LANES);
      squares[j] += x * x;
    }
  const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  return 1.f / std::sqrt(total / float(size) + eps);
}

// row = x + residual, rounded to T and written to `total` as such.
template <typename T>
inline void add_row(const T* x, const T* residual, int64_t size, T* total, float* row) {
  each(size, [&](int64_t i, auto lanes) {
    const floats y = rounded<T>(load(x + i, lanes) + load(residual + i, lanes));
    store(total + i, y, lanes);
    store(row + i, y, lanes);
  });
}

// out = row / rms(row) * weight; the quotient is rounded to T, and so is the product. `out` may be the row.
template <typename T, typename U>
inline void norm_row(const float* row, const T* weight, int64_t size, float eps, U* out) {
  const floats inverse = splat(inverse_rms(row, size, eps));
  each(size, [&](int64_t i, auto lanes) {
    const floats normed = rounded<T>(load(row + i, lanes) * inverse);
    store_rounded<T>(out + i, normed * load(weight + i, lanes), lanes);
  });
}

}  // namespace piecework
