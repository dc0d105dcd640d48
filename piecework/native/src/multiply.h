// y[m][n] = x[m] . w[n] for vectors of sixteen lanes: which way for how many rows, and who does which columns.
#pragma once

#include "panel.h"
#include "row_lanes.h"

namespace piecework {

constexpr int64_t WAKING_PRODUCTS = 1 << 16;  // below which other threads aren't woken

// Share the columns, in units of `width`, among all threads, in parts small enough that a thread which is kept from
// working holds up no other: work(from, to).
template <typename Work>
void share_columns(int64_t columns, int64_t width, int64_t cost, const Work& work) {
  const int64_t units = (columns + width - 1) / width, threads = omp_get_max_threads();
  const auto part = [&](int64_t from, int64_t to) { work(from * width, std::min(columns, to * width)); };
  if (threads == 1 || columns * cost < WAKING_PRODUCTS) return part(0, units);
  const int64_t each = std::max<int64_t>(1, 32 * LANES / width);  // units of a part, at most
  const int64_t parts = threads * ((units + each * threads - 1) / (each * threads));
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < parts; ++i) part(units * i / parts, units * (i + 1) / parts);
}

// Calls `finish` as `give` does for each row of x w^T, sums being floats or int32.
template <typename P, typename W, typename Finish>
void multiply(const Product<P, W>& p, const Finish& finish) {
  if (!p.rows) return;
  const int64_t cost = p.rows * p.depth;
  if constexpr (P::SPREADS && W::IN_ROWS) {
    if (p.rows > FEW && fills_row_lanes(p.rows)) {
      const auto lanes = row_lanes(p);
      return share_columns(p.columns, GROUP, cost, [&](int64_t from, int64_t to) {
        for (; from < to; from += GROUP) columns_of(p, lanes, from, std::min<int64_t>(GROUP, to - from), finish);
      });
    }
  }
  share_columns(p.columns, LANES, cost, [&](int64_t from, int64_t to) {
    some_panels(p, from / LANES, (to + LANES - 1) / LANES, finish);
  });
}

}  // namespace piecework
