// Rotary position embedding of heads, alone and from the packed projection, with norms before it or not.
// A head's first 2 * half channels turn, the others pass. cos_sin [positions, 2 * half]: cosines, then sines.
#include "norm.h"

namespace piecework {
namespace {

struct Angles {
  const float* cos_sin;
  const int64_t* positions;
  int64_t half;
  bool interleaved;

  const float* of(int64_t token) const { return cos_sin + positions[token] * 2 * half; }
};

template <typename S, typename T>
inline void turn_head(const S* x, const float* cos, int64_t half, bool interleaved, int64_t size, T* out) {
  const float* sin = cos + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      out[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);
      out[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);
    }
  } else {
    each(half, [&](int64_t i, auto lanes) {
      const floats a = load(x + i, lanes), b = load(x + half + i, lanes);
      const floats c = load(cos + i, lanes), s = load(sin + i, lanes);
      store(out + i, a * c - b * s, lanes);
      store(out + half + i, b * c + a * s, lanes);
    });
  }
  const int64_t done = 2 * half;
  each(size - done, [&](int64_t i, auto lanes) { store(out + done + i, load(x + done + i, lanes), lanes); });
}

// Heads of a token, `step` apart, into contiguous ones.
template <typename T>
inline void turn_heads(const T* x, int64_t step, int64_t heads, int64_t size, int64_t token, Angles angles,
                       T* out) {
  const float* cos = angles.of(token);
  for (int64_t h = 0; h < heads; ++h)
    turn_head(x + h * step, cos, angles.half, angles.interleaved, size, out + h * size);
}

// The same with a norm of each head's channels first, and a bias where there is one.
template <typename T>
inline void norm_turn_heads(const T* x, const T* weight, const T* bias, float eps, int64_t heads, int64_t size,
                            int64_t token, Angles angles, T* out) {
  const float* cos = angles.of(token);
  float* row = scratch_row(size);
  for (int64_t h = 0; h < heads; ++h) {
    norm_row(row, weight, size, fill_row(x + h * size, size, eps, row), row);
    if (bias)
      each(size, [&](int64_t i, auto lanes) {
        store(row + i, rounded<T>(load(row + i, lanes) + load(bias + i, lanes)), lanes);
      });
    turn_head(row, cos, angles.half, angles.interleaved, size, out + h * size);
  }
}

}  // namespace

// Token t's head h of q lies at t * q_row + h * q_step, and so for k; outputs are contiguous.
// All fields are 8 bytes, so that there are no gaps.
struct RotaryCall {
  const int64_t* positions;  // [tokens]
  const void *q, *k;
  const float* cos_sin;
  void *q_out, *k_out;
  int64_t tokens, heads, kv_heads, size, half, q_row, q_step, k_row, k_step, interleaved;
  int64_t type;  // of q and k
};

// Token t's heads lie at t * row: those of q, of k, and of v, which stay there. Weights null: no norms.
struct SplitRopeCall {
  const void* qkv;
  const int64_t* positions;  // [tokens]
  const float* cos_sin;
  void *q, *k;
  const void *q_weight, *k_weight, *q_bias, *k_bias;  // [size], or null
  int64_t tokens, heads, kv_heads, size, half, row, interleaved;
  int64_t type;  // of qkv and the weights
  double eps;
};

}  // namespace piecework

using namespace piecework;

extern "C" {

void piecework_rotary(const RotaryCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->tokens, (call->heads + call->kv_heads) * call->size, [c = *call](int64_t i) {
      const Angles angles{c.cos_sin, c.positions, c.half, c.interleaved != 0};
      T* q_out = (T*)c.q_out + i * c.heads * c.size;
      T* k_out = (T*)c.k_out + i * c.kv_heads * c.size;
      turn_heads((const T*)c.q + i * c.q_row, c.q_step, c.heads, c.size, i, angles, q_out);
      turn_heads((const T*)c.k + i * c.k_row, c.k_step, c.kv_heads, c.size, i, angles, k_out);
    });
  });
}

void piecework_split_qkv_rope(const SplitRopeCall* call) {
  with_type(call->type, [=](auto t) {
    using T = decltype(t);
    for_rows(call->tokens, (call->heads + call->kv_heads) * call->size, [c = *call](int64_t i) {
      const Angles angles{c.cos_sin, c.positions, c.half, c.interleaved != 0};
      const int64_t size = c.size;
      const T* x = (const T*)c.qkv + i * c.row;
      const T* x_k = x + c.heads * size;
      T* q = (T*)c.q + i * c.heads * size;
      T* k = (T*)c.k + i * c.kv_heads * size;
      if (c.q_weight) {
        const float eps = float(c.eps);
        norm_turn_heads(x, (const T*)c.q_weight, (const T*)c.q_bias, eps, c.heads, size, i, angles, q);
        norm_turn_heads(x_k, (const T*)c.k_weight, (const T*)c.k_bias, eps, c.kv_heads, size, i, angles, k);
      } else {
        turn_heads(x, size, c.heads, size, i, angles, q);
        turn_heads(x_k, size, c.kv_heads, size, i, angles, k);
      }
    });
  });
}

}  // extern "C"
