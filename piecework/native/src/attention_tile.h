// One tile of attention: blocks of keys under an online softmax (Milakov and Gimelshein 2018,
// arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention.h"
#include "attention_cache.h"
#include "matrix.h"
#include "rows.h"
#include "transpose.h"

namespace piecework {

constexpr int KEYS = 64;           // of a block
constexpr int FEW_ROWS = 8;        // up to so many read keys and values as they lie
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline int padded(int n) { return (n + LANES - 1) / LANES * LANES; }

// Whether keys and values are read where they are: for few rows of a head, of whole vectors.
inline bool reads_as_they_lie(int rows, int dim) { return rows <= FEW_ROWS && dim == padded(dim); }

// What a thread works in; it grows to the largest tile and stays.
struct AttentionScratch {
  std::vector<float> q, scores, sums, keys, values, top, total, key_scales, value_scales;
  std::vector<const float*> key_rows, value_rows;

  void fit(int rows, int heads, int width) {
    grow(q, rows * width);
    grow(scores, rows * KEYS);
    grow(sums, rows * width);
    grow(keys, width * KEYS);
    grow(values, KEYS * width);
    grow(top, rows);
    grow(total, rows);
    grow(key_scales, heads * KEYS);
    grow(value_scales, heads * KEYS);
    grow(key_rows, width);
    grow(value_rows, KEYS);
  }

  template <typename T>
  static void grow(std::vector<T>& v, size_t size) {
    if (v.size() < size) v.resize(size);
  }
};

// e^x for x <= 0, within 2 units of the last place; 0 below -87. NaN stays NaN.
// Cody and Waite's reduction, then the polynomial of Moshier's Cephes (expf).
inline floats exponential(floats x) {
  const floats y = x < -87.0f ? splat(-87.0f) : x;
  const floats shifted = y * 0x1.715476p0f + 0x1.8p23f;  // has no bits below one: rounds to n
  const floats n = shifted - 0x1.8p23f;
  floats r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const floats power = (floats)(((ints)shifted - 0x4b400000 + 127) << 23);
  return x < -87.0f ? floats{} : p * power;
}

// Turn scores into weights e^(scale * score - top) of the keys [low, high) of a block and 0 of the others;
// fold the row's new maximum into what it has summed so far.
inline void weigh(float* scores, int low, int high, int keys, float scale, float& top, float& total,
                  float* sums, int width) {
  if (low >= high) {
    for (int i = 0; i < padded(keys); ++i) scores[i] = 0;
    return;
  }
  for (int i = 0; i < low; ++i) scores[i] = NEVER;
  for (int i = high; i < padded(keys); ++i) scores[i] = NEVER;
  floats highest = splat(NEVER);
  for (int i = 0; i < keys; i += LANES) {
    const floats x = load(scores + i) * splat(scale);
    store(scores + i, x);
    highest = x > highest ? x : highest;
  }
  float found = top;
  for (int i = 0; i < LANES; ++i) found = std::max(found, float(highest[i]));
  if (found != top) {
    const float before = std::exp(top - found);
    total *= before;
    for (int d = 0; d < width; d += LANES) store(sums + d, load(sums + d) * splat(before));
    top = found;
  }
  floats added = floats{};
  for (int i = 0; i < keys; i += LANES) {
    const floats x = exponential(load(scores + i) - splat(found));
    store(scores + i, x);
    added = added + x;
  }
  total += sum(added);
}

// Copy a block's keys transposed, and its values, as floats; channels past head_dim, and keys past the last, are 0.
template <typename T>
void pack(const T* const* k_rows, const T* const* v_rows, int keys, int dim, int width, AttentionScratch& s) {
  for (int i = 0; i < padded(keys); i += LANES)
    for (int d = 0; d < width; d += LANES) {
      ints block[LANES];
      for (int j = 0; j < LANES; ++j) {
        const int channels = i + j < keys ? std::min(LANES, dim - d) : 0;
        floats row = {};
        if (channels == LANES)
          row = load(k_rows[i + j] + d);
        else if (channels)
          row = load(k_rows[i + j] + d, channels);
        block[j] = (ints)row;
      }
      transpose(block);
      for (int j = 0; j < LANES; ++j) store(&s.keys[(d + j) * KEYS + i], (floats)block[j]);
    }
  for (int i = 0; i < keys; ++i) {
    s.value_rows[i] = &s.values[i * width];
    widen_row(v_rows[i], dim, &s.values[i * width]);
    for (int d = dim; d < width; ++d) s.values[i * width + d] = 0;
  }
  for (int d = 0; d < dim; ++d) s.key_rows[d] = &s.keys[d * KEYS];
}

// The rows of a tile: one head of the cache after the other, of each its tokens, of each its group of queries' heads.
struct TileRow {
  int64_t row, head;
  TileRow(const AttentionCall& call, const AttentionTile& tile, int r) {
    const int group = int(call.heads / call.kv_heads), of_head = tile.tokens * group;
    row = call.query_starts[tile.sequence] + tile.first + r % of_head / group;
    head = (tile.kv_head + r / of_head) * group + r % group;
  }
};

// Where row r of a tile goes.
template <typename T>
inline T* output_row(const AttentionCall& call, const AttentionTile& tile, int r) {
  const TileRow at(call, tile, r);
  return static_cast<T*>(call.out) + at.row * call.out_stride + at.head * call.head_dim;
}

// Where a cache of type C has the keys and values of a tile's sequence.
template <typename C>
struct TileCache {
  const AttentionCall& call;
  const AttentionTile& tile;
  const int32_t* pages = call.page_table + tile.sequence * call.table_stride;

