// rms_norm and its fusions: the residual's addition before it, quantisation behind it.
// Rows are contiguous but for those of rms_norm: row r lies at (r / inner) * outer + (r % inner) * step.
#include "norm.h"

namespace piecework {
namespace {

// What becomes of a normed row: stored as T, quantised by a given scale, or by the row's own.
template <typename T>
struct AsIs {
  T* out;
  void operator()(int64_t r, float* row, const T* weight, int64_t size, float eps) const {
    norm_row(row, weight, size, eps, out + r * size);
  }
};

template <typename T>
struct Quantized {
  Static by;
  int8_t* out;
  void operator()(int64_t r, float* row, const T* weight, int64_t size, float eps) const {
    norm_row(row, weight, size, eps, row);
    quantize_row(row, size, by, out + r * size);
  }
};

template <typename T>
struct RowQuantized {
  int8_t* out;
  float* scale;
  void operator()(int64_t r, float* row, const T* weight, int64_t size, float eps) const {
    norm_row(row, weight, size, eps, row);
    scale[r] = quantize_row(row, size, out + r * size);
  }
};

template <typename T, template <typename> class Finish>
void norm(const void* x, const void* weight, float eps, int64_t rows, int64_t size, Finish<T> finish) {
  for_rows(rows, 2 * size, [=](int64_t r) {
    float* row = scratch_row(size);
    widen_row((const T*)x + r * size, size, row);
    finish(r, row, (const T*)weight, size, eps);
  });
}

template <typename T, template <typename> class Finish>
void add_norm(const void* x, const void* residual, const void* weight, float eps, void* total, int64_t rows,
              int64_t size, Finish<T> finish) {
  for_rows(rows, 2 * size, [=](int64_t r) {
    float* row = scratch_row(size);
    add_row((const T*)x + r * size, (const T*)residual + r * size, size, (T*)total + r * size, row);
    finish(r, row, (const T*)weight, size, eps);
  });
}

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
                              const float* offset, int8_t* out, int64_t rows, int64_t size) {
  with_type(type, [=](auto t) {
    norm(x, weight, eps, rows, size, Quantized<decltype(t)>{{scale, offset}, out});
  });
}

void piecework_rms_norm_dynamic_quant(int32_t type, const void* x, const void* weight, float eps, int8_t* out,
                                      float* row_scale, int64_t rows, int64_t size) {
  with_type(type, [=](auto t) {
    norm(x, weight, eps, rows, size, RowQuantized<decltype(t)>{out, row_scale});
  });
}

void piecework_add_rms_norm(int32_t type, const void* x, const void* residual, const void* weight, float eps,
                            void* out, void* total, int64_t rows, int64_t size) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    add_norm(x, residual, weight, eps, total, rows, size, AsIs<T>{(T*)out});
  });
}

void piecework_add_rms_norm_quant(int32_t type, const void* x, const void* residual, const void* weight,
                                  float eps, const float* scale, const float* offset, int8_t* out, void* total,
                                  int64_t rows, int64_t size) {
  with_type(type, [=](auto t) {
    add_norm(x, residual, weight, eps, total, rows, size, Quantized<decltype(t)>{{scale, offset}, out});
  });
}

void piecework_add_rms_norm_dynamic_quant(int32_t type, const void* x, const void* residual,
                                          const void* weight, float eps, int8_t* out, void* total,
                                          float* row_scale, int64_t rows, int64_t size) {
  with_type(type, [=](auto t) {
    add_norm(x, residual, weight, eps, total, rows, size, RowQuantized<decltype(t)>{out, row_scale});
  });
}

}  // extern "C"
