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

#define QRNN_KERNEL(name, Arguments, body)                                       \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce)         \
        name(const __grid_constant__ Arguments a) {                              \
        body(a);                                                                 \
    }


#ifndef QRNN_BLOCKS
#define QRNN_BLOCKS 1
#endif
constexpr int kBlocksAtOnce = QRNN_BLOCKS;

#if QRNN_WANTS(0)
QRNN_KERNEL(qrnn_forget_mult, ForgetMultArgs, (forget_mult<QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(1)
QRNN_KERNEL(qrnn_forget_mult_starts, ForgetMultArgs, (forget_mult<QRNN_CHANNELS, true>))
#endif
#if QRNN_WANTS(2)
QRNN_KERNEL(qrnn_forget_mult_backward, ForgetMultBackwardArgs, (forget_mult_backward<QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(3)
QRNN_KERNEL(qrnn_fo_pool, FoPoolArgs, (fo_pool<true, QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(4)
QRNN_KERNEL(qrnn_f_pool, FoPoolArgs, (fo_pool<false, QRNN_CHANNELS, false>))
#endif
#if QRNN_WANTS(5)
QRNN_KERNEL(qrnn_pool_starts, FoPoolArgs, (fo_pool<false, QRNN_CHANNELS, true>))
#endif
#if QRNN_WANTS(6)
QRNN_KERNEL(qrnn_fo_pool_backward, FoPoolBackwardArgs, (fo_pool_backward<true, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(7)
QRNN_KERNEL(qrnn_f_pool_backward, FoPoolBackwardArgs, (fo_pool_backward<false, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(8)
QRNN_KERNEL(qrnn_prepare, PrepareArgs, prepare)
#endif
