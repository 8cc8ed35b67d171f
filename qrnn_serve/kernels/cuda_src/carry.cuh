// How the state gets from one chunk of timesteps to the next, inside a block and between blocks.
//
// Over any stretch of timesteps the state h becomes decay * h + local, where decay is the product
// of 1 - f. Warps find both for their own chunks; the stretches are then joined in one fixed order
// (chunks of a tile, tiles of a sequence), so that results do not depend on how the work is shared.
#pragma once

#include "sequences.cuh"

struct Stretch {
    Wide decay, local;
};

__device__ inline Stretch nothing_yet() { return {(Wide)1, (Wide)0}; }

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

// Where packed offsets are wrong, a sequence may own no slot: its state is NaN like that of every
// sequence with wrong offsets. Each slot looks after one sequence.
template <int V>
__device__ inline void spoil_lost_sequence(const Sequences& s, int64 slot, const Rows& state,
                                           int64 channel, bool active) {
    if (!active || slot >= s.batch || sequence_of_slot(s, first_slot(s, slot)) == slot) return;
    Wide lost[V];
#pragma unroll
    for (int i = 0; i < V; ++i) lost[i] = not_a_number();
    write_state<V>(state, slot, channel, lost);
}

// How far a block looks back for the state, in tiles; the last one must hold it.
constexpr int kFarthest = 4 * kWarps;

template <int V>
struct CarryMemory {
    Stretch chunks[2][kWarps][V][32];
    uint64 words[kFarthest][V][32];
};

// One thread's part: V channels of one chunk. All warps of a block find the same state.
template <int V>
struct Carry {
    CarryMemory<V>& memory;
    int warp, lane;
    bool active;  // the channels exist
    int turn = 0;
    Wide state[V];  // before the tile at hand, after `hand_over` before the next

    Stretch before[V];  // the chunks of this tile that come before the thread's own
    Stretch tile[V];

    // `place` is the chunk's number in the order of the scan.
    __device__ void join_chunks(const Stretch (&own)[V], int place) {
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < V; ++i) memory.chunks[turn][place][i][lane] = own[i];
        barrier();
#pragma unroll
        for (int i = 0; i < V; ++i) tile[i] = before[i] = nothing_yet();
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (w == place) before[i] = tile[i];
                tile[i] = joined(tile[i], memory.chunks[turn][w][i][lane]);
            }
        }
    }

    // The state before this thread's chunk.
    __device__ Compute at_chunk(int i) const { return (Compute)applied(before[i], state[i]); }

    __device__ void finish_tile() {
#pragma unroll
        for (int i = 0; i < V; ++i) state[i] = advanced(state[i], tile[i]);
    }

    __device__ void publish_tile(uint64* words) const {
        if (warp != 0 || !active) return;
#pragma unroll
        for (int i = 0; i < V; ++i) write_word(words + i, word_of(tile[i]));
    }

    __device__ void publish_state(uint64* words) const {
        if (warp != 0 || !active) return;
#pragma unroll
        for (int i = 0; i < V; ++i) write_word(words + i, word_of(state[i]));
    }

    // Finds the state before this tile in the words of the tiles before it: `words` are this
    // tile's, those of the one before it are `step` before them, and `count` tiles come before it.
    // Each warp waits for one of those tiles.
    __device__ void look_back(const uint64* words, int64 step, int64 count) {
        int distance[V];
#pragma unroll
        for (int i = 0; i < V; ++i) distance[i] = -1;
        for (int first = 0; first < kFarthest; first += kWarps) {
            const int mine = first + warp;  // tiles between that one and this
            if (active && mine < count) {
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    const uint64* address = words - (mine + 1) * step + i;
                    uint64 word = read_word(address);
                    while (word == 0 || (mine == kFarthest - 1 && (word & kStateWord) == 0)) {
                        wait_a_little();
                        word = read_word(address);
                    }
                    memory.words[mine][i][lane] = word;
                }
            }
            barrier();
            bool found = true;
#pragma unroll
            for (int i = 0; i < V; ++i) {
                for (int d = first; active && d < first + kWarps && d < count; ++d) {
                    if (distance[i] < 0 && (memory.words[d][i][lane] & kStateWord)) distance[i] = d;
                }
                found = found && (!active || distance[i] >= 0);
            }
            if (barrier_and(found)) break;
        }
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (!active) continue;
            state[i] = state_of(memory.words[distance[i]][i][lane]);
            for (int d = distance[i] - 1; d >= 0; --d) {
                state[i] = state_of(
                    word_of(applied(tile_of(memory.words[d][i][lane]), state[i])));
            }
        }
    }
};
