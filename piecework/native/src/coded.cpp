// Bfloat16 in 12 bits: made of a matrix, multiplied with, and looked up by rows. See coded.h.
#include "coded.h"

#include <algorithm>

#include "linear.h"
#include "rows.h"

#if defined(PIECEWORK_PANELS)
#include "coded_panel.h"
#include "multiply.h"
#endif

namespace piecework {
namespace {

// The lower and the upper bytes of a block's weights, [pairs][places], which are zero outside of the matrix.
struct Halves {
  uint8_t low[CODED_LOW], high[CODED_LOW];

  Halves(const CodeCall& c, int64_t panel, int64_t block) : low{}, high{} {
    const int64_t row = panel * CODED_ROWS, channel = block * CODED_CHANNELS;
    const int rows = int(std::min<int64_t>(CODED_ROWS, c.outputs - row));
    const int channels = int(std::min<int64_t>(CODED_CHANNELS, c.inputs - channel));
    for (int r = 0; r < rows; ++r) {
      const bf16* from = (const bf16*)c.weight + (row + r) * c.weight_stride + channel;
      for (int k = 0; k < channels; ++k) {
        const int64_t at = k / 4 * PAIR_BYTES + place_in_pair(r, k % 4);
        low[at] = uint8_t(from[k].bits), high[at] = uint8_t(from[k].bits >> 8);
      }
    }
  }
};

// Number the upper bytes; how many there are is returned. Places of the table that stay free have bytes that differ.
int number(const uint8_t* high, uint8_t* table, int16_t* number_of) {
  std::fill(number_of, number_of + 256, int16_t(-1));
  int count = 0;
  for (int i = 0; i < CODED_LOW; ++i) {
    if (number_of[high[i]] >= 0) continue;
    if (count < TABLE_BYTES) table[count] = high[i];
    number_of[high[i]] = int16_t(count++);
  }
  for (int i = count; i < TABLE_BYTES; ++i) table[i] = uint8_t(table[0] + i);
  return count;
}

void code_block(const Halves& bytes, uint8_t* block, uint8_t* table) {
  int16_t number_of[256];
  std::memcpy(block, bytes.low, CODED_LOW);
  if (number(bytes.high, table, number_of) > TABLE_BYTES) {
    std::memset(table, 0, TABLE_BYTES);
    std::memcpy(block + CODED_LOW, bytes.high, SLOT_BYTES);
    return;
  }
  for (int i = 0; i < CODED_PAIRS; i += 2)
    for (int j = 0; j < PAIR_BYTES; ++j) {
      const uint8_t* high = bytes.high + i * PAIR_BYTES + j;
      block[CODED_LOW + i / 2 * PAIR_BYTES + j] = uint8_t(number_of[high[0]] | number_of[high[PAIR_BYTES]] << 4);
    }
}

// Give slots to spilled blocks, in order; the number of these blocks is returned.
int64_t spill(const CodeCall& c, const CodedShape& shape) {
  uint8_t *table = c.coded + shape.count() * CODED_BLOCK, *slots = table + shape.count() * TABLE_BYTES;
  int64_t found = 0;
  for (int64_t i = 0; i < shape.count(); ++i, table += TABLE_BYTES) {
    if (!is_spilled(table)) continue;
    if (found < shape.slots()) {
      const int32_t slot = int32_t(found);
      std::memcpy(table + SLOT_AT, &slot, sizeof slot);
      std::memcpy(slots + found * SLOT_BYTES, Halves(c, i / shape.blocks, i % shape.blocks).high + SLOT_BYTES, SLOT_BYTES);
    }
    ++found;
  }
  return found;
}

// The upper byte of the weight at place j of pair i.
uint8_t upper_byte(const uint8_t* block, const uint8_t* table, const Slots& slots, int64_t i, int64_t j) {
  if (!is_spilled(table)) return table[block[CODED_LOW + i / 2 * PAIR_BYTES + j] >> i % 2 * 4 & 15];
  const int64_t at = i * PAIR_BYTES + j;
  return at < SLOT_BYTES ? block[CODED_LOW + at] : slots.of(table)[at - SLOT_BYTES];
}

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

// Called by several threads at once, each with a matrix of its own, so it starts none.
void piecework_code(const CodeCall* call) {
  const CodedShape shape(call->outputs, call->inputs);
  uint8_t *block = call->coded, *table = block + shape.count() * CODED_BLOCK;
  for (int64_t i = 0; i < shape.count(); ++i, block += CODED_BLOCK, table += TABLE_BYTES)
    code_block(Halves(*call, i / shape.blocks, i % shape.blocks), block, table);
  *call->spilled = spill(*call, shape);
}

void piecework_embedding_coded(const CodedEmbeddingCall* call) {
  const CodedShape shape(call->outputs, call->inputs);
  for_rows(call->rows, 16 * call->inputs, [&, c = *call](int64_t m) {
    const int64_t id = c.ids[m];
    bf16* to = (bf16*)c.out + m * c.inputs;
    if (id < 0 || id >= c.outputs) {
      std::memset((void*)to, 0xff, size_t(c.inputs) * sizeof *to);
      return;
    }
    const int64_t first = id / CODED_ROWS * shape.blocks;
    const Slots slots = shape.slots_of(c.coded);
    for (int64_t k = 0; k < c.inputs; ++k) {
      const int64_t at = first + k / CODED_CHANNELS, i = k % CODED_CHANNELS / 4;
      const int64_t j = place_in_pair(int(id % CODED_ROWS), int(k % 4));
      const uint8_t *block = c.coded + at * CODED_BLOCK, *table = shape.tables(c.coded) + at * TABLE_BYTES;
      to[k].bits = uint16_t(block[i * PAIR_BYTES + j] | upper_byte(block, table, slots, i, j) << 8);
    }
  });
}

#if defined(PIECEWORK_PANELS)
void piecework_linear_coded(const CodedLinearCall* call) {
  const CodedLinearCall& c = *call;
  const bf16* bias = static_cast<const bf16*>(c.bias);
  int64_t stride = c.x_stride;
  const auto* x = rows_as<BrainWords::X>(static_cast<const bf16*>(c.x), c.rows, c.inputs, &stride);
  const CodedWeights weights{c.coded, CodedShape(c.outputs, c.inputs)};
  multiply(Product<BrainWords, CodedWeights>{x, stride, c.rows, weights, c.outputs, c.inputs},
           [&](int64_t row, int64_t first, int64_t count, const float* sums) {
             store_with_bias(static_cast<bf16*>(c.out) + row * c.outputs + first, sums, bias ? bias + first : nullptr, count);
           });
}
#endif

// Whether weights are multiplied with as they are coded.
int64_t piecework_reads_panels() {
#if defined(PIECEWORK_PANELS)
  return 1;
#else
  return 0;
#endif
}

}  // extern "C"
