// Arguments, sequences, and how the warps of a block share tiles through shared memory.
#pragma once

#include "layer_hopper.cuh"

constexpr int kTile = QRNN_TILE;      // timesteps of a tile
constexpr int kStages = QRNN_STAGES;  // in the ring; one holds a chunk of a tile's inputs
constexpr int kChunks = QRNN_CHUNKS;  // stages that a tile takes
constexpr int kChannels = 64;         // channels of a block
constexpr int kChunk = 64;            // columns of a stage: 128 bytes, one row of the swizzle
constexpr int kRun = kTile / 4;       // consecutive timesteps of one thread
constexpr int kConsumers = 2;         // warpgroups
constexpr int kThreads = 128 * (1 + kConsumers);
// A tile of h is stored in parts, through a staging area.
constexpr int kParts = 2;
constexpr int kPartGroups = kTile / 8 / kParts;  // groups of 8 columns
constexpr int kSteps = kTile / kParts / 16;      // timesteps that one thread stores

// Where things lie in shared memory, as in layer_plan.py.
constexpr int kWeightChunkBytes = 3 * kChannels * 128;
constexpr int kStageBytes = kTile * 128;
constexpr int kOutBytes = kTile / kParts * 128;
constexpr int kStagesAt = kChunks * kWeightChunkBytes;
constexpr int kOutAt = kStagesAt + kStages * kStageBytes;
constexpr int kCarryAt = kOutAt + kConsumers * kOutBytes;
constexpr int kTilesAt = kCarryAt + kConsumers * kChannels * 4;
constexpr int kTicketAt = kTilesAt + kStages * 32;
constexpr int kBarriersAt = kTicketAt + 8;
constexpr int kSharedBytes = kBarriersAt + (2 * kStages + kConsumers * 5) * 8;
// Swizzled memory starts at a multiple of 1024, for which the launch asks for 1023 more.
static_assert(kSharedBytes + 1023 <= 232448, "more shared memory than a block of sm_90 can have");

// Numbers of the named barriers; 0 is __syncthreads.
constexpr int kProducersMeet = 1, kWeightsLoaded = 2, kGroupMeets = 3;

constexpr float kLog2E = 1.4426950408889634f;

// Every field is eight bytes, or two of four, as cuda_layer.py packs them. Strides are in elements.
struct LayerArgs {
    int64 timesteps, batch, hidden;  // T, or N of packed rows
    int64 reverse;                   // nonzero: from the last timestep to the first
    const void* offsets;             // [B + 1] of packed rows, or null
    int64 offset_bytes;              // 4 or 8
    int64 inputs, window;
    int64 workers;  // blocks that share one set of channels
    float scale;    // 1 / (1 - zoneout)
    int aligned;    // rows of h start at multiples of 16 bytes
    int* tickets;   // a counter for each set of channels, zero at launch; null: dealt in turn
    const unsigned short* x;
    int64 x_time, x_sequence;
    const unsigned short* weight;  // [3 * H, window * I], the current input's columns first
    int64 weight_row;
    const unsigned short* bias;      // [3 * H], or null
    const unsigned short* previous;  // [B, window - 1, I], oldest first, or null for zeros
    int64 previous_sequence, previous_time;
    const unsigned short* c0;  // [B, H], or null for zeros
    int64 c0_sequence;
    unsigned short* h;
    int64 h_time, h_sequence;
    unsigned short* c;
    int64 c_sequence;
};

static_assert(sizeof(LayerArgs) == 216, "cuda_layer.py packs so many bytes");

// What a consumer must know of a tile. sequence -1: there are no more.
struct Tile {
    int sequence;
    int first;  // position of its first timestep in running order
    int count;  // timesteps from `first` to the sequence's end
    int valid;  // 0: offsets are wrong here, and the results are NaN
    int64 out;  // element of h where its first timestep starts
    int64 unused;
};
static_assert(sizeof(Tile) == 32, "kTicketAt counts on it");

__device__ inline int64 offset_at(const LayerArgs& a, int64 b) {
    return a.offset_bytes == 4 ? (int64)((const int*)a.offsets)[b] : ((const int64*)a.offsets)[b];
}

__device__ inline int64 clamp(int64 value, int64 low, int64 high) {
    return value < low ? low : (value > high ? high : value);
}

// The rows of one sequence in running order. Wrong offsets reach no memory outside the tensors, and
// their rows become NaN.
struct Line {
    int64 first_row, base_sequence;
    int count;
    bool valid;

    __device__ Line(const LayerArgs& a, int64 b) {
        int64 start = 0, stop = a.timesteps;
        valid = true;
        base_sequence = a.offsets ? 0 : b;
        if (a.offsets) {
            const bool is_first = b == 0, is_last = b == a.batch - 1;
            const int64 before = is_first ? 0 : offset_at(a, b - 1);
            start = offset_at(a, b);
            stop = offset_at(a, b + 1);
            valid = 0 <= before && before <= start && start <= stop && stop <= a.timesteps;
            valid = valid && (!is_first || start == 0) && (!is_last || stop == a.timesteps);
            start = is_first ? 0 : clamp(start, 0, a.timesteps);
            stop = is_last ? a.timesteps : clamp(stop, start, a.timesteps);
        }
        count = (int)(stop - start);
        first_row = a.reverse ? stop - 1 : start;
    }
};

// A place in the ring of stages.
struct Place {
    uint32 stage, parity;

    __device__ void next() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
    // Past the chunks of a tile that the other consumer takes.
    __device__ void skip_tile() {
        stage += kChunks % kStages;
        parity ^= kChunks / kStages & 1;
        if (stage >= kStages) stage -= kStages, parity ^= 1;
    }
};

// Addresses in shared memory.
struct Shared {
    uint32 base;

    // A stage holds its chunk; the consumer has multiplied it.
    __device__ uint32 full(int stage) const { return base + kBarriersAt + stage * 8; }
    __device__ uint32 empty(int stage) const { return base + kBarriersAt + (kStages + stage) * 8; }
    // A warp of a consumer has left the state after its tile.
    __device__ uint32 carry(int group, int warp) const {
        return base + kBarriersAt + (2 * kStages + group * 4 + warp) * 8;
    }
    // A consumer has seen every stage of its tile. A parity tells two uses of a stage apart and no
    // more, so the other must not ask for its tile before.
    __device__ uint32 turn(int group) const {
        return base + kBarriersAt + (2 * kStages + kConsumers * 4 + group) * 8;
    }
};
