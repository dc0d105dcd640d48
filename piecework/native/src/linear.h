// Arguments of the product with float weights; linear.cpp says what they mean.
#pragma once

#include <cstdint>

namespace piecework {

// All fields are 8 bytes, so that there are no gaps; strides are in elements.
struct LinearCall {
  const void* x;
  const void* weight;
  const void* bias;  // or null
  void* out;         // [rows][outputs]
  int64_t x_stride, weight_stride;
  int64_t rows, outputs, inputs;
  int64_t type;  // of x, weight, bias and out
};

}  // namespace piecework
