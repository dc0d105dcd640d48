// Products of rows, y[m][n] = x[m] . w[n], both read along K as they lie in memory, for vectors of sixteen lanes:
// it takes their many registers, and their wide products, to make up for the transposition. Others use dots.h and tiles.h.
//
// LANES rows of w are a panel. Blocks of it are transposed on their way to the registers, so that each lane has a
// column of its own: nothing is added across lanes, and a value is summed in the order of K however many rows and
// columns there are: a row of a batch gives what it gives alone. Few rows are multiplied with a block while it is
// in registers; for many, panels are laid out anew in the cache. Panels that lie so in memory: straight.h.
#pragma once

#include <algorithm>

#include "rows.h"
#include "transpose.h"
#include "words.h"

namespace piecework {

constexpr int ACROSS = 4;                     // panels at once
constexpr int DOWN = 6, HALF = 3;             // rows at once with these, and at the end: sums fill most registers
constexpr int FEW = 8;                        // rows that are multiplied straight from memory
constexpr int64_t CACHED = 1 << 18;           // bytes of panels at once, of a core's second cache
constexpr int64_t KEPT_ROWS = 40 * DOWN;      // rows whose sums wait for the next channels where panels are deeper
constexpr int64_t LONG_PANEL = 1 << 17;       // bytes, from which on the processor finds the next ones by itself

// Up to LANES rows of w; where there are fewer the last one stands for the others.
template <typename P, bool WHOLE>
struct RowPanel {
  const typename P::Weight* first;
  int64_t stride;
  int last;

  const typename P::Weight* row(int i) const { return first + (WHOLE ? i : std::min(i, last)) * stride; }

  // The block of LANES words of each row from channel k on.
  PIECEWORK_INLINED void load(int64_t k, ints* block) const {
    PIECEWORK_UNROLLED
    for (int i = 0; i < LANES; ++i) block[i] = P::words(row(i) + k);
    transpose(block);
  }

  // The same of the last channels, and zeros.
  void load(int64_t k, int64_t channels, ints* block) const {
    for (int i = 0; i < LANES; ++i) {
      typename P::Weight kept[LANES * P::PER] = {};
      std::memcpy(static_cast<void*>(kept), row(i) + k, size_t(channels) * sizeof *kept);
      block[i] = P::words(kept);
    }
    transpose(block);
  }

  // Blocks jump from row to row, in which processors see no stream: so ask for the memory of the panel after the
  // next one, in order, as much as a block reads.
  void fetch(int64_t k) const {
    const int64_t bytes = stride * int64_t(sizeof *first);
    if (bytes * LANES > LONG_PANEL) return;
    const char* from = reinterpret_cast<const char*>(first) + 2 * LANES * bytes + k * int64_t(sizeof *first) * LANES;
    PIECEWORK_UNROLLED
    for (int i = 0; i < LANES * LANES * P::PER * int(sizeof *first); i += 64) __builtin_prefetch(from + i, 0, 2);
  }
};

// Weights as a checkpoint has them: a row for each column of the product. Strides are in elements.
template <typename P>
struct Rows {
  static constexpr bool IN_ROWS = true;
  const typename P::Weight* w;
  int64_t stride;

  template <bool WHOLE>
  RowPanel<P, WHOLE> panel(int64_t first, int64_t columns) const {
    return {w + first * stride, stride, int(std::min<int64_t>(LANES, columns - first)) - 1};
  }

  const char* at(int64_t column) const { return reinterpret_cast<const char*>(w + column * stride); }
};

enum Near { SECOND_CACHE = 2, FIRST_CACHE = 3 };  // how near __builtin_prefetch brings memory

// Memory that will be read next, and is asked for while there is work: `lines` cache lines at each step.
struct Ahead {
  const char *from, *end;
  int lines;

  void fetch() {
    for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, SECOND_CACHE);
  }
};

// So many elements of x, of `channels` of which a row has the last, can be read.
template <typename P>
constexpr int64_t readable(int64_t channels) {
  return P::PADDED ? (channels + P::PER - 1) / P::PER * P::PER : channels;
}

// A product's arguments; W is how its weights lie.
template <typename P, typename W = Rows<P>>
struct Product {
  const typename P::X* x;
  int64_t x_stride, rows;
  W weights;
  int64_t columns, depth;

  // Weights that were laid out in panels have whole ones.
  static constexpr bool PARTIAL = W::IN_ROWS;

  template <bool WHOLE>
  auto panel(int64_t first) const {
    return weights.template panel<WHOLE>(first, columns);
  }

  // The n panels after those from column `first` on.
  Ahead after(int64_t first, int n) const {
    const auto at = [&](int64_t column) { return weights.at(std::min(column, columns)); };
    const char *from = at(first + n * LANES), *end = at(first + 2 * n * LANES);
    const int64_t steps = (rows + DOWN - 1) / DOWN * std::max<int64_t>(1, depth / P::PER);
    return {from, end, int((end - from) / 64 / steps + 1)};
  }

