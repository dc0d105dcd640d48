// y[m][n] = x[m] . w[n] for vectors of sixteen lanes: which way for how many rows.
#pragma once

#include "panel.h"
#include "row_lanes.h"
#include "straight.h"

namespace piecework {

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
  share_columns(p.columns, LANES, cost, [&](int64_t first, int64_t last) {
    int64_t from = first / LANES;
    const int64_t to = (last + LANES - 1) / LANES;
    if constexpr (W::IN_ROWS) {
      if (p.rows > FEW) return many_rows(p, from, to, finish);
      for (; from < to; ++from) few_rows(p, from * LANES, finish);
    } else {
      if (p.rows > STRAIGHT) return many_rows(p, from, to, finish);
      straight_panels(p, from, to, finish);
    }
  });
}

}  // namespace piecework
