// Dot products of float rows with int8 weights as the numbers that they are, for the driver in tiles.h.
#pragma once

#include "matrix.h"
#include "tiles.h"

namespace piecework {

struct FloatDot {
  using Sum = float;
  using Packed = float;
  static constexpr int COLUMNS = 2;

  template <int M, int N>
  static void block(const Packed* x, int64_t x_stride, const int8_t* w, int64_t apart, int64_t k,
                    Sum* found) {
    floats sums[M * N];
    for (int i = 0; i < M * N; ++i) sums[i] = floats{};
    each(k, [&](int64_t i, auto lanes) {
      for (int n = 0; n < N; ++n) {
        const floats y = load(w + n * apart * k + i, lanes);
        for (int m = 0; m < M; ++m) sums[m * N + n] += load(x + m * x_stride + i, lanes) * y;
      }
    });
    if constexpr (M * N % 4 == 0)
      for (int i = 0; i < M * N; i += 4) store_sums(sums + i, found + i);
    else
      for (int i = 0; i < M * N; ++i) found[i] = sum(sums[i]);
  }
};

}  // namespace piecework
