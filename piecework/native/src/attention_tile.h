// One tile of attention: blocks of keys under an online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
#include "attention_cache.h"
#include "attention_pack.h"
#include "matrix.h"
#include "rows.h"

namespace piecework {

constexpr int FEW_ROWS = 8;  // up to so many read keys and values as they lie
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Whether keys and values are read where they are: for few rows, of whole vectors of words.
template <typename P>
inline bool reads_as_they_lie(int rows, int dim) {
  return rows <= FEW_ROWS && dim % (LANES * P::PER) == 0;
}

// What a row has seen so far: its highest score times log2(e), and its weights' sum, to be added across.
struct Seen {
  float top;
  floats total;
};

// What a thread works in; it grows to the largest tile and stays. What is multiplied is packed as P says; with
// floats, weights take the place of their scores.
template <typename P>
struct AttentionScratch {
  static constexpr bool FLOATS = std::is_same_v<typename P::X, float>;
  std::vector<float> scores, sums, key_scales, value_scales;
  std::vector<typename P::X> q, packed_weights;
  std::vector<typename P::Word> keys, values;
  std::vector<const typename P::Word*> key_rows, value_rows;
  std::vector<Seen> seen;

  void fit(int rows, int width) {
    const int words = words_of<P>(width);
    grow(q, rows * words * P::PER);
    grow(scores, rows * KEYS);
    grow(sums, rows * width);
    if (!FLOATS) grow(packed_weights, rows * KEYS);
    grow(keys, words * KEYS);
    grow(values, KEYS / P::PER * width);
    grow(seen, rows);
    grow(key_scales, KEYS);
    grow(value_scales, KEYS);
    key_rows.resize(words);
    for (int i = 0; i < words; ++i) key_rows[i] = &keys[i * KEYS];
    value_rows.resize(KEYS / P::PER);
    for (int i = 0; i < KEYS / P::PER; ++i) value_rows[i] = &values[i * width];
  }

  typename P::X* weights() {
    if constexpr (FLOATS)
      return scores.data();
    else
      return packed_weights.data();
  }

  template <typename T>
  static void grow(std::vector<T>& v, size_t size) {
    if (v.size() < size) v.resize(size);
  }
};

// 2^x for x <= 0, as exactly as P wants it; 0 below -126. NaN stays NaN.
template <typename P>
inline floats power_of_two(floats x) {
  const floats y = x < -126.0f ? splat(-126.0f) : x;
  const floats shifted = y + 0x1.8p23f;  // has no bits below one: rounds to n
  const floats r = y - (shifted - 0x1.8p23f);
  floats p = splat(P::POWER[0]);
  for (size_t i = 1; i < std::size(P::POWER); ++i) p = p * r + P::POWER[i];
  const floats power = (floats)(((ints)shifted - 0x4b400000 + 127) << 23);
  return x < -126.0f ? floats{} : p * power;
}

// Turn scores into weights e^(scale * score - top) of the keys [low, high) of a block and 0 of the others;
// fold the row's new maximum into what it has summed so far. Not inlined: there are better uses for the registers.
template <typename P>
__attribute__((noinline)) void weigh(float* scores, typename P::X* weights, int low, int high, int keys, float scale, Seen& seen,
                                     float* sums, int width) {
  if (low >= high) {
    std::fill_n(weights, padded(keys), typename P::X{});
    return;
  }
  for (int i = 0; i < low; ++i) scores[i] = NEVER;
  for (int i = high; i < padded(keys); ++i) scores[i] = NEVER;
  floats highest = splat(NEVER);
  for (int i = 0; i < keys; i += LANES) {
    const floats x = load(scores + i) * splat(scale);
    highest = x > highest ? x : highest;
  }
  const float found = std::max(seen.top, largest(highest));
  if (found != seen.top) {
    const floats before = splat(std::exp2(seen.top - found));
    seen.total *= before;
    for (int d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * before);
    seen.top = found;
  }
  floats added = floats{};
  for (int i = 0; i < keys; i += LANES) {
    const floats x = power_of_two<P>(load(scores + i) * splat(scale) - splat(found));
    store(weights + i, x);
    added = added + x;
  }
  seen.total += added;
}

// A query's channels as numbers of type X, and zeros up to `width`.
template <typename T, typename X>
inline void lay_row(const T* q, int dim, X* to, int width) {
  if constexpr (std::is_same_v<T, X>)
    std::copy_n(q, dim, to);
  else
    widen_row(q, dim, to);
  std::fill(to + dim, to + width, X{});
}

// Where row r of a tile, of each of its tokens the group of queries' heads, begins in a tensor of queries or results.
struct TileRow {
  int64_t row, head;
  TileRow(const AttentionCall& call, const AttentionTile& tile, int r) {
    const int group = int(call.heads / call.kv_heads);
    row = call.query_starts[tile.sequence] + tile.first + r / group;
    head = tile.kv_head * group + r % group;
  }
};

// Where row r of a tile goes.
template <typename T>
inline T* output_row(const AttentionCall& call, const AttentionTile& tile, int r) {
  const TileRow at(call, tile, r);
  return static_cast<T*>(call.out) + at.row * call.out_stride + at.head * call.head_dim;
}

// The keys and values that a tile takes at once, in a cache of type C.
template <typename C>
struct TileBlock {
  const C* keys[KEYS];
  const C* values[KEYS];
  int64_t rows[KEYS];  // of the cache

