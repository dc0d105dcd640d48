// Matrix products with int8 weights: exact int32 sums of int8 inputs, and float sums of float inputs.
#include "int8_linear.h"

#include "int8_panel.h"
#include "matrix.h"

namespace piecework {
namespace {

constexpr int64_t MANY_ROWS = 16;  // from which on it pays to lay weights out anew

int64_t whole_steps(int64_t k, int64_t step) { return (k + step - 1) / step * step; }

// Packed rows live in the calling thread's memory, which grows to the largest call and stays.
template <typename T>
T* scratch_rows(int64_t size) {
  thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < size) memory.resize(size_t(size));
  return memory.data();
}

struct FloatDot {
  using Sum = float;
  using Packed = float;
  static constexpr int STEP = LANES, COLUMNS = 2;

  template <int M, int N>
  static void block(const Packed* x, int64_t x_stride, const int8_t* w, int64_t apart, int64_t k,
                    Sum* found) {
    floats sums[M * N];
    for (int i = 0; i < M * N; ++i) sums[i] = floats{};
    each(k, [&](int64_t i, auto lanes) {
      for (int n = 0; n < N; ++n) {
        const floats y = load(w + n * apart * k + i, lanes);
        for (int m = 0; m < M; ++m) sums[m * N + n] += load(x + m * x_stride + i) * y;
      }
    });
    if constexpr (M * N % 4 == 0)
      for (int i = 0; i < M * N; i += 4) store_sums(sums + i, found + i);
    else
      for (int i = 0; i < M * N; ++i) found[i] = sum(sums[i]);
  }
};

// The bias as floats; those of another type are widened into the calling thread's memory.
const float* widened(const void* bias, int64_t type, int64_t n) {
  if (!bias || type == FLOAT32) return (const float*)bias;
  thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < n) memory.resize(size_t(n));
  with_type(type, [=](auto t) { widen_row((const decltype(t)*)bias, n, memory.data()); });
  return memory.data();
}

// out [rows][n] = (x w^T + quant_bias) * scale * x_scale + bias; x int8 with rows `stride` apart.
// x_scale [rows], quant_bias [n] and bias [n] may be null.
void linear_w8a8(int64_t type, const int8_t* x, const int8_t* w, const float* scale,
                 const float* x_scale, const int32_t* quant_bias, const float* bias, void* out,
                 int64_t rows, int64_t n, int64_t k, int64_t stride) {
  using Packed = Int8Dot::Packed;
  const int64_t width = whole_steps(k, Int8Dot::STEP);
  Packed* packed = scratch_rows<Packed>(rows * width);
  int32_t* shift = scratch_rows<int32_t>(rows);
  for_rows(rows, k, [=](int64_t r) {
    const int8_t* from = x + r * stride;
    Packed* to = packed + r * width;
    uint32_t total = 0;
    for (int64_t i = 0; i < k; ++i) to[i] = from[i];
    for (int64_t i = k; i < width; ++i) to[i] = 0;
    if (Int8Dot::SHIFT)
      for (int64_t i = 0; i < k; ++i) total += uint32_t(from[i]);
    shift[r] = int32_t(total * Int8Dot::SHIFT);
  });
  with_type(type, [=](auto t) {
    using T = decltype(t);
    const auto finish = [=](int64_t r, int64_t first, int64_t count, const int32_t* sums) {
      T* to = (T*)out + r * n + first;
      const floats by = splat(x_scale ? x_scale[r] : 1.f);
      each(count, [&](int64_t i, auto lanes) {
        ints y = load_ints(sums + i, lanes) - shift[r];
        if (quant_bias) y += load_ints(quant_bias + first + i, lanes);
        floats z = __builtin_convertvector(y, floats) * load(scale + first + i, lanes) * by;
        if (bias) z += load(bias + first + i, lanes);
        store(to + i, z, lanes);
      });
    };
#if defined(PIECEWORK_INT8_PANELS)
    if (rows >= MANY_ROWS) return panels(packed, width, rows, w, n, k, finish);
#endif
    tiles<Int8Dot>(packed, width, rows, w, n, k, finish);
  });
}

// out [rows][n] = (x w^T) * scale + bias; x of `type` with rows `stride` apart. bias [n] may be null.
void linear_w8(int64_t type, const void* x, const int8_t* w, const float* scale, const float* bias,
               void* out, int64_t rows, int64_t n, int64_t k, int64_t stride) {
  const int64_t width = whole_steps(k, FloatDot::STEP);
  float* packed = scratch_rows<float>(rows * width);
  with_type(type, [=](auto t) {
    using T = decltype(t);
    for_rows(rows, k, [=](int64_t r) {
      widen_row((const T*)x + r * stride, k, packed + r * width);
      std::fill(packed + r * width + k, packed + (r + 1) * width, 0.f);
    });
    tiles<FloatDot>(packed, width, rows, w, n, k, [=](int64_t r, int64_t first, int64_t count, const float* sums) {
      T* to = (T*)out + r * n + first;
      each(count, [&](int64_t i, auto lanes) {
        floats z = load(sums + i, lanes) * load(scale + first + i, lanes);
        if (bias) z += load(bias + first + i, lanes);
        store(to + i, z, lanes);
      });
    });
  });
}

}  // namespace

}  // namespace piecework

using namespace piecework;

extern "C" void piecework_linear_w8a8(const W8A8Call* c) {
  linear_w8a8(c->type, c->x, c->weight, c->scale, c->x_scale, c->quant_bias,
              widened(c->bias, c->bias_type, c->outputs), c->out, c->rows, c->outputs, c->inputs, c->x_stride);
}

extern "C" void piecework_linear_w8(const W8Call* c) {
  linear_w8(c->type, c->x, c->weight, c->scale, widened(c->bias, c->bias_type, c->outputs), c->out, c->rows,
            c->outputs, c->inputs, c->x_stride);
}
