// Exact products of int8 rows with panels of sixteen columns, for many rows.
//
// A panel is laid out anew as pairs of int16, [k / 2][16][2]: a pair of a row is spread over all its columns, so
// that a sum stays in its lane, and what it costs to widen the weights is shared by all rows.
#pragma once

#include "int8_dot.h"
#include "transpose.h"

#if defined(__AVX2__)
#define PIECEWORK_INT8_PANELS 1

namespace piecework {

constexpr int PANEL = 16;
constexpr int PANEL_ROWS = 6;          // of x at once: their sums fill twelve registers
constexpr int64_t PANEL_DEPTH = 2048;  // channels at once, so that a panel stays in a core's second cache

// The pairs of eight rows of sixteen bytes, one below the other: to[i] holds the i-th pair of each row.
inline void transpose_pairs(const __m128i* row, __m128i* to) {
  __m128i a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
    a[2 * i + 1] = _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm_unpacklo_epi32(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm_unpackhi_epi32(a[4 * i + j], a[4 * i + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {
    to[2 * j] = _mm_unpacklo_epi64(b[j], b[4 + j]);
    to[2 * j + 1] = _mm_unpackhi_epi64(b[j], b[4 + j]);
  }
}

// Eight of the panel's columns, `columns` of them there, and `depth` channels; the rest is zeros.
inline void pack_half(const int8_t* w, int64_t stride, int columns, int64_t depth, int16_t* to) {
  for (int64_t k = 0; k < depth; k += 16) {
    __m128i row[8], pairs[8];
    for (int n = 0; n < 8; ++n) {
      row[n] = _mm_setzero_si128();
      if (n >= columns) continue;
      if (k + 16 <= depth)
        row[n] = _mm_loadu_si128((const __m128i*)(w + n * stride + k));
      else
        std::memcpy(&row[n], w + n * stride + k, size_t(depth - k));
    }
    transpose_pairs(row, pairs);
    for (int i = 0; i < 8; ++i)
      _mm256_storeu_si256((__m256i*)(to + (k / 2 + i) * 2 * PANEL), _mm256_cvtepi8_epi16(pairs[i]));
  }
}

inline void pack_panel(const int8_t* w, int64_t stride, int columns, int64_t depth, int16_t* to) {
  pack_half(w, stride, columns, depth, to);
  pack_half(w + 8 * stride, stride, columns - 8, depth, to + PANEL);
}

// sums [M][16] of M rows of x with a panel; added to what is there, or in place of it.
template <int M>
inline void panel_rows(const int16_t* x, int64_t x_stride, const int16_t* panel, int64_t depth, bool add,
                       int32_t* sums) {
  __m256i total[M][2];
PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m)
PIECEWORK_UNROLLED
    for (int i = 0; i < 2; ++i)
      total[m][i] = add ? _mm256_loadu_si256((const __m256i*)(sums + m * PANEL + i * 8)) : _mm256_setzero_si256();
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * PANEL) {
    const __m256i w[2] = {_mm256_loadu_si256((const __m256i*)panel),
                          _mm256_loadu_si256((const __m256i*)(panel + PANEL))};
PIECEWORK_UNROLLED
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * x_stride + k, sizeof pair);
      const __m256i both = _mm256_set1_epi32(pair);
PIECEWORK_UNROLLED
      for (int i = 0; i < 2; ++i)
        total[m][i] = _mm256_add_epi32(total[m][i], _mm256_madd_epi16(w[i], both));
    }
  }
PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m)
PIECEWORK_UNROLLED
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(sums + m * PANEL + i * 8), total[m][i]);
}

template <int M = PANEL_ROWS - 1>
inline void panel_rest(int64_t rows, const int16_t* x, int64_t x_stride, const int16_t* panel, int64_t depth,
                       bool add, int32_t* sums) {
  if (rows == M)
    panel_rows<M>(x, x_stride, panel, depth, add, sums);
  else if constexpr (M > 1)
    panel_rest<M - 1>(rows, x, x_stride, panel, depth, add, sums);
}

// Calls finish(row, first column, columns, sums) for each row and panel of x w^T, as `tiles` does for its tiles.
// x: rows packed as int16, `stride` apart, with zeros from k on up to a multiple of 16.
template <typename Finish>
inline void panels(const int16_t* x, int64_t stride, int64_t rows, const int8_t* w, int64_t n, int64_t k,
                   Finish finish) {
  const int64_t count = (n + PANEL - 1) / PANEL;
  const auto share = [&](int64_t from, int64_t to) {
    int16_t* panel = thread_memory<int16_t, PANELS>((std::min(k, PANEL_DEPTH) + 15) / 16 * 16 * PANEL);
    int32_t* sums = thread_memory<int32_t, SUMS>(rows * PANEL);
    for (int64_t first = from * PANEL; first < to * PANEL; first += PANEL) {
      const int columns = int(std::min<int64_t>(PANEL, n - first));
      for (int64_t start = 0; start == 0 || start < k; start += PANEL_DEPTH) {
        const int64_t depth = std::min(PANEL_DEPTH, k - start), whole = (depth + 15) / 16 * 16;
        pack_panel(w + first * k + start, k, columns, depth, panel);
        int64_t m = 0;
        for (; m + PANEL_ROWS <= rows; m += PANEL_ROWS)
          panel_rows<PANEL_ROWS>(x + m * stride + start, stride, panel, whole, start > 0, sums + m * PANEL);
        panel_rest(rows - m, x + m * stride + start, stride, panel, whole, start > 0, sums + m * PANEL);
      }
      for (int64_t m = 0; m < rows; ++m) finish(m, first, columns, sums + m * PANEL);
    }
  };
  if (omp_get_max_threads() == 1) return share(0, count);
#pragma omp parallel
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    share(count * t / all, count * (t + 1) / all);
  }
}

}  // namespace piecework
#endif
