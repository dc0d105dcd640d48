// The threads that kernels run on: those of torch, with which they share the OpenMP runtime.
#include <omp.h>

#include "types.h"

extern "C" int32_t piecework_threads() { return int32_t(omp_get_max_threads()); }
