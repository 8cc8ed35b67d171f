// The CUDA pool kernels. The maths stands in reference.py; sequences.cuh says how the work is
// shared, carry.cuh how the state crosses from block to block.
//
// Compiled with these on the command line, by NVRTC or nvcc: QRNN_DTYPE (the codes of
// csrc/qrnn_kernels.h), QRNN_CHANNELS (neighbouring channels of a thread) and, for one kernel alone,
// QRNN_ONLY (its number below). Includes nothing of CUDA's, so that no header need be installed.

#include "backward.cuh"
#include "forward.cuh"
#include "prepare.cuh"

#ifdef QRNN_ONLY
#define QRNN_WANTS(number) (QRNN_ONLY == number)
#else
#define QRNN_WANTS(number) 1
#endif

// Blocks that a processor must hold at once: fewer registers a thread, more loads in flight.
#ifndef QRNN_FORWARD_BLOCKS
#define QRNN_FORWARD_BLOCKS (sizeof(Compute) == 8 ? 1 : kHalf && QRNN_CHANNELS > 1 ? 3 : 4)
#endif
#ifndef QRNN_BACKWARD_BLOCKS
#define QRNN_BACKWARD_BLOCKS (sizeof(Compute) == 8 ? 1 : kHalf && QRNN_CHANNELS > 1 ? 2 : 3)
#endif

#define QRNN_KERNEL(name, Arguments, blocks, body)                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, blocks)                      \
        name(const __grid_constant__ Arguments a) {                                     \
        body(a);                                                                        \
    }

#if QRNN_WANTS(0)
QRNN_KERNEL(qrnn_forget_mult, ForgetMultArgs, QRNN_FORWARD_BLOCKS,
            (forget_mult<QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(1)
QRNN_KERNEL(qrnn_forget_mult_starts, ForgetMultArgs, QRNN_FORWARD_BLOCKS,
            (forget_mult<QRNN_CHANNELS, true>))
#endif
#if QRNN_WANTS(2)
QRNN_KERNEL(qrnn_forget_mult_backward, ForgetMultBackwardArgs, QRNN_BACKWARD_BLOCKS,
            (forget_mult_backward<QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(3)
QRNN_KERNEL(qrnn_fo_pool, FoPoolArgs, QRNN_FORWARD_BLOCKS,
            (fo_pool<true, QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(4)
QRNN_KERNEL(qrnn_f_pool, FoPoolArgs, QRNN_FORWARD_BLOCKS,
            (fo_pool<false, QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(5)
QRNN_KERNEL(qrnn_pool_starts, FoPoolArgs, QRNN_FORWARD_BLOCKS,
            (fo_pool<false, QRNN_CHANNELS, true>))
#endif
#if QRNN_WANTS(6)
QRNN_KERNEL(qrnn_fo_pool_backward, FoPoolBackwardArgs, QRNN_BACKWARD_BLOCKS,
            (fo_pool_backward<true, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(7)
QRNN_KERNEL(qrnn_f_pool_backward, FoPoolBackwardArgs, QRNN_BACKWARD_BLOCKS,
            (fo_pool_backward<false, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(8)
QRNN_KERNEL(qrnn_prepare, PrepareArgs, 1,
            prepare)
#endif
