// largest: each row's largest number and where it stands first, as numpy's argmax says it.
#include <cmath>
#include <limits>

#include "rows.h"

namespace piecework {

// All fields are 8 bytes.
struct LargestCall {
  const void* x;   // [rows, size], row r at r * stride
  float* best;     // [rows]
  int64_t* index;  // [rows]
  int64_t rows, size, stride;
  int64_t type;  // of x

  template <typename T>
  void run(int64_t r) const {
    const T* row = (const T*)x + r * stride;
    const int64_t whole = size / LANES * LANES;
    floats top = splat(-std::numeric_limits<float>::infinity());
    ints odd = {};
    for (int64_t i = 0; i < whole; i += LANES) {
      const floats y = load(row + i);
      top = y > top ? y : top;
      odd |= y != y;
    }
    float most = -std::numeric_limits<float>::infinity();
    bool nan = false;
    for (int j = 0; j < LANES; ++j) {
      most = top[j] > most ? top[j] : most;
      nan |= odd[j] != 0;
    }
    for (int64_t i = whole; i < size; ++i) {
      const float y = to_float(row[i]);
      most = y > most ? y : most;
      nan |= y != y;
    }
    int64_t at = 0;
    if (nan) {
      while (to_float(row[at]) == to_float(row[at])) ++at;
      most = to_float(row[at]);
    } else {
      at = first(row, whole, most);
      while (to_float(row[at]) != most) ++at;
    }
    best[r] = most;
    index[r] = at;
  }

 private:
  // Where the vector begins that has the number, or the end of the whole ones.
  template <typename T>
  static int64_t first(const T* row, int64_t whole, float most) {
    const floats wanted = splat(most);
    for (int64_t i = 0; i < whole; i += LANES) {
      const ints same = load(row + i) == wanted;
      int32_t found = 0;
      for (int j = 0; j < LANES; ++j) found |= same[j];
      if (found) return i;
    }
    return whole;
  }
};

}  // namespace piecework

extern "C" void piecework_largest(const piecework::LargestCall* call) {
  using namespace piecework;
  with_type(call->type, [=](auto t) {
    for_rows(call->rows, call->size, [c = *call](int64_t r) { c.run<decltype(t)>(r); });
  });
}
