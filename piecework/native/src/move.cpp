// Threads share out the bytes that move: whole tensors, and slices of those that lie across a bound.
#include "move.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace piecework {
namespace {

constexpr int64_t ALONE = 96 * 1024;  // bytes that one thread moves sooner than it wakes another
constexpr int64_t SLICE = 8 * 1024;   // bytes that a thread moves at least of a tensor that it shares

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
constexpr int64_t WIDTH = sizeof(wide), LINES = 4 * WIDTH;

inline wide read(const char* from) {
  wide x;
  memcpy(&x, from, WIDTH);
  return x;
}

// Past the caches with STREAM: memory that is only written to isn't read first.
template <bool STREAM, int COUNT>
inline void move_lines(char* to, const char* from) {
  wide part[COUNT];
  for (int i = 0; i < COUNT; ++i) part[i] = read(from + i * WIDTH);
  for (int i = 0; i < COUNT; ++i)
    if (STREAM)
      stream((wide*)to + i, part[i]);
    else
      ((wide*)to)[i] = part[i];
}

// memmove with whole lines of the target written at once. `up`: to > from, and the end goes first.
template <bool STREAM>
void move_row(char* to, const char* from, int64_t size, bool up) {
  if (size < WIDTH) {
    memmove(to, from, size);
    return;
  }
  const wide first = read(from), last = read(from + size - WIDTH);  // before either is overwritten
  if (up) {
    int64_t at = size - (uintptr_t)(to + size) % WIDTH;
    for (; at >= LINES; at -= LINES) move_lines<STREAM, 4>(to + at - LINES, from + at - LINES);
    for (; at >= WIDTH; at -= WIDTH) move_lines<STREAM, 1>(to + at - WIDTH, from + at - WIDTH);
  } else {
    int64_t at = -(uintptr_t)to % WIDTH;
    for (; at + LINES <= size; at += LINES) move_lines<STREAM, 4>(to + at, from + at);
    for (; at + WIDTH <= size; at += WIDTH) move_lines<STREAM, 1>(to + at, from + at);
  }
  memcpy(to, &first, WIDTH);
  memcpy(to + size - WIDTH, &last, WIDTH);
}

// The sources of a run, as addresses from a tensor's start, gaps between rows among them.
struct Sources {
  RowRun run;
  bool up;

  explicit Sources(const RowRun& r) : run(r), up(r.last != 0) {
    if (run.rows == 1) run.from_stride = run.to_stride = run.size;
  }

  int64_t begin() const { return run.from; }
  int64_t end() const { return run.from + run.rows * run.from_stride; }

  // The lower edge of the block below `edge`, the sources of which and the targets of which lie apart: where rows
  // move up that which moves to `edge`, else where `edge` moves to. Nothing below begin().
  int64_t below(int64_t edge) const {
    const int64_t first = up ? run.to : run.from, stride = up ? run.to_stride : run.from_stride;
    if (edge <= first) return run.from;
    const int64_t row = std::min((edge - first) / stride, up ? run.rows - 1 : run.rows);
    const int64_t inside = edge - first - row * stride;
    if (up) return run.from + row * run.from_stride + std::min(inside, run.from_stride);
    const int64_t to = run.to + row * run.to_stride + (inside < run.size ? inside : run.to_stride);
    return std::max(run.from, std::min(edge, to));
  }

  // Rows that move by `far` bytes and more go past the caches.
  void move(char* base, int64_t low, int64_t high, int64_t far) const {
    high = std::min(high, end());
    while (low < high) {
      const int64_t row = ((up ? high - 1 : low) - run.from) / run.from_stride;
      const int64_t start = run.from + row * run.from_stride;
      const int64_t first = std::max(low, start), stop = std::min(high, start + run.size);
      const int64_t by = run.to + row * run.to_stride - start;
      if (first < stop && std::abs(by) >= far)
        move_row<true>(base + first + by, base + first, stop - first, up);
      else if (first < stop)
        move_row<false>(base + first + by, base + first, stop - first, up);
      (up ? high : low) = up ? first : start + run.from_stride;
    }
  }
};

// A run in blocks whose sources and targets lie apart, from the end of the sources on, each as long as its rows move.
// Small blocks are one thread's: where rows move up they come last, where they move down first.
struct Blocks {
  int64_t count = 0, edge;  // the small ones begin below `edge`
  double small;             // their part of the run

  Blocks(const RowRun& run, int sharers) {
    const Sources all(run);
    edge = all.end();
    for (int64_t low; edge - (low = all.below(edge)) >= sharers * SLICE; edge = low) ++count;
    small = double(edge - all.begin()) / double(all.end() - all.begin());
  }
};

enum Phase { SHARED, OWN, REST };

// The bytes of a tensor, of `size`, that a thread moves.
struct Part {
  int64_t low, high, size;
};

// All threads agree on who moves what: `bounds` cuts the bytes of all tensors, one behind the other.
class Work {
 public:
  Work(const TensorMove* moves, int64_t tensors, int64_t far)
      : moves_(moves), tensors_(tensors), far_(far), finished_(tensors) {
    for (int64_t t = 0; t < tensors; ++t) bytes_ += bytes_of(moves[t]);
  }

