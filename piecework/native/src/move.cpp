// Rows of bytes that move inside one buffer, where the old place of a row may overlap its new one.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace piecework {

// `rows` rows of `size` bytes, the first from address `from` to `to`, each next one a stride further. With
// `last` the last row goes first, and its end before its beginning. All fields are 8 bytes.
struct RowRun {
  int64_t from, to, from_stride, to_stride, rows, size, last;
};

namespace {

#ifdef __AVX2__
constexpr int64_t WIDTH = 32;
constexpr int64_t LINES = 4 * WIDTH;  // bytes that are read before any of them is written

inline void stream_lines(char* to, const char* from) {
  __m256i part[LINES / WIDTH];
  for (int i = 0; i < LINES / WIDTH; ++i) part[i] = _mm256_loadu_si256((const __m256i*)from + i);
  for (int i = 0; i < LINES / WIDTH; ++i) _mm256_stream_si256((__m256i*)to + i, part[i]);
}

// memmove past the caches: memory that is only written to isn't read first.
void stream_row(char* to, const char* from, int64_t size, bool last) {
  if (last) {
    const int64_t odd = std::min<int64_t>(size, (uintptr_t)(to + size) % WIDTH);
    size -= odd;
    memmove(to + size, from + size, odd);
    for (; size >= LINES; size -= LINES) stream_lines(to + size - LINES, from + size - LINES);
    memmove(to, from, size);
  } else {
    int64_t done = std::min<int64_t>(size, -(uintptr_t)to % WIDTH);
    memmove(to, from, done);
    for (; done + LINES <= size; done += LINES) stream_lines(to + done, from + done);
    memmove(to + done, from + done, size - done);
  }
}

inline void finish_stream() { _mm_sfence(); }
#else
void stream_row(char* to, const char* from, int64_t size, bool) { memmove(to, from, size); }

inline void finish_stream() {}
#endif

void move_run(const RowRun& run, bool stream) {
  for (int64_t i = 0; i < run.rows; ++i) {
    const int64_t row = run.last ? run.rows - 1 - i : i;
    char* to = (char*)(run.to + row * run.to_stride);
    const char* from = (const char*)(run.from + row * run.from_stride);
    if (to == from) continue;
    if (stream)
      stream_row(to, from, run.size, run.last);
    else
      memmove(to, from, size_t(run.size));
  }
}

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

// Tensor t has the runs starts[t] to starts[t + 1], in this order; tensors move side by side.
void piecework_move_rows(const RowRun* runs, const int64_t* starts, int64_t tensors, int64_t stream) {
  const int threads = int(std::min<int64_t>(tensors, omp_get_max_threads()));
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tensors; ++t) {
    for (int64_t r = starts[t]; r < starts[t + 1]; ++r) move_run(runs[r], stream != 0);
    if (stream) finish_stream();
  }
}

}  // extern "C"