  // Those of the keys [begin, begin + count), and the last one again up to a multiple of four.
  void find(const AttentionCall& call, const AttentionTile& tile, int begin, int count) {
    const int size = int(call.page_size);
    const int32_t* page = call.page_table + tile.sequence * call.table_stride + begin / size;
    int i = 0;
    for (int offset = begin % size; i < count; offset = 0, ++page) {
      int64_t row = (*page * call.kv_heads + tile.kv_head) * size + offset;
      for (const int end = std::min(count, i + size - offset); i < end; ++i, ++row) {
        rows[i] = row;
        keys[i] = static_cast<const C*>(call.k_cache) + row * call.head_dim;
        values[i] = static_cast<const C*>(call.v_cache) + row * call.head_dim;
      }
    }
    for (; i % 4; ++i) keys[i] = keys[i - 1], values[i] = values[i - 1];
  }
};

// Ask for rows that are read soon: a processor reads ahead in one page at most. Always inlined, here and below: GCC
// leaves out calls of functions that do nothing else.
template <typename C>
PIECEWORK_INLINED inline void fetch(const C* const* rows, int count, int dim) {
  for (int i = 0; i < count; ++i)
    for (int d = 0; d < dim; d += 64 / int(sizeof(C))) __builtin_prefetch(rows[i] + d, 0, 2);
}

// The same for the keys of a block of a tile from `begin` on.
template <typename C>
PIECEWORK_INLINED inline void fetch_keys(const AttentionCall& call, const AttentionTile& tile, int begin) {
  TileBlock<C> block;
  block.find(call, tile, begin, std::min(KEYS, tile.end - begin));
  fetch(block.keys, std::min(KEYS, tile.end - begin), int(call.head_dim));
}

// Do a tile, of a cache of type C: where that is int8, a key's scale is a factor of its scores, and a value's of its
// weights, so that neither is multiplied channel by channel. A partial one leaves, at `partial`, for each row its
// maximum and its sum, and after all of those the unnormalised rows [rows][width]; any other writes its rows of `out`.
// `next`, which may be null, is what this thread does then.
template <typename T, typename C>
void attend_tile(const AttentionCall& call, const AttentionTile& tile, const AttentionTile* next, float* partial,
                 AttentionScratch<PackOf<T, C>>& s) {
  using P = PackOf<T, C>;
  const int dim = int(call.head_dim), width = padded(dim), group = int(call.heads / call.kv_heads);
  const int rows = tile.tokens * group;
  const int length = call.context_lengths[tile.sequence];
  const int queries = call.query_starts[tile.sequence + 1] - call.query_starts[tile.sequence];
  const int position = length - queries + tile.first;  // of the tile's first token
  const bool as_they_lie = reads_as_they_lie<P>(rows, dim);
  const auto of_words = [](int n) { return (n + P::PER - 1) / P::PER; };
  const int q_width = words_of<P>(width) * P::PER;
  s.fit(rows, width);
  for (int r = 0; r < rows; ++r) {
    const TileRow at(call, tile, r);
    lay_row(static_cast<const T*>(call.q) + at.row * call.q_stride + at.head * dim, dim, &s.q[r * q_width], q_width);
    s.seen[r] = {NEVER, floats{}};
  }
  std::fill_n(s.sums.begin(), rows * width, 0.0f);
  const float scale = float(call.scale * 1.4426950408889634);  // log2(e): powers of two are cheaper than those of e
  constexpr bool scaled = std::is_same_v<C, int8_t>;
  TileBlock<C> block;
  for (int begin = tile.begin; begin < tile.end; begin += KEYS) {
    const int keys = std::min(KEYS, tile.end - begin);
    block.find(call, tile, begin, keys);
    if constexpr (scaled)
      for (int i = 0; i < keys; ++i) {
        s.key_scales[i] = to_float(static_cast<const bf16*>(call.k_scales)[block.rows[i]]);
        s.value_scales[i] = to_float(static_cast<const bf16*>(call.v_scales)[block.rows[i]]);
      }
    if (as_they_lie) {
      fetch(block.values, keys, dim);
      dots<P>(s.q.data(), q_width, block.keys, rows, keys, dim, s.scores.data(), KEYS);
    } else {
      pack_keys<P>(block.keys, keys, dim, width, s.keys.data());
      pack_values<P>(block.values, keys, dim, width, s.values.data());
      product<Packed<P>>(s.q.data(), q_width, s.key_rows.data(), rows, padded(keys), of_words(dim), s.scores.data(),
                         KEYS, false);
    }
    for (int r = 0; r < rows; ++r) {
      const int last = position + r / group;  // the last key that this row sees
      const int high = std::clamp(last + 1 - begin, 0, keys);
      const int64_t oldest = call.window > 0 ? last - call.window + 1 : 0;
      const int low = int(std::clamp<int64_t>(oldest - begin, 0, keys));
      float* scores = &s.scores[r * KEYS];
      if constexpr (scaled) scale_row(scores, s.key_scales.data(), keys);
      weigh<P>(scores, s.weights() + r * KEYS, low, high, keys, scale, s.seen[r], &s.sums[r * width], width);
      if constexpr (scaled) scale_row(scores, s.value_scales.data(), keys);
    }
    if (as_they_lie) {
      if (begin + KEYS < tile.end)
        fetch_keys<C>(call, tile, begin + KEYS);
      else if (next)
        fetch_keys<C>(call, *next, next->begin);
      product<AsTheyLie<P>>(s.weights(), KEYS, block.values, rows, width, of_words(keys), s.sums.data(), width, true);
    } else {
      product<Packed<P>>(s.weights(), KEYS, s.value_rows.data(), rows, width, of_words(keys), s.sums.data(), width,
                         true);
    }
  }
  if (partial) {
    for (int r = 0; r < rows; ++r) {
      partial[r] = s.seen[r].top;
      partial[rows + r] = sum(s.seen[r].total);
    }
    std::copy_n(s.sums.begin(), rows * width, partial + 2 * rows);
    return;
  }
  for (int r = 0; r < rows; ++r) {
    T* out = output_row<T>(call, tile, r);
    const float total = sum(s.seen[r].total), share = total == 0 ? 0 : 1 / total;  // 0: a row that sees no key
    for (int d = 0; d < dim; ++d) out[d] = from_float<T>(s.sums[r * width + d] * share);
  }
}

}  // namespace piecework