  int64_t bytes() const { return bytes_; }

  // The part of thread `me`: first of tensors that are shared, then those of its own, then what others must be
  // done with.
  void run(int me, int threads) {
    const std::vector<int64_t> bounds = cut(threads);
    for (const Phase phase : {SHARED, OWN, REST}) {
      int64_t start = 0;
      for (int64_t t = 0; t < tensors_ && start < bounds[me + 1]; ++t) {
        const int64_t size = bytes_of(moves_[t]), end = start + size;
        const Part part{std::max(start, bounds[me]) - start, std::min(end, bounds[me + 1]) - start, size};
        if (part.low < part.high && (phase == OWN) == (part.high - part.low == size)) {
          int sharers = 0;
          for (int i = 0; i < threads; ++i) sharers += std::max(start, bounds[i]) < std::min(end, bounds[i + 1]);
          if (phase == OWN)
            move_all(moves_[t]);
          else if (phase == SHARED)
            move_slices(t, part, sharers);
          else
            move_rest(t, part, sharers);
        }
        start = end;
      }
    }
  }

 private:
  static int64_t bytes_of(const TensorMove& move) {
    int64_t bytes = 0;
    for (int64_t r = 0; r < move.count; ++r) bytes += move.runs[r].rows * move.runs[r].size;
    return bytes;
  }

  // Even shares, but only of tensors that can be shared, and no small part of one: sharers wait for each other.
  std::vector<int64_t> cut(int threads) const {
    std::vector<int64_t> bounds(threads + 1);
    int64_t start = 0, t = 0;
    for (int i = 1; i < threads; ++i) {
      const int64_t even = bytes_ / threads * i;
      for (; start + bytes_of(moves_[t]) <= even; ++t) start += bytes_of(moves_[t]);
      const int64_t size = bytes_of(moves_[t]), part = even - start;
      const int sharers = int(std::min<int64_t>(threads, size / (bytes_ / threads) + 2));
      const bool whole = moves_[t].count > 1 || Blocks(moves_[t].runs[0], sharers).small * size > part;
      const int64_t least = whole ? size / 2 : std::min(size / 2, std::max(size / 8, ALONE));
      bounds[i] = std::max(bounds[i - 1], part <= least ? start : part >= size - least ? start + size : even);
    }
    bounds[threads] = bytes_;
    return bounds;
  }

  void move_all(const TensorMove& move) const {
    for (int64_t r = 0; r < move.count; ++r) {
      const Sources all(move.runs[r]);
      all.move(move.base, all.begin(), all.end(), far_);
    }
  }

  // A slice of a run's first block, and what moves to where that was or where that moves to, and so on, is a
  // thread's: it reads nothing that another one writes.
  void move_slices(int64_t t, Part part, int sharers) {
    const Sources all(moves_[t].runs[0]);
    const Blocks blocks(moves_[t].runs[0], sharers);
    if (!all.up) {
      if (part.low == 0) {
        all.move(moves_[t].base, all.begin(), blocks.edge, far_);
        ++finished_[t];
      }
      wait(t, 1);
    }
    const double small = blocks.small * part.size;  // the first sharer's, within its part
    const auto bound = [&](int64_t at) {
      const int64_t low = all.below(all.end());
      if (at == part.size) return all.end();
      return low + int64_t(double(all.end() - low) * (std::max(0., at - small) / (part.size - small)));
    };
    std::vector<std::pair<int64_t, int64_t>> slices(blocks.count, {bound(part.low), bound(part.high)});
    for (size_t i = 1; i < slices.size(); ++i)
      slices[i] = {all.below(slices[i - 1].first), all.below(slices[i - 1].second)};
    if (!all.up) std::reverse(slices.begin(), slices.end());
    for (const auto& [low, high] : slices) all.move(moves_[t].base, low, high, far_);
    if (all.up) ++finished_[t];
  }

  void move_rest(int64_t t, Part part, int sharers) {
    const Sources all(moves_[t].runs[0]);
    if (!all.up || part.low > 0) return;
    wait(t, sharers);
    all.move(moves_[t].base, all.begin(), Blocks(moves_[t].runs[0], sharers).edge, far_);
  }

  void wait(int64_t t, int count) const {
    for (int tries = 0; finished_[t] < count; ++tries)
      if (tries > 1000) std::this_thread::yield();
  }

  const TensorMove* moves_;
  int64_t tensors_, far_, bytes_ = 0;
  std::vector<std::atomic<int>> finished_;
};

}  // namespace
}  // namespace piecework

using namespace piecework;

extern "C" {

// `far`: by how many bytes a row moves that goes past the caches.
void piecework_move_rows(const TensorMove* moves, int64_t tensors, int64_t far) {
  Work work(moves, tensors, far);
#pragma omp parallel if (work.bytes() >= ALONE)
  {
    const int me = omp_get_thread_num(), threads = omp_get_num_threads();
    work.run(me, threads);
    finish_stream();
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
