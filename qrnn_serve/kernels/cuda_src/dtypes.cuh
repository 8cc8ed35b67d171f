// Each dtype: how elements are stored, the type they are computed in, the type of the carried
// state, and the arithmetic of one timestep.
#pragma once

typedef long long int64;

// A float32 state would lose digits over long memory (f near 0.002): see csrc/state_math.h.
#if QRNN_DTYPE == 0
typedef float Storage;
typedef float Compute;
typedef double State;
__device__ inline Compute widen(Storage x) { return x; }
__device__ inline Storage narrow(Compute x) { return x; }
#elif QRNN_DTYPE == 1
typedef unsigned short Storage;
typedef float Compute;
typedef float State;
__device__ inline Compute widen(Storage x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ inline Storage narrow(Compute x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#elif QRNN_DTYPE == 2
typedef unsigned short Storage;
typedef float Compute;
typedef float State;
__device__ inline Compute widen(Storage x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline Storage narrow(Compute x) {
#if __CUDA_ARCH__ >= 800
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16 : 0x7FC0u;
#endif
}
#elif QRNN_DTYPE == 3
typedef double Storage;
typedef double Compute;
typedef double State;
__device__ inline Compute widen(Storage x) { return x; }
__device__ inline Storage narrow(Compute x) { return x; }
#else
#error "QRNN_DTYPE must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (float64)"
#endif

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }

// f * x + (1 - f) * h, so that f = 1 resets the state exactly and f = 0 keeps it exactly.
__device__ inline State mix(Compute f, Compute x, State h) {
    return (State)f * (State)x + ((State)1 - (State)f) * h;
}

__device__ inline State not_a_number() { return (State)__int_as_float(0x7FC00000); }
