// How the state gets from one chunk of timesteps to the next, inside a block and between blocks.
//
// Over any stretch of timesteps the state h becomes decay * h + local, where decay is the product
// of 1 - f. Warps find both for their own chunks; the stretches are then joined in one fixed order
// (chunks of a tile, tiles of a sequence), so that results do not depend on how the work is shared.
#pragma once

#include "jobs.cuh"

struct Stretch {
    Wide decay, local;
};

__device__ inline Stretch joined(const Stretch& first, const Stretch& second) {
    return {first.decay * second.decay, fma(second.decay, first.local, second.local)};
}

__device__ inline Wide applied(const Stretch& stretch, Wide state) {
    return fma(stretch.decay, state, stretch.local);
}

// 1 minus a product of gates near zero has lost the gates' digits. `fall` is 1 - decay, summed
// without that loss; where it is large, decay is the better number.
__device__ inline Stretch stretch_of(Compute decay, Compute fall, Compute local) {
    const bool slow = sizeof(Wide) > sizeof(Compute) && fall < (Compute)0.5 && fall > (Compute)-1;
    return {slow ? (Wide)1 - (Wide)fall : (Wide)decay, (Wide)local};
}

// Blocks talk in words of 64 bits, which are read whole or not at all: the lowest bits say what a
// word holds, and zero that nothing is there yet.
constexpr uint64 kStateBits = ~(uint64)3;  // what is left of a float64 state
constexpr unsigned kTileWord = 1;   // local in the high half; decay, or 1 - decay, in the low half
constexpr unsigned kStateWord = 2;  // the state after the tile
constexpr unsigned kFallBit = 4;    // the low half of a tile word is 1 - decay

__device__ inline uint64 word_of(const Stretch& tile) {
    const bool slow = tile.decay > (Wide)0.5 && tile.decay < (Wide)2;
    const float decay = (float)(slow ? (Wide)1 - tile.decay : tile.decay);
    const unsigned rounded = decay == decay ? (bits_of(decay) + 4u) & ~7u : 0x7FC00000u;
    const unsigned low = rounded | kTileWord | (slow ? kFallBit : 0u);
    return (uint64)bits_of((float)tile.local) << 32 | low;
}

__device__ inline Stretch tile_of(uint64 word) {
    const float decay = float_of((unsigned)word & ~7u);
    const bool slow = (word & kFallBit) != 0;
    return {slow ? (Wide)1 - (Wide)decay : (Wide)decay, (Wide)float_of((unsigned)(word >> 32))};
}

#if QRNN_DTYPE == 0
__device__ inline uint64 word_of(Wide state) {
    return (bits_of(state) & kStateBits) | kStateWord;
}
__device__ inline Wide state_of(uint64 word) { return double_of(word & kStateBits); }
#else
__device__ inline uint64 word_of(Wide state) {
    return (uint64)bits_of((float)state) << 32 | kStateWord;
}
__device__ inline Wide state_of(uint64 word) { return (Wide)float_of((unsigned)(word >> 32)); }
#endif

// Words hold less than float64, so blocks that need none round as if they did. The numbers of
// float64 tensors do not fit into words, and one block takes a whole sequence.
__device__ inline Wide advanced(Wide state, const Stretch& tile) {
    if constexpr (sizeof(Compute) == 8) return applied(tile, state);
    return state_of(word_of(applied(tile_of(word_of(tile)), state)));
}

// How far a block looks back for the state, in tiles; the last one must hold it.
constexpr int kFarthest = 32;
// Words of a channel that it asks for at once, and while it waits for the chunks.
constexpr int kTogether = 4;
constexpr int kEarly = 2 * kTogether;

template <int V>
struct BlockMemory {
    Stretch chunks[kWarps][V][32];  // and later what comes before each chunk, from `state` on
    Wide state[V][32];              // before the tile
    uint64 words[kFarthest][V][32];
    Jobs<V> jobs;
    Job ring[4];  // while one is written the two before it are read

    __device__ Job& job(int number) { return ring[number % 4]; }
};

// What the carrying warp of a block does, for V channels a thread: it has no chunk of its own.
template <int V>
struct Carry {
    BlockMemory<V>& memory;
    int lane;
    Wide state[V] = {};     // before the tile at hand, after `join` before the next
    bool active = false;      // the channels exist
    uint64* words = nullptr;  // where blocks claim tiles: those of this tile
    int64 step = 0;         // from them back to those of the tile before
    int64 count = 0;        // tiles before this one

    __device__ bool looks_back() const { return words && active && count > 0; }

    // Whether the tile before has left the state, as far as was read.
    __device__ bool knows() const { return state_is_at(0); }

    // With the stretches of all chunks of a tile in `memory`, puts there what comes before each of
    // them. `backwards`: the last chunk comes first.
    __device__ void join(bool backwards) {
        Stretch tile[V];
#pragma unroll
        for (int i = 0; i < V; ++i) tile[i] = {(Wide)1, (Wide)0};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const int chunk = backwards ? kWarps - 1 - w : w;
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Stretch own = memory.chunks[chunk][i][lane];
                memory.chunks[chunk][i][lane] = tile[i];
                tile[i] = joined(tile[i], own);
            }
        }
        if (looks_back()) {
            if (knows()) {
#pragma unroll
                for (int i = 0; i < V; ++i) state[i] = state_of(memory.words[0][i][lane]);
            } else {
#pragma unroll
                for (int i = 0; i < V; ++i) write_word(words + i, word_of(tile[i]));
                look_back();
            }
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            memory.state[i][lane] = state[i];
            state[i] = advanced(state[i], tile[i]);
        }
        publish();
    }

    __device__ void publish() const {
        if (words == nullptr || !active) return;
#pragma unroll
        for (int i = 0; i < V; ++i) write_word(words + i, word_of(state[i]));
    }

    // Finds the state before this tile in the words of the tiles before it: the nearest that holds
    // the state, and what the tiles from there on make of it. The first kEarly have been read.
    __device__ void look_back() {
        int first = 0, distance = nearest_state(0);
        while (distance < 0) {
            const bool farther = distance == kFarther;
            if (farther) {
                first += kTogether;
            } else {
                wait_a_little();
            }
            if (!farther || first >= kEarly) fetch<kTogether>(first);
            distance = nearest_state(first);
        }
#pragma unroll
        for (int i = 0; i < V; ++i) state[i] = state_of(memory.words[distance][i][lane]);
        for (int d = distance - 1; d >= 0; --d) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Stretch tile = tile_of(memory.words[d][i][lane]);
                state[i] = state_of(word_of(applied(tile, state[i])));
            }
        }
    }

    static constexpr int kMissing = -1, kFarther = -2;

    // The distance of the nearest tile that left the state, among kTogether from `first` on; or that
    // a word is missing before it is known, or that it lies farther back.
    __device__ int nearest_state(int first) const {
        int nearest = kFarther;
#pragma unroll
        for (int j = kTogether - 1; j >= 0; --j) {
            const int d = first + j;
            if (!tile_is_at(d) || d >= kFarthest - 1) nearest = kMissing;
            if (state_is_at(d)) nearest = d;
        }
        return nearest;
    }

    // Of all channels: one alone is about to be followed by the others.
    __device__ bool state_is_at(int d) const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < V; ++i) all = all && (memory.words[d][i][lane] & kStateWord);
        return all;
    }

    __device__ bool tile_is_at(int d) const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < V; ++i) all = all && (memory.words[d][i][lane] & kTileWord);
        return all;
    }

    // Reads the words of `Count` tiles from `first` on before this one; zero is none.
    template <int Count>
    __device__ void fetch(int first) {
        uint64 together[Count][V];
#pragma unroll
        for (int j = 0; j < Count; ++j) {
#pragma unroll
            for (int i = 0; i < V; ++i) together[j][i] = 0;
            if (first + j < count) read(first + j, together[j]);
        }
#pragma unroll
        for (int j = 0; j < Count; ++j) {
#pragma unroll
            for (int i = 0; i < V; ++i) memory.words[first + j][i][lane] = together[j][i];
        }
    }

    // The words of the tile `distance + 1` before this one.
    __device__ void read(int distance, uint64 (&out)[V]) const {
        const uint64* from = words - (distance + 1) * step;
        if constexpr (V == 1) {
            out[0] = read_word(from);
        } else {
#pragma unroll
            for (int i = 0; i < V; i += 2) read_words(from + i, out[i], out[i + 1]);
        }
    }
};
