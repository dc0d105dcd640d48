// Reads memory and does next to nothing with it: how fast that goes is the bound of a kernel that reads as much.
#include <omp.h>

#include <algorithm>

#include "vector.h"

namespace piecework {

// All fields are 8 bytes.
struct ReadCall {
  const int64_t* from;
  int64_t* total;  // of all words
  int64_t words;
};

namespace {

constexpr int STREAMS = 4;               // that a thread reads at once: more than one is faster
constexpr int64_t STREAM = 1 << 15;      // words of a stream
constexpr int64_t PART = STREAMS * STREAM;
typedef int64_t words4 __attribute__((vector_size(32)));

int64_t total_of(const int64_t* from) {
  words4 sums[STREAMS] = {};
  for (int64_t i = 0; i < STREAM; i += 4)
    for (int s = 0; s < STREAMS; ++s) sums[s] += load_raw<words4>(from + s * STREAM + i);
  const words4 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return sum[0] + sum[1] + sum[2] + sum[3];
}

}  // namespace
}  // namespace piecework

extern "C" void piecework_read(const piecework::ReadCall* call) {
  using namespace piecework;
  const int64_t parts = call->words / PART;
  int64_t total = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : total)
  for (int64_t i = 0; i < parts; ++i) total += total_of(call->from + i * PART);
  for (int64_t i = parts * PART; i < call->words; ++i) total += call->from[i];
  *call->total = total;
}
