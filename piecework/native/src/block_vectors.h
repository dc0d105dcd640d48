// The vectors of block products: lane r is row r of a group of weights. AVX-512 with VNNI can have two groups in one.
#pragma once

#include "blocks.h"
#include "vector.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PIECEWORK_BLOCK_VECTORS 1
#endif

namespace piecework {

// Where N groups lie, `apart` bytes from one another.
template <int N>
struct Groups {
  const uint8_t* at;
  int64_t apart;

  Groups operator+(int64_t bytes) const { return {at + bytes, apart}; }
};

#if defined(PIECEWORK_BLOCK_VECTORS)

template <int N>
struct Vectors {
  using Floats = __m256;
  using Integers = __m256i;
};

inline __m256i bytes_at(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline __m128i half_of_bytes_at(const uint8_t* from) { return _mm_loadu_si128((const __m128i*)from); }

inline __m256i load_weights(Groups<1> from) { return bytes_at(from.at); }
// Eight halves of each group, and eight bytes without a sign, as floats; and sixteen bytes with one, as int16.
inline __m256 halves_of(Groups<1> from) { return _mm256_cvtph_ps(half_of_bytes_at(from.at)); }
inline __m256 bytes_of(Groups<1> from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from.at)));
}
inline __m256i signed_bytes_of(Groups<1> from) { return _mm256_cvtepi8_epi16(half_of_bytes_at(from.at)); }

inline __m256 times(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
inline __m256 times(__m256 a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
inline __m256 add_product(__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }
inline __m256 add_product(__m256 sum, __m256 a, float b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), sum); }
inline __m256 to_floats(__m256i x) { return _mm256_cvtepi32_ps(x); }
inline void store_groups(float* to, int64_t, __m256 x) { _mm256_storeu_ps(to, x); }

inline __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
inline __m256i subtract(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
inline __m256i product(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
inline __m256i product_of_pairs(__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }
inline __m256i left(__m256i x, int bits) { return _mm256_slli_epi32(x, bits); }
inline __m256i right(__m256i x, int bits) { return _mm256_srai_epi32(x, bits); }
inline __m256i pairs_left(__m256i x, int bits) { return _mm256_slli_epi16(x, bits); }
inline __m256i pairs_right(__m256i x, int bits) { return _mm256_srli_epi16(x, bits); }
inline __m256i all(__m256i, int32_t x) { return _mm256_set1_epi32(x); }
inline __m256i all_bytes(__m256i, int8_t x) { return _mm256_set1_epi8(x); }

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool VNNI = true;
inline __m256i add_fours(__m256i sum, __m256i unsigned_w, __m256i x) { return _mm256_dpbusd_epi32(sum, unsigned_w, x); }
#else
constexpr bool VNNI = false;
inline __m256i add_fours(__m256i sum, __m256i unsigned_w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_w, x);
  return add(sum, product_of_pairs(pairs, _mm256_set1_epi16(1)));
}
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
constexpr bool TWO_GROUPS = true;

template <>
struct Vectors<2> {
  using Floats = __m512;
  using Integers = __m512i;
};

inline __m512i load_weights(Groups<2> from) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(bytes_at(from.at)), bytes_at(from.at + from.apart), 1);
}
inline __m256i half_of_bytes_at(Groups<2> from) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(half_of_bytes_at(from.at)),
                                 half_of_bytes_at(from.at + from.apart), 1);
}
inline __m512 halves_of(Groups<2> from) { return _mm512_cvtph_ps(half_of_bytes_at(from)); }
inline __m512 bytes_of(Groups<2> from) {
  const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)from.at),
                                          _mm_loadl_epi64((const __m128i*)(from.at + from.apart)));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both));
}
inline __m512i signed_bytes_of(Groups<2> from) { return _mm512_cvtepi8_epi16(half_of_bytes_at(from)); }

inline __m512 times(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
inline __m512 times(__m512 a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
inline __m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
inline __m512 add_product(__m512 sum, __m512 a, float b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), sum); }
inline __m512 to_floats(__m512i x) { return _mm512_cvtepi32_ps(x); }
inline void store_groups(float* to, int64_t apart, __m512 x) {
  _mm256_storeu_ps(to, _mm512_castps512_ps256(x));
  _mm256_storeu_ps(to + apart, _mm512_extractf32x8_ps(x, 1));
}

inline __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
inline __m512i subtract(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
inline __m512i product(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
inline __m512i product_of_pairs(__m512i a, __m512i b) { return _mm512_madd_epi16(a, b); }
inline __m512i left(__m512i x, int bits) { return _mm512_slli_epi32(x, unsigned(bits)); }
inline __m512i right(__m512i x, int bits) { return _mm512_srai_epi32(x, unsigned(bits)); }
inline __m512i pairs_left(__m512i x, int bits) { return _mm512_slli_epi16(x, unsigned(bits)); }
inline __m512i pairs_right(__m512i x, int bits) { return _mm512_srli_epi16(x, unsigned(bits)); }
inline __m512i all(__m512i, int32_t x) { return _mm512_set1_epi32(x); }
inline __m512i all_bytes(__m512i, int8_t x) { return _mm512_set1_epi8(x); }
inline __m512i add_fours(__m512i sum, __m512i unsigned_w, __m512i x) { return _mm512_dpbusd_epi32(sum, unsigned_w, x); }
#else
constexpr bool TWO_GROUPS = false;
#endif

#else

constexpr bool VNNI = false, TWO_GROUPS = false;

struct PortableFloats {
  float v[GROUP];
};
struct PortableIntegers {
  int32_t v[GROUP];
};

template <int N>
struct Vectors {
  using Floats = PortableFloats;
  using Integers = PortableIntegers;
};

inline PortableFloats halves_of(Groups<1> from) {
  PortableFloats y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = half_at(from.at, r);
  return y;
}
inline PortableFloats bytes_of(Groups<1> from) {
  PortableFloats y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = from.at[r];
  return y;
}
inline PortableFloats times(PortableFloats a, PortableFloats b) {
  for (int r = 0; r < GROUP; ++r) a.v[r] *= b.v[r];
  return a;
}
inline PortableFloats times(PortableFloats a, float b) {
  for (float& x : a.v) x *= b;
  return a;
}
inline PortableFloats add_product(PortableFloats sum, PortableFloats a, PortableFloats b) {
  for (int r = 0; r < GROUP; ++r) sum.v[r] += a.v[r] * b.v[r];
  return sum;
}
inline PortableFloats add_product(PortableFloats sum, PortableFloats a, float b) {
  for (int r = 0; r < GROUP; ++r) sum.v[r] += a.v[r] * b;
  return sum;
}
inline void store_groups(float* to, int64_t, PortableFloats x) { std::memcpy(to, x.v, sizeof x.v); }
inline PortableFloats to_floats(PortableIntegers x) {
  PortableFloats y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = float(x.v[r]);
  return y;
}

#endif

template <int N>
using Floats = typename Vectors<N>::Floats;
template <int N>
using Integers = typename Vectors<N>::Integers;

}  // namespace piecework
