// Each dtype: how elements are stored, the type they are computed in, the type of the carried
// state, vectors of neighbouring channels, and the activations.
#pragma once

#include "intrinsics.cuh"

// `Wide` carries state between chunks of timesteps. A float32 state would lose digits over long
// memory (f near 0.002), see csrc/state_math.h; half types round more than that.
#if QRNN_DTYPE == 0
typedef unsigned Storage;
typedef float Compute;
typedef double Wide;
#elif QRNN_DTYPE == 1 || QRNN_DTYPE == 2
typedef unsigned short Storage;
typedef float Compute;
typedef float Wide;
#elif QRNN_DTYPE == 3
typedef uint64 Storage;
typedef double Compute;
typedef double Wide;
#else
#error "QRNN_DTYPE must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (float64)"
#endif

// Where a thread takes several channels, rows begin at multiples of so many bytes: 16 or 8.
#ifndef QRNN_ROW_BYTES
#define QRNN_ROW_BYTES 16
#endif

constexpr bool kHalf = sizeof(Storage) == 2;

// The elements of V neighbouring channels at one timestep, as they lie in memory.
template <int V>
struct alignas((V * sizeof(Storage) + 3) / 4 * 4) Vector {
    static constexpr int kWords = (V * (int)sizeof(Storage) + 3) / 4;
    unsigned words[kWords];
};

template <int V>
__device__ inline Vector<V> load(const void* address) {
    Vector<V> v;
    if constexpr (V * sizeof(Storage) == 2) {
        v.words[0] = load_once<unsigned short>(address);
    } else if constexpr (V * sizeof(Storage) == 4) {
        v.words[0] = load_once<unsigned>(address);
    } else if constexpr (V * sizeof(Storage) == 8) {
        const uint2 pair = load_once<uint2>(address);
        v.words[0] = pair.x;
        v.words[1] = pair.y;
    } else {
        const uint4 four = load_once<uint4>(address);
        v.words[0] = four.x;
        v.words[1] = four.y;
        v.words[2] = four.z;
        v.words[3] = four.w;
    }
    return v;
}

template <int V>
__device__ inline void store(void* address, const Vector<V>& v) {
    if constexpr (V * sizeof(Storage) == 2) {
        *(unsigned short*)address = (unsigned short)v.words[0];
    } else if constexpr (V * sizeof(Storage) == 4) {
        *(unsigned*)address = v.words[0];
    } else if constexpr (V * sizeof(Storage) == 8) {
        *(uint2*)address = uint2{v.words[0], v.words[1]};
    } else {
        *(uint4*)address = uint4{v.words[0], v.words[1], v.words[2], v.words[3]};
    }
}

// From memory into the block's; two bytes at once have no copy of their own.
template <int V>
__device__ inline void start_load(Vector<V>& to, const void* from) {
    if constexpr (V * sizeof(Storage) >= 4) {
        start_copy<V * sizeof(Storage)>(&to, from);
    } else {
        to = load<V>(from);
    }
}

#if QRNN_DTYPE == 2
__device__ inline unsigned floats_to_half(float low, float high) {
#ifdef QRNN_CONVERTS_BFLOAT16
    return floats_to_bfloat16(low, high);
#else
    const unsigned a = bits_of(low), b = bits_of(high);
    const unsigned a16 = low == low ? (a + 0x7FFFu + ((a >> 16) & 1u)) >> 16 : 0x7FC0u;
    const unsigned b16 = high == high ? (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16 : 0x7FC0u;
    return a16 | b16 << 16;
#endif
}
__device__ inline float half_to_float(unsigned word, int i) {
    return float_of(i == 0 ? word << 16 : word & 0xFFFF0000u);
}
#elif QRNN_DTYPE == 1
__device__ inline unsigned floats_to_half(float low, float high) {
    return floats_to_float16(low, high);
}
__device__ inline float half_to_float(unsigned word, int i) {
    return float16_to_float(i == 0 ? word & 0xFFFFu : word >> 16);
}
#endif

template <int V>
__device__ inline void widen(const Vector<V>& v, Compute (&out)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
#if QRNN_DTYPE == 0
        out[i] = float_of(v.words[i]);
#elif QRNN_DTYPE == 3
        out[i] = double_of(v.words[2 * i] | (uint64)v.words[2 * i + 1] << 32);
#else
        out[i] = half_to_float(v.words[i / 2], i % 2);
#endif
    }
}

template <int V>
__device__ inline Vector<V> narrow(const Compute (&in)[V]) {
    Vector<V> v;
#pragma unroll
    for (int i = 0; i < V; ++i) {
#if QRNN_DTYPE == 0
        v.words[i] = bits_of(in[i]);
#elif QRNN_DTYPE == 3
        v.words[2 * i] = (unsigned)bits_of(in[i]);
        v.words[2 * i + 1] = (unsigned)(bits_of(in[i]) >> 32);
#else
        if (i % 2 == 0) v.words[i / 2] = floats_to_half(in[i], i + 1 < V ? in[i + 1] : 0.0f);
#endif
    }
    return v;
}

// The same number in every channel.
template <int V>
__device__ inline Vector<V> everywhere(Compute value) {
    Compute values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = value;
    return narrow<V>(values);
}

__device__ inline float not_a_number() { return float_of(0x7FC00000u); }
__device__ inline float minus_infinity() { return float_of(0xFF800000u); }

// exp2 gives exactly 0 and infinity far out, so gates saturate at exactly 1 and 0. The relative error
// is below 1e-6 for every gate that is not 0: the forget gate is accurate over long memory too.
__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ inline float sigmoid(float x) {
    return reciprocal_fast(1.0f + exp2_fast(-1.4426950408889634f * x));
}

__device__ inline double tanh_of(double x) { return tanh(x); }
__device__ inline float tanh_of(float x) {
    const float size = fabsf(x);
    const float exponential = exp2_fast(-2.885390081777927f * size);
    const float far = (1.0f - exponential) * reciprocal_fast(1.0f + exponential);
    // That difference has no digits left for small x; the series has all.
    const float square = x * x;
    float series = fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f);
    series = fmaf(series, square, -1.0f / 3.0f);
    series = fmaf(series * square, size, size);
    return copysignf(size < 0.15f ? series : far, x);
}

// Of the values that a half type rounds once and that feed no long memory, an error of 2^-11 is
// below the rounding: one special function instead of two, which are what half types wait for.
__device__ inline double fresh_value(double x) { return tanh(x); }
__device__ inline float fresh_value(float x) { return kHalf ? tanh_fast(x) : tanh_of(x); }
__device__ inline double output_gate_of(double x) { return sigmoid(x); }
__device__ inline float output_gate_of(float x) {
    return kHalf ? fmaf(0.5f, tanh_fast(0.5f * x), 0.5f) : sigmoid(x);
}
