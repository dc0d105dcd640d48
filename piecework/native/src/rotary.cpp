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
    widen_row(x + h * size, size, row);
    norm_row(row, weight, size, eps, row);
    if (bias)
      each(size, [&](int64_t i, auto lanes) {
        store(row + i, rounded<T>(load(row + i, lanes) + load(bias + i, lanes)), lanes);
      });
    turn_head(row, cos, angles.half, angles.interleaved, size, out + h * size);
  }
}

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

// Token t's head h of q lies at t * q_row + h * q_step, and so for k; outputs are contiguous.
void piecework_rotary(int32_t type, const int64_t* positions, const void* q, const void* k,
                      const float* cos_sin, int32_t interleaved, void* q_out, void* k_out, int64_t tokens,
                      int64_t heads, int64_t kv_heads, int64_t size, int64_t half, int64_t q_row,
                      int64_t q_step, int64_t k_row, int64_t k_step) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    const Angles angles{cos_sin, positions, half, interleaved != 0};
    for_rows(tokens, (heads + kv_heads) * size, [=](int64_t i) {
      turn_heads((const T*)q + i * q_row, q_step, heads, size, i, angles, (T*)q_out + i * heads * size);
      turn_heads((const T*)k + i * k_row, k_step, kv_heads, size, i, angles, (T*)k_out + i * kv_heads * size);
    });
  });
}

// Token t's heads lie at t * row: those of q, of k, of v. Weights null: no norms.
void piecework_split_qkv_rope(int32_t type, const void* qkv, int64_t row, const int64_t* positions,
                              const float* cos_sin, int64_t half, int32_t interleaved, int64_t tokens,
                              int64_t heads, int64_t kv_heads, int64_t size, void* q, void* k, void* v,
                              const void* q_weight, const void* k_weight, const void* q_bias,
                              const void* k_bias, float eps) {
  with_type(type, [=](auto t) {
    using T = decltype(t);
    const Angles angles{cos_sin, positions, half, interleaved != 0};
    for_rows(tokens, (heads + 2 * kv_heads) * size, [=](int64_t i) {
      const T* x = (const T*)qkv + i * row;
      const T* x_k = x + heads * size;
      T* out_q = (T*)q + i * heads * size;
      T* out_k = (T*)k + i * kv_heads * size;
      if (q_weight) {
        norm_turn_heads(x, (const T*)q_weight, (const T*)q_bias, eps, heads, size, i, angles, out_q);
        norm_turn_heads(x_k, (const T*)k_weight, (const T*)k_bias, eps, kv_heads, size, i, angles, out_k);
      } else {
        turn_heads(x, size, heads, size, i, angles, out_q);
        turn_heads(x_k, size, kv_heads, size, i, angles, out_k);
      }
      std::memcpy((T*)v + i * kv_heads * size, x_k + kv_heads * size, size_t(kv_heads * size) * sizeof(T));
    });
  });
}

}  // extern "C"
