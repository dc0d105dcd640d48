// Threads take pieces of a tensor's bytes in the order in which they must move. A piece waits until the others
// have read what lies where it is written.
#include "move.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace piecework {
namespace {

constexpr int64_t PIECE = 32 * 1024;
constexpr int64_t ALONE = 96 * 1024;  // bytes that one thread moves sooner than it wakes another

#ifdef __AVX512F__
typedef __m512i wide;
inline void stream(wide* to, wide x) { _mm512_stream_si512(to, x); }
inline void finish_stream() { _mm_sfence(); }
#elif defined(__AVX2__)
typedef __m256i wide;
inline void stream(wide* to, wide x) { _mm256_stream_si256(to, x); }
inline void finish_stream() { _mm_sfence(); }
#else
typedef int64_t wide __attribute__((vector_size(16)));
inline void stream(wide* to, wide x) { *to = x; }
inline void finish_stream() {}
#endif
constexpr int64_t WIDTH = sizeof(wide), LINES = 4 * WIDTH;  // LINES: bytes that are read before any is written

// Past the caches with STREAM: memory that is only written to isn't read first.
template <bool STREAM>
inline void move_lines(char* to, const char* from) {
  wide part[LINES / WIDTH];
  memcpy(part, from, LINES);
  for (int i = 0; i < LINES / WIDTH; ++i)
    if (STREAM)
      stream((wide*)to + i, part[i]);
    else
      ((wide*)to)[i] = part[i];
}

// memmove with whole lines of the target written at once. `up`: to > from, and the end goes first.
template <bool STREAM>
void move_row(char* to, const char* from, int64_t size, bool up) {
  if (up) {
    const int64_t odd = std::min<int64_t>(size, (uintptr_t)(to + size) % WIDTH);
    size -= odd;
    memmove(to + size, from + size, odd);
    for (; size >= LINES; size -= LINES) move_lines<STREAM>(to + size - LINES, from + size - LINES);
    memmove(to, from, size);
  } else {
    int64_t done = std::min<int64_t>(size, -(uintptr_t)to % WIDTH);
    memmove(to, from, done);
    for (; done + LINES <= size; done += LINES) move_lines<STREAM>(to + done, from + done);
    memmove(to + done, from + done, size - done);
  }
}

// The bytes of a run without the gaps between its rows, in pieces.
struct Pieces {
  RowRun run;
  int64_t bytes, count;

  explicit Pieces(const RowRun& r) : run(r), bytes(r.rows * r.size), count((bytes + PIECE - 1) / PIECE) {}

  int64_t begin(int64_t i) const { return run.last ? std::max<int64_t>(0, bytes - (i + 1) * PIECE) : i * PIECE; }
  int64_t end(int64_t i) const { return run.last ? bytes - i * PIECE : std::min(bytes, (i + 1) * PIECE); }

  // The last piece that must have been read before piece i is written; -1: none.
  int64_t needed(int64_t i) const {
    const int64_t edge = run.last ? begin(i) : end(i) - 1;  // the byte whose target lies deepest in the sources
    const int64_t offset = run.to + edge / run.size * run.to_stride + edge % run.size - run.from;
    if (offset < 0) return -1;
    const int64_t row = run.rows == 1 ? 0 : std::min(offset / run.from_stride, run.rows - 1);
    const int64_t inside = offset - row * run.from_stride;
    // Up: the first byte of the sources at or behind the target. Down: the last one at or before it.
    const int64_t byte = row * run.size + std::min(inside, run.last ? run.size : run.size - 1);
    if (byte >= bytes) return -1;
    return std::min(i - 1, (run.last ? bytes - 1 - byte : byte) / PIECE);
  }

  template <bool STREAM>
  void move(char* base, int64_t i) const {
    for (int64_t low = begin(i), high = end(i); low < high;) {
      const int64_t row = (run.last ? high - 1 : low) / run.size, start = row * run.size;
      const int64_t first = std::max(low, start), stop = std::min(high, start + run.size);
      move_row<STREAM>(base + run.to + row * run.to_stride + first - start,
                       base + run.from + row * run.from_stride + first - start, stop - first, run.last);
      (run.last ? high : low) = run.last ? first : stop;
    }
  }
};

// What a thread works on: no piece of this tensor below it is still to be read by this thread.
struct alignas(64) Mark {
  std::atomic<int64_t> piece{INT64_MAX};
};
constexpr int64_t TENSOR = int64_t(1) << 40;  // pieces are numbered through all runs of a tensor

class Work {
 public:
  Work(const TensorMove* moves, int64_t tensors, int threads) : moves_(moves), next_(tensors), marks_(threads) {}

  // One thread's part of a tensor.
  template <bool STREAM>
  void join(int64_t t, int me) {
    const TensorMove& tensor = moves_[t];
    int64_t first = 0, piece = take(t, me);
    for (int64_t r = 0; r < tensor.count; ++r) {
      const Pieces pieces(tensor.runs[r]);
      for (; piece < first + pieces.count; piece = take(t, me)) {
        wait(t, first + pieces.needed(piece - first), me);
        pieces.move<STREAM>(tensor.base, piece - first);
      }
      first += pieces.count;
    }
    marks_[me].piece = INT64_MAX;
  }

 private:
  // The mark is there before the piece is taken: whoever takes a later one sees it.
  int64_t take(int64_t t, int me) {
    marks_[me].piece = t * TENSOR + next_[t];
    const int64_t piece = next_[t]++;
    marks_[me].piece = t * TENSOR + piece;
    return piece;
  }

  void wait(int64_t t, int64_t needed, int me) const {
    for (int other = 0; other < int(marks_.size()); ++other)
      for (int64_t tries = 0; other != me; ++tries) {
        const int64_t piece = marks_[other].piece - t * TENSOR;
        if (piece < 0 || piece > needed) break;
        if (tries > 1000) std::this_thread::yield();
      }
  }

  const TensorMove* moves_;
  std::vector<std::atomic<int64_t>> next_;
  std::vector<Mark> marks_;
};

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

// Each thread begins with tensors of its own and then helps with the others.
void piecework_move_rows(const TensorMove* moves, int64_t tensors, int64_t stream) {
  int64_t bytes = 0;
  for (int64_t t = 0; t < tensors; ++t)
    for (int64_t r = 0; r < moves[t].count; ++r) bytes += moves[t].runs[r].rows * moves[t].runs[r].size;
  const int threads = bytes < ALONE ? 1 : omp_get_max_threads();
  Work work(moves, tensors, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t me = omp_get_thread_num(), start = me * tensors / threads;
    for (int64_t i = 0; i < tensors; ++i) {
      const int64_t t = (start + i) % tensors;
      stream ? work.join<true>(t, int(me)) : work.join<false>(t, int(me));
    }
    if (stream) finish_stream();
  }
}

// memcpy from one buffer to another, each thread an even share of every run: what benchmarks compare with.
void piecework_copy_rows(const RowRun* runs, int64_t count) {
#pragma omp parallel
  for (int64_t r = 0; r < count; ++r) {
    const RowRun& run = runs[r];
    const int64_t bytes = run.rows * run.size, me = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t end = bytes * (me + 1) / threads / 64 * 64;
    for (int64_t at = bytes * me / threads / 64 * 64, stop = me + 1 == threads ? bytes : end; at < stop;) {
      const int64_t row = at / run.size, inside = at % run.size, part = std::min(stop - at, run.size - inside);
      memcpy((char*)run.to + row * run.to_stride + inside, (const char*)run.from + row * run.from_stride + inside,
             size_t(part));
      at += part;
    }
  }
}

}  // extern "C"