  const typename P::X* row(int64_t m) const { return x + std::min(m, rows - 1) * x_stride; }
};

// sums [M] += a block with M rows of x from channel k on.
template <typename P, int M>
inline void add_block(const ints* block, const typename P::X* const* x, int64_t k, typename P::Sum* sums) {
  PIECEWORK_UNROLLED
  for (int i = 0; i < LANES; ++i) {
    typename P::Part w[P::PARTS];
    P::widen(block[i], w);
    PIECEWORK_UNROLLED
    for (int part = 0; part < P::PARTS; ++part)
      PIECEWORK_UNROLLED
      for (int m = 0; m < M; ++m) sums[m] = P::add(sums[m], w[part], P::spread(x[m] + k + i * P::PER, part));
  }
}

// sums [M][LANES] of all rows, at most M, with a panel. Not inlined, so that it is compiled once for all callers.
template <int M, bool WHOLE, typename P>
__attribute__((noinline)) void few_rows(const Product<P>& p, int64_t first, typename P::Sum* to) {
  constexpr int64_t STEP = LANES * P::PER;
  const auto panel = p.template panel<WHOLE>(first);
  const typename P::X* x[M];
  typename P::Sum sums[M];
  for (int m = 0; m < M; ++m) x[m] = p.row(m), sums[m] = typename P::Sum{};
  ints block[LANES];
  int64_t k = 0;
  for (; k + STEP <= p.depth; k += STEP) {
    panel.fetch(k);
    panel.load(k, block);
    add_block<P, M>(block, x, k, sums);
  }
  if (k < p.depth) {
    typename P::X rest[M][STEP] = {};
    for (int m = 0; m < M; ++m) {
      std::memcpy(static_cast<void*>(rest[m]), x[m] + k, size_t(readable<P>(p.depth - k)) * sizeof(typename P::X));
      x[m] = rest[m];
    }
    panel.load(k, p.depth - k, block);
    add_block<P, M>(block, x, 0, sums);
  }
  for (int m = 0; m < M; ++m) to[m] = sums[m];
}

// Lay `words` words of a panel out from channel k on: to [words up to a multiple of LANES][PARTS].
template <typename P, typename Panel>
void pack(const Panel& panel, int64_t k, int64_t depth, int64_t words, typename P::Part* to) {
  for (int64_t i = 0; i < words; i += LANES, k += LANES * P::PER) {
    ints block[LANES];
    if (k + LANES * P::PER <= depth)
      panel.load(k, block);
    else
      panel.load(k, depth - k, block);
    PIECEWORK_UNROLLED
    for (int j = 0; j < LANES; ++j) P::widen(block[j], to + (i + j) * P::PARTS);
  }
}

// sums [M][N] of rows of x with N packed panels `apart` from one another; added to what is there if `add`.
template <typename P, int M, int N>
__attribute__((noinline)) void packed_rows(const typename P::X* const* x, int64_t channels,
                                           const typename P::Part* w, int64_t apart, bool add, Ahead& ahead,
                                           typename P::Sum* to) {
  typename P::Sum sums[M][N];
  PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m)
    PIECEWORK_UNROLLED
    for (int n = 0; n < N; ++n) sums[m][n] = add ? to[m * N + n] : typename P::Sum{};
  const auto step = [&](int64_t k, const typename P::X* const* from, int64_t at) PIECEWORK_INLINED {
    PIECEWORK_UNROLLED
    for (int part = 0; part < P::PARTS; ++part) {
      typename P::Part column[N];
      PIECEWORK_UNROLLED
      for (int n = 0; n < N; ++n) column[n] = w[n * apart + k * P::PARTS + part];
      PIECEWORK_UNROLLED
      for (int m = 0; m < M; ++m) {
        const typename P::Part one = P::spread(from[m] + at, part);
        PIECEWORK_UNROLLED
        for (int n = 0; n < N; ++n) sums[m][n] = P::add(sums[m][n], column[n], one);
      }
    }
  };
  const int64_t words = readable<P>(channels) / P::PER;
  if (ahead.from < ahead.end)
    for (int64_t k = 0; k < words; ++k) ahead.fetch(), step(k, x, k * P::PER);
  else
    for (int64_t k = 0; k < words; ++k) step(k, x, k * P::PER);
  if (const int64_t rest = readable<P>(channels) % P::PER) {
    typename P::X kept[M][P::PER] = {};
    const typename P::X* from[M];
    for (int m = 0; m < M; ++m) {
      std::memcpy(static_cast<void*>(kept[m]), x[m] + words * P::PER, size_t(rest) * sizeof(typename P::X));
      from[m] = kept[m];
    }
    step(words, from, 0);
  }
  PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m)
    PIECEWORK_UNROLLED
    for (int n = 0; n < N; ++n) to[m * N + n] = sums[m][n];
}

