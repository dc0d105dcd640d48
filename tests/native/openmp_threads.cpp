// As much of GCC's OpenMP runtime (the entry points of libgomp) as the kernels use, on std::thread.
//
// The thread sanitizer doesn't see how libgomp's threads wait for each other and takes every loop for a
// race; these it sees.
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int THREADS = 3;

struct Loop {
  long next, end, step, chunk;
};

struct Team {
  int size = 1, waiting = 0, round = 0;
  std::mutex mutex;
  std::condition_variable all_here;
  std::map<int, Loop> loops;  // by their number in the region
};

thread_local Team alone;
thread_local Team* team = &alone;
thread_local int number = 0, loop = 0;

void run(Team* of, int id, void (*body)(void*), void* data) {
  Team* before = team;
  const int number_before = number, loop_before = loop;
  team = of;
  number = id;
  loop = 0;
  body(data);
  team = before;
  number = number_before;
  loop = loop_before;
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return team->size; }
int omp_get_max_threads() { return THREADS; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Team made;
  made.size = threads ? int(threads) : THREADS;
  std::vector<std::thread> others;
  for (int i = 1; i < made.size; ++i) others.emplace_back(run, &made, i, body, data);
  run(&made, 0, body, data);
  for (std::thread& other : others) other.join();
}

void GOMP_barrier() {
  std::unique_lock<std::mutex> lock(team->mutex);
  const int round = team->round;
  if (++team->waiting == team->size) {
    team->waiting = 0;
    ++team->round;
    team->all_here.notify_all();
  }
  team->all_here.wait(lock, [&] { return team->round != round; });
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) {
  std::lock_guard<std::mutex> lock(team->mutex);
  Loop& mine = team->loops[loop];
  if (mine.next >= mine.end) return false;
  *from = mine.next;
  *to = mine.next + mine.chunk < mine.end ? mine.next + mine.chunk : mine.end;
  mine.next = *to;
  return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* from, long* to) {
  {
    std::lock_guard<std::mutex> lock(team->mutex);
    team->loops.emplace(++loop, Loop{start, end, step, chunk});
  }
  return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end() { GOMP_barrier(); }
void GOMP_loop_end_nowait() {}
}
