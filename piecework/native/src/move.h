// Rows of bytes that move inside one buffer, where the old place of a row may overlap its new one.
#pragma once

#include <cstdint>

namespace piecework {

// `rows` rows of `size` bytes, the first from byte `from` of a tensor to its byte `to`, each next one a stride
// further. With `last` they move up and the last row goes first, else they move down. All fields are 8 bytes.
struct RowRun {
  int64_t from, to, from_stride, to_stride, rows, size, last;
};

// A tensor's runs, in the order in which they must move.
struct TensorMove {
  char* base;
  const RowRun* runs;
  int64_t count;
};

}  // namespace piecework
