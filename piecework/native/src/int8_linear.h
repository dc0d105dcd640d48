// Arguments of the products with int8 weights; int8_linear.cpp says what they mean.
#pragma once

#include <cstdint>

namespace piecework {

// All fields are 8 bytes, so that there are no gaps. `laid`: the weight is laid out in panels (laid_panel.h).
struct W8A8Call {
  const int8_t* x;
  const int8_t* weight;
  const float* scale;
  const float* x_scale;
  const int32_t* quant_bias;
  const void* bias;
  void* out;
  int64_t rows, outputs, inputs, x_stride;
  int64_t type, bias_type, laid;
};

struct W8Call {
  const void* x;
  const int8_t* weight;
  const float* scale;
  const void* bias;
  void* out;
  int64_t rows, outputs, inputs, x_stride;
  int64_t type, bias_type, laid;
};

}  // namespace piecework
