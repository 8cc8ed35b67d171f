// Each dtype: how elements are stored, the vector they are computed in, and the way between.
#pragma once

#include "vector_math.h"

namespace {

inline VUint select(VInt mask, VUint yes, VUint no) {
    const VUint keep = bits_as<VUint>(mask);
    return (yes & keep) | (no & ~keep);
}

inline VFloat select(VInt mask, const VFloat& yes, const VFloat& no) {
    return bits_as<VFloat>(select(mask, bits_as<VUint>(yes), bits_as<VUint>(no)));
}

struct Float32 {
    using Storage = float;
    using Vector = VFloat;
    using Recorded = float;
    static constexpr int lanes = kLanes;
    static Vector load(const Storage* from) {
        Vector v;
        std::memcpy(&v, from, sizeof(v));
        return v;
    }
    static Vector pack(const Vector& v) { return v; }
};

struct Float64 {
    using Storage = double;
    using Vector = VDouble;
    using Recorded = double;
    static constexpr int lanes = kLanes / 2;
    static Vector load(const Storage* from) {
        Vector v;
        std::memcpy(&v, from, sizeof(v));
        return v;
    }
    static Vector pack(const Vector& v) { return v; }
};

// Spelled for AVX2, where the compiler takes four instructions for one.
inline VUint load_short(const uint16_t* from) {
    VShort v;
    std::memcpy(&v, from, sizeof(v));
#if defined(__AVX2__) && !defined(__AVX512F__)
    return bits_as<VUint>(_mm256_cvtepu16_epi32(bits_as<__m128i>(v)));
#else
    return __builtin_convertvector(v, VUint);
#endif
}

// The low halves of the lanes, which are below 2^16.
inline VShort pack_short(const VUint& bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i lanes = bits_as<__m256i>(bits);
    return bits_as<VShort>(
        _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
#else
    return __builtin_convertvector(bits, VShort);
#endif
}

struct Bfloat16 {
    using Storage = uint16_t;
    using Vector = VFloat;
    using Recorded = float;
    static constexpr int lanes = kLanes;
    static Vector load(const Storage* from) { return bits_as<VFloat>(load_short(from) << 16); }
    static VShort pack(const Vector& v) {
        const VUint bits = bits_as<VUint>(v);
        const VUint rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return pack_short(select(v == v, rounded, VUint{} + 0x7FC0u));
    }
};

struct Float16 {
    using Storage = uint16_t;
    using Vector = VFloat;
    using Recorded = float;
    static constexpr int lanes = kLanes;
#if defined(__AVX512F__)
    // The zero-masked forms, since gcc warns that the plain ones read an undefined register.
    static Vector load(const Storage* from) {
        __m256i raw;
        std::memcpy(&raw, from, sizeof(raw));
        return bits_as<VFloat>(_mm512_maskz_cvtph_ps(0xFFFF, raw));
    }
    static __m256i pack(const Vector& v) {
        return _mm512_maskz_cvtps_ph(0xFFFF, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
    }
#elif defined(__F16C__)
    static Vector load(const Storage* from) {
        __m128i raw;
        std::memcpy(&raw, from, sizeof(raw));
        return bits_as<VFloat>(_mm256_cvtph_ps(raw));
    }
    static __m128i pack(const Vector& v) {
        return _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
    }
#else
    static Vector load(const Storage* from) {
        const VUint half = load_short(from);
        const VUint magnitude = (half & 0x7FFFu) << 13;
        const VUint bias = VUint{} + (112u << 23);
        const VUint normal = magnitude + bias;
        // Below the smallest normal half: place the digits under an implicit one, take that one
        // away.
        const VUint one = VUint{} + (113u << 23);
        const VFloat small = bits_as<VFloat>(magnitude + one) - bits_as<VFloat>(one);
        VUint value = select(magnitude < (1u << 23), bits_as<VUint>(small), normal);
        value = select(magnitude >= 0x0F800000u, normal + bias, value);
        return bits_as<VFloat>(value | ((half & 0x8000u) << 16));
    }
    static VShort pack(const Vector& v) {
        const VUint bits = bits_as<VUint>(v);
        const VUint magnitude = bits & 0x7FFFFFFFu;
        const VUint normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        // Between 0.5 and 1 a float has the spacing of small halves, so the addition rounds.
        const VFloat shifted = bits_as<VFloat>(magnitude) + 0.5f;
        VUint half = select(magnitude < 0x38800000u, bits_as<VUint>(shifted) - 0x3F000000u, normal);
        half = select(magnitude >= 0x477FF000u, VUint{} + 0x7C00u, half);
        half = select(magnitude > 0x7F800000u, VUint{} + 0x7E00u, half);
        return pack_short(half | ((bits >> 16) & 0x8000u));
    }
#endif
};

// The first `count` lanes; the others read as 0 and are not written.
template <class D>
inline typename D::Vector load(const typename D::Storage* from, int64_t count) {
    if (count >= D::lanes) return D::load(from);
    typename D::Storage padded[D::lanes] = {};
    std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(*from));
    return D::load(padded);
}

template <class D>
inline void store(typename D::Storage* to, const typename D::Vector& v) {
    const auto packed = D::pack(v);
    std::memcpy(to, &packed, sizeof(packed));
}

template <class D>
inline void store(typename D::Storage* to, const typename D::Vector& v, int64_t count) {
    if (count >= D::lanes) return store<D>(to, v);
    typename D::Storage padded[D::lanes];
    store<D>(padded, v);
    std::memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(*to));
}

// Past the caches, where the processor can: a line that nobody reads soon need not be read from
// memory before it is written. `to` is aligned to the vector.
template <class D>
inline void stream(typename D::Storage* to, const typename D::Vector& v) {
    const auto packed = D::pack(v);
#if defined(__AVX512F__)
    if constexpr (sizeof(packed) == 64)
        return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(packed));
#endif
#if defined(__AVX__)
    if constexpr (sizeof(packed) == 32)
        return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(packed));
#endif
#if defined(__SSE2__)
    if constexpr (sizeof(packed) == 16)
        return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(packed));
#endif
    std::memcpy(to, &packed, sizeof(packed));
}

// Makes what was streamed visible to other threads before anything written later.
inline void finish_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace
