// The threads that kernels run on: those of torch, with which they share the OpenMP runtime.
#include <omp.h>

#include "types.h"

extern "C" {

int32_t piecework_threads() { return int32_t(omp_get_max_threads()); }

// Ends the threads that wait for work of the calling thread; its next parallel loop starts others.
// Each thread that runs loops has a team of its own, and the runtime counts all that wait: with more of them
// than cores it takes the machine for busy and puts every team to sleep after each loop, and waking one takes
// longer than most of the loops here.
void piecework_release_threads() { omp_pause_resource_all(omp_pause_soft); }

}  // extern "C"
