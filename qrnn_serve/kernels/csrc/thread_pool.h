// A small thread pool behind qrnn_parallel_for.
#pragma once

#include "qrnn_kernels.h"

namespace qrnn {

// Calls task(data, i) for every i below count on the caller's thread and up to threads - 1 workers.
// Workers start at the first call that needs them and are kept. Several callers share them. A
// forked child starts with none and makes its own.
void run_on_pool(int64_t threads, qrnn_task task, int64_t count, void* data);

}  // namespace qrnn
