// What a tile multiplies: floats, or for bfloat16 pairs that the hardware multiplies exactly and adds up in float32.
//
// For many query rows keys are packed transposed, [channels / PER][KEYS] words, and values as [keys / PER][width]
// words: so one kind of product does both, of queries with keys along channels and of weights with values along keys.
// Few rows take both from where they lie, values of PER keys put side by side as they are read.
#pragma once

#include <algorithm>

#include "transpose.h"
#include "words.h"

namespace piecework {

constexpr int KEYS = 64;  // of a block

inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

// The numbers of a head from channel d on, LANES at most, and zeros past its end.
template <typename T>
inline floats some(const T* x, int d, int dim) {
  if (d + LANES <= dim) return load(x + d);
  return d < dim ? load(x + d, dim - d) : floats{};
}

struct FloatPack : FloatSums {
  using Word = float;
  static constexpr int PER = 1;
  // 2^x for |x| <= 1/2, highest power first, fitted to the least relative error, which is 2e-9.
  static constexpr float POWER[] = {0x1.41d332p-13f, 0x1.5f456cp-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f,
                                    0x1.ebfbdap-3f,  0x1.62e43p-1f,   1.0f};

  template <typename T>
  static Part part(const T* x) {
    return load(x);
  }

  template <typename T>
  static Part side_by_side(const T* const* rows, int column) {
    return load(rows[0] + column);
  }

  template <typename T>
  static ints words(const T* x, int word, int dim) {
    return (ints)some(x, word, dim);
  }

  template <typename T>
  static floats values(const T* const* rows, int, int d, int dim) {
    return some(rows[0], d, dim);
  }
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
struct BrainPack : BrainSums {
  using Word = int32_t;
  static constexpr int PER = 2;
  // As in FloatPack, with an error of 3e-6: weights are rounded to bfloat16.
  static constexpr float POWER[] = {0x1.3997d2p-7f, 0x1.ca1442p-5f, 0x1.ec06dap-3f, 0x1.62e0dcp-1f, 0x1.ffffe8p-1f};
  static constexpr int16_t BY_TURNS[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

  static Part part(const bf16* x) { return load_raw<ints>(x); }

  static Part side_by_side(const bf16* const* rows, int column) {
    const __m512i first = _mm512_castsi256_si512(load_raw<__m256i>(rows[0] + column));
    const __m512i both = _mm512_inserti64x4(first, load_raw<__m256i>(rows[1] + column), 1);
    return (ints)_mm512_permutexvar_epi16(load_raw<__m512i>(BY_TURNS), both);
  }

  static ints words(const bf16* x, int word, int dim) {
    if (dim - 2 * word >= 2 * LANES) return load_raw<ints>(x + 2 * word);
    ints found = {};
    std::memcpy(&found, x + 2 * word, size_t(std::max(0, dim - 2 * word)) * sizeof *x);
    return found;
  }

  static ints values(const bf16* const* rows, int count, int d, int dim) {
    const ints first = (ints)((uints)some(rows[0], d, dim) >> 16);
    return count > 1 ? first | (ints)some(rows[1], d, dim) : first;
  }
};
#endif

// What tiles of queries of type T with a cache of type C use.
template <typename T, typename C>
struct PackFor {
  using Kind = FloatPack;
};

#if defined(PIECEWORK_AVX512) && defined(__AVX512BF16__)
template <>
struct PackFor<bf16, bf16> {
  using Kind = BrainPack;
};
#endif

template <typename T, typename C>
using PackOf = typename PackFor<T, C>::Kind;

// What `product` multiplies with: words that were packed, or values as they lie.
template <typename P>
struct Packed : P {
  static constexpr int ROWS = 1;
  static typename P::Part read(const typename P::Word* const* rows, int column) {
    return load_raw<typename P::Part>(rows[0] + column);
  }
};

template <typename P>
struct AsTheyLie : P {
  static constexpr int ROWS = P::PER;
  template <typename T>
  static typename P::Part read(const T* const* rows, int column) {
    return P::side_by_side(rows, column);
  }
};

// Words of a row of `width` channels, a multiple of LANES, in whole vectors.
template <typename P>
inline int words_of(int width) {
  return padded(width / P::PER);
}

// Pack the keys of a block: to [words_of(width)][KEYS], where keys past the last are 0.
template <typename P, typename C>
void pack_keys(const C* const* rows, int keys, int dim, int width, typename P::Word* to) {
  for (int i = 0; i < padded(keys); i += LANES)
    for (int word = 0; word < words_of<P>(width); word += LANES) {
      ints block[LANES];
      PIECEWORK_UNROLLED
      for (int j = 0; j < LANES; ++j) block[j] = i + j < keys ? P::words(rows[i + j], word, dim) : ints{};
      transpose(block);
      PIECEWORK_UNROLLED
      for (int j = 0; j < LANES; ++j) std::memcpy(to + (word + j) * KEYS + i, &block[j], sizeof(ints));
    }
}

// Pack the values of a block: to [keys / PER, rounded up][width].
template <typename P, typename C>
void pack_values(const C* const* rows, int keys, int dim, int width, typename P::Word* to) {
  for (int i = 0; i < keys; i += P::PER, to += width)
    for (int d = 0; d < width; d += LANES) {
      const auto found = P::values(rows + i, keys - i, d, dim);
      std::memcpy(to + d, &found, sizeof found);
    }
}

}  // namespace piecework
