// One QRNN layer at inference in one kernel, for Hopper (sm_90a) and half precision: the product of
// inputs and weights, activations, scan and output gate. The maths stands in reference.py.
// Pre-activations live in the accumulators of the tensor cores and never reach memory.
//
// A block owns 64 channels and keeps their 192 weight rows (Z, F, O) in shared memory. It walks
// sequences in tiles of kTile timesteps. Four producer warps copy inputs into a ring of stages; two
// consumer warpgroups take the tiles in turn, so that one multiplies while the other runs
// activations, scan and stores.
//
// Channels are the rows of the product and timesteps its columns. Columns are permuted so that a
// thread's accumulators hold a run of kTile / 4 consecutive timesteps of two channels: the scan is a
// loop in registers, then two steps over four lanes. The permutation costs nothing, because the
// producers copy any timestep to any place.
//
// Compiled by NVRTC or nvcc, without CUDA's headers, with these given on the command line:
// QRNN_DTYPE (the codes of csrc/qrnn_kernels.h: 1 float16, 2 bfloat16), QRNN_TILE (64 or 128),
// QRNN_STAGES, and QRNN_CHUNKS (columns of the weights over 64, rounded up).

#include "layer_consumer.cuh"
#include "layer_producer.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    qrnn_layer(const __grid_constant__ LayerArgs a) {
    extern __shared__ unsigned char unaligned[];
    unsigned char* shared = unaligned + (-shared_address(unaligned) & 1023);
    const Shared s{shared_address(shared)};
    const int sets = (int)((a.hidden + kChannels - 1) / kChannels);
    const int set = blockIdx.x % sets, worker = blockIdx.x / sets;
    const int64 channel0 = (int64)set * kChannels;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(s.full(stage), 128 + 1);
            barrier_init(s.empty(stage), 4);
        }
        for (int i = 0; i < kConsumers * 4; ++i) barrier_init(s.carry(i >> 2, i & 3), 8);
        for (int group = 0; group < kConsumers; ++group) barrier_init(s.turn(group), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    // Through a shuffle, so that the compiler knows it to be the same in a whole warp.
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (group == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce(a, shared, s, set, worker);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        load_weights(a, s.base, channel0);
        consume(a, shared, s, group, channel0);
    }
}
