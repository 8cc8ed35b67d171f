// What the kernels use of the GPU beside plain C++. The test that runs them on a CPU replaces this
// file by its own.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;

#ifndef QRNN_ON_HOST

__device__ inline unsigned thread_of_block() { return threadIdx.x; }
__device__ inline unsigned threads_of_block() { return blockDim.x; }
__device__ inline unsigned block_of_grid() { return blockIdx.x; }
__device__ inline unsigned blocks_of_grid() { return gridDim.x; }

// n / d for the magic number ceil(2^64 / d), which is 0 for d = 1.
__device__ inline unsigned quotient(unsigned n, uint64 magic) {
    return magic ? (unsigned)__umul64hi((uint64)n, magic) : n;
}

// Every thread of the block arrives before one goes on.
__device__ inline void barrier() { __syncthreads(); }
// The same, and whether all say yes.
__device__ inline bool all_of_block(bool yes) { return __syncthreads_and(yes) != 0; }
// As `barrier`, for a warp.
__device__ inline void warp_barrier() { __syncwarp(); }
// A bit for every thread of the warp, which all call this, that says yes.
__device__ inline unsigned lanes_of_warp(bool yes) { return __ballot_sync(0xFFFFFFFFu, yes); }
__device__ inline int bits_in(unsigned word) { return __popc(word); }
__device__ inline unsigned sum_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
    for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, i);
    return value;
#endif
}

// Memory that the threads of a block share: as much as the launch asks for.
template <class T>
__device__ inline T& block_memory() {
    extern __shared__ __align__(16) char memory[];
    return *(T*)memory;
}

// An address `k` steps on, in one instruction.
__device__ inline const char* stepped(const char* address, int step, int k) {
    const char* there;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(there) : "r"(step), "r"(k), "l"(address));
    return there;
}

// Words through which blocks talk: whole or not there, and never from a stale cache.
__device__ inline uint64 read_word(const uint64* address) {
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    return word;
}
// Two neighbours.
__device__ inline void read_words(const uint64* address, uint64& first, uint64& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(address)
                 : "memory");
}
__device__ inline void write_word(uint64* address, uint64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}
__device__ inline void wait_a_little() { __nanosleep(20); }

// Elements that are read once: they leave the caches first.
template <class Word>
__device__ inline Word load_once(const void* address) {
    return __ldcs((const Word*)address);
}

// Copies from memory into the block's without a register: starts here, and is there for the thread
// that asked once `wait_for_copies<n>` lets only the last n `end_of_copies` be under way. Bytes: 4, 8
// or 16, which both addresses are multiples of.
#if __CUDA_ARCH__ >= 800
template <int Bytes>
__device__ inline void start_copy(void* to, const void* from) {
    const unsigned there = (unsigned)__cvta_generic_to_shared(to);
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(there), "l"(from), "n"(Bytes)
                     : "memory");
    }
}
__device__ inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Ends>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Ends) : "memory");
}
#else
template <int Bytes>
__device__ inline void start_copy(void* to, const void* from) {
#pragma unroll
    for (int i = 0; i < Bytes / 4; ++i) ((unsigned*)to)[i] = ((const unsigned*)from)[i];
}
__device__ inline void end_of_copies() {}
template <int Ends>
__device__ inline void wait_for_copies() {}
#endif

// For a thread that `asks`: the number that was there, which grows by one. Nobody waits for it
// before it is used.
__device__ inline void claim(uint64* counter, bool asks, uint64& ticket) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
        " @p atom.relaxed.gpu.global.add.u64 %0, [%1], 1;\n}"
        : "+l"(ticket)
        : "l"(counter), "r"((unsigned)asks)
        : "memory");
}

__device__ inline unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ inline float float_of(unsigned bits) { return __uint_as_float(bits); }
__device__ inline uint64 bits_of(double x) { return (uint64)__double_as_longlong(x); }
__device__ inline double double_of(uint64 bits) { return __longlong_as_double((int64)bits); }

// The special function unit: relative errors of 2^-22, 2^-23 and 2^-11.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float tanh_fast(float x) {
#if __CUDA_ARCH__ >= 750
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return tanhf(x);
#endif
}

__device__ inline float float16_to_float(unsigned bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
    return y;
}
// Two elements at once, the first in the low half.
__device__ inline unsigned floats_to_float16(float low, float high) {
    unsigned y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    unsigned short a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    y = a | (unsigned)b << 16;
#endif
    return y;
}
#if __CUDA_ARCH__ >= 800
#define QRNN_CONVERTS_BFLOAT16
__device__ inline unsigned floats_to_bfloat16(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

#endif
