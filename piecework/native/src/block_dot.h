// Products of int8 activations with a part of a block, 8 rows of 32 weights of 4 to 8 bits, of one group or two.
#pragma once

#include "block_vectors.h"

namespace piecework {

// Rows of x lie side by side, ABREAST of them, four channels of each at a time.
constexpr int ABREAST = 8, FOURS = 4 * ABREAST;

inline int64_t place(int64_t m, int64_t channel) { return 4 * m + channel / 4 * FOURS + channel % 4; }

#if defined(PIECEWORK_BLOCK_VECTORS)

// Channels 4 g to 4 g + 3 of row m, for each row of weights.
template <int N>
inline Integers<N> four(const int8_t* x, int m, int g) {
  int32_t bits;
  std::memcpy(&bits, x + 4 * m + FOURS * g, sizeof bits);
  return all(Integers<N>{}, bits);
}

// Sums of products of fours; without VNNI in pairs of 16 bits, until `whole` adds them up.
template <typename V>
inline V add_pairs(V sum, V w, V x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return add_fours(sum, w, x);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
#endif
}
template <typename V>
inline V whole(V sum) {
  return VNNI ? sum : product_of_pairs(sum, all(sum, 0x10001));
}

// Fours k = 0 to 3, or 4 to 7, of a part in 4 to 6 bits.
template <int BITS, typename V>
inline V lower_four(V both, V upper, int k) {
  const V low = both & all_bytes(both, 15);
  if (BITS == 4) return low;
  const int at = (BITS - 4) * k;
  const V moved = at < 4 ? pairs_left(upper, 4 - at) : pairs_right(upper, at - 4);
  return low | (moved & all_bytes(both, BITS == 5 ? 16 : 48));
}

// sums[m] = the integer products of 32 weights of 4 or 5 bits with ROWS rows of x.
template <int BITS, int ROWS, int N>
inline void products_small(Groups<N> w, const int8_t* x, Integers<N>* sums) {
  using V = Integers<N>;
  // As many pairs fit in 16 bits: eight of at most 2 * 15 * 127, four of 2 * 31 * 127.
  constexpr int FIT = VNNI || BITS == 4 ? 4 : 2;
  V upper = {};
  if constexpr (BITS == 5) upper = load_weights(w + 128);
  for (int first = 0; first < 4; first += FIT) {
    V pairs[ROWS] = {};
    for (int g = first; g < first + FIT; ++g) {
      const V both = load_weights(w + 32 * g);
      const V low = lower_four<BITS>(both, upper, g);
      const V high = lower_four<BITS>(pairs_right(both, 4), upper, g + 4);
      for (int m = 0; m < ROWS; ++m)
        pairs[m] = add_pairs(add_pairs(pairs[m], low, four<N>(x, m, g)), high, four<N>(x, m, g + 4));
    }
    for (int m = 0; m < ROWS; ++m) sums[m] = first ? add(sums[m], whole(pairs[m])) : whole(pairs[m]);
  }
}

// The same of weights of 6 bits less 32, 16 channels times their row's first scale and 16 times its second.
// halves[m]: the sums of both 16 of x, 16 bits each.
template <int ROWS, int N>
inline void products_scaled(Groups<N> part, const int8_t* x, const int32_t* halves, Integers<N>* sums) {
  using V = Integers<N>;
  const V scales = signed_bytes_of(part);
  const Groups<N> w = part + 16;
  const V upper[2] = {load_weights(w + 128), load_weights(w + 160)};
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  const V one = right(left(scales, 16), 16), two = right(scales, 16);
  V last[ROWS];
  for (int m = 0; m < ROWS; ++m) sums[m] = last[m] = V{};
  for (int g = 0; g < 4; ++g) {
    const V both = load_weights(w + 32 * g);
    const V low = lower_four<6>(both, upper[0], g);
    const V high = lower_four<6>(pairs_right(both, 4), upper[1], g);
    for (int m = 0; m < ROWS; ++m) {
      sums[m] = add_fours(sums[m], low, four<N>(x, m, g));
      last[m] = add_fours(last[m], high, four<N>(x, m, g + 4));
    }
  }
  for (int m = 0; m < ROWS; ++m) sums[m] = add(product(sums[m], one), product(last[m], two));
#else
  // Two pairs of at most 2 * 63 * 127 fit in 16 bits; what adds them up multiplies too.
  const V order = _mm256_set_epi8(13, 12, 13, 12, 9, 8, 9, 8, 5, 4, 5, 4, 1, 0, 1, 0, 13, 12, 13, 12, 9, 8, 9, 8, 5, 4,
                                  5, 4, 1, 0, 1, 0);
  const V one = _mm256_shuffle_epi8(scales, order);
  const V two = _mm256_shuffle_epi8(scales, _mm256_add_epi8(order, _mm256_set1_epi8(2)));
  for (int m = 0; m < ROWS; ++m) sums[m] = V{};
  for (int g = 0; g < 4; g += 2) {
    const V both[2] = {load_weights(w + 32 * g), load_weights(w + 32 * g + 32)};
    V low[2], high[2];
    for (int i = 0; i < 2; ++i) {
      low[i] = lower_four<6>(both[i], upper[0], g + i);
      high[i] = lower_four<6>(pairs_right(both[i], 4), upper[1], g + i);
    }
    for (int m = 0; m < ROWS; ++m) {
      const V first = add_pairs(_mm256_maddubs_epi16(low[0], four<N>(x, m, g)), low[1], four<N>(x, m, g + 1));
      const V last = add_pairs(_mm256_maddubs_epi16(high[0], four<N>(x, m, g + 4)), high[1], four<N>(x, m, g + 5));
      sums[m] = add(sums[m], product_of_pairs(first, one));
      sums[m] = add(sums[m], product_of_pairs(last, two));
    }
  }
#endif
  for (int m = 0; m < ROWS; ++m)
    sums[m] = subtract(sums[m], left(product_of_pairs(scales, all(scales, halves[m])), 5));
}

// The same of weights of 8 bits. VNNI multiplies unsigned by signed bytes: weights count from -128, and what that
// adds is taken off before, 128 times the sum of x.
template <int ROWS, int N>
inline void products_8bit(Groups<N> w, const int8_t* x, const int32_t* taken_off, Integers<N>* sums) {
  using V = Integers<N>;
  for (int m = 0; m < ROWS; ++m) sums[m] = VNNI ? all(V{}, taken_off[m]) : V{};
  for (int g = 0; g < 8; ++g) {
    const V signed_w = load_weights(w + 32 * g);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    const V size = signed_w ^ all_bytes(signed_w, -128);
    for (int m = 0; m < ROWS; ++m) sums[m] = add_fours(sums[m], size, four<N>(x, m, g));
#else
    const V size = _mm256_abs_epi8(signed_w);
    for (int m = 0; m < ROWS; ++m)
      sums[m] = add_fours(sums[m], size, _mm256_sign_epi8(four<N>(x, m, g), signed_w));
#endif
  }
}

#else

template <int BITS, int ROWS, int>
inline void products_small(Groups<1> w, const int8_t* x, Integers<1>* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < GROUP * BLOCK; ++i) {
      const int r = i % 32 / 4, channel = i / 32 * 4 + i % 4;
      sums[m].v[r] += weight_at<BITS>(w.at, r, channel) * x[place(m, channel)];
    }
  }
}

template <int ROWS, int>
inline void products_8bit(Groups<1> w, const int8_t* x, const int32_t*, Integers<1>* sums) {
  products_small<8, ROWS, 1>(w, x, sums);
}

template <int ROWS, int>
inline void products_scaled(Groups<1> part, const int8_t* x, const int32_t*, Integers<1>* sums) {
  for (int m = 0; m < ROWS; ++m) {
    sums[m] = {};
    for (int i = 0; i < GROUP * BLOCK; ++i) {
      const int r = i % 32 / 4, channel = i / 32 * 4 + i % 4;
      const int scaled = int8_t(part.at[2 * r + channel / 16]) * (weight_at<6>(part.at + 16, r, channel) - 32);
      sums[m].v[r] += scaled * x[place(m, channel)];
    }
  }
}

#endif

}  // namespace piecework
