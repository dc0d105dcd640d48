// Coded weights as panel.h reads them.
#pragma once

#include "coded.h"
#include "panel.h"

namespace piecework {

static_assert(LANES == CODED_ROWS);

#if defined(PIECEWORK_AVX512)
inline __m512i bytes_at(const uint8_t* from) { return _mm512_loadu_si512(from); }

// The two words of a pair from its lower and its upper bytes.
PIECEWORK_INLINED inline void put_together(__m512i low, __m512i high, ints* words) {
  words[0] = (ints)_mm512_unpacklo_epi8(low, high);
  words[1] = (ints)_mm512_unpackhi_epi8(low, high);
}

PIECEWORK_INLINED inline void decode(const uint8_t* block, const uint8_t* table, ints* words) {
  const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  const __m512i four = _mm512_set1_epi8(15);
  PIECEWORK_UNROLLED
  for (int i = 0; i < CODED_PAIRS; i += 2) {
    const uint8_t* low = block + i * PAIR_BYTES;
    const __m512i codes = bytes_at(block + CODED_LOW + i / 2 * PAIR_BYTES);
    const __m512i first = _mm512_and_si512(codes, four), second = _mm512_and_si512(_mm512_srli_epi16(codes, 4), four);
    put_together(bytes_at(low), _mm512_shuffle_epi8(upper, first), words + 2 * i);
    put_together(bytes_at(low + PAIR_BYTES), _mm512_shuffle_epi8(upper, second), words + 2 * i + 2);
  }
}

inline void decode_spilled(const uint8_t* block, const uint8_t* slot, ints* words) {
  for (int i = 0; i < CODED_PAIRS; ++i) {
    const uint8_t* high = i < CODED_PAIRS / 2 ? block + CODED_LOW : slot - SLOT_BYTES;
    put_together(bytes_at(block + i * PAIR_BYTES), bytes_at(high + i * PAIR_BYTES), words + 2 * i);
  }
}
#else
inline void put_together(const uint8_t* low, const uint8_t* high, ints* words) {
  for (int i = 0; i < PAIR_BYTES; ++i) {
    const int at = i / 16 * 8 + i % 8;  // of 32 halves of a word
    const int32_t bits = int32_t(uint32_t(low[i] | high[i] << 8) << at % 2 * 16);
    if (at % 2) words[i % 16 / 8][at / 2] |= bits;
    else words[i % 16 / 8][at / 2] = bits;
  }
}

inline void decode(const uint8_t* block, const uint8_t* table, ints* words) {
  for (int i = 0; i < CODED_PAIRS; ++i) {
    uint8_t high[PAIR_BYTES];
    for (int j = 0; j < PAIR_BYTES; ++j) high[j] = table[block[CODED_LOW + i / 2 * PAIR_BYTES + j] >> i % 2 * 4 & 15];
    put_together(block + i * PAIR_BYTES, high, words + 2 * i);
  }
}

inline void decode_spilled(const uint8_t* block, const uint8_t* slot, ints* words) {
  for (int i = 0; i < CODED_PAIRS; ++i) {
    const uint8_t* high = i < CODED_PAIRS / 2 ? block + CODED_LOW : slot - SLOT_BYTES;
    put_together(block + i * PAIR_BYTES, high + i * PAIR_BYTES, words + 2 * i);
  }
}
#endif

struct CodedPanel {
  static constexpr int64_t BLOCK_BYTES = CODED_BLOCK;
  const uint8_t *blocks, *tables;
  Slots slots;

  PIECEWORK_INLINED void load(int64_t k, ints* block) const {
    const int64_t i = k / CODED_CHANNELS;
    const uint8_t* table = tables + i * TABLE_BYTES;
    if (__builtin_expect(is_spilled(table), 0))
      decode_spilled(blocks + i * CODED_BLOCK, slots.of(table), block);
    else
      decode(blocks + i * CODED_BLOCK, table, block);
  }

  void load(int64_t k, int64_t, ints* block) const { load(k, block); }

  const char* at(int64_t i) const { return reinterpret_cast<const char*>(blocks + i * CODED_BLOCK); }
};

struct CodedWeights {
  static constexpr bool IN_ROWS = false;
  const uint8_t* coded;
  CodedShape shape;

  template <bool>
  CodedPanel panel(int64_t first, int64_t) const {
    const int64_t block = first / CODED_ROWS * shape.blocks;
    return {coded + block * CODED_BLOCK, shape.tables(coded) + block * TABLE_BYTES, shape.slots_of(coded)};
  }

  const char* at(int64_t column) const {
    return reinterpret_cast<const char*>(coded + column / CODED_ROWS * shape.blocks * CODED_BLOCK);
  }
};

}  // namespace piecework
