// A piece as calls of kernels: what piecework/compile/native_piece.py hands over.
#pragma once

#include <cstdint>

namespace piecework {

// Where a field begins: at nothing, a plain number; in the memory between calls; in buffer number FIRST + i.
enum Start : int64_t { NUMBER = 0, ARENA = 1, FIRST = 2 };

// start + per_token * tokens + constant, in bytes if it is an address. The bits of a double are a constant.
struct Field {
  int64_t buffer, per_token, constant;
};

struct Step {
  void (*kernel)(const void*);
  const Field* fields;
  int64_t count;  // at most MOST_FIELDS
};

constexpr int64_t MOST_FIELDS = 32;
constexpr int64_t ALIGNMENT = 64;

}  // namespace piecework

// Runs all steps in order. `buffers`: addresses. Returns 1 where there is no memory for `arena_bytes`, else 0.
extern "C" int64_t piecework_run(const piecework::Step* steps, int64_t count, const int64_t* buffers,
                                 int64_t tokens, int64_t arena_bytes);
