// Instructions of sm_90a, and conversions of the half types.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;

#if QRNN_DTYPE == 1
#define QRNN_MMA_TYPES "f32.f16.f16"
__device__ inline float widen(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ inline uint32 narrow2(float low, float high) {
    uint32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#else
#define QRNN_MMA_TYPES "f32.bf16.bf16"
__device__ inline float widen(unsigned short x) { return __uint_as_float((uint32)x << 16); }
__device__ inline uint32 narrow2(float low, float high) {
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

__device__ inline float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float not_a_number() { return __int_as_float(0x7FC00000); }

__device__ inline uint32 shared_address(const void* p) {
    return (uint32)__cvta_generic_to_shared(p);
}
__device__ inline void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ inline void meet(int named_barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(named_barrier), "r"(threads) : "memory");
}
__device__ inline void fence_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last `kept` groups of products are done.
template <int kept>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kept) : "memory");
}
// Four 8 x 8 matrices, transposed; each lane gives the address of one row.
__device__ inline void store_matrices(uint32 to, const uint32 (&packed)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
}
// 16 bytes from global to shared memory; zeros when not `valid`.
__device__ inline void copy16(uint32 to, const void* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// K-major operand with 128-byte swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ inline uint64 operand(uint32 address) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)1 << 16 | (uint64)(1024 >> 4) << 32 |
           (uint64)1 << 62;
}

#define QRNN_R8(a, i)                                                                          \
    "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), \
        "+f"(a[i + 6]), "+f"(a[i + 7])

__device__ inline void multiply(float (&d)[QRNN_TILE / 2], uint64 a, uint64 b, bool add) {
#if QRNN_TILE == 128
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." QRNN_MMA_TYPES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, "
        "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "
        "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n"
        "}\n"
        : QRNN_R8(d, 0), QRNN_R8(d, 8), QRNN_R8(d, 16), QRNN_R8(d, 24), QRNN_R8(d, 32),
          QRNN_R8(d, 40), QRNN_R8(d, 48), QRNN_R8(d, 56)
        : "l"(a), "l"(b), "r"((int)add));
#else
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." QRNN_MMA_TYPES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, "
        "0;\n"
        "}\n"
        : QRNN_R8(d, 0), QRNN_R8(d, 8), QRNN_R8(d, 16), QRNN_R8(d, 24)
        : "l"(a), "l"(b), "r"((int)add));
#endif
}

__device__ inline uint4 load16(uint32 from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}
// In assembly, because the compiler splits the store of a uint4 here in four.
__device__ inline void store16(unsigned short* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
