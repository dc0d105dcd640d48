// Matrix products with int8 weights: exact int32 sums of int8 inputs, and float sums of float inputs.
#include "int8_linear.h"

#include <cmath>
#include <type_traits>

#include "rows.h"

#if defined(PIECEWORK_PANELS)
#include "laid_panel.h"
#include "multiply.h"
#else
#include "float_dot.h"
#include "int8_panel.h"
#endif

namespace piecework {
namespace {

// The bias as floats; those of another type are widened into the calling thread's memory.
const float* widened(const void* bias, int64_t type, int64_t n) {
  if (!bias || type == FLOAT32) return (const float*)bias;
  float* wide = thread_memory<float, BIAS>(n);
  with_type(type, [=](auto t) { widen_row((const decltype(t)*)bias, n, wide); });
  return wide;
}

#if defined(PIECEWORK_PANELS)

using Packed = ByteWords::X;
constexpr uint32_t SHIFT = ByteWords::SHIFT;
int64_t packed_width(int64_t k) { return readable<ByteWords>(k); }
const Packed* as_packed(const int8_t* x) { return x; }

// Calls finish(row, first column, columns, sums) for each row of x w^T, x being packed rows; C: a call.
template <typename C, typename Finish>
void int8_products(const Packed* x, int64_t width, int64_t rows, const C& c, const Finish& finish) {
  const int64_t n = c.outputs, k = c.inputs;
  if (c.laid)
    multiply(Product<LaidBytes, Laid<LaidBytes>>{x, width, rows, Laid<LaidBytes>(c.weight, k), n, k}, finish);
  else
    multiply(Product<ByteWords>{x, width, rows, c.weight, k, n, k}, finish);
}

// Whether rows of 16-bit floats are multiplied as integers: rounded to 16 bits, whose digits of base 256 are two rows
// of int8. Their products are exact and take half the time of products of floats where reading weights is what counts.
// Where the hardware multiplies bfloat16, that is as fast as two products of int8 if the rows share what widening costs.
template <typename T>
bool in_digits(int64_t rows, bool laid) {
  if (std::is_same_v<T, float>) return false;
  if (std::is_same_v<T, f16> || sizeof(BrainWords::X) == sizeof(float)) return true;
  if (laid) return 2 * rows <= STRAIGHT;
  return 2 * rows <= FEW || (rows > FEW && 2 * rows <= MOST_ROW_LANES);
}

constexpr float LARGEST_IN_DIGITS = 127 * 256;

// What integers are multiplied with, and what is taken from the sums of each digit.
struct Digits {
  float scale;
  int32_t shift[2];
};

template <typename T>
Digits digits_of_row(const T* x, int64_t size, int64_t width, Packed* to) {
  ints top = {};
  each(size, [&](int64_t i, auto lanes) { top = largest(top, size_bits(load(x + i, lanes))); });
  const float scale = bits_to_float(uint32_t(largest(top))) / LARGEST_IN_DIGITS;
  std::memset(to, 0, size_t(2 * width));
  if (!(scale > 0) || !(scale < INFINITY)) return {scale, {}};  // zeros, or NaN, which is their scale
  ints total[2] = {};
  const floats by = splat(1.f / scale);
  each(size, [&](int64_t i, auto lanes) {
    const ints q = (ints)(load(x + i, lanes) * by + 0x1.8p23f) - 0x4b400000;  // rounded as a float is
    const ints low = byte_of(q, 0), high = (q - low) >> 8;
    store(to + i, __builtin_convertvector(high, floats), lanes);
    store(to + width + i, __builtin_convertvector(low, floats), lanes);
    total[0] += high, total[1] += low;
  });
  return {scale, {int32_t(uint32_t(sum(total[0])) * SHIFT), int32_t(uint32_t(sum(total[1])) * SHIFT)}};
}

template <typename T>
void linear_w8_in_digits(const W8Call& c, const float* bias) {
  const int64_t k = c.inputs, width = packed_width(k);
  Packed* packed = thread_memory<Packed, INPUTS>(2 * c.rows * width);
  Digits* digits = thread_memory<Digits, SCALES>(c.rows);
  for_rows(c.rows, k, [=](int64_t r) {
    digits[r] = digits_of_row((const T*)c.x + r * c.x_stride, k, width, packed + 2 * r * width);
  });
  int8_products(packed, width, 2 * c.rows, c,
                [=](int64_t row, int64_t first, int64_t count, const int32_t* sums, int64_t apart) {
    if (row % 2 == 0) return;  // the low digits come next
    const Digits& by = digits[row / 2];
    T* to = (T*)c.out + row / 2 * c.outputs + first;
    each(count, [&](int64_t i, auto lanes) {
      const ints high = load_ints(sums - apart + i, lanes) - by.shift[0], low = load_ints(sums + i, lanes) - by.shift[1];
      floats z = __builtin_convertvector(high, floats) * 256.f + __builtin_convertvector(low, floats);
      z = z * by.scale * load(c.scale + first + i, lanes);
      if (bias) z += load(bias + first + i, lanes);
      store(to + i, z, lanes);
    });
  });
}

template <typename T, typename Finish>
void mixed_products(const W8Call& c, const Finish& finish) {
  using X = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;
  using P = MixedWords<X>;
  using L = LaidMixed<X>;
  int64_t stride = c.x_stride;
  const auto* x = rows_as<typename P::X>((const T*)c.x, c.rows, c.inputs, &stride);
  if (c.laid)
    multiply(Product<L, Laid<L>>{x, stride, c.rows, Laid<L>(c.weight, c.inputs), c.outputs, c.inputs}, finish);
  else
    multiply(Product<P>{x, stride, c.rows, c.weight, c.inputs, c.outputs, c.inputs}, finish);
}

#else

using Packed = Int8Dot::Packed;
constexpr uint32_t SHIFT = 0;
constexpr int64_t MANY_ROWS = 16;  // from which on it pays to lay weights out anew
int64_t packed_width(int64_t k) { return (k + Int8Dot::STEP - 1) / Int8Dot::STEP * Int8Dot::STEP; }
const Packed* as_packed(const int8_t*) { return nullptr; }  // it is wider

template <typename C, typename Finish>
void int8_products(const Packed* x, int64_t width, int64_t rows, const C& c, const Finish& finish) {
#if defined(PIECEWORK_INT8_PANELS)
  if (rows >= MANY_ROWS) return panels(x, width, rows, c.weight, c.outputs, c.inputs, finish);
#endif
  tiles<Int8Dot>(x, width, rows, c.weight, c.outputs, c.inputs, finish);
}

template <typename T, typename Finish>
void mixed_products(const W8Call& c, const Finish& finish) {
  int64_t stride = c.x_stride;
  const float* x = rows_as<float>((const T*)c.x, c.rows, c.inputs, &stride);
  tiles<FloatDot>(x, stride, c.rows, c.weight, c.outputs, c.inputs, finish);
}

#endif

// Rows of x as they are multiplied, `width` apart, in the calling thread's memory.
const Packed* packed_rows_of(const W8A8Call& c, int64_t width) {
  Packed* packed = thread_memory<Packed, INPUTS>(c.rows * width);
  for_rows(c.rows, c.inputs, [=](int64_t r) {
    const int8_t* from = c.x + r * c.x_stride;
    Packed* to = packed + r * width;
    for (int64_t i = 0; i < c.inputs; ++i) to[i] = from[i];
    for (int64_t i = c.inputs; i < width; ++i) to[i] = 0;
  });
  return packed;
}

uint32_t sum_of(const int8_t* from, int64_t size) {
  uint32_t total = 0;
  for (int64_t i = 0; i < size; ++i) total += uint32_t(from[i]);
  return total;
}

// out [rows][n] = (x w^T + quant_bias) * scale * x_scale + bias; x int8 with rows `x_stride` apart.
// x_scale [rows], quant_bias [n] and bias [n] may be null.
void linear_w8a8(const W8A8Call& c, const float* bias) {
  const int64_t k = c.inputs;
  int64_t stride = packed_width(k);
  const Packed* x = stride == k ? as_packed(c.x) : nullptr;
  if (x)
    stride = c.x_stride;
  else
    x = packed_rows_of(c, stride);
  int32_t* shift = thread_memory<int32_t, SHIFTS>(c.rows);
  if (SHIFT)
    for_rows(c.rows, k / 8, [=](int64_t r) { shift[r] = int32_t(sum_of(c.x + r * c.x_stride, k) * SHIFT); });
  with_type(c.type, [=](auto t) {
    using T = decltype(t);
    int8_products(x, stride, c.rows, c, [=](int64_t r, int64_t first, int64_t count, const int32_t* sums) {
      T* to = (T*)c.out + r * c.outputs + first;
      const floats by = splat(c.x_scale ? c.x_scale[r] : 1.f);
      each(count, [&](int64_t i, auto lanes) {
        ints y = load_ints(sums + i, lanes);
        if (SHIFT) y -= shift[r];
        if (c.quant_bias) y += load_ints(c.quant_bias + first + i, lanes);
        floats z = __builtin_convertvector(y, floats) * load(c.scale + first + i, lanes) * by;
        if (bias) z += load(bias + first + i, lanes);
        store(to + i, z, lanes);
      });
    });
  });
}

// out [rows][n] = (x w^T) * scale + bias; x of type T with rows `x_stride` apart. bias [n] may be null.
template <typename T>
void linear_w8(const W8Call& c, const float* bias) {
#if defined(PIECEWORK_PANELS)
  if (in_digits<T>(c.rows, c.laid)) return linear_w8_in_digits<T>(c, bias);
#endif
  mixed_products<T>(c, [=](int64_t r, int64_t first, int64_t count, const float* sums) {
    T* to = (T*)c.out + r * c.outputs + first;
    each(count, [&](int64_t i, auto lanes) {
      floats z = load(sums + i, lanes) * load(c.scale + first + i, lanes);
      if (bias) z += load(bias + first + i, lanes);
      store(to + i, z, lanes);
    });
  });
}

}  // namespace

}  // namespace piecework

using namespace piecework;

extern "C" void piecework_linear_w8a8(const W8A8Call* c) {
  linear_w8a8(*c, widened(c->bias, c->bias_type, c->outputs));
}

extern "C" void piecework_linear_w8(const W8Call* c) {
  const float* bias = widened(c->bias, c->bias_type, c->outputs);
  with_type(c->type, [=](auto t) { linear_w8<decltype(t)>(*c, bias); });
}
