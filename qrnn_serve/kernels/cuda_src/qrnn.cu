// The CUDA scan kernels, and those of the window. The maths stands in reference.py; sequences.cuh says how the work is
// shared, carry.cuh how the state crosses from block to block.
//
// Compiled with these on the command line, by NVRTC or nvcc: QRNN_DTYPE (the codes of
// csrc/qrnn_kernels.h), QRNN_CHANNELS (neighbouring channels of a thread), QRNN_ROW_BYTES (of dtypes.cuh)
// and, for one kernel alone, QRNN_ONLY (its number below). Includes nothing of CUDA's, so that no header need be installed.

#include "backward.cuh"
#include "forward.cuh"
#include "prepare.cuh"
#include "short.cuh"
#include "window.cuh"

#ifdef QRNN_ONLY
#define QRNN_WANTS(number) (QRNN_ONLY == number)
#else
#define QRNN_WANTS(number) 1
#endif

// A processor of sm_75 holds 1024 threads, others hold 1536 or more.
#if __CUDA_ARCH__ == 750
#define QRNN_MOST_BLOCKS 3
#else
#define QRNN_MOST_BLOCKS 4
#endif

// Blocks that a processor must hold at once: fewer registers a thread, more loads in flight.
enum {
    kForwardBlocks = sizeof(Compute) == 8 ? 1 : QRNN_CHANNELS > 1 ? 3 : QRNN_MOST_BLOCKS,
    kBackwardBlocks = sizeof(Compute) == 8 ? 1 : 2,
};

// Channels that a thread of the window kernels takes: whole pieces where rows are aligned.
constexpr int kCopiedChannels = QRNN_CHANNELS > 1 ? QRNN_ROW_BYTES / sizeof(Storage) : 1;

typedef ForwardMemory<true, QRNN_CHANNELS> GatedMemory;
typedef ForwardMemory<false, QRNN_CHANNELS> UngatedMemory;
typedef BackwardMemory<true, QRNN_CHANNELS> GatedBackwardMemory;
typedef BackwardMemory<false, QRNN_CHANNELS> UngatedBackwardMemory;

// A launch gives a kernel as much shared memory as its `_shared_bytes` says.
#define QRNN_KERNEL_OF(threads, name, Arguments, shared_bytes, blocks, body)            \
    extern "C" __device__ unsigned name##_shared_bytes = shared_bytes;                  \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                       \
        name(const __grid_constant__ Arguments a) {                                     \
        body(a);                                                                        \
    }
#define QRNN_KERNEL(name, Arguments, shared_bytes, blocks, body) \
    QRNN_KERNEL_OF(kThreads, name, Arguments, shared_bytes, blocks, body)
#define QRNN_SHORT_KERNEL(name, Arguments, body)                                        \
    QRNN_KERNEL_OF(32 * kWarps * kTilesAtOnce, name, Arguments,                         \
                   sizeof(ShortMemory<QRNN_CHANNELS>), 1, body)

#if QRNN_WANTS(0)
QRNN_KERNEL(qrnn_forget_mult, ForgetMultArgs, sizeof(UngatedMemory), kForwardBlocks,
            (forget_mult<QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(2)
QRNN_KERNEL(qrnn_forget_mult_backward, ForgetMultBackwardArgs, sizeof(UngatedBackwardMemory),
            kBackwardBlocks, (forget_mult_backward<QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(3)
QRNN_KERNEL(qrnn_fo_pool, FoPoolArgs, sizeof(GatedMemory), kForwardBlocks,
            (fo_pool<true, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(4)
QRNN_KERNEL(qrnn_f_pool, FoPoolArgs, sizeof(UngatedMemory), kForwardBlocks,
            (fo_pool<false, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(6)
QRNN_KERNEL(qrnn_fo_pool_backward, FoPoolBackwardArgs, sizeof(GatedBackwardMemory),
            kBackwardBlocks, (fo_pool_backward<true, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(7)
QRNN_KERNEL(qrnn_f_pool_backward, FoPoolBackwardArgs, sizeof(UngatedBackwardMemory),
            kBackwardBlocks, (fo_pool_backward<false, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(8)
QRNN_KERNEL(qrnn_prepare, PrepareArgs, 0, 1, prepare)
#endif
#if QRNN_WANTS(9)
QRNN_KERNEL(qrnn_window, WindowArgs, 0, 1, (window<kCopiedChannels>))
#endif
#if QRNN_WANTS(10)
QRNN_KERNEL(qrnn_window_backward, WindowBackwardArgs, 0, 1, (window_backward<kCopiedChannels>))
#endif
#if QRNN_WANTS(11)
QRNN_SHORT_KERNEL(qrnn_forget_mult_short, ForgetMultArgs, (forget_mult_short<QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(12)
QRNN_SHORT_KERNEL(qrnn_fo_pool_short, FoPoolArgs, (fo_pool_short<true, QRNN_CHANNELS>))
#endif
#if QRNN_WANTS(13)
QRNN_SHORT_KERNEL(qrnn_f_pool_short, FoPoolArgs, (fo_pool_short<false, QRNN_CHANNELS>))
#endif
