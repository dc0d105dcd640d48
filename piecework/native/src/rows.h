// What all kernels over rows share: threads, a row of floats to work in, and quantisation of such a row.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "vector.h"

namespace piecework {

// Below this many elements waking a thread takes longer than the work.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

constexpr int64_t ROWS_AHEAD = 2;  // of the one at work, that are asked for

// Ask for memory that will be read soon, or written.
template <bool WRITTEN = false>
inline void ask_for(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, WRITTEN, 3);
}

// Not inlined, so that the work of a kernel is compiled once and not for each place that starts it.
template <typename F, typename Ask>
__attribute__((noinline)) void rows_between(int64_t from, int64_t to, F f, Ask ask) {
  for (int64_t row = from; row < to; ++row) {
    if (row + ROWS_AHEAD < to) ask(row + ROWS_AHEAD);
    f(row);
  }
}

// Calls f(row) for each row, on all threads where there is work for them; `cost`: of a row, in elements. ask(row) may
// ask for a row's memory: what other threads made lies in their caches, and waiting for it can take longer than the work.
template <typename F, typename Ask>
inline void for_rows(int64_t rows, int64_t cost, F f, Ask ask) {
  if (rows == 1 || rows * cost < PARALLEL_ELEMENTS || omp_get_max_threads() == 1)
    return rows_between(0, rows, f, ask);
#pragma omp parallel
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    rows_between(rows * t / all, rows * (t + 1) / all, f, ask);
  }
}

template <typename F>
inline void for_rows(int64_t rows, int64_t cost, F f) {
  for_rows(rows, cost, f, [](int64_t) {});
}

constexpr int64_t WAKING_PRODUCTS = 1 << 16;  // below which other threads aren't woken
constexpr int64_t MOST_COLUMNS = 512;         // of a part

// Share the columns of a product, in units of `width`, among all threads, in parts small enough that a thread which is
// kept from working holds up no other: work(from, to). `cost`: products of a column.
template <typename Work>
void share_columns(int64_t columns, int64_t width, int64_t cost, const Work& work) {
  const int64_t units = (columns + width - 1) / width, threads = omp_get_max_threads();
  const auto part = [&](int64_t from, int64_t to) { work(from * width, std::min(columns, to * width)); };
  if (threads == 1 || columns * cost < WAKING_PRODUCTS) return part(0, units);
  const int64_t each = std::max<int64_t>(1, MOST_COLUMNS / width);  // units of a part, at most
  const int64_t parts = threads * ((units + each * threads - 1) / (each * threads));
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < parts; ++i) part(units * i / parts, units * (i + 1) / parts);
}

// The calling thread's memory for one of its uses, which grows to the largest call and stays.
enum Use { PANELS, SUMS, LANED, INPUTS, SCALES, SHIFTS, BIAS, ROW };

template <typename T, Use>
T* thread_memory(int64_t size) {
  thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < size) memory.resize(size_t(size));
  return memory.data();
}

// This thread's memory for `size` floats, then zeros up to a multiple of STRIDE.
constexpr int64_t STRIDE = 4 * LANES;

inline float* scratch_row(int64_t size) {
  const int64_t whole = (size + STRIDE - 1) / STRIDE * STRIDE;
  float* row = thread_memory<float, ROW>(whole);
  for (int64_t i = size; i < whole; ++i) row[i] = 0;
  return row;
}

template <typename T>
inline void widen_row(const T* x, int64_t size, float* row) {
  each(size, [&](int64_t i, auto lanes) { store(row + i, load(x + i, lanes), lanes); });
}

// Rows of x, `stride` apart, as elements of type X: as they are, or as floats in the calling thread's memory.
template <typename X, typename T>
const X* rows_as(const T* x, int64_t rows, int64_t size, int64_t* stride) {
  if constexpr (std::is_same_v<X, T>) {
    return x;
  } else {
    static_assert(std::is_same_v<X, float>);
    float* wide = thread_memory<float, INPUTS>(rows * size);
    const int64_t apart = *stride;
    for_rows(rows, size, [=](int64_t m) { widen_row(x + m * apart, size, wide + m * size); });
    *stride = size;
    return wide;
  }
}

// The static scale and offset of a tensor; `offset` may be null.
struct Static {
  const float* scale;
  const float* offset;
};

inline void quantize_row(const float* row, int64_t size, Static by, int8_t* out) {
  const floats scale = splat(*by.scale), offset = splat(by.offset ? *by.offset : 0.f);
  each(size, [&](int64_t i, auto lanes) { store(out + i, load(row + i, lanes) / scale + offset, lanes); });
}

// The row's own scale is returned: its largest number through 127, 0 for zeros. NaN or infinity, which
// have no int8, leave zeros and are themselves the scale.
inline float quantize_row(const float* row, int64_t size, int8_t* out) {
  ints top[4] = {};
  for (int64_t i = 0; i < size; i += STRIDE)
    for (int j = 0; j < 4; ++j) top[j] = largest(top[j], size_bits(load(row + i + j * LANES)));
  const int32_t bits = largest(largest(largest(top[0], top[1]), largest(top[2], top[3])));
  const float scale = bits_to_float(uint32_t(bits)) / 127.f;
  if (!(scale > 0) || bits >= 0x7f800000) {
    std::memset(out, 0, size_t(size));
    return scale;
  }
  const floats by = splat(scale);
  each(size, [&](int64_t i, auto lanes) { store(out + i, load(row + i, lanes) / by, lanes); });
  return scale;
}

// Calls f(T{}) with the element type that a caller's number names.
template <typename F>
inline void with_type(int64_t type, F f) {
  if (type == BFLOAT16) return f(bf16{});
  if (type == FLOAT16) return f(f16{});
  f(float{});
}

}  // namespace piecework
