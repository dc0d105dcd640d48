// Products of some rows with panels that lie in memory block by block, as they are multiplied: see panel.h.
//
// Each few rows read the blocks of a panel anew, part by part, so that a part comes from the first cache for all rows
// but the first ones. The next part is asked for meanwhile, evenly over all rows: the first ones alone would be done
// before memory has delivered it.
#pragma once

#include "panel.h"

namespace piecework {

constexpr int AT_ONCE = 8;                 // rows: their sums, a block and what it is decoded with fill the registers
constexpr int64_t STRAIGHT = 8 * AT_ONCE;  // rows, above which laying panels out anew costs less
constexpr int64_t PART_BYTES = 14 << 10;   // of a panel, at most: two of them and some rows fit into the first cache
constexpr int64_t AHEAD_BYTES = 6 << 10;   // how far ahead of a block memory is asked for

// The next part, of which a block is asked for at each turn: one of `every` blocks that are multiplied.
template <int64_t BYTES, Near CACHE>
struct NextPart {
  const char* from;
  int64_t every, left;

  void fetch() {
    if (--left > 0) return;
    left = every;
    PIECEWORK_UNROLLED
    for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i, 0, CACHE);
    from += BYTES;
  }
};

// sums [M] += the blocks of a panel in channels `from` to `to` with M rows of x.
template <int M, typename P, typename W, typename Panel, typename Next>
__attribute__((noinline)) void add_part(const Product<P, W>& p, int64_t top, const Panel& panel, int64_t from,
                                        int64_t to, Next& next, typename P::Sum* sums) {
  constexpr int64_t STEP = LANES * P::PER;
  const typename P::X* x[M];
  typename P::Sum kept[M];
  PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m) x[m] = p.row(top + m), kept[m] = sums[m];
  ints block[LANES];
  int64_t k = from;
  for (; k + STEP <= to; k += STEP) {
    next.fetch();
    panel.load(k, block);
    add_block<P, M>(block, x, k, kept);
  }
  if (k < to) {
    typename P::X rest[M][STEP] = {};
    for (int m = 0; m < M; ++m) {
      std::memcpy(static_cast<void*>(rest[m]), x[m] + k, size_t(readable<P>(to - k)) * sizeof(typename P::X));
      x[m] = rest[m];
    }
    panel.load(k, block);
    add_block<P, M>(block, x, 0, kept);
  }
  PIECEWORK_UNROLLED
  for (int m = 0; m < M; ++m) sums[m] = kept[m];
}

// All rows, `each` at a time, at most M, with the panels `from` to `to`.
template <int M, Near CACHE, typename P, typename W, typename Finish>
void straight_rows(const Product<P, W>& p, int64_t each, int64_t from, int64_t to, const Finish& finish) {
  constexpr int64_t STEP = LANES * P::PER, BYTES = decltype(p.template panel<true>(0))::BLOCK_BYTES;
  constexpr int64_t AHEAD = AHEAD_BYTES / BYTES;
  const int64_t blocks = (p.depth + STEP - 1) / STEP;
  const int64_t parts = std::max<int64_t>(1, (blocks * BYTES + PART_BYTES - 1) / PART_BYTES);
  const int64_t part = (blocks + parts - 1) / parts * STEP;
  const int64_t groups = (p.rows + each - 1) / each;
  const int64_t ahead = groups == 1 ? AHEAD : part / STEP * (groups - 1) / groups + AHEAD / 2;
  typename P::Sum sums[STRAIGHT / AT_ONCE][M];
  for (; from < to; ++from) {
    const auto panel = p.template panel<true>(from * LANES);
    for (int64_t g = 0; g < groups; ++g)
      PIECEWORK_UNROLLED
      for (int m = 0; m < M; ++m) sums[g][m] = typename P::Sum{};
    for (int64_t k = 0; k < p.depth; k += part) {
      NextPart<BYTES, CACHE> next{panel.at(k / STEP + ahead), groups, groups};
      for (int64_t g = 0; g < groups; ++g)
        add_part<M>(p, g * each, panel, k, std::min(p.depth, k + part), next, sums[g]);
    }
    const int64_t count = std::min<int64_t>(LANES, p.columns - from * LANES);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t m = 0; m < std::min(each, p.rows - g * each); ++m)
        give(finish, g * each + m, from * LANES, count, numbers(sums[g] + m), LANES);
  }
}

// At most STRAIGHT rows with the panels `from` to `to`.
template <typename P, typename W, typename Finish>
void straight_panels(const Product<P, W>& p, int64_t from, int64_t to, const Finish& finish) {
  const int64_t groups = (p.rows + AT_ONCE - 1) / AT_ONCE;
  const int64_t each = groups == 1 ? p.rows : (p.rows + 2 * groups - 1) / (2 * groups) * 2;  // even: some are pairs
  if (each == 1) return straight_rows<1, SECOND_CACHE>(p, each, from, to, finish);
  if (each == 2) return straight_rows<2, SECOND_CACHE>(p, each, from, to, finish);
  if (each <= 4) return straight_rows<4, SECOND_CACHE>(p, each, from, to, finish);
  if (groups > 2) return straight_rows<AT_ONCE, FIRST_CACHE>(p, each, from, to, finish);
  if (each <= 6) return straight_rows<6, SECOND_CACHE>(p, each, from, to, finish);
  straight_rows<AT_ONCE, SECOND_CACHE>(p, each, from, to, finish);
}

}  // namespace piecework
