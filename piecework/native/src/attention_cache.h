// Keys and values as the cache keeps them: as the model gives them, or as int8 with a scale for each token and head.
#pragma once

#include <algorithm>

#include "vector.h"

namespace piecework {

// Put one head's channels of a token into row `where` of a cache, as they are.
template <typename T>
inline void keep(const T* x, int64_t dim, int64_t where, T* cache, bf16*) {
  std::copy_n(x, dim, cache + where * dim);
}

// As int8. The scale is the largest number through 127, rounded to bfloat16 first, so that what is read is what
// was divided by. NaN or infinity, which have no int8, leave zeros and are themselves the scale.
template <typename T>
inline void keep(const T* x, int64_t dim, int64_t where, int8_t* cache, bf16* scales) {
  int8_t* out = cache + where * dim;
  ints top = {};
  each(dim, [&](int64_t i, auto lanes) { top = largest(top, size_bits(load(x + i, lanes))); });
  const int32_t bits = largest(top);
  scales[where] = from_float<bf16>(bits_to_float(uint32_t(bits)) / 127.f);
  const float by = to_float(scales[where]);
  if (!(by > 0) || bits >= 0x7f800000) {
    std::memset(out, 0, size_t(dim));
    return;
  }
  each(dim, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) / splat(by), lanes); });
}

// row[i] *= scales[i]; both have room for whole vectors.
inline void scale_row(float* row, const float* scales, int size) {
  for (int i = 0; i < size; i += LANES) store(row + i, load(row + i) * load(scales + i));
}

}  // namespace piecework
