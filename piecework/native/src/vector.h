// Vectors of floats, written with the compilers' vector extension: AVX-512, AVX2 and anything else by width.
#pragma once

#include <type_traits>

#include "types.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // nothing here is called from elsewhere

namespace piecework {

#if !defined(PIECEWORK_LANES)  // tests may ask for another width than the machine's
#if defined(__AVX512F__)
#define PIECEWORK_LANES 16
#else
#define PIECEWORK_LANES 8
#endif
#endif
constexpr int LANES = PIECEWORK_LANES;

#if PIECEWORK_LANES == 16
#define PIECEWORK_PANELS 1  // products of rows are those of panel.h
#endif

// Where a vector is one of the machine's, some steps have instructions that compilers don't find.
#if defined(__AVX512F__) && PIECEWORK_LANES == 16
#define PIECEWORK_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__) && PIECEWORK_LANES == 8
#define PIECEWORK_AVX2 1
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

inline floats splat(float x) { return x - floats{}; }

template <typename V>
inline V load_raw(const void* from) {
  V x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline floats load(const float* from) { return load_raw<floats>(from); }

// GCC 12 makes each widening of __builtin_convertvector into several steps.
inline floats widened(shorts bits) {
#if defined(PIECEWORK_AVX512)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(PIECEWORK_AVX2)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
  return (floats)(__builtin_convertvector(bits, uints) << 16);
#endif
}

inline floats load(const bf16* from) { return widened(load_raw<shorts>(from)); }

inline floats load(const int8_t* from) {
#if defined(PIECEWORK_AVX512)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(from)));
#elif defined(PIECEWORK_AVX2)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load_raw<bytes>(from), floats);
#endif
}

inline floats load(const f16* from) {
#if defined(PIECEWORK_AVX512)
  return (floats)_mm512_cvtph_ps(load_raw<__m256i>(from));
#elif defined(PIECEWORK_AVX2)
  return (floats)_mm256_cvtph_ps(load_raw<__m128i>(from));
#else
  floats x;
  for (int i = 0; i < LANES; ++i) x[i] = to_float(from[i]);
  return x;
#endif
}

inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof x); }

// With bits of bfloat16 in the upper half; the lower half is left over.
inline uints rounded_bits(floats x) {
  const uints bits = (uints)x;
  const uints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (uints)(x == x ? (floats)rounded : (floats)(bits | 0x400000));
}

inline shorts upper_halves(uints bits) {
  bits >>= 16;
#if defined(PIECEWORK_AVX512)
  return (shorts)_mm512_cvtepi32_epi16((__m512i)bits);
#elif defined(PIECEWORK_AVX2)
  const __m256i y = (__m256i)bits;
  return (shorts)_mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
#else
  return __builtin_convertvector(bits, shorts);
#endif
}

// Nearest, halves to even, NaN stays NaN. The hardware would take numbers below 2^-126 for zero.
inline shorts to_bf16(floats x) {
#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
  if (__builtin_expect(!_mm512_testn_epi32_mask((__m512i)x, _mm512_set1_epi32(0x7f800000)), 1))
    return (shorts)_mm512_cvtneps_pbh((__m512)x);
#endif
  return upper_halves(rounded_bits(x));
}

inline void store(bf16* to, floats x) {
  const shorts y = to_bf16(x);
  std::memcpy(to, &y, sizeof y);
}

inline void store(f16* to, floats x) {
#if defined(PIECEWORK_AVX512)
  const __m256i y = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &y, sizeof y);
#elif defined(PIECEWORK_AVX2)
  const __m128i y = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &y, sizeof y);
#else
  for (int i = 0; i < LANES; ++i) to[i] = from_float<f16>(x[i]);
#endif
}

// x as it is after it was stored as a T.
template <typename T>
inline floats rounded(floats x) {
  T kept[LANES];
  store(kept, x);
  return load(kept);
}

template <>
inline floats rounded<float>(floats x) {
  return x;
}

template <>
inline floats rounded<bf16>(floats x) {
#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
  return widened(to_bf16(x));
#else
  return (floats)(rounded_bits(x) & 0xffff0000);
#endif
}

