// Vectors of channels: exp, tanh and sigmoid.
//
// Included by translation units that are compiled once per instruction set, so everything has
// internal linkage: the linker must never hand AVX-512 code to a processor that lacks it. For the
// same reason nothing here instantiates a template of the standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The compiler finds these worth a call, which would move every vector through memory.
#define QRNN_INLINE __attribute__((always_inline)) inline

namespace {

constexpr int kLanes = QRNN_VECTOR_BYTES / 4;

typedef float VFloat __attribute__((vector_size(QRNN_VECTOR_BYTES)));
typedef int32_t VInt __attribute__((vector_size(QRNN_VECTOR_BYTES)));
typedef uint32_t VUint __attribute__((vector_size(QRNN_VECTOR_BYTES)));
typedef uint16_t VShort __attribute__((vector_size(QRNN_VECTOR_BYTES / 2)));
typedef double VDouble __attribute__((vector_size(QRNN_VECTOR_BYTES)));
typedef float VHalfFloat __attribute__((vector_size(QRNN_VECTOR_BYTES / 2)));

template <class To, class From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline VFloat splat(float value) { return VFloat{} + value; }

// The larger and the smaller of a bound and x; a NaN in x passes through. Spelled for x86, where
// compilers make two instructions of the comparison.
inline VFloat at_least(float bound, VFloat x) {
#if defined(__AVX512F__)
    return bits_as<VFloat>(_mm512_maskz_max_ps(0xFFFF, _mm512_set1_ps(bound), bits_as<__m512>(x)));
#elif defined(__AVX__)
    return bits_as<VFloat>(_mm256_max_ps(_mm256_set1_ps(bound), bits_as<__m256>(x)));
#else
    return x < splat(bound) ? splat(bound) : x;
#endif
}

inline VFloat at_most(float bound, VFloat x) {
#if defined(__AVX512F__)
    return bits_as<VFloat>(_mm512_maskz_min_ps(0xFFFF, _mm512_set1_ps(bound), bits_as<__m512>(x)));
#elif defined(__AVX__)
    return bits_as<VFloat>(_mm256_min_ps(_mm256_set1_ps(bound), bits_as<__m256>(x)));
#else
    return x > splat(bound) ? splat(bound) : x;
#endif
}

// The exponentials of m vectors, step by step side by side: one alone is a chain of operations that
// each wait for the last. exp2(t) = scale * (1 + remainder) with t = x * factor, within -127.5 to
// 128.5. x holds the remainder afterwards.
//
// 2^r - 1 = r q(r) with |r| <= 1/2, and q fitted to the smallest relative error of 2^r: 9e-8, of
// which a quarter at most reaches sigmoid and half tanh.
template <int m>
QRNN_INLINE void exp2_parts(VFloat (&x)[m], const float (&factor)[m], VFloat (&scale)[m]) {
    // Adding 1.5 * 2^23 leaves the nearest integer n in the low bits of the sum; 127 more makes it
    // the exponent field of 2^n, from 0 (n = -127) to infinity (n = 128).
    const float shifter = 12582912.0f + 127.0f;
    VFloat q[m];
    for (int i = 0; i < m; ++i) scale[i] = x[i] * factor[i] + shifter;
    for (int i = 0; i < m; ++i) x[i] = x[i] * factor[i] - (scale[i] - shifter);
    for (int i = 0; i < m; ++i) q[i] = x[i] * 1.326469999e-3f + 9.671534049e-3f;
    for (int i = 0; i < m; ++i) q[i] = q[i] * x[i] + 5.550734002e-2f;
    for (int i = 0; i < m; ++i) q[i] = q[i] * x[i] + 2.402224176e-1f;
    for (int i = 0; i < m; ++i) q[i] = q[i] * x[i] + 6.931469774e-1f;
    for (int i = 0; i < m; ++i) scale[i] = bits_as<VFloat>(bits_as<VUint>(scale[i]) << 23);
    for (int i = 0; i < m; ++i) x[i] = x[i] * q[i];
}

constexpr float kLog2E = 1.44269504f;

// In place: tanh of the first n vectors, sigmoid of the others, times keep of the second n.
//
// tanh = (exp(2x) - 1) / (exp(2x) + 1), the numerator put together so that small x keep their
// digits; past |x| = 10 it is 1 in float32. sigmoid = 1 / (1 + exp(-x)): exactly 0 and 1 far out.
template <int n, int m>
QRNN_INLINE void activate(VFloat (&x)[m], float keep) {
    float factor[m];
    VFloat scale[m], under[m];
    for (int i = 0; i < m; ++i) factor[i] = i < n ? 2.0f * kLog2E : -kLog2E;
    for (int i = 0; i < m; ++i) x[i] = at_least(i < n ? -10.0f : -89.0f, x[i]);
    for (int i = 0; i < m; ++i) x[i] = at_most(i < n ? 10.0f : 88.0f, x[i]);
    exp2_parts(x, factor, scale);
    for (int i = 0; i < n; ++i) x[i] = scale[i] * x[i] + (scale[i] - 1.0f);
    for (int i = 0; i < n; ++i) under[i] = x[i] + 2.0f;
    for (int i = n; i < m; ++i) under[i] = scale[i] * (x[i] + 1.0f) + 1.0f;
    for (int i = n; i < m; ++i) x[i] = splat(i < 2 * n ? keep : 1.0f);
    for (int i = 0; i < m; ++i) x[i] = x[i] / under[i];
}

inline VFloat tanh(VFloat x) {
    VFloat one[1] = {x};
    activate<1>(one, 1.0f);
    return one[0];
}

inline VFloat sigmoid(VFloat x) {
    VFloat one[1] = {x};
    activate<0>(one, 1.0f);
    return one[0];
}

// float64 is there to be right, not fast: one library call a lane.
inline VDouble sigmoid(VDouble x) {
    VDouble y;
    for (int i = 0; i < kLanes / 2; ++i) y[i] = 1.0 / (1.0 + std::exp(-x[i]));
    return y;
}

inline VDouble tanh(VDouble x) {
    VDouble y;
    for (int i = 0; i < kLanes / 2; ++i) y[i] = std::tanh(x[i]);
    return y;
}

template <int n, int m>
inline void activate(VDouble (&x)[m], double keep) {
    for (int i = 0; i < m; ++i) x[i] = i < n ? tanh(x[i]) : sigmoid(x[i]);
    for (int i = n; i < 2 * n; ++i) x[i] *= keep;
}

}  // namespace
