// LANES words of LANES rows, changed about in registers.
#pragma once

#include "vector.h"

// GCC stops inlining where a file has many kernels, which costs them up to half their speed.
#define PIECEWORK_INLINED __attribute__((always_inline))

// Without this GCC 12 leaves arrays of vectors in memory.
#if defined(__clang__)
#define PIECEWORK_UNROLLED _Pragma("unroll")
#else
#define PIECEWORK_UNROLLED _Pragma("GCC unroll 16")
#endif

namespace piecework {

// From each 128 bits of a and b by turns: the lower or upper half, in words or in pairs of words.
#if defined(PIECEWORK_AVX512)
inline ints low_words(ints a, ints b) { return (ints)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline ints high_words(ints a, ints b) { return (ints)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline ints low_pairs(ints a, ints b) { return (ints)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline ints high_pairs(ints a, ints b) { return (ints)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
inline ints even_quarters(ints a, ints b) { return (ints)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88); }
inline ints odd_quarters(ints a, ints b) { return (ints)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd); }
#elif defined(PIECEWORK_AVX2)
inline ints low_words(ints a, ints b) { return (ints)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
inline ints high_words(ints a, ints b) { return (ints)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
inline ints low_pairs(ints a, ints b) { return (ints)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline ints high_pairs(ints a, ints b) { return (ints)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
inline ints low_halves(ints a, ints b) { return (ints)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20); }
inline ints high_halves(ints a, ints b) { return (ints)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31); }
#endif

// Word j of row i becomes word i of row j. Always inlined: a call would pass the vectors through memory.
PIECEWORK_INLINED inline void transpose(ints* r) {
#if defined(PIECEWORK_AVX512) || defined(PIECEWORK_AVX2)
  ints a[LANES], b[LANES];
  PIECEWORK_UNROLLED
  for (int i = 0; i < LANES; i += 2) {
    a[i] = low_words(r[i], r[i + 1]);
    a[i + 1] = high_words(r[i], r[i + 1]);
  }
  PIECEWORK_UNROLLED
  for (int i = 0; i < LANES; i += 4)
    PIECEWORK_UNROLLED
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = low_pairs(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = high_pairs(a[i + j], a[i + 2 + j]);
    }
  PIECEWORK_UNROLLED
  for (int j = 0; j < 4; ++j) {  // 128 bits q of b[i + j] have word 4 q + j of rows i to i + 3
#if defined(PIECEWORK_AVX512)
    const ints even = even_quarters(b[j], b[4 + j]), last_even = even_quarters(b[8 + j], b[12 + j]);
    const ints odd = odd_quarters(b[j], b[4 + j]), last_odd = odd_quarters(b[8 + j], b[12 + j]);
    r[j] = even_quarters(even, last_even);
    r[4 + j] = even_quarters(odd, last_odd);
    r[8 + j] = odd_quarters(even, last_even);
    r[12 + j] = odd_quarters(odd, last_odd);
#else
    r[j] = low_halves(b[j], b[4 + j]);
    r[4 + j] = high_halves(b[j], b[4 + j]);
#endif
  }
#else
  int32_t kept[LANES][LANES];
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) kept[j][i] = r[i][j];
  std::memcpy(r, kept, sizeof kept);
#endif
}

}  // namespace piecework
