// linear_blocks: weights in blocks of 8 rows against activations that are quantised here.
#include <algorithm>

#include "block_dot.h"
#include "rows.h"

namespace piecework {

namespace {

constexpr int ROWS = 4;                        // of x at a time
constexpr int MANY = VNNI ? 8 : 4;             // where there are registers for them: weights are unpacked less often
constexpr int STREAMS = VNNI ? 1 : 4;          // of them that are read at once
constexpr int64_t QUANTISED_ALONE = 1 << 14;   // elements of x, up to which other threads aren't woken
constexpr int64_t AHEAD = VNNI ? 1 << 14 : 0;  // bytes from what is read to what is asked for

// Rows of x as int8, and for each block of 32 channels its scale, its scaled sum, and what products_scaled (the sums of
// both of its halves) or products_8bit wants to know. ABREAST rows lie side by side in all of them.
struct Quantised {
  int8_t* values;
  float *scales, *sums;
  int32_t* known;
  int64_t blocks;

  // From row m on.
  Quantised at(int64_t m) const {
    const int64_t b = m / ABREAST * blocks * ABREAST + m % ABREAST;
    int8_t* row = values + m / ABREAST * blocks * BLOCK * ABREAST + 4 * (m % ABREAST);
    return {row, scales + b, sums + b, known + b, blocks};
  }
};

// The sum of half a block.
int32_t sum_of_half(const int8_t* x) {
#if defined(__AVX2__)
  const __m128i from_0 = _mm_xor_si128(_mm_loadu_si128((const __m128i*)x), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(from_0, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - BLOCK / 2 * 128;
#else
  int32_t sum = 0;
  for (int i = 0; i < BLOCK / 2; ++i) sum += x[i];
  return sum;
#endif
}

// Into a row of `to`.
template <typename T>
void quantise_row(const T* x, const Quantised& to, bool halves) {
  for (int64_t b = 0; b < to.blocks; ++b) {
    const T* from = x + b * BLOCK;
    ints size = size_bits(load(from));  // NaN is larger than any number and so stays
    for (int i = LANES; i < BLOCK; i += LANES) size = largest(size, size_bits(load(from + i)));
    const float most = bits_to_float(uint32_t(largest(size)));
    const float reciprocal = most == 0 ? 0 : 127 / most;
    int8_t values[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) store(values + i, load(from + i) * reciprocal);
    const int32_t first = sum_of_half(values), last = sum_of_half(values + BLOCK / 2);
    for (int i = 0; i < BLOCK; i += 4) std::memcpy(to.values + place(0, b * BLOCK + i), values + i, 4);
    to.scales[b * ABREAST] = most / 127;
    to.sums[b * ABREAST] = float(first + last) * to.scales[b * ABREAST];
    to.known[b * ABREAST] = halves ? int32_t(uint32_t(last) << 16 | uint16_t(first)) : -128 * (first + last);
  }
}

// y [STREAMS * N][MANY][8] of groups of weights that lie `apart` bytes from one another, N in a vector, for rows of x from m on: a
// processor that has little else to do fetches a few streams of memory faster than one; one that computes faster than
// memory comes is better off to ask ahead. Not inlined, so that it is compiled once for all types.
template <typename K, int ROWS_, int STREAMS, int N>
__attribute__((noinline)) void group_rows(K, const uint8_t* w, int64_t apart, Quantised x, float* y) {
  constexpr Layout layout = K::layout;
  static_assert(N == 1 || STREAMS == 1);
  Floats<N> total[STREAMS][ROWS_] = {};
  for (int64_t b = 0; b < x.blocks; ++b) {
    for (int s = 0; s < STREAMS; ++s) {
      const Groups<N> block{w + s * apart, apart};
      const Groups<N> part = block + (layout.head() + b % layout.parts * layout.part());
      if constexpr (AHEAD > 0)
        for (int i = 0; i < layout.bytes() / layout.parts; i += 64)
          for (int n = 0; n < N; ++n) __builtin_prefetch(part.at + n * apart + AHEAD + i, 0, 2);
      Floats<N> scale = halves_of(block);
      Integers<N> products[ROWS_];
      if constexpr (layout.bits == 8)
        products_8bit<ROWS_, N>(part, x.values, x.known, products);
      else if constexpr (layout.bits == 6)
        products_scaled<ROWS_, N>(part, x.values, x.known, products);
      else
        products_small<layout.bits, ROWS_, N>(part + layout.small(), x.values, products);
      Floats<N> minimum = scale;
      if constexpr (layout.minimum) minimum = halves_of(block + 2 * GROUP);
      if constexpr (layout.minimum && layout.parts > 1) {
        scale = times(scale, bytes_of(part));
        minimum = times(minimum, bytes_of(part + GROUP));
      }
      // Minimums are subtracted in the K kinds; the weights of 6 bits have their 32 taken off before.
      constexpr int times_sum = !layout.minimum ? (layout.bits == 6 ? 0 : -layout.zero) : layout.parts > 1 ? -1 : 1;
      for (int m = 0; m < ROWS_; ++m) {
        Floats<N>& sum = total[s][m];
        sum = add_product(sum, to_floats(products[m]), times(scale, x.scales[m]));
        if constexpr (times_sum != 0) sum = add_product(sum, minimum, times_sum * x.sums[m]);
      }
    }
    x.values += BLOCK * ABREAST, x.scales += ABREAST, x.sums += ABREAST, x.known += ABREAST;
    if ((b + 1) % layout.parts == 0) w += layout.bytes();
  }
  for (int s = 0; s < STREAMS; ++s)
    for (int m = 0; m < ROWS_; ++m) store_groups(y + (s * MANY + m) * GROUP, MANY * GROUP, total[s][m]);
}

// Write y [rows][8] with the bias, a vector at a time, whatever part of it a row is.
template <typename T>
void finish(const BlockLinearCall& call, const float* y, int64_t row, int rows, int64_t column) {
  constexpr int AT_ONCE = LANES / GROUP;
  static_assert(MANY % AT_ONCE == 0, "y has room for whole vectors");
  const int columns = int(std::min<int64_t>(GROUP, call.outputs - column));
  T* out = static_cast<T*>(call.out) + row * call.out_stride + column;
  float bias[LANES] = {};
  if (call.bias)
    for (int n = 0; n < LANES; ++n)
      if (n % GROUP < columns) bias[n] = to_float(static_cast<const T*>(call.bias)[column + n % GROUP]);
  T kept[LANES];
  for (int m = 0; m < rows; ++m) {
    if (m % AT_ONCE == 0) store(kept, load(y + m * GROUP) + load(bias));
    const T* from = kept + m % AT_ONCE * GROUP;
    if (columns == GROUP)  // a copy of a size that is known is one instruction
      std::memcpy(out + m * call.out_stride, from, GROUP * sizeof(T));
    else
      std::copy_n(from, columns, out + m * call.out_stride);
  }
}

// Groups `first`, `first` + apart, ..., STREAMS or N of them, for `rows` rows of x from `m` on.
template <typename T, int STREAMS, int N, typename K>
void some_groups(K kind, const BlockLinearCall& call, const Quantised& x, int64_t m, int rows, int64_t first,
                 int64_t apart) {
  const int64_t row_bytes = x.blocks / K::layout.parts * K::layout.bytes();
  const uint8_t* w = call.packed + first * row_bytes;
  const int64_t bytes = apart * row_bytes;
  float y[STREAMS * N * MANY * GROUP];
  if constexpr (N == 1) {
    switch (rows) {
      case 1: group_rows<K, 1, STREAMS, 1>(kind, w, bytes, x.at(m), y); break;
      case 2: group_rows<K, 2, STREAMS, 1>(kind, w, bytes, x.at(m), y); break;
      case 3: group_rows<K, 3, STREAMS, 1>(kind, w, bytes, x.at(m), y); break;
      case 4: group_rows<K, 4, STREAMS, 1>(kind, w, bytes, x.at(m), y); break;
      default: group_rows<K, MANY, 1, 1>(kind, w, bytes, x.at(m), y);  // only with one stream
    }
  } else {
    group_rows<K, MANY, 1, N>(kind, w, bytes, x.at(m), y);
  }
  for (int s = 0; s < STREAMS * N; ++s) finish<T>(call, y + s * MANY * GROUP, m, rows, (first + s * apart) * GROUP);
}

// One group, or STREAMS of them, for all rows from `m` on.
template <typename T, int STREAMS, typename K>
void all_rows(K kind, const BlockLinearCall& call, const Quantised& x, int64_t m, int64_t first, int64_t apart) {
  if constexpr (STREAMS == 1)
    for (; m + MANY <= call.rows; m += MANY) some_groups<T, 1, 1>(kind, call, x, m, MANY, first, apart);
  for (; m < call.rows; m += ROWS)
    some_groups<T, STREAMS, 1>(kind, call, x, m, int(std::min<int64_t>(ROWS, call.rows - m)), first, apart);
}

template <typename T, typename K>
void run_kind(K kind, const BlockLinearCall& call, const Quantised& x) {
  share_columns(call.outputs, GROUP, call.rows * call.inputs, [&](int64_t first, int64_t last) {
    int64_t g = first / GROUP;
    const int64_t to = (last + GROUP - 1) / GROUP;
    if constexpr (STREAMS > 1) {
      const int64_t apart = (to - g) / STREAMS;
      for (const int64_t end = g + apart; g < end; ++g) all_rows<T, STREAMS>(kind, call, x, 0, g, apart);
      g += apart * (STREAMS - 1);
    }
    if constexpr (TWO_GROUPS)
      for (; g + 2 <= to && call.rows >= MANY; g += 2) {
        int64_t m = 0;
        for (; m + MANY <= call.rows; m += MANY) some_groups<T, 1, 2>(kind, call, x, m, MANY, g, 1);
        for (int i = 0; i < 2; ++i) all_rows<T, 1>(kind, call, x, m, g + i, 0);
      }
    for (; g < to; ++g) all_rows<T, 1>(kind, call, x, 0, g, 0);
  });
}

template <typename T>
void run(const BlockLinearCall& call) {
  const int64_t blocks = call.inputs / BLOCK, all = (call.rows + ABREAST - 1) / ABREAST * ABREAST * blocks;
  float* scales = thread_memory<float, SCALES>(2 * all);
  const Quantised x{thread_memory<int8_t, INPUTS>(all * BLOCK), scales, scales + all,
                    thread_memory<int32_t, SHIFTS>(all), blocks};
#pragma omp parallel for schedule(static) if (call.rows * call.inputs > QUANTISED_ALONE)
  for (int64_t m = 0; m < call.rows; ++m)
    quantise_row(static_cast<const T*>(call.x) + m * call.x_stride, x.at(m), call.kind != Q8_0);
  with_kind(call.kind, [&](auto kind) { run_kind<T>(kind, call, x); });
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_linear_blocks(const piecework::BlockLinearCall* call) {
  piecework::with_type(call->type, [=](auto t) { piecework::run<decltype(t)>(*call); });
}