inline const float* numbers(const floats* sums) { return reinterpret_cast<const float*>(sums); }
inline const int32_t* numbers(const ints* sums) { return reinterpret_cast<const int32_t*>(sums); }

// Calls finish(row, first column, columns, sums), or with how far the sums of the row before lie from these as well:
// rows that belong together in pairs are never apart. Mostly all columns are there: a number that callers know, so
// that what is done with them has no loops.
template <typename Finish, typename Sum>
inline void give(const Finish& finish, int64_t row, int64_t first, int64_t columns, const Sum* sums, int64_t apart) {
  const auto call = [&](int64_t count) PIECEWORK_INLINED {
    if constexpr (std::is_invocable_v<Finish, int64_t, int64_t, int64_t, const Sum*, int64_t>)
      finish(row, first, count, sums, apart);
    else
      finish(row, first, count, sums);
  };
  if (__builtin_expect(columns == apart, 1))
    call(apart);
  else
    call(columns);
}

// All rows with N panels from column `first` on.
template <int N, typename P, typename W, typename Finish>
void many_rows(const Product<P, W>& p, int64_t first, const Finish& finish) {
  using Sum = typename P::Sum;
  constexpr int64_t STEP = LANES * P::PER;  // channels of a block
  constexpr int64_t MOST = std::max<int64_t>(1, CACHED / int64_t(ACROSS * P::PARTS * sizeof(ints) * LANES)) * STEP;
  const bool at_once = p.depth <= MOST;
  const int64_t chunk = at_once ? p.rows : std::min(p.rows, KEPT_ROWS);
  const int64_t apart = (std::min(p.depth, MOST) + STEP - 1) / STEP * LANES * P::PARTS;
  auto* packed = thread_memory<typename P::Part, PANELS>(N * apart);
  Sum* sums = thread_memory<Sum, SUMS>((at_once ? DOWN : (chunk + DOWN - 1) / DOWN * DOWN) * N);
  const int64_t count = std::min<int64_t>(N * LANES, p.columns - first);
  Ahead ahead = at_once ? p.after(first, N) : Ahead{};  // deep panels would push each other out of the cache
  for (int64_t top = 0; top < p.rows; top += chunk)
    for (int64_t k = 0; k == 0 || k < p.depth; k += MOST) {
      const int64_t channels = std::min(MOST, p.depth - k), words = (channels + P::PER - 1) / P::PER;
      for (int n = 0; n < N; ++n) {
        const int64_t column = first + n * LANES;
        if (!p.PARTIAL || column + LANES <= p.columns)
          pack<P>(p.template panel<true>(column), k, p.depth, words, packed + n * apart);
        else
          pack<P>(p.template panel<false>(column), k, p.depth, words, packed + n * apart);
      }
      for (int64_t m = top; m < std::min(p.rows, top + chunk); m += DOWN) {
        const typename P::X* x[DOWN];
        for (int i = 0; i < DOWN; ++i) x[i] = p.row(m + i) + k;
        Sum* to = sums + (at_once ? 0 : (m - top) * N);
        if (p.rows - m > HALF)
          packed_rows<P, DOWN, N>(x, channels, packed, apart, k > 0, ahead, to);
        else
          packed_rows<P, HALF, N>(x, channels, packed, apart, k > 0, ahead, to);
        if (k + MOST < p.depth) continue;
        for (int64_t i = m; i < std::min(p.rows, m + DOWN); ++i)
          give(finish, i, first, count, numbers(to + (i - m) * N), N * LANES);
      }
    }
}

// All rows, at most M, with the panel from column `first` on, straight from memory.
template <int M, typename P, typename Finish>
void few_rows(const Product<P>& p, int64_t first, const Finish& finish) {
  const int64_t count = std::min<int64_t>(LANES, p.columns - first);
  typename P::Sum sums[M];
  if (count == LANES)
    few_rows<M, true>(p, first, sums);
  else
    few_rows<M, false>(p, first, sums);
  for (int m = 0; m < p.rows; ++m) give(finish, m, first, count, numbers(sums + m), LANES);
}

template <typename P, typename Finish>
void few_rows(const Product<P>& p, int64_t first, const Finish& finish) {
  if (p.rows == 1) return few_rows<1>(p, first, finish);
  if (p.rows == 2) return few_rows<2>(p, first, finish);
  if (p.rows <= 4) return few_rows<4>(p, first, finish);
  if (p.rows <= 6) return few_rows<6>(p, first, finish);
  few_rows<FEW>(p, first, finish);
}

// Many rows with the panels `from` to `to`.
template <typename P, typename W, typename Finish>
void many_rows(const Product<P, W>& p, int64_t from, int64_t to, const Finish& finish) {
  for (; from + ACROSS <= to; from += ACROSS) many_rows<ACROSS>(p, from * LANES, finish);
  for (; from < to; ++from) many_rows<1>(p, from * LANES, finish);
}

}  // namespace piecework
