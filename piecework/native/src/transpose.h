// LANES words of LANES rows, changed about in registers.
#pragma once

#include "vector.h"

// Without this GCC 12 leaves arrays of vectors in memory.
#if defined(__clang__)
#define PIECEWORK_UNROLLED _Pragma("unroll")
#else
#define PIECEWORK_UNROLLED _Pragma("GCC unroll 16")
#endif

namespace piecework {

// Word j of row i becomes word i of row j.
inline void transpose(ints* r) {
#if defined(PIECEWORK_AVX512)
  __m512i a[16], b[16];
  PIECEWORK_UNROLLED
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
  }
  PIECEWORK_UNROLLED
  for (int i = 0; i < 4; ++i)
    PIECEWORK_UNROLLED
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  PIECEWORK_UNROLLED
  for (int j = 0; j < 4; ++j) {  // quarter q of b[4 i + j] has word 4 q + j of rows 4 i to 4 i + 3
    const __m512i even = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    r[j] = (ints)_mm512_shuffle_i32x4(even, even2, 0x88);
    r[8 + j] = (ints)_mm512_shuffle_i32x4(even, even2, 0xdd);
    r[4 + j] = (ints)_mm512_shuffle_i32x4(odd, odd2, 0x88);
    r[12 + j] = (ints)_mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
#elif defined(PIECEWORK_AVX2)
  __m256i a[8], b[8];
  PIECEWORK_UNROLLED
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
  }
  PIECEWORK_UNROLLED
  for (int i = 0; i < 2; ++i)
    PIECEWORK_UNROLLED
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  PIECEWORK_UNROLLED
  for (int j = 0; j < 4; ++j) {
    r[j] = (ints)_mm256_permute2x128_si256(b[j], b[4 + j], 0x20);
    r[4 + j] = (ints)_mm256_permute2x128_si256(b[j], b[4 + j], 0x31);
  }
#else
  int32_t kept[LANES][LANES];
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < LANES; ++j) kept[j][i] = r[i][j];
  std::memcpy(r, kept, sizeof kept);
#endif
}

}  // namespace piecework
