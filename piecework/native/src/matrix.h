// Small matrix products on rows in cache: the inner loops of attention.
#pragma once

#include "transpose.h"
#include "words.h"

namespace piecework {

// c[m][n] (+)= sum over k of a[m][k] * b[k][n], for ROWS rows and COLUMNS * LANES columns, where k counts words and S
// says how these are multiplied. `b` is a list of row pointers, S::ROWS for each word, read from column `first` on.
template <typename S, int ROWS, int COLUMNS, typename T>
inline void product_block(const typename S::X* a, int a_stride, const T* const* b, int first, int depth, float* c,
                          int c_stride, bool add) {
  floats sum[ROWS][COLUMNS];
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < COLUMNS; ++n) sum[m][n] = add ? load(c + m * c_stride + n * LANES) : floats{};
  for (int k = 0; k < depth; ++k) {
    typename S::Part x[ROWS];
    for (int m = 0; m < ROWS; ++m) x[m] = S::spread(a + m * a_stride, k);
    for (int n = 0; n < COLUMNS; ++n) {
      const typename S::Part y = S::read(b + k * S::ROWS, first + n * LANES);
      for (int m = 0; m < ROWS; ++m) sum[m][n] = S::add(sum[m][n], y, x[m]);
    }
  }
  for (int m = 0; m < ROWS; ++m)
    for (int n = 0; n < COLUMNS; ++n) store(c + m * c_stride + n * LANES, sum[m][n]);
}

template <typename S, int ROWS, typename T>
inline void product_rows(const typename S::X* a, int a_stride, const T* const* b, int columns, int depth, float* c,
                         int c_stride, bool add) {
  int n = 0;
  for (; n + 4 * LANES <= columns; n += 4 * LANES)
    product_block<S, ROWS, 4>(a, a_stride, b, n, depth, c + n, c_stride, add);
  for (; n < columns; n += LANES) product_block<S, ROWS, 1>(a, a_stride, b, n, depth, c + n, c_stride, add);
}

// c [rows][columns] (+)= a [rows][depth words] b [depth words][columns]; columns is a multiple of LANES.
template <typename S, typename T>
inline void product(const typename S::X* a, int a_stride, const T* const* b, int rows, int columns, int depth,
                    float* c, int c_stride, bool add) {
  int m = 0;
#if defined(__AVX512F__)
  for (; m + 6 <= rows; m += 6)
    product_rows<S, 6>(a + m * a_stride, a_stride, b, columns, depth, c + m * c_stride, c_stride, add);
#endif
  for (; m + 3 <= rows; m += 3)
    product_rows<S, 3>(a + m * a_stride, a_stride, b, columns, depth, c + m * c_stride, c_stride, add);
  if (rows - m == 2)
    product_rows<S, 2>(a + m * a_stride, a_stride, b, columns, depth, c + m * c_stride, c_stride, add);
  else if (rows - m == 1)
    product_rows<S, 1>(a + m * a_stride, a_stride, b, columns, depth, c + m * c_stride, c_stride, add);
}

// The sums of four vectors.
inline void store_sums(const floats* x, float* to) {
#if defined(PIECEWORK_AVX512)
  const auto halve = [](__m512 a, __m512 b) {  // quarters of a, then of b, each the sum of two
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  __m512 y = halve(halve(__m512(x[0]), __m512(x[1])), halve(__m512(x[2]), __m512(x[3])));  // a quarter of each
  y = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
  y = _mm512_add_ps(y, _mm512_permute_ps(y, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, y)));
#elif defined(PIECEWORK_AVX2)
  __m128 half[4];
  for (int i = 0; i < 4; ++i)
    half[i] = _mm_add_ps(_mm256_castps256_ps128(__m256(x[i])), _mm256_extractf128_ps(__m256(x[i]), 1));
  _MM_TRANSPOSE4_PS(half[0], half[1], half[2], half[3]);
  _mm_storeu_ps(to, _mm_add_ps(_mm_add_ps(half[0], half[1]), _mm_add_ps(half[2], half[3])));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(x[i]);
#endif
}

// c[m][n] = a[m] . b[n] over `depth` channels, a multiple of those in a vector of P's words, for ROWS rows and four n.
template <typename P, int ROWS, typename T>
inline void dots_block(const typename P::X* a, int a_stride, const T* const* b, int depth, float* c, int c_stride) {
  floats total[ROWS][4];
  PIECEWORK_UNROLLED
  for (int m = 0; m < ROWS; ++m)
    PIECEWORK_UNROLLED
    for (int n = 0; n < 4; ++n) total[m][n] = floats{};
  for (int k = 0; k < depth; k += LANES * P::PER) {
    typename P::Part x[ROWS];
    PIECEWORK_UNROLLED
    for (int m = 0; m < ROWS; ++m) x[m] = P::part(a + m * a_stride + k);
    PIECEWORK_UNROLLED
    for (int n = 0; n < 4; ++n) {
      const typename P::Part y = P::part(b[n] + k);
      PIECEWORK_UNROLLED
      for (int m = 0; m < ROWS; ++m) total[m][n] = P::add(total[m][n], y, x[m]);
    }
  }
  PIECEWORK_UNROLLED
  for (int m = 0; m < ROWS; ++m) store_sums(total[m], c + m * c_stride);
}

template <typename P, int ROWS, typename T>
inline void dots_rows(const typename P::X* a, int a_stride, const T* const* b, int keys, int depth, float* c,
                      int c_stride) {
  for (int n = 0; n < keys; n += 4) dots_block<P, ROWS>(a, a_stride, b + n, depth, c + n, c_stride);
}

// c [rows][keys] = a [rows][depth] b [keys][depth]^T, for few rows: keys are read as they lie, four at once; b and c have
// as many.
template <typename P, typename T>
inline void dots(const typename P::X* a, int a_stride, const T* const* b, int rows, int keys, int depth, float* c,
                 int c_stride) {
  int m = 0;
  for (; m + 3 <= rows; m += 3)
    dots_rows<P, 3>(a + m * a_stride, a_stride, b, keys, depth, c + m * c_stride, c_stride);
  if (rows - m == 2)
    dots_rows<P, 2>(a + m * a_stride, a_stride, b, keys, depth, c + m * c_stride, c_stride);
  else if (rows - m == 1)
    dots_rows<P, 1>(a + m * a_stride, a_stride, b, keys, depth, c + m * c_stride, c_stride);
}

}  // namespace piecework
