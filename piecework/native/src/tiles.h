// The product of packed rows with int8 weights [n][k] in tiles: a few rows stay in the innermost cache while
// a panel of weights passes them. Threads share the output channels.
#pragma once

#include <algorithm>

#include "rows.h"

namespace piecework {

constexpr int64_t TILE_ROWS = 64, TILE_COLUMNS = 64;

// From this many products on a thread is worth waking.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 18;

// One group of up to four rows against `columns` rows of weights, into a tile.
// The rows of weights that are taken at once lie `apart`, so that each is the next of a long stream: a processor
// follows a few such streams, and loses track of many short ones.
template <class Dot, int M>
inline void group(const typename Dot::Packed* x, int64_t stride, const int8_t* w, int64_t columns, int64_t k,
                  typename Dot::Sum* tile) {
  constexpr int N = M < 3 ? 4 : Dot::COLUMNS;
  const int64_t apart = columns / N;
  typename Dot::Sum found[M * N];
  for (int64_t n = 0; n < apart; ++n) {
    Dot::template block<M, N>(x, stride, w + n * k, apart, k, found);
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < N; ++i) tile[m * TILE_COLUMNS + n + i * apart] = found[m * N + i];
  }
  for (int64_t n = apart * N; n < columns; ++n) {
    Dot::template block<M, 1>(x, stride, w + n * k, 1, k, found);
    for (int m = 0; m < M; ++m) tile[m * TILE_COLUMNS + n] = found[m];
  }
}

template <class Dot>
inline void panel(const typename Dot::Packed* x, int64_t stride, int64_t rows, const int8_t* w, int64_t columns,
                  int64_t k, typename Dot::Sum* tile) {
  int64_t m = 0;
  for (; m + 4 <= rows; m += 4) group<Dot, 4>(x + m * stride, stride, w, columns, k, tile + m * TILE_COLUMNS);
  x += m * stride;
  tile += m * TILE_COLUMNS;
  if (rows - m == 3) group<Dot, 3>(x, stride, w, columns, k, tile);
  if (rows - m == 2) group<Dot, 2>(x, stride, w, columns, k, tile);
  if (rows - m == 1) group<Dot, 1>(x, stride, w, columns, k, tile);
}

// Calls finish(row, first column, columns, sums) for each row of each tile of x w^T.
// x: packed rows, `stride` apart, with zeros from k on up to a multiple of Dot::STEP.
template <class Dot, typename Finish>
inline void tiles(const typename Dot::Packed* x, int64_t stride, int64_t rows, const int8_t* w, int64_t n,
                  int64_t k, Finish finish) {
  const int64_t quads = (n + 3) / 4;
  const auto share = [&](int64_t from, int64_t to) {  // columns from..to, of one thread
    alignas(64) typename Dot::Sum tile[TILE_ROWS * TILE_COLUMNS];
    for (int64_t m = 0; m < rows; m += TILE_ROWS) {
      const int64_t height = std::min(TILE_ROWS, rows - m);
      for (int64_t first = from; first < to; first += TILE_COLUMNS) {
        const int64_t width = std::min(TILE_COLUMNS, to - first);
        panel<Dot>(x + m * stride, stride, height, w + first * k, width, k, tile);
        for (int64_t i = 0; i < height; ++i) finish(m + i, first, width, tile + i * TILE_COLUMNS);
      }
    }
  };
  if (rows * n * k < PARALLEL_PRODUCTS || omp_get_max_threads() == 1) return share(0, n);
  // All threads or one: where their number changes, the runtime ends some and later starts others.
#pragma omp parallel
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    share(quads * t / all * 4, std::min(n, quads * (t + 1) / all * 4));
  }
}

}  // namespace piecework
