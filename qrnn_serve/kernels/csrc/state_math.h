// The carried state, which is float64 for every dtype.
//
// With long memory (f near 0.002) a float32 state stops moving once a step is below half its last
// digit, and 1 - f loses digits of f that count a thousand times over: constant gates would end
// 4e-5 off. fo_pool, which is bound by arithmetic, comes back to float64 only now and then: cells.h.
#pragma once

#include "dtypes.h"

namespace {

constexpr int kHalfLanes = kLanes / 2;

struct Halves {
    VHalfFloat low;
    VHalfFloat high;
};

inline VDouble widen(const VHalfFloat& v) {
#if defined(__AVX512F__)
    return bits_as<VDouble>(_mm512_maskz_cvtps_pd(0xFF, bits_as<__m256>(v)));
#elif defined(__AVX__)
    return bits_as<VDouble>(_mm256_cvtps_pd(bits_as<__m128>(v)));
#else
    return __builtin_convertvector(v, VDouble);
#endif
}

inline VHalfFloat narrow(const VDouble& v) {
#if defined(__AVX512F__)
    return bits_as<VHalfFloat>(_mm512_maskz_cvtpd_ps(0xFF, bits_as<__m512d>(v)));
#else
    return __builtin_convertvector(v, VHalfFloat);
#endif
}

inline Halves split(const VFloat& v) { return bits_as<Halves>(v); }

// Joined in registers: through memory, one wide load would have to wait for two narrow stores.
inline VFloat join(const VHalfFloat& low, const VHalfFloat& high) {
#if defined(__AVX512F__)
    return bits_as<VFloat>(
        _mm512_insertf32x8(_mm512_castps256_ps512(bits_as<__m256>(low)), bits_as<__m256>(high), 1));
#elif defined(__AVX__)
    return bits_as<VFloat>(_mm256_set_m128(bits_as<__m128>(high), bits_as<__m128>(low)));
#else
    return bits_as<VFloat>(Halves{low, high});
#endif
}

inline VDouble read(const double* state) {
    VDouble v;
    std::memcpy(&v, state, sizeof(v));
    return v;
}

inline void write(double* state, const VDouble& v) { std::memcpy(state, &v, sizeof(v)); }

inline VDouble finite_or_zero(const VDouble& v) { return v - v == VDouble{} ? v : VDouble{}; }

// f * x + (1 - f) * h, so that f = 1 resets the state exactly and f = 0 keeps it exactly.
inline VDouble mix(const VDouble& f, const VDouble& x, const VDouble& h) {
    return f * x + (1.0 - f) * h;
}

template <class Vector>
inline Vector get(const double* state);

template <>
inline VDouble get<VDouble>(const double* state) {
    return read(state);
}

template <>
inline VFloat get<VFloat>(const double* state) {
    return join(narrow(read(state)), narrow(read(state + kHalfLanes)));
}

inline void put(double* state, const VDouble& v) { write(state, v); }

inline void put(double* state, const VFloat& v) {
    const Halves halves = split(v);
    write(state, widen(halves.low));
    write(state + kHalfLanes, widen(halves.high));
}

// Move the state one timestep on and return it.
inline VDouble advance(double* state, const VDouble& f, const VDouble& x) {
    const VDouble next = mix(f, x, read(state));
    write(state, next);
    return next;
}

inline VFloat advance(double* state, const VFloat& f, const VFloat& x) {
    const Halves fs = split(f), xs = split(x);
    const VDouble low = advance(state, widen(fs.low), widen(xs.low));
    const VDouble high = advance(state + kHalfLanes, widen(fs.high), widen(xs.high));
    return join(narrow(low), narrow(high));
}

// Add the gradient that reaches the state at this timestep, return the sum, and move it one
// timestep back.
inline VDouble retreat(double* adjoint, const VDouble& f, const VDouble& grad) {
    const VDouble sum = read(adjoint) + grad;
    write(adjoint, sum * (1.0 - f));
    return sum;
}

inline VFloat retreat(double* adjoint, const VFloat& f, const VFloat& grad) {
    const Halves fs = split(f), grads = split(grad);
    const VDouble low = retreat(adjoint, widen(fs.low), widen(grads.low));
    const VDouble high = retreat(adjoint + kHalfLanes, widen(fs.high), widen(grads.high));
    return join(narrow(low), narrow(high));
}

}  // namespace
