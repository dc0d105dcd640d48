// What a look-up of rows has. All fields are 8 bytes, so that there are no gaps.
#pragma once

#include <cstdint>

namespace piecework {

// Width and stride are in bytes.
struct EmbeddingCall {
  const int64_t* ids;  // [rows]
  const void* weight;  // [vocabulary] rows, weight_stride apart
  void* out;           // [rows][width]
  int64_t rows, width, weight_stride, vocabulary;
};

struct BlockEmbeddingCall {
  const int64_t* ids;     // [rows]
  const uint8_t* packed;  // [groups][blocks][kind]
  void* out;              // [rows][inputs]
  int64_t rows, inputs, groups;
  int64_t kind;  // Blocks of blocks.h
  int64_t type;  // of out
};

struct Int8EmbeddingCall {
  const int64_t* ids;    // [rows]
  const int8_t* weight;  // [vocabulary][inputs]
  const float* scale;    // [vocabulary]
  void* out;             // [rows][inputs]
  int64_t rows, inputs, vocabulary;
  int64_t type;  // of out
  int64_t laid;  // whether the weight is laid out in panels (laid_panel.h)
};

}  // namespace piecework
