// Products of int8 activations with a part of a block, 8 rows of 32 weights of 4 to 8 bits: lane r is row r.
#pragma once

#include "blocks.h"
#include "vector.h"

namespace piecework {

// Rows of x lie side by side, ABREAST of them, four channels of each at a time.
constexpr int ABREAST = 8, FOURS = 4 * ABREAST;

inline int64_t place(int64_t m, int64_t channel) { return 4 * m + channel / 4 * FOURS + channel % 4; }

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Lanes = __m256;
using Integers = __m256i;

inline Lanes no_lanes() { return _mm256_setzero_ps(); }
inline Lanes all_lanes(float x) { return _mm256_set1_ps(x); }
inline Lanes lanes_of(const uint8_t* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
// Eight bytes without a sign.
inline Lanes bytes_of(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes times(Lanes a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
inline Lanes add_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
inline void store_lanes(float* to, Lanes x) { _mm256_storeu_ps(to, x); }
inline Lanes to_lanes(Integers x) { return _mm256_cvtepi32_ps(x); }

// Channels 4 g to 4 g + 3 of row m, for each row of weights.
inline Integers four(const int8_t* x, int m, int g) {
  int32_t bits;
  std::memcpy(&bits, x + 4 * m + FOURS * g, sizeof bits);
  return _mm256_set1_epi32(bits);
}

inline Integers load_weights(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool VNNI = true;
inline Integers add_fours(Integers sum, Integers unsigned_w, Integers x) {
  return _mm256_dpbusd_epi32(sum, unsigned_w, x);
}
inline Integers add_pairs(Integers sum, Integers w, Integers x) { return add_fours(sum, w, x); }
inline Integers whole(Integers sum) { return sum; }
#else
constexpr bool VNNI = false;
inline Integers add_fours(Integers sum, Integers unsigned_w, Integers x) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// In pairs of 16 bits.
inline Integers add_pairs(Integers sum, Integers w, Integers x) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
}
inline Integers whole(Integers sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

// Fours k = 0 to 3, or 4 to 7, of a part in 4 to 6 bits.
template <int BITS>
inline Integers lower_four(Integers both, Integers upper, int k) {
  const Integers low = _mm256_and_si256(both, _mm256_set1_epi8(15));
  if (BITS == 4) return low;
  const int at = (BITS - 4) * k;
  const Integers moved = at < 4 ? _mm256_slli_epi16(upper, 4 - at) : _mm256_srli_epi16(upper, at - 4);
  return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(BITS == 5 ? 16 : 48)));
}

// sums[m] = the integer products of 32 weights of 4 or 5 bits with ROWS rows of x.
template <int BITS, int ROWS>
inline void products_small(const uint8_t* w, const int8_t* x, Integers* sums) {
  // As many pairs fit in 16 bits: eight of at most 2 * 15 * 127, four of 2 * 31 * 127.
  constexpr int FIT = VNNI || BITS == 4 ? 4 : 2;
  const Integers upper = BITS == 5 ? load_weights(w + 128) : _mm256_setzero_si256();
  for (int first = 0; first < 4; first += FIT) {
    Integers pairs[ROWS];
    for (int m = 0; m < ROWS; ++m) pairs[m] = _mm256_setzero_si256();
    for (int g = first; g < first + FIT; ++g) {
      const Integers both = load_weights(w + 32 * g);
      const Integers low = lower_four<BITS>(both, upper, g);
      const Integers high = lower_four<BITS>(_mm256_srli_epi16(both, 4), upper, g + 4);
      for (int m = 0; m < ROWS; ++m)
        pairs[m] = add_pairs(add_pairs(pairs[m], low, four(x, m, g)), high, four(x, m, g + 4));
    }
    for (int m = 0; m < ROWS; ++m)
      sums[m] = first ? _mm256_add_epi32(sums[m], whole(pairs[m])) : whole(pairs[m]);
  }
}

// The same of weights of 6 bits less 32, 16 channels times their row's first scale and 16 times its second.
// halves[m]: the sums of both 16 of x, 16 bits each.
template <int ROWS>
inline void products_scaled(const uint8_t* part, const int8_t* x, const int32_t* halves, Integers* sums) {
  const Integers scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part)));
  const uint8_t* w = part + 16;
  const Integers upper[2] = {load_weights(w + 128), load_weights(w + 160)};
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  const Integers one = _mm256_srai_epi32(_mm256_slli_epi32(scales, 16), 16), two = _mm256_srai_epi32(scales, 16);
  Integers last[ROWS];
  for (int m = 0; m < ROWS; ++m) sums[m] = last[m] = _mm256_setzero_si256();
  for (int g = 0; g < 4; ++g) {
    const Integers both = load_weights(w + 32 * g);
    const Integers low = lower_four<6>(both, upper[0], g);
    const Integers high = lower_four<6>(_mm256_srli_epi16(both, 4), upper[1], g);
    for (int m = 0; m < ROWS; ++m) {
      sums[m] = add_fours(sums[m], low, four(x, m, g));
      last[m] = add_fours(last[m], high, four(x, m, g + 4));
    }
  }
  for (int m = 0; m < ROWS; ++m)
    sums[m] = _mm256_add_epi32(_mm256_mullo_epi32(sums[m], one), _mm256_mullo_epi32(last[m], two));
#else
  // Two pairs of at most 2 * 63 * 127 fit in 16 bits; what adds them up multiplies too.
  const Integers order = _mm256_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0, 13, 12, 13, 12, 9, 8, 9,
                                         8, 5, 4, 5, 4, 1, 0, 1, 0);
  const Integers one = _mm256_shuffle_epi8(scales, order);
  const Integers two = _mm256_shuffle_epi8(scales, _mm256_add_epi8(order, _mm256_set1_epi8(2)));
  for (int m = 0; m < ROWS; ++m) sums[m] = _mm256_setzero_si256();
  for (int g = 0; g < 4; g += 2) {
    const Integers both[2] = {load_weights(w + 32 * g), load_weights(w + 32 * g + 32)};
    Integers low[2], high[2];
    for (int i = 0; i < 2; ++i) {
      low[i] = lower_four<6>(both[i], upper[0], g + i);
      high[i] = lower_four<6>(_mm256_srli_epi16(both[i], 4), upper[1], g + i);
    }
    for (int m = 0; m < ROWS; ++m) {
      const Integers first = add_pairs(_mm256_maddubs_epi16(low[0], four(x, m, g)), low[1], four(x, m, g + 1));
      const Integers last = add_pairs(_mm256_maddubs_epi16(high[0], four(x, m, g + 4)), high[1], four(x, m, g + 5));
      sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(first, one));
      sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(last, two));
    }
  }
