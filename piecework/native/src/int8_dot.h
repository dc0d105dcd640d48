// Exact dot products of int8 rows, for the driver in tiles.h.
// An input row is packed once, as int16; its tail is zeros. Machines with VNNI use panel.h.
#pragma once

#include "tiles.h"

namespace piecework {

#if defined(__AVX2__)

// The sums of the lanes of four vectors.
inline void store_sums(const __m256i* x, int32_t* to) {
  const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
  const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128((__m128i*)to, all);
}

inline int32_t lane_sum(__m256i x) {
  const __m256i all[4] = {x, x, x, x};
  int32_t to[4];
  store_sums(all, to);
  return to[0];
}

struct Int8Dot {
  using Sum = int32_t;
  using Packed = int16_t;
  static constexpr int STEP = 16, COLUMNS = 2;

  static __m256i weights(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)); }
  static __m256i add(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
  }
  static __m256i inputs(const Packed* x) { return _mm256_loadu_si256((const __m256i*)x); }

  // found[m][n] = x[m] . w[n * apart] for M packed rows and N rows of k weights.
  template <int M, int N>
  static void block(const Packed* x, int64_t x_stride, const int8_t* w, int64_t apart, int64_t k,
                    Sum* found) {
    __m256i sums[M * N];
    for (int i = 0; i < M * N; ++i) sums[i] = _mm256_setzero_si256();
    const int64_t whole = k / STEP * STEP;
    for (int64_t i = 0; i < whole; i += STEP) {
      __m256i row[M];
      for (int m = 0; m < M; ++m) row[m] = inputs(x + m * x_stride + i);
      for (int n = 0; n < N; ++n) {
        const __m256i y = weights(w + n * apart * k + i);
        for (int m = 0; m < M; ++m) sums[m * N + n] = add(sums[m * N + n], y, row[m]);
      }
    }
    if (whole < k)
      for (int n = 0; n < N; ++n) {
        int8_t tail[STEP] = {};  // its products with the row's own zeros are zero whatever is here
        std::memcpy(tail, w + n * apart * k + whole, size_t(k - whole));
        const __m256i y = weights(tail);
        for (int m = 0; m < M; ++m) sums[m * N + n] = add(sums[m * N + n], y, inputs(x + m * x_stride + whole));
      }
    if constexpr (M * N % 4 == 0)
      for (int i = 0; i < M * N; i += 4) store_sums(sums + i, found + i);
    else
      for (int i = 0; i < M * N; ++i) found[i] = lane_sum(sums[i]);
  }
};

#else

struct Int8Dot {
  using Sum = int32_t;
  using Packed = int16_t;
  static constexpr int STEP = 16, COLUMNS = 2;

  template <int M, int N>
  static void block(const Packed* x, int64_t x_stride, const int8_t* w, int64_t apart, int64_t k,
                    Sum* found) {
    for (int n = 0; n < N; ++n) {
      const int8_t* y = w + n * apart * k;
      int32_t sums[M] = {};
      for (int m = 0; m < M; ++m)
        for (int64_t i = 0; i < k; ++i) sums[m] += int32_t(x[m * x_stride + i]) * y[i];
      for (int m = 0; m < M; ++m) found[m * N + n] = sums[m];
    }
  }
};

#endif

}  // namespace piecework
