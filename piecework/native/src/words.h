// How panel.h multiplies weights and inputs: a word is 32 bits of a row of weights, one float, two halves or four bytes.
//
// Each kind says how LANES words of a row are read, how a word of LANES columns is widened into PARTS vectors, how
// what it is multiplied with is spread over the lanes, and how the products are added to a sum for each column.
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

// Floats with weights that are floats, or become so as they are read.
template <typename W>
struct FloatWords {
  using Weight = W;
  using X = float;
  using Sum = floats;
  using Part = floats;
  static constexpr int PER = 1, PARTS = 1;
  static constexpr bool PADDED = false;
  static ints words(const W* w) { return (ints)load(w); }
  static void widen(ints word, Part* to) { to[0] = (floats)word; }
  static Part spread(const float* x, int) { return splat(*x); }
  static Sum add(Sum sum, Part w, Part x) { return sum + w * x; }
};

struct BrainWords {
  using Weight = bf16;
  using Sum = floats;
  static constexpr int PER = 2;
  static constexpr bool PADDED = false;
  static ints words(const bf16* w) { return load_raw<ints>(w); }
#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
  // Pairs are multiplied exactly and added up in float32 by the hardware.
  using X = bf16;
  using Part = ints;
  static constexpr int PARTS = 1;
  static void widen(ints word, Part* to) { to[0] = word; }
  static Part spread(const bf16* x, int) { return spread_word(x); }
  static Sum add(Sum sum, Part w, Part x) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
#else
  using X = float;
  using Part = floats;
  static constexpr int PARTS = 2;
  static void widen(ints word, Part* to) {
    to[0] = (floats)(word << 16);
    to[1] = (floats)(word & int32_t(0xffff0000));
  }
  static Part spread(const float* x, int part) { return splat(x[part]); }
  static Sum add(Sum sum, Part w, Part x) { return sum + w * x; }
#endif
};

// Exact sums of int8 inputs. VNNI multiplies unsigned by signed bytes: weights count from -128, which adds 128 times
// the sum of the row of x.
struct ByteWords {
  using Weight = int8_t;
  using X = int8_t;
  using Sum = ints;
  using Part = ints;
  static constexpr int PER = 4, PARTS = 1;
  static constexpr bool PADDED = true;
  static constexpr uint32_t SHIFT = 128;
  static ints words(const int8_t* w) { return load_raw<ints>(w) ^ int32_t(0x80808080); }
  static void widen(ints word, Part* to) { to[0] = word; }
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

// Inputs of type T with int8 weights as the numbers that they are.
template <typename T>
struct MixedWords {
  using Weight = int8_t;
  using X = float;
  using Sum = floats;
  using Part = floats;
  static constexpr int PER = 4, PARTS = 4;
  static constexpr bool PADDED = false;
  static ints words(const int8_t* w) { return load_raw<ints>(w); }
  static void widen(ints word, Part* to) {
    for (int i = 0; i < 4; ++i) to[i] = __builtin_convertvector(byte_of(word, i), floats);
  }
  static Part spread(const float* x, int part) { return splat(x[part]); }
  static Sum add(Sum sum, Part w, Part x) { return sum + w * x; }
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
template <>
struct MixedWords<bf16> : BrainWords {  // int8 are exact in bfloat16
  using Weight = int8_t;
  static constexpr int PER = 4, PARTS = 2;
  static ints words(const int8_t* w) { return load_raw<ints>(w); }
  static void widen(ints word, Part* to) {
    for (int i = 0; i < 2; ++i) {
      const ints first = (ints)__builtin_convertvector(byte_of(word, 2 * i), floats);
      const ints second = (ints)__builtin_convertvector(byte_of(word, 2 * i + 1), floats);
      to[i] = (ints)((uints)first >> 16) | second;
    }
  }
  static Part spread(const bf16* x, int part) { return spread_word(x + 2 * part); }
};
#endif

}  // namespace piecework
