// How a scan over time is shared by the blocks of a GPU, chosen by rule from sizes alone.
//
// The kernels cut every sequence into tiles from its first timestep, whatever the plan, so a plan
// changes the time that a call takes and never its numbers. kernels/plan.py has the rule for Python;
// tests/kernels/test_plan.py compares the two.
#ifndef QRNN_CUDA_PLAN_H
#define QRNN_CUDA_PLAN_H

#include <cstdint>

namespace qrnn {

// As in cuda_src/sequences.cuh.
constexpr int64_t kChunkTimesteps = 8;
constexpr int64_t kChunks = 8;
constexpr int64_t kTileTimesteps = kChunkTimesteps * kChunks;
constexpr int64_t kSlotBytes = 32;
constexpr int64_t kWarp = 32;
// One more warp carries the state.
constexpr unsigned kThreadsPerBlock = kWarp * (kChunks + 1);
// More than one channel a thread needs rows that begin at multiples of one of these; longer is faster.
constexpr int64_t kRowBytes[] = {16, 8};
// From here on the timesteps of a chunk are further apart than 32 bits can say.
constexpr int64_t kFarBytes = (int64_t{1} << 31) / kChunkTimesteps;

struct Plan {
    int channels;
    bool single_tiles;
    int64_t channel_tiles, slots, tiles;
    unsigned threads = kThreadsPerBlock;
    bool at_once = false;  // the kernel of cuda_src/short.cuh

    int64_t blocks() const { return slots * channel_tiles; }
};

// The number by which the kernels divide; 0 for a divisor of 0 or 1.
inline uint64_t magic(int64_t divisor) {
    if (divisor < 2) return 0;
    const auto by = static_cast<uint64_t>(divisor);
    // 2^64 / by, rounded up.
    return (~uint64_t{0}) / by + 1;
}

inline int bytes_of(int64_t dtype) { return dtype == 3 ? 8 : dtype == 0 ? 4 : 2; }

// Neighbouring channels that a thread takes where all rows are aligned as kRowBytes says.
inline int widest_channels(int itemsize) { return itemsize == 8 ? 1 : 2; }

// `timesteps`: T, or N of `packed` rows; `longest`: no sequence has more timesteps.
inline Plan plan_scan(int64_t timesteps, int64_t batch, int64_t hidden, bool packed,
                      int64_t longest, int itemsize, int channels) {
    constexpr int64_t most_blocks = (int64_t{1} << 31) - 1;
    // Timesteps up to which handing the state from block to block costs more than it saves.
    constexpr int64_t short_timesteps = 4 * kTileTimesteps;
    // Where there are no more blocks than a large GPU has processors, one takes a sequence of up to so
    // many timesteps at once.
    constexpr int64_t at_once_timesteps = 2 * kTileTimesteps, few_blocks = 132;
    Plan plan{};
    plan.tiles = packed ? timesteps / kTileTimesteps + batch
                        : (timesteps + kTileTimesteps - 1) / kTileTimesteps * batch;
    plan.slots = batch;
    plan.channels = 1;
    plan.channel_tiles = (hidden + kWarp - 1) / kWarp;
    if (longest <= at_once_timesteps && plan.blocks() <= few_blocks && itemsize < 8) {
        const int64_t warps = (longest + kChunkTimesteps - 1) / kChunkTimesteps;
        plan.threads = static_cast<unsigned>(kWarp * (warps > 0 ? warps : 1));
        plan.at_once = true;
        return plan;
    }
    plan.channels = channels;
    plan.channel_tiles = (hidden + kWarp * channels - 1) / (kWarp * channels);
    // The numbers of float64 do not fit into the words that blocks hand on.
    const bool whole_sequences = longest <= short_timesteps || itemsize == 8 ||
                                 plan.tiles * plan.channel_tiles > most_blocks;
    plan.single_tiles = !whole_sequences;
    plan.slots = whole_sequences ? batch : plan.tiles;
    return plan;
}

}  // namespace qrnn

#endif
