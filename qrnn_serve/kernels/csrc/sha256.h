// SHA-256 (FIPS 180-4): names and checks the compiled kernels on disk as hashlib does in Python.
#ifndef QRNN_SHA256_H
#define QRNN_SHA256_H

#include <cstdint>
#include <string>

namespace qrnn {

inline void sha256_block(const unsigned char* block, uint32_t (&state)[8]) {
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static constexpr uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    const auto turned = [](uint32_t x, int by) { return x >> by | x << (32 - by); };
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
        const unsigned char* at = block + 4 * t;
        w[t] = uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
    }
    for (int t = 16; t < 64; ++t) {
        const uint32_t a = w[t - 15], b = w[t - 2];
        w[t] = w[t - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[t - 7] +
               (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    uint32_t v[8];
    for (int i = 0; i < 8; ++i) v[i] = state[i];
    for (int t = 0; t < 64; ++t) {
        const uint32_t a = v[0], e = v[4];
        const uint32_t one = v[7] + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) +
                             ((e & v[5]) ^ (~e & v[6])) + k[t] + w[t];
        const uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) +
                             ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        for (int i = 7; i > 0; --i) v[i] = v[i - 1];
        v[4] += one;
        v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
}

// The 32 bytes of the digest.
inline std::string sha256(std::string text) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const uint64_t bits = 8 * static_cast<uint64_t>(text.size());
    text += '\x80';
    text.append((120 - text.size() % 64) % 64, '\0');
    for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift);
    for (size_t at = 0; at < text.size(); at += 64)
        sha256_block(reinterpret_cast<const unsigned char*>(text.data()) + at, state);
    std::string digest;
    for (const uint32_t word : state)
        for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift);
    return digest;
}

}  // namespace qrnn

#endif
