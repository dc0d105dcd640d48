// Runs a piece that was written down as calls of kernels: see piecework/compile/plan.py.
#include "run.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace piecework {
namespace {

struct Freed {
  void operator()(void* memory) const { std::free(memory); }
};

// What lives between the calls of a piece: one block for each thread, which grows to the largest piece.
char* arena(int64_t bytes) {
  thread_local std::unique_ptr<void, Freed> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    const int64_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    memory.reset();
    size = 0;
    memory.reset(std::aligned_alloc(size_t(ALIGNMENT), size_t(whole)));
    if (!memory) return nullptr;
    size = whole;
  }
  return static_cast<char*>(memory.get());
}

}  // namespace
}  // namespace piecework

extern "C" int64_t piecework_run(const piecework::Step* steps, int64_t count, const int64_t* buffers,
                                 int64_t tokens, int64_t arena_bytes) {
  using namespace piecework;
  const int64_t between = reinterpret_cast<int64_t>(arena(arena_bytes));
  if (arena_bytes && !between) return 1;
  for (const Step* step = steps; step < steps + count; ++step) {
    int64_t values[MOST_FIELDS];
    for (int64_t i = 0; i < step->count; ++i) {
      const Field& field = step->fields[i];
      const int64_t start = field.buffer == NUMBER ? 0 : field.buffer == ARENA ? between : buffers[field.buffer - FIRST];
      values[i] = start + field.per_token * tokens + field.constant;
    }
    step->kernel(values);
  }
  return 0;
}
