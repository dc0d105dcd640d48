// silu_and_mul, alone and with quantisation behind it, and quantisation alone.
#include "rows.h"

namespace piecework {

// Row r of x lies at r * stride; outputs are contiguous. Quantised by a given scale, by each row's own, or
// (of the gate only) not at all. All fields are 8 bytes, so that there are no gaps.
struct QuantizeCall {
  const void* x;        // [rows][size], of the gate [rows][2 * size]
  void* out;            // [rows][size], of int8 where it is quantised
  const float* scale;   // [1], or null
  const float* offset;  // [1], or null
  float* row_scale;     // [rows], or null
  int64_t rows, size, stride;
  int64_t type;  // of x
};

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

void finish_row(const QuantizeCall& c, const float* row, int64_t r) {
  int8_t* to = (int8_t*)c.out + r * c.size;
  if (c.scale)
    quantize_row(row, c.size, {c.scale, c.offset}, to);
  else
    c.row_scale[r] = quantize_row(row, c.size, to);
}

// Ask for row r, `parts` inputs for each output, and for where it goes.
template <typename T>
void ask_row(const QuantizeCall& c, int64_t parts, int64_t r) {
  const int64_t bytes = c.size * int64_t(c.scale || c.row_scale ? 1 : sizeof(T));
  ask_for((const T*)c.x + r * c.stride, parts * c.size * int64_t(sizeof(T)));
  ask_for<true>((char*)c.out + r * bytes, bytes);
}

constexpr int64_t GATE_COST = 4;  // of an element, in those of a copy

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_silu_and_mul(const QuantizeCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->rows, GATE_COST * call->size, [c = *call](int64_t r) {
      const T* x = (const T*)c.x + r * c.stride;
      if (!c.scale && !c.row_scale) return gate_row(x, c.size, (T*)c.out + r * c.size);
      float* row = scratch_row(c.size);
      gate_row(x, c.size, row);
      finish_row(c, row, r);
    }, [c = *call](int64_t r) { ask_row<T>(c, 2, r); });
  });
}

void piecework_quantize(const QuantizeCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->rows, call->size, [c = *call](int64_t r) {
      float* row = scratch_row(c.size);
      widen_row((const T*)c.x + r * c.stride, c.size, row);
      finish_row(c, row, r);
    }, [c = *call](int64_t r) { ask_row<T>(c, 1, r); });
  });
}

}  // extern "C"
