// rms_norm and its fusions: the residual's addition before it, quantisation behind it.
#include "norm.h"

namespace piecework {

// Row r of x lies at (r / inner) * outer + (r % inner) * step, the other rows one after the other. What is
// added before the norm (nothing if null), and what becomes of the normed row: stored as it is, quantised
// by a given scale, or by the row's own. All fields are 8 bytes, so that there are no gaps.
struct NormCall {
  const void* x;
  const void* residual;  // or null
  const void* weight;    // [size]
  void* total;           // x + residual; null without one
  void* out;             // of int8 where it is quantised
  const float* scale;    // [1], or null
  const float* offset;   // [1], or null
  float* row_scale;      // [rows], or null
  int64_t rows, size, inner, outer, step;
  int64_t type;  // of x, residual, weight and total
  double eps;

  template <typename T>
  const T* row_of(int64_t r) const {
    return (const T*)x + (inner == 1 ? r * outer : r / inner * outer + r % inner * step);
  }

  template <typename T>
  void ask(int64_t r) const {
    const int64_t bytes = size * int64_t(sizeof(T)), out_bytes = scale || row_scale ? size : bytes;
    ask_for(row_of<T>(r), bytes);
    ask_for<true>((char*)out + r * out_bytes, out_bytes);
    if (!residual) return;
    ask_for((const char*)residual + r * bytes, bytes);
    ask_for<true>((char*)total + r * bytes, bytes);
  }

  template <typename T>
  void run(int64_t r) const {
    float* row = scratch_row(size);
    const int64_t at = r * size;
    const T* from = row_of<T>(r);
    const T* weights = (const T*)weight;
    const float inverse = residual ? fill_sum(from, (const T*)residual + at, size, float(eps), row)
                                   : fill_row(from, size, float(eps), row);
    T* sum = residual ? (T*)total + at : nullptr;
    if (!scale && !row_scale) return norm_row(row, weights, size, inverse, (T*)out + at, sum);
    norm_row(row, weights, size, inverse, row, sum);
    if (scale)
      quantize_row(row, size, {scale, offset}, (int8_t*)out + at);
    else
      row_scale[r] = quantize_row(row, size, (int8_t*)out + at);
  }
};

}  // namespace piecework

extern "C" void piecework_rms_norm(const piecework::NormCall* call) {
  using namespace piecework;
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->rows, 2 * call->size, [c = *call](int64_t r) { c.run<T>(r); },
             [c = *call](int64_t r) { c.ask<T>(r); });
  });
}
