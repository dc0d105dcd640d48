// Int8 weights that were laid out in panels, as panel.h reads them.
//
// A block is as much of a panel as LANES registers hold, LANES channels four times, in the order in which they are
// multiplied; blocks of a panel follow one another, and panels. Bytes count from -128, as ByteWords wants them, and what
// exceeds the matrix is zeros.
#pragma once

#include "panel.h"

namespace piecework {

struct LaidBytes : ByteWords {
  static ints words(const int8_t* w) { return load_raw<ints>(w); }
};

template <typename T>
struct LaidMixed : MixedWords<T> {
  static ints words(const int8_t* w) { return ByteWords::words(w); }
};

template <typename P>
struct LaidPanel {
  static constexpr int64_t BLOCK_BYTES = LANES * LANES * P::PER;
  const int8_t* first;

  PIECEWORK_INLINED void load(int64_t k, ints* block) const {
    const int8_t* from = first + k * LANES;
    PIECEWORK_UNROLLED
    for (int i = 0; i < LANES; ++i) block[i] = P::words(from + i * LANES * P::PER);
  }

  void load(int64_t k, int64_t, ints* block) const { load(k, block); }

  const char* at(int64_t i) const { return reinterpret_cast<const char*>(first + i * BLOCK_BYTES); }
};

template <typename P>
struct Laid {
  static constexpr bool IN_ROWS = false;
  const int8_t* w;
  int64_t panel_bytes;

  Laid(const int8_t* w, int64_t depth)
      : w(w), panel_bytes((depth + LANES * P::PER - 1) / (LANES * P::PER) * LaidPanel<P>::BLOCK_BYTES) {}

  template <bool>
  LaidPanel<P> panel(int64_t first, int64_t) const {
    return {w + first / LANES * panel_bytes};
  }

  const char* at(int64_t column) const { return reinterpret_cast<const char*>(w + column / LANES * panel_bytes); }
};

}  // namespace piecework
