// What reading rows of a file takes that have the file's own blocks. All fields are 8 bytes, so that there are no
// gaps.
#pragma once

#include <cstdint>

namespace piecework {

// The kinds of piecework/weights/gguf/types.py, by the bytes of a block of one row.
enum FileBlocks : int64_t { FILE_Q4_0 = 18, FILE_Q4_1 = 20, FILE_Q8_0 = 34 };

struct DequantiseCall {
  const uint8_t* from;  // [rows][width / 32][kind]
  void* out;            // [rows][width]
  int64_t rows, width;
  int64_t kind;      // FileBlocks
  int64_t head_dim;  // rows are those of heads with interleaved halves; 0: they stay where they are
  int64_t type;      // of out
};

struct PackCall {
  const uint8_t* from;  // [rows][blocks][kind]
  uint8_t* packed;      // [groups][blocks][8 * kind], as in piecework/ops/block_kinds.py
  int64_t rows, blocks;
  int64_t kind;      // FileBlocks
  int64_t head_dim;  // as above
  int64_t first;     // of all packed rows, the first one to fill
};

}  // namespace piecework
