// rms_norm and its fusions: the residual's addition before it, quantisation behind it.
// Rows are contiguous but for those of rms_norm: row r lies at (r / inner) * outer + (r % inner) * step.
#include "norm.h"

namespace piecework {
namespace {

// One call: what is added before the norm (nothing if null), and what becomes of the normed row: stored as
// it is, quantised by a given scale, or by the row's own.
struct Norm {
  const void* x;
  const void* residual;
  const void* weight;
  float eps;
  void* total;
  void* out;
  const float* scale;
  const float* offset;
  float* row_scale;
  int64_t rows, size;

  void run(int32_t type) const {
    const Norm call = *this;
    with_type(type, [=](auto t) {
      for_rows(call.rows, 2 * call.size, [=](int64_t r) { call.row<decltype(t)>(r); });
    });
  }

  template <typename T>
  void row(int64_t r) const {
    float* row = scratch_row(size);
    const int64_t at = r * size;
    const T* from = (const T*)x + at;
    if (residual)
      add_row(from, (const T*)residual + at, size, (T*)total + at, row);
    else
      widen_row(from, size, row);
    if (!scale && !row_scale) return norm_row(row, (const T*)weight, size, eps, (T*)out + at);
    norm_row(row, (const T*)weight, size, eps, row);
    if (scale)
      quantize_row(row, size, {scale, offset}, (int8_t*)out + at);
    else
      row_scale[r] = quantize_row(row, size, (int8_t*)out + at);
  }
};

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_rms_norm(int32_t type, const void* x, const void* weight, float eps, void* out, int64_t rows,
                        int64_t size, int64_t inner, int64_t outer, int64_t step) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, 2 * size, [=](int64_t r) {
      float* row = scratch_row(size);
      widen_row((const T*)x + (inner == 1 ? r * outer : r / inner * outer + r % inner * step), size, row);
      norm_row(row, (const T*)weight, size, eps, (T*)out + r * size);
    });
  });
}

void piecework_rms_norm_quant(int32_t type, const void* x, const void* weight, float eps, const float* scale,
                              const float* offset, void* out, int64_t rows, int64_t size) {
  Norm{x, nullptr, weight, eps, nullptr, out, scale, offset, nullptr, rows, size}.run(type);
}

void piecework_rms_norm_dynamic_quant(int32_t type, const void* x, const void* weight, float eps, void* out,
                                      float* row_scale, int64_t rows, int64_t size) {
  Norm{x, nullptr, weight, eps, nullptr, out, nullptr, nullptr, row_scale, rows, size}.run(type);
}

void piecework_add_rms_norm(int32_t type, const void* x, const void* residual, const void* weight, float eps,
                            void* out, void* total, int64_t rows, int64_t size) {
  Norm{x, residual, weight, eps, total, out, nullptr, nullptr, nullptr, rows, size}.run(type);
}

void piecework_add_rms_norm_quant(int32_t type, const void* x, const void* residual, const void* weight,
                                  float eps, const float* scale, const float* offset, void* out, void* total,
                                  int64_t rows, int64_t size) {
  Norm{x, residual, weight, eps, total, out, scale, offset, nullptr, rows, size}.run(type);
}

void piecework_add_rms_norm_dynamic_quant(int32_t type, const void* x, const void* residual,
                                          const void* weight, float eps, void* out, void* total,
                                          float* row_scale, int64_t rows, int64_t size) {
  Norm{x, residual, weight, eps, total, out, nullptr, nullptr, row_scale, rows, size}.run(type);
}

}  // extern "C"
