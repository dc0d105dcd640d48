// silu_and_mul, alone and with quantisation behind it, and quantisation alone.
// Row r of an input lies at r * stride; outputs are contiguous.
#include "rows.h"

namespace piecework {
namespace {

// x / (1 + e^-x), with no power of e above 1.
inline floats silu(floats x) {
  const floats e = exp_of_negative(x < 0.f ? x : -x);
  return (x < 0.f ? x * e : x) / (1.f + e);
}

// row = silu(x[:size]) * x[size:], each rounded to T. `row` may be of T.
template <typename T, typename U>
inline void gate_row(const T* x, int64_t size, U* row) {
  each(size, [&](int64_t i, auto lanes) {
    const floats gate = rounded<T>(silu(load(x + i, lanes)));
    store_rounded<T>(row + i, gate * load(x + size + i, lanes), lanes);
  });
}

constexpr int64_t GATE_COST = 4;  // of an element, in those of a copy

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_silu_and_mul(int32_t type, const void* x, void* out, int64_t rows, int64_t size,
                            int64_t stride) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, GATE_COST * size,
             [=](int64_t r) { gate_row((const T*)x + r * stride, size, (T*)out + r * size); });
  });
}

void piecework_silu_mul_quant(int32_t type, const void* x, const float* scale, const float* offset,
                              int8_t* out, int64_t rows, int64_t size, int64_t stride) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, GATE_COST * size, [=](int64_t r) {
      float* row = scratch_row(size);
      gate_row((const T*)x + r * stride, size, row);
      quantize_row(row, size, {scale, offset}, out + r * size);
    });
  });
}

void piecework_silu_mul_dynamic_quant(int32_t type, const void* x, int8_t* out, float* row_scale, int64_t rows,
                                      int64_t size, int64_t stride) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, GATE_COST * size, [=](int64_t r) {
      float* row = scratch_row(size);
      gate_row((const T*)x + r * stride, size, row);
      row_scale[r] = quantize_row(row, size, out + r * size);
    });
  });
}

void piecework_quantize(int32_t type, const void* x, const float* scale, const float* offset, int8_t* out,
                        int64_t rows, int64_t size, int64_t stride) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, size, [=](int64_t r) {
      float* row = scratch_row(size);
      widen_row((const T*)x + r * stride, size, row);
      quantize_row(row, size, {scale, offset}, out + r * size);
    });
  });
}

void piecework_dynamic_quantize(int32_t type, const void* x, int8_t* out, float* row_scale, int64_t rows,
                                int64_t size, int64_t stride) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, size, [=](int64_t r) {
      float* row = scratch_row(size);
      widen_row((const T*)x + r * stride, size, row);
      row_scale[r] = quantize_row(row, size, out + r * size);
    });
  });
}

}  // extern "C"
