// Bfloat16 weights in 12 bits, without a loss.
//
// The upper byte of a bfloat16, its sign and most of its exponent, is one of few: 16 rows x 32 channels of trained
// weights have about twelve. So a block of as many has a table of 16 bytes, four bits that choose from it for each
// weight, and the lower byte as it is. A block with more than 16 different upper bytes is spilled: it has them all, half of
// them in the place of its choices and half in a slot at the end. Blocks lie in the order in which a product
// reads them: those of 16 rows, a panel, one after the other. What exceeds the matrix is zeros.
#pragma once

#include <cstdint>
#include <cstring>

namespace piecework {

constexpr int CODED_ROWS = 16, CODED_CHANNELS = 32, CODED_PAIRS = 8;  // of a block; two words of each row are a pair
constexpr int64_t PAIR_BYTES = 64, CODED_LOW = CODED_PAIRS * PAIR_BYTES, CODED_BLOCK = CODED_LOW * 3 / 2;
constexpr int64_t TABLE_BYTES = 16, SLOT_BYTES = CODED_LOW / 2;
constexpr int64_t BLOCKS_A_SLOT = 32;

// Where the byte of a weight is in its pair: of channel c, of 4, and row r. In each 16 bytes the first word of four
// rows, then their second one: vectors interleave these halves with one instruction.
constexpr int place_in_pair(int r, int c) { return r / 4 * 16 + c / 2 * 8 + r % 4 * 2 + c % 2; }

// A table that begins with two equal bytes is that of a spilled block, and has the number of its slot behind them.
constexpr int64_t SLOT_AT = 4;
inline bool is_spilled(const uint8_t* table) { return table[0] == table[1]; }

struct Slots {
  const uint8_t* first;
  uint32_t count;

  // Bytes that nobody coded are weights, too: nothing outside is read.
  const uint8_t* of(const uint8_t* table) const {
    uint32_t slot;
    std::memcpy(&slot, table + SLOT_AT, sizeof slot);
    return first + slot % count * SLOT_BYTES;
  }
};

// A matrix in memory: all blocks, then their tables, then the slots.
struct CodedShape {
  int64_t panels, blocks;  // of a panel

  CodedShape(int64_t outputs, int64_t inputs)
      : panels((outputs + CODED_ROWS - 1) / CODED_ROWS), blocks((inputs + CODED_CHANNELS - 1) / CODED_CHANNELS) {}
  int64_t count() const { return panels * blocks; }
  int64_t slots() const { return count() / BLOCKS_A_SLOT + 1; }
  const uint8_t* tables(const uint8_t* coded) const { return coded + count() * CODED_BLOCK; }
  Slots slots_of(const uint8_t* coded) const { return {tables(coded) + count() * TABLE_BYTES, uint32_t(slots())}; }
  int64_t bytes() const { return count() * (CODED_BLOCK + TABLE_BYTES) + slots() * SLOT_BYTES; }
};

struct CodeCall {
  const void* weight;  // bfloat16 [outputs][inputs], weight_stride elements apart
  uint8_t* coded;      // [CodedShape::bytes()]
  int64_t* spilled;    // one number: blocks that need slots; only if there are as many is the result of use
  int64_t weight_stride, outputs, inputs;
};

// Strides are in elements.
struct CodedLinearCall {
  const void* x;  // bfloat16, as bias and out
  const uint8_t* coded;
  const void* bias;  // or null
  void* out;         // [rows][outputs]
  int64_t x_stride, rows, outputs, inputs;
};

struct CodedEmbeddingCall {
  const int64_t* ids;  // [rows]
  const uint8_t* coded;
  void* out;  // bfloat16 [rows][inputs]
  int64_t rows, outputs, inputs;
};

}  // namespace piecework
