// Products of rows, y[m][n] = x[m] . w[n], for a middling number of rows, with a row of x in each lane.
//
// What panel.h does to weights happens to x here: it is laid out anew, once for all columns, and words of w are spread
// over the lanes from where they lie. Weights are then read once and in their order, and none is transposed, which
// is what counts where few rows share it. Each sum adds the same numbers in the same order as in panel.h.
#pragma once

#include "panel.h"

namespace piecework {

constexpr int GROUP = 3 * LANES;                // columns whose sums wait to be turned into rows of y
constexpr int64_t MOST_ROW_LANES = 4 * LANES;  // rows, above which laying weights out anew costs less

// Whether so few lanes stay empty that it pays.
inline bool fills_row_lanes(int64_t rows) {
  const int64_t lanes = (rows + LANES - 1) / LANES * LANES;
  return lanes <= MOST_ROW_LANES && lanes - rows <= 2 + rows / 16;
}

// Words of x as they are.
template <typename P>
struct InputWords {
  using Weight = typename P::X;
  using Part = ints;
  static constexpr int PER = P::PER, PARTS = 1;
  static ints words(const Weight* x) { return load_raw<ints>(x); }
  static void widen(ints word, Part* to) { to[0] = word; }
};

// x as vectors of LANES rows: row vector v of word k is x[v * apart + k].
struct RowLanes {
  const ints* x;
  int64_t apart;
};

template <typename P>
RowLanes row_lanes(const Product<P>& p) {
  const int64_t words = (p.depth + P::PER - 1) / P::PER, apart = (words + LANES - 1) / LANES * LANES;
  const int64_t vectors = (p.rows + LANES - 1) / LANES;
  ints* x = thread_memory<ints, LANED>(vectors * apart);
  for (int64_t v = 0; v < vectors; ++v) {
    const int last = int(std::min<int64_t>(LANES, p.rows - v * LANES)) - 1;
    const RowPanel<InputWords<P>, false> rows{p.x + v * LANES * p.x_stride, p.x_stride, last};
    pack<InputWords<P>>(rows, 0, p.depth, words, x + v * apart);
  }
  return {x, apart};
}

// sums [COLUMNS][V] of V vectors of rows with the columns from w on; `last` stands for those past it.
template <typename P, int V, int COLUMNS>
__attribute__((noinline)) void spread_columns(const RowLanes& rows, const typename P::Weight* w, int64_t stride, int last,
                                              int64_t depth, Ahead& ahead, typename P::Sum* to) {
  const typename P::Weight* column[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) column[c] = w + std::min(c, last) * stride;
  typename P::Sum sums[COLUMNS][V];
  PIECEWORK_UNROLLED
  for (int c = 0; c < COLUMNS; ++c)
    PIECEWORK_UNROLLED
    for (int v = 0; v < V; ++v) sums[c][v] = typename P::Sum{};
  const auto step = [&](int64_t word, const typename P::Weight* const* from, int64_t at) PIECEWORK_INLINED {
    typename P::Part x[V];
    PIECEWORK_UNROLLED
    for (int v = 0; v < V; ++v) x[v] = (typename P::Part)rows.x[v * rows.apart + word];
    PIECEWORK_UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const typename P::Part one = P::one(from[c] + at);
      PIECEWORK_UNROLLED
      for (int v = 0; v < V; ++v) sums[c][v] = P::add(sums[c][v], one, x[v]);
    }
  };
  const int64_t words = depth / P::PER;
  for (int64_t k = 0; k < words; ++k) {
    if (ahead.from < ahead.end) ahead.fetch();
    step(k, column, k * P::PER);
  }
  if (const int64_t rest = depth % P::PER) {
    typename P::Weight kept[COLUMNS][P::PER] = {};
    for (int c = 0; c < COLUMNS; ++c) {
      std::memcpy(static_cast<void*>(kept[c]), column[c] + words * P::PER, size_t(rest) * sizeof *w);
      column[c] = kept[c];
    }
    step(words, column, 0);
  }
  PIECEWORK_UNROLLED
  for (int c = 0; c < COLUMNS; ++c)
    PIECEWORK_UNROLLED
    for (int v = 0; v < V; ++v) to[c * V + v] = sums[c][v];
}

// All rows with `count` columns from `first` on, GROUP at most.
template <typename P, int V, typename Finish>
void columns_of(const Product<P>& p, const RowLanes& rows, int64_t first, int64_t count, const Finish& finish) {
  constexpr int COLUMNS = V == 1 ? LANES : 24 / V;  // sums fill most registers
  using Sum = typename P::Sum;
  Sum sums[GROUP][V], row[LANES][GROUP / LANES];
  const auto [w, stride] = p.weights;
  const auto at = [&](int64_t column) { return p.weights.at(std::min(column, p.columns)); };
  for (int64_t c = 0; c < count; c += COLUMNS) {
    Ahead ahead{at(first + c + COLUMNS), at(first + c + 2 * COLUMNS), 0};
    ahead.lines = int((ahead.end - ahead.from) / 64 / std::max<int64_t>(1, p.depth / P::PER) + 1);
    spread_columns<P, V, COLUMNS>(rows, w + (first + c) * stride, stride,
                                  int(std::min<int64_t>(COLUMNS, p.columns - first - c)) - 1, p.depth, ahead, sums[c]);
  }
  for (int v = 0; v < V; ++v) {
    for (int i = 0; i < GROUP / LANES; ++i) {
      ints block[LANES];
      PIECEWORK_UNROLLED
      for (int j = 0; j < LANES; ++j) block[j] = (ints)sums[i * LANES + j][v];
      transpose(block);
      PIECEWORK_UNROLLED
      for (int j = 0; j < LANES; ++j) row[j][i] = (Sum)block[j];
    }
    for (int64_t m = v * LANES; m < std::min<int64_t>(p.rows, (v + 1) * LANES); ++m)
      give(finish, m, first, count, numbers(row[m - v * LANES]), GROUP);
  }
}

template <typename P, typename Finish>
void columns_of(const Product<P>& p, const RowLanes& rows, int64_t first, int64_t count, const Finish& finish) {
  static_assert(MOST_ROW_LANES == 4 * LANES);
  if (p.rows <= LANES)
    columns_of<P, 1>(p, rows, first, count, finish);
  else if (p.rows <= 2 * LANES)
    columns_of<P, 2>(p, rows, first, count, finish);
  else if (p.rows <= 3 * LANES)
    columns_of<P, 3>(p, rows, first, count, finish);
  else
    columns_of<P, 4>(p, rows, first, count, finish);
}

}  // namespace piecework
