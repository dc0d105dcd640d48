// paged_attention: writes a step's keys and values, cuts the work into tiles, and joins their results.
#include "attention.h"

#include <omp.h>

#include "attention_cache.h"
#include "attention_tile.h"

namespace piecework {
namespace {

constexpr int ROWS = 48;           // query rows of a tile, heads of a group counted each
constexpr int FEW_CHUNK = 256;     // keys of a tile with few rows
constexpr int MANY_CHUNK = 2048;   // keys of a tile with many
constexpr int64_t SMALL = 1 << 14;  // products of one thread, below which others aren't woken

// Tiles [first, first + count) have the same rows, and keys one after the other.
struct Split {
  int32_t first, count;
};

struct Plan {
  std::vector<AttentionTile> tiles;
  std::vector<Split> splits;
  std::vector<float> partials;
  int64_t products;
};

// How a sequence is cut depends on itself alone, and so does its result, whatever runs beside it.
void cut(const AttentionCall& call, Plan& plan) {
  plan.tiles.clear();
  plan.splits.clear();
  plan.products = 0;
  const int group = int(call.heads / call.kv_heads), width = padded(int(call.head_dim));
  const int step = std::max(1, ROWS / group);
  int64_t floats = 0;
  for (int b = 0; b < call.sequences; ++b) {
    const int length = call.context_lengths[b];
    const int queries = call.query_starts[b + 1] - call.query_starts[b];
    if (queries <= 0) continue;
    for (int first = (queries - 1) / step * step; first >= 0; first -= step) {
      const int tokens = std::min(step, queries - first), rows = tokens * group;
      const int position = length - queries + first;
      const int end = std::max(0, position + tokens);
      const int begin = call.window > 0 ? int(std::max<int64_t>(0, position - call.window + 1)) : 0;
      const int most = rows <= FEW_ROWS ? FEW_CHUNK : MANY_CHUNK;
      const int parts = std::max(1, (end - begin + most - 1) / most);
      const int chunk = ((end - begin + parts - 1) / parts + 7) / 8 * 8;
      for (int head = 0; head < call.kv_heads; ++head) {
        if (parts > 1) plan.splits.push_back({int32_t(plan.tiles.size()), parts});
        for (int i = 0; i < parts; ++i) {
          const int from = std::min(end, begin + i * chunk), to = std::min(end, from + chunk);
          plan.tiles.push_back({b, head, first, tokens, from, to, parts > 1 ? floats : -1});
          if (parts > 1) floats += int64_t(rows) * (width + 2);
          plan.products += int64_t(to - from) * rows * width;
        }
      }
    }
  }
  if (plan.partials.size() < size_t(floats)) plan.partials.resize(floats);
}

template <typename T, typename C>
void write_row(const AttentionCall& call, int64_t t) {
  const int64_t dim = call.head_dim;
  const int64_t page = call.slots[t] / call.page_size, offset = call.slots[t] % call.page_size;
  const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
  const T* v = static_cast<const T*>(call.v) + t * call.v_stride;
  for (int64_t h = 0; h < call.kv_heads; ++h) {
    const int64_t where = (page * call.kv_heads + h) * call.page_size + offset;
    keep(k + h * dim, dim, where, static_cast<C*>(call.k_cache), static_cast<bf16*>(call.k_scales));
    keep(v + h * dim, dim, where, static_cast<C*>(call.v_cache), static_cast<bf16*>(call.v_scales));
  }
}

template <typename T>
void join(const AttentionCall& call, const Plan& plan, const Split& split) {
  const AttentionTile& tile = plan.tiles[split.first];
  const int group = int(call.heads / call.kv_heads), width = padded(int(call.head_dim));
  const int rows = tile.tokens * group;
  std::vector<float> shares(split.count);
  for (int r = 0; r < rows; ++r) {
    float top = NEVER, total = 0;
    for (int i = 0; i < split.count; ++i)
      top = std::max(top, plan.partials[plan.tiles[split.first + i].partial + r]);
    for (int i = 0; i < split.count; ++i) {
      const float* part = &plan.partials[plan.tiles[split.first + i].partial];
      shares[i] = part[r] == NEVER ? 0 : std::exp2(part[r] - top);
      total += shares[i] * part[rows + r];
    }
    T* out = output_row<T>(call, tile, r);
    for (int d = 0; d < call.head_dim; ++d) {
      float y = 0;
      for (int i = 0; i < split.count; ++i)
        y += shares[i] * plan.partials[plan.tiles[split.first + i].partial + 2 * rows + r * width + d];
      out[d] = from_float<T>(total == 0 ? 0 : y / total);
    }
  }
}

template <typename T, typename C>
void attend(const AttentionCall& call) {
  thread_local Plan plan_of_caller;
  Plan& plan = plan_of_caller;
  cut(call, plan);
  const int64_t valid = call.query_starts[call.sequences];
  const int64_t tiles = int64_t(plan.tiles.size()), splits = int64_t(plan.splits.size());
#pragma omp parallel if (plan.products > SMALL)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < call.rows; ++t) {
      if (t < valid)
        write_row<T, C>(call, t);
      else
        std::fill_n(static_cast<T*>(call.out) + t * call.out_stride, call.heads * call.head_dim, T{});
    }
    thread_local AttentionScratch<PackOf<T, C>> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles; ++i) {
      const AttentionTile& tile = plan.tiles[i];
      const int64_t after = i + omp_get_num_threads();  // what this thread will most likely do next
      attend_tile<T, C>(call, tile, after < tiles ? &plan.tiles[after] : nullptr,
                        tile.partial < 0 ? nullptr : &plan.partials[tile.partial], scratch);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < splits; ++i) join<T>(call, plan, plan.splits[i]);
  }
}

template <typename T>
void attend(const AttentionCall& call) {
  call.cache_type == INT8 ? attend<T, int8_t>(call) : attend<T, T>(call);
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_paged_attention(const piecework::AttentionCall* call) {
  using namespace piecework;
  if (call->type == BFLOAT16)
    attend<bf16>(*call);
  else if (call->type == FLOAT16)
    attend<f16>(*call);
  else
    attend<float>(*call);
}