#endif
  for (int m = 0; m < ROWS; ++m) {
    const Integers both = _mm256_set1_epi32(halves[m]);
    sums[m] = _mm256_sub_epi32(sums[m], _mm256_slli_epi32(_mm256_madd_epi16(scales, both), 5));
  }
}

// The same of weights of 8 bits.
template <int ROWS>
inline void products_8bit(const uint8_t* w, const int8_t* x, const int32_t* halves, Integers* sums) {
  // VNNI multiplies unsigned by signed bytes: weights count from -128, and 128 times the sum of x is taken off.
  for (int m = 0; m < ROWS; ++m)
    sums[m] = VNNI ? _mm256_madd_epi16(_mm256_set1_epi32(halves[m]), _mm256_set1_epi16(-128)) : _mm256_setzero_si256();
  for (int g = 0; g < 8; ++g) {
    const Integers signed_w = load_weights(w + 32 * g);
    const Integers size = VNNI ? _mm256_xor_si256(signed_w, _mm256_set1_epi8(-128)) : _mm256_abs_epi8(signed_w);
    for (int m = 0; m < ROWS; ++m)
      sums[m] = add_fours(sums[m], size, VNNI ? four(x, m, g) : _mm256_sign_epi8(four(x, m, g), signed_w));
  }
}

#else

constexpr bool VNNI = false;

struct Lanes {
  float v[GROUP];
};
struct Integers {
  int32_t v[GROUP];
};

inline Lanes no_lanes() { return {}; }
inline Lanes all_lanes(float x) {
  Lanes y;
  for (float& lane : y.v) lane = x;
  return y;
}
inline Lanes lanes_of(const uint8_t* halves) {
  Lanes y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = half_at(halves, r);
  return y;
}
inline Lanes bytes_of(const uint8_t* from) {
  Lanes y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = from[r];
  return y;
}
inline Lanes times(Lanes a, Lanes b) {
  for (int r = 0; r < GROUP; ++r) a.v[r] *= b.v[r];
  return a;
}
inline Lanes times(Lanes a, float b) {
  for (float& x : a.v) x *= b;
  return a;
}
inline Lanes add_product(Lanes sum, Lanes a, Lanes b) {
  for (int r = 0; r < GROUP; ++r) sum.v[r] += a.v[r] * b.v[r];
  return sum;
}
inline void store_lanes(float* to, Lanes x) { std::memcpy(to, x.v, sizeof x.v); }
inline Lanes to_lanes(Integers x) {
  Lanes y;
  for (int r = 0; r < GROUP; ++r) y.v[r] = float(x.v[r]);
  return y;
}

template <int BITS, int ROWS>
inline void products_small(const uint8_t* w, const int8_t* x, Integers* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < GROUP * BLOCK; ++i) {
      const int r = i % 32 / 4, channel = i / 32 * 4 + i % 4;
      sums[m].v[r] += weight_at<BITS>(w, r, channel) * x[place(m, channel)];
    }
  }
}

template <int ROWS>
inline void products_8bit(const uint8_t* w, const int8_t* x, const int32_t*, Integers* sums) {
  products_small<8, ROWS>(w, x, sums);
}

template <int ROWS>
inline void products_scaled(const uint8_t* part, const int8_t* x, const int32_t*, Integers* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < GROUP * BLOCK; ++i) {
      const int r = i % 32 / 4, channel = i / 32 * 4 + i % 4;
      const int scaled = int8_t(part[2 * r + channel / 16]) * (weight_at<6>(part + 16, r, channel) - 32);
      sums[m].v[r] += scaled * x[place(m, channel)];
    }
  }
}

#endif

}  // namespace piecework
