// Element types of tensors, and their conversion to and from float.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace piecework {

// The numbers by which callers name a type; piecework/native/types.py has the same.
enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(int8_t x) { return float(x); }

inline float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = float(fraction) * 0x1p-24f;  // zero or a denormal
  return sign ? -small : small;
#endif
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// Round to nearest, halves to even, as torch does; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(0x7fc0)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline f16 from_float<f16>(float x) {
#if defined(__F16C__)
  return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (size >= 0x47800000) return {uint16_t(sign | 0x7c00)};
  if (size < 0x38800000) {  // a denormal: let float addition round at its last bit
    const float shifted = bits_to_float(size) + bits_to_float(0x3f000000);
    return {uint16_t(sign | (float_to_bits(shifted) - 0x3f000000))};
  }
  const uint32_t rounded = size + 0xfff + ((size >> 13) & 1);
  return {uint16_t(sign | ((rounded - 0x38000000) >> 13))};
#endif
}

}  // namespace piecework
