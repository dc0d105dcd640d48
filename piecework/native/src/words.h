// How panel.h multiplies weights and inputs: a word is 32 bits of a row of weights, one float, two halves or four bytes.
//
// Each kind says how LANES words of a row are read, how a word of LANES columns is widened into PARTS vectors, how
// what it is multiplied with is spread over the lanes, and how the products are added to a sum for each column. Those
// that SPREAD can have one word of weights in all lanes, too (row_lanes.h).
#pragma once

#include "vector.h"

namespace piecework {

inline ints spread_word(const void* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return word - ints{};
}

// Channel i of four signed bytes.
inline ints byte_of(ints word, int i) { return word << (24 - 8 * i) >> 24; }

// Sums of floats, one channel for each part of a word.
struct FloatSums {
  using X = float;
  using Sum = floats;
  using Part = floats;
  static constexpr bool PADDED = false;
  static Part spread(const float* x, int part) { return splat(x[part]); }
  static Sum add(Sum sum, Part w, Part x) { return sum + w * x; }
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied exactly and added up in float32 by the hardware.
struct BrainSums {
  using X = bf16;
  using Sum = floats;
  using Part = ints;
  static constexpr bool PADDED = false;
  static Part spread(const bf16* x, int part) { return spread_word(x + 2 * part); }
  static Sum add(Sum sum, Part w, Part x) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};
#endif

// Floats with weights that are floats, or become so as they are read.
template <typename W>
struct FloatWords : FloatSums {
  using Weight = W;
  static constexpr int PER = 1, PARTS = 1;
  static constexpr bool SPREADS = true;
  static Part one(const W* w) { return splat(to_float(*w)); }
  static ints words(const W* w) { return (ints)load(w); }
  static void widen(ints word, Part* to) { to[0] = (floats)word; }
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
struct BrainWords : BrainSums {
  static constexpr int PARTS = 1;
  static constexpr bool SPREADS = true;
  static Part one(const bf16* w) { return spread_word(w); }
  static void widen(ints word, Part* to) { to[0] = word; }
#else
struct BrainWords : FloatSums {
  static constexpr int PARTS = 2;
  static constexpr bool SPREADS = false;
  static void widen(ints word, Part* to) {
    to[0] = (floats)(word << 16);
    to[1] = (floats)(word & int32_t(0xffff0000));
  }
#endif
  using Weight = bf16;
  static constexpr int PER = 2;
  static ints words(const bf16* w) { return load_raw<ints>(w); }
};

// Exact sums of int8 inputs. VNNI multiplies unsigned by signed bytes: weights count from -128, which adds 128 times
// the sum of the row of x.
struct ByteWords {
  using Weight = int8_t;
  using X = int8_t;
  using Sum = ints;
  using Part = ints;
  static constexpr int PER = 4, PARTS = 1;
  static constexpr bool PADDED = true, SPREADS = true;
  static constexpr uint32_t SHIFT = 128;
  static ints words(const int8_t* w) { return load_raw<ints>(w) ^ int32_t(0x80808080); }
  static void widen(ints word, Part* to) { to[0] = word; }
  static Part one(const int8_t* w) { return spread_word(w) ^ int32_t(0x80808080); }
  static Part spread(const int8_t* x, int) { return spread_word(x); }
  static Sum add(Sum sum, Part w, Part x) {
#if defined(PIECEWORK_AVX512) && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
    for (int i = 0; i < 4; ++i) sum += (w >> 8 * i & 255) * byte_of(x, i);
    return sum;
#endif
  }
};

// Int8 weights as the numbers that they are.
struct PlainBytes {
  using Weight = int8_t;
  static constexpr int PER = 4;
  static constexpr bool SPREADS = false;
  static ints words(const int8_t* w) { return load_raw<ints>(w); }
};

// These with inputs of type T.
template <typename T>
struct MixedWords : PlainBytes, FloatSums {
  static constexpr int PARTS = 4;
  static void widen(ints word, Part* to) {
    for (int i = 0; i < 4; ++i) to[i] = __builtin_convertvector(byte_of(word, i), floats);
  }
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
template <>
struct MixedWords<bf16> : PlainBytes, BrainSums {
  static constexpr int PARTS = 2;
  static void widen(ints word, Part* to) {  // exactly
    for (int i = 0; i < 2; ++i) {
      const ints first = (ints)__builtin_convertvector(byte_of(word, 2 * i), floats);
      const ints second = (ints)__builtin_convertvector(byte_of(word, 2 * i + 1), floats);
      to[i] = (ints)((uints)first >> 16) | second;
    }
  }
};
#endif

}  // namespace piecework
