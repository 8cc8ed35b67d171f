// Runs the benchmark's CUDA kernels as plain C++, a host thread for each thread of a block, so that
// their arithmetic is tested where there is no GPU. Built by test_peers_source.py with PEERS_SOURCE.

#include <pthread.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

struct Dimension {
    unsigned x;
};
static Dimension blockIdx, blockDim;
static thread_local Dimension threadIdx;

#define __device__
#define __global__
#define __shared__ static

class Barrier {
  public:
    explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
    ~Barrier() { pthread_barrier_destroy(&barrier_); }
    void wait() { pthread_barrier_wait(&barrier_); }

  private:
    pthread_barrier_t barrier_;
};

struct Warp {
    Barrier barrier{32};
    float values[32];
};
static std::unique_ptr<Barrier> block;
static std::vector<std::unique_ptr<Warp>> warps;

static void __syncthreads() { block->wait(); }

static float __shfl_up_sync(unsigned, float value, int distance) {
    Warp& warp = *warps[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    warp.values[lane] = value;
    warp.barrier.wait();
    const float result = lane >= distance ? warp.values[lane - distance] : value;
    warp.barrier.wait();
    return result;
}

static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

static unsigned short rounded(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
// The one instruction that the source writes in assembly.
#define asm(...) to.bits = rounded(value)

#include PEERS_SOURCE

template <class Kernel>
static void run(unsigned blocks, unsigned threads, Kernel kernel) {
    blockDim = {threads};
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        block = std::make_unique<Barrier>(threads);
        warps.clear();
        for (unsigned warp = 0; warp < (threads + 31) / 32; ++warp)
            warps.push_back(std::make_unique<Warp>());
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; ++thread)
            running.emplace_back([=] {
                threadIdx = {thread};
                kernel();
            });
        for (std::thread& thread : running) thread.join();
    }
}

template <class T>
static void launch_of(const char* name, unsigned blocks, unsigned threads, void** raw,
                      const long long* sizes) {
    T** at = reinterpret_cast<T**>(raw);
    if (std::strcmp(name, "channel_scan") == 0)
        run(blocks, threads, [=] { channel_scan<T>(at[0], at[1], at[2], sizes[0], sizes[1]); });
    if (std::strcmp(name, "channel_scan_backward") == 0)
        run(blocks, threads, [=] {
            channel_scan_backward<T>(at[0], at[1], at[2], at[3], at[4], at[5], sizes[0], sizes[1]);
        });
    if (std::strcmp(name, "block_scan") == 0)
        run(blocks, threads, [=] { block_scan<T>(at[0], at[1], at[2], sizes[0]); });
}

extern "C" void launch(const char* name, int single, unsigned blocks, unsigned threads,
                       void** tensors, const long long* sizes) {
    if (single)
        launch_of<float>(name, blocks, threads, tensors, sizes);
    else
        launch_of<Bfloat16>(name, blocks, threads, tensors, sizes);
}
