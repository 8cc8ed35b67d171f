// Runs the CUDA kernels' own source as plain C++, one thread after the other, so that its
// arithmetic and indexing are tested where there is no GPU. Built by test_cuda_source.py with
// QRNN_DTYPE and QRNN_SOURCE.

#include <cmath>
#include <cstring>

struct Dimension {
    unsigned x;
};
static Dimension blockIdx, threadIdx, blockDim, gridDim;

#define __device__
#define __global__
#define __grid_constant__

static float bits_to_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
static unsigned float_to_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
#define __uint_as_float(bits) bits_to_float(bits)
#define __int_as_float(bits) bits_to_float(bits)
#define __float_as_uint(value) float_to_bits(value)

#include QRNN_SOURCE

template <class Arguments>
static void run(void (*kernel)(const Arguments), unsigned blocks, unsigned threads,
                const void* raw) {
    Arguments arguments;
    std::memcpy(static_cast<void*>(&arguments), raw, sizeof(arguments));
    gridDim = {blocks};
    blockDim = {threads};
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments);
}

// Returns the size of the kernel's argument block, or 0 for an unknown name.
extern "C" int launch(const char* name, unsigned blocks, unsigned threads, const void* arguments) {
#define QRNN_CASE(kernel, Arguments)                        \
    if (std::strcmp(name, #kernel) == 0) {                  \
        run<Arguments>(kernel, blocks, threads, arguments); \
        return sizeof(Arguments);                           \
    }
    QRNN_CASE(qrnn_forget_mult, ForgetMultArgs)
    QRNN_CASE(qrnn_forget_mult_backward, ForgetMultBackwardArgs)
    QRNN_CASE(qrnn_fo_pool, FoPoolArgs)
    QRNN_CASE(qrnn_f_pool, FoPoolArgs)
    QRNN_CASE(qrnn_fo_pool_backward, FoPoolBackwardArgs)
    QRNN_CASE(qrnn_f_pool_backward, FoPoolBackwardArgs)
    return 0;
}