#if defined(PIECEWORK_AVX512)
template <>
inline floats rounded<f16>(floats x) {
  return (floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(PIECEWORK_AVX2)
template <>
inline floats rounded<f16>(floats x) {
  return (floats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// Bits of |x|. Compared as integers they are in the order of the numbers, infinity after them, then NaN.
inline ints size_bits(floats x) { return (ints)x & 0x7fffffff; }

inline ints largest(ints a, ints b) { return a > b ? a : b; }

inline float sum(floats x) {
  float kept[LANES];
  store(kept, x);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) kept[i] += kept[i + n];
  return kept[0];
}

// Around the range of int32 as unsigned integers go.
inline int32_t sum(ints x) {
  uint32_t all = 0;
  for (int i = 0; i < LANES; ++i) all += uint32_t(x[i]);
  return int32_t(all);
}

inline float largest(floats x) {
#if defined(PIECEWORK_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float found = x[0];
  for (int i = 1; i < LANES; ++i) found = x[i] > found ? x[i] : found;
  return found;
#endif
}

inline int32_t largest(ints x) {
#if defined(PIECEWORK_AVX512)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t found = x[0];
  for (int i = 1; i < LANES; ++i) found = x[i] > found ? x[i] : found;
  return found;
#endif
}

// The integer nearest to x, halves to even, held within int8's range; NaN gives 0.
inline void store(int8_t* to, floats x) {
#if defined(PIECEWORK_AVX512)
  const __m512 held = _mm512_max_ps(_mm512_min_ps((__m512)x, _mm512_set1_ps(127)), _mm512_set1_ps(-128));
  const __m512 number = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q), held);
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(number)));
#elif defined(PIECEWORK_AVX2)
  const __m256 held = _mm256_max_ps(_mm256_min_ps((__m256)x, _mm256_set1_ps(127)), _mm256_set1_ps(-128));
  const __m256 number = _mm256_and_ps(held, _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_ORD_Q));
  const __m256i q = _mm256_cvtps_epi32(number);
  const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(y, y));
#else
  x = x > 127.f ? splat(127.f) : x;
  x = x < -128.f ? splat(-128.f) : x;
  x = x == x ? x : floats{};
  // Adding 1.5 * 2^23 leaves a float no bits below one, so the sum is rounded as floats are.
  const ints q = (ints)(x + 0x1.8p23f) - 0x4b400000;
  const bytes y = __builtin_convertvector(q, bytes);
  std::memcpy(to, &y, sizeof y);
#endif
}

// e^x for x <= 0, within 2 units of the last place; below -87 it is 0.
inline floats exp_of_negative(floats x) {
  // x = n ln 2 + r with |r| <= ln 2 / 2, in two parts so that r is exact; then Taylor's series for e^r.
  const floats shifted = x * 0x1.715476p0f + 0x1.8p23f;
  const floats n = shifted - 0x1.8p23f;
  floats r = x - n * 0x1.62e4p-1f;
  r = r - n * 0x1.7f7d1cp-20f;
  floats y = splat(1.f / 5040);
  y = y * r + 1.f / 720;
  y = y * r + 1.f / 120;
  y = y * r + 1.f / 24;
  y = y * r + 1.f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.f;
  y = y * r + 1.f;
  const ints exponent = (ints)shifted - 0x4b400000;
  const floats power = (floats)((exponent + 127) << 23);
  const floats e = y * power;
  return x < -87.f ? floats{} : e;
}

// A row is taken in whole vectors and what is left of it: `each` calls f(i, lanes) with AllLanes or a count.
struct AllLanes {};

template <typename F>
inline void each(int64_t size, F f) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) f(i, AllLanes{});
  if (i < size) f(i, size - i);
}

template <typename T>
inline floats load(const T* from, AllLanes) {
  return load(from);
}

// The first n lanes of memory, the others zero.
template <typename T>
inline floats load(const T* from, int64_t n) {
  T kept[LANES] = {};
  std::memcpy(kept, from, size_t(n) * sizeof(T));
  return load(kept);
}

inline ints load_ints(const int32_t* from, AllLanes) { return load_raw<ints>(from); }

inline ints load_ints(const int32_t* from, int64_t n) {
  ints x = {};
  std::memcpy(&x, from, size_t(n) * 4);
  return x;
}

template <typename T>
inline void store(T* to, floats x, AllLanes) {
  store(to, x);
}

template <typename T>
inline void store(T* to, floats x, int64_t n) {
  T kept[LANES];
  store(kept, x);
  std::memcpy(to, kept, size_t(n) * sizeof(T));
}

// Store x, which is rounded to T already.
template <typename T, typename L>
inline void store_as_it_is(T* to, floats x, L lanes) {
  store(to, x, lanes);
}

inline void store_as_it_is(bf16* to, floats x, AllLanes) {
  const shorts y = upper_halves((uints)x);
  std::memcpy(to, &y, sizeof y);
}

// Store x as it is after a rounding to T; storing a T is that rounding.
template <typename T, typename U, typename L>
inline void store_rounded(U* to, floats x, L lanes) {
  if constexpr (std::is_same_v<T, U>)
    store(to, x, lanes);
  else
    store(to, rounded<T>(x), lanes);
}

}  // namespace piecework