  int64_t row(int key, int head) const {
    return (pages[key / call.page_size] * call.kv_heads + tile.kv_head + head) * call.page_size + key % call.page_size;
  }
  const C* keys(int64_t row) const { return static_cast<const C*>(call.k_cache) + row * call.head_dim; }
  const C* values(int64_t row) const { return static_cast<const C*>(call.v_cache) + row * call.head_dim; }

  // f(first, count, head, row) for the keys of [begin, begin + keys) in each page, in the order of memory: a page has
  // them head by head, and a processor reads ahead only where it sees that nothing is left out.
  template <typename F>
  void each_run(int begin, int keys, F f) const {
    for (int i = 0, count; i < keys; i += count) {
      count = std::min(keys - i, int(call.page_size - (begin + i) % call.page_size));
      for (int h = 0; h < tile.kv_heads; ++h) f(i, count, h, row(begin + i, h));
    }
  }
};

// Do a tile, of a cache of type C: where that is int8, a key's scale is a factor of its scores, and a value's of its
// weights, so that neither is multiplied channel by channel. A partial one leaves, at `partial`, for each row its
// maximum and its sum, and after all of those the unnormalised rows [rows][width]; any other writes its rows of `out`.
template <typename T, typename C>
void attend_tile(const AttentionCall& call, const AttentionTile& tile, float* partial, AttentionScratch& s) {
  const int dim = int(call.head_dim), width = padded(dim), group = int(call.heads / call.kv_heads);
  const int of_head = tile.tokens * group, rows = tile.kv_heads * of_head;
  const int length = call.context_lengths[tile.sequence];
  const int queries = call.query_starts[tile.sequence + 1] - call.query_starts[tile.sequence];
  const int position = length - queries + tile.first;  // of the tile's first token
  const TileCache<C> cache{call, tile};
  s.fit(rows, tile.kv_heads, width);
  for (int r = 0; r < rows; ++r) {
    const TileRow at(call, tile, r);
    const T* q = static_cast<const T*>(call.q) + at.row * call.q_stride + at.head * dim;
    widen_row(q, dim, &s.q[r * width]);
    for (int d = dim; d < width; ++d) s.q[r * width + d] = 0;
    s.top[r] = NEVER;
    s.total[r] = 0;
  }
  std::fill_n(s.sums.begin(), rows * width, 0.0f);
  const bool as_they_lie = reads_as_they_lie(of_head, dim);
  constexpr bool scaled = std::is_same_v<C, int8_t>;
  const C* k_rows[KEYS];
  const C* v_rows[KEYS];
  for (int begin = tile.begin; begin < tile.end; begin += KEYS) {
    const int keys = std::min(KEYS, tile.end - begin);
    cache.each_run(begin, keys, [&](int first, int count, int h, int64_t row) {
      for (int i = 0; i < count; ++i) k_rows[first + i] = cache.keys(row + i);
      if (as_they_lie)
        dots(&s.q[h * of_head * width], width, k_rows + first, of_head, count, dim,
             &s.scores[h * of_head * KEYS + first], KEYS);
      else
        for (int i = 0; i < count; ++i) v_rows[first + i] = cache.values(row + i);
      if constexpr (scaled)
        for (int i = 0; i < count; ++i) {
          s.key_scales[h * KEYS + first + i] = to_float(static_cast<const bf16*>(call.k_scales)[row + i]);
          s.value_scales[h * KEYS + first + i] = to_float(static_cast<const bf16*>(call.v_scales)[row + i]);
        }
    });
    if (!as_they_lie) {
      pack(k_rows, v_rows, keys, dim, width, s);
      product(s.q.data(), width, s.key_rows.data(), rows, padded(keys), dim, s.scores.data(), KEYS, false);
    }
    for (int r = 0; r < rows; ++r) {
      const int last = position + r % of_head / group;  // the last key that this row sees
      const int high = std::clamp(last + 1 - begin, 0, keys);
      const int64_t oldest = call.window > 0 ? last - call.window + 1 : 0;
      const int low = int(std::clamp<int64_t>(oldest - begin, 0, keys));
      if constexpr (scaled) scale_row(&s.scores[r * KEYS], &s.key_scales[r / of_head * KEYS], keys);
      weigh(&s.scores[r * KEYS], low, high, keys, float(call.scale), s.top[r], s.total[r], &s.sums[r * width],
            width);
      if constexpr (scaled) scale_row(&s.scores[r * KEYS], &s.value_scales[r / of_head * KEYS], keys);
    }
    if (!as_they_lie) {
      product(s.scores.data(), KEYS, s.value_rows.data(), rows, width, keys, s.sums.data(), width, true);
      continue;
    }
    cache.each_run(begin, keys, [&](int first, int count, int h, int64_t row) {
      for (int i = 0; i < count; ++i) v_rows[i] = cache.values(row + i);
      product(&s.scores[h * of_head * KEYS + first], KEYS, v_rows, of_head, width, count,
              &s.sums[h * of_head * width], width, true);
    });
  }
  if (partial) {
    std::copy_n(s.top.begin(), rows, partial);
    std::copy_n(s.total.begin(), rows, partial + rows);
    std::copy_n(s.sums.begin(), rows * width, partial + 2 * rows);
    return;
  }
  for (int r = 0; r < rows; ++r) {
    T* out = output_row<T>(call, tile, r);
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];  // 0: a row that sees no key
    for (int d = 0; d < dim; ++d) out[d] = from_float<T>(s.sums[r * width + d] * share);
  }
}

}  // namespace piecework
