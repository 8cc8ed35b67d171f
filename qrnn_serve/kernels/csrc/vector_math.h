// Vectors of channels: exp, tanh and sigmoid.
//
// Included by translation units that are compiled once per instruction set, so everything has
// internal linkage: the linker must never hand AVX-512 code to a processor that lacks it. For the
// same reason nothing here instantiates a template of the standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

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

struct Exp2 {
    VFloat scale;      // 2^n, from 0 (n = -127) to infinity (n = 128)
    VFloat remainder;  // 2^r - 1 with |r| <= 1/2
};

// 2^t = scale * (1 + remainder) for t within -127 to 128. 2^r - 1 = r q(r), with q fitted to the
// smallest relative error of 2^r: 9e-8, of which a quarter at most reaches sigmoid and half tanh.
inline Exp2 exp2_parts(VFloat t) {
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const float shifter = 12582912.0f;
    const VFloat shifted = t + shifter;
    const VFloat r = t - (shifted - shifter);
    VFloat q = r * 1.326469999e-3f + 9.671534049e-3f;
    q = q * r + 5.550734002e-2f;
    q = q * r + 2.402224176e-1f;
    q = q * r + 6.931469774e-1f;
    const VUint exponent = (bits_as<VUint>(shifted) << 23) + 0x3F800000u;
    return {bits_as<VFloat>(exponent), q * r};
}

constexpr float kLog2E = 1.44269504f;

// 1 / (1 + 2^t) with t = -x log2(e): exactly 0 and 1 far out.
inline VFloat sigmoid(VFloat x) {
    const Exp2 e = exp2_parts(at_most(128.0f, at_least(-127.0f, x * -kLog2E)));
    return 1.0f / (e.scale * (e.remainder + 1.0f) + 1.0f);
}

// (2^t - 1) / (2^t + 1) with t = 2x log2(e); 2^t - 1 is put together so that small x keep their
// digits, and past |x| = 10 the result is 1 in float32.
inline VFloat tanh(VFloat x) {
    const float bound = 20.0f * kLog2E;
    const Exp2 e = exp2_parts(at_most(bound, at_least(-bound, x * (2.0f * kLog2E))));
    const VFloat minus_one = e.scale * e.remainder + (e.scale - 1.0f);
    return minus_one / (minus_one + 2.0f);
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

}  // namespace
