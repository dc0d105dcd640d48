// VNNI's product of unsigned and signed bytes, for machines that have AVX2 only.
#pragma once

#include <immintrin.h>

inline __m256i emulated_dpbusd(__m256i sum, __m256i u, __m256i s) {
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  // Even bytes: products with zeros in the odd places.
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(odd, even));
}

#define _mm256_dpbusd_epi32 emulated_dpbusd
#define __AVX512VNNI__ 1
#define __AVX512VL__ 1
