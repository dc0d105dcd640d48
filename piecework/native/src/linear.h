// Arguments of the product with float weights; linear.cpp says what they mean.
#pragma once

#include <cstdint>

#include "vector.h"

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

// What is done with sums of products: a bias may be added.
template <typename T>
inline void store_with_bias(T* out, const float* sums, const T* bias, int64_t count) {
  each(count, [&](int64_t i, auto lanes) {
    floats y = load(sums + i, lanes);
    if (bias) y += load(bias + i, lanes);
    store(out + i, y, lanes);
  });
}

}  // namespace piecework
