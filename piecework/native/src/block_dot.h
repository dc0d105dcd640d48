// Products of int8 activations with a block of 8 rows of 4-bit or 8-bit weights: lane r is row r.
#pragma once

#include "vector.h"

namespace piecework {

// The kinds of piecework/ops/block_linear.py, by the bytes of a block of 8 rows.
enum Blocks : int64_t { Q4_0 = 144, Q4_1 = 160, Q8_0 = 272 };

// All fields are 8 bytes, so that there are no gaps.
struct BlockLinearCall {
  const void* x;          // [rows][x_stride]
  const uint8_t* packed;  // [groups][inputs / 32][kind]
  const void* bias;       // or null
  void* out;              // [rows][outputs]
  int64_t x_stride, rows, outputs, inputs;
  int64_t kind;  // Blocks
  int64_t type;  // of x, bias and out
};

constexpr int BLOCK = 32;  // channels
constexpr int GROUP = 8;   // rows

inline float half_at(const uint8_t* from, int i) {
  f16 x;
  std::memcpy(&x, from + 2 * i, sizeof x);
  return to_float(x);
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

using Lanes = __m256;
using Integers = __m256i;

inline Lanes no_lanes() { return _mm256_setzero_ps(); }
inline Lanes all_lanes(float x) { return _mm256_set1_ps(x); }
inline Lanes lanes_of(const uint8_t* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
inline Lanes times(Lanes a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
inline Lanes add_product(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
inline void store_lanes(float* to, Lanes x) { _mm256_storeu_ps(to, x); }
inline Lanes to_lanes(Integers x) { return _mm256_cvtepi32_ps(x); }

// Four channels of x, for each row.
inline Integers four(const int8_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return _mm256_set1_epi32(bits);
}

inline Integers load_weights(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline Integers add_fours(Integers sum, Integers unsigned_w, Integers x) {
  return _mm256_dpbusd_epi32(sum, unsigned_w, x);
}
inline Integers add_4bit(Integers sum, Integers w, Integers x) { return add_fours(sum, w, x); }
inline Integers whole(Integers sum) { return sum; }
#else
inline Integers add_fours(Integers sum, Integers unsigned_w, Integers x) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// In pairs of 16 bits: eight of at most 2 * 15 * 127 fit.
inline Integers add_4bit(Integers sum, Integers w, Integers x) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
}
inline Integers whole(Integers sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif

// sums[m] = the integer products of a block's weights with ROWS rows of x, each x_stride apart.
template <int ROWS>
inline void products_4bit(const uint8_t* w, const int8_t* x, int64_t x_stride, Integers* sums) {
  const Integers mask = _mm256_set1_epi8(15);
  for (int m = 0; m < ROWS; ++m) sums[m] = _mm256_setzero_si256();
  for (int g = 0; g < 4; ++g) {
    const Integers both = load_weights(w + 32 * g);
    const Integers low = _mm256_and_si256(both, mask);
    const Integers high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    for (int m = 0; m < ROWS; ++m) {
      const int8_t* row = x + m * x_stride + 4 * g;
      sums[m] = add_4bit(add_4bit(sums[m], low, four(row)), high, four(row + 16));
    }
  }
  for (int m = 0; m < ROWS; ++m) sums[m] = whole(sums[m]);
}

template <int ROWS>
inline void products_8bit(const uint8_t* w, const int8_t* x, int64_t x_stride, Integers* sums) {
  for (int m = 0; m < ROWS; ++m) sums[m] = _mm256_setzero_si256();
  for (int g = 0; g < 8; ++g) {
    const Integers signed_w = load_weights(w + 32 * g);
    const Integers size = _mm256_abs_epi8(signed_w);
    for (int m = 0; m < ROWS; ++m)
      sums[m] = add_fours(sums[m], size, _mm256_sign_epi8(four(x + m * x_stride + 4 * g), signed_w));
  }
}

#else

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

template <int ROWS>
inline void products_4bit(const uint8_t* w, const int8_t* x, int64_t x_stride, Integers* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < 128; ++i) {
      const int8_t* four = x + m * x_stride + i / 32 * 4 + i % 4;
      sums[m].v[i % 32 / 4] += (w[i] & 15) * four[0] + (w[i] >> 4) * four[16];
    }
  }
}

template <int ROWS>
inline void products_8bit(const uint8_t* w, const int8_t* x, int64_t x_stride, Integers* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < 256; ++i)
      sums[m].v[i % 32 / 4] += int8_t(w[i]) * x[m * x_stride + i / 32 * 4 + i % 4];
  }
}

#endif

}  // namespace piecework
