// Argument blocks, and how blocks of threads share the timesteps of sequences.
//
// A sequence is cut into tiles of kTile timesteps from its first one (in running order), whatever
// is beside it, so that its numbers are the same alone and in any batch. A block takes job after job:
// a tile of 32 * V neighbouring channels. Jobs are either all tiles of a sequence one after the
// other, or tiles that the block claims (`words` given): then the state comes from the blocks that
// have the tiles before.
#pragma once

#include "dtypes.cuh"

// Argument blocks: every field is eight bytes, as the launcher packs them.

// Row (t, b) starts at element t * time_stride + b * sequence_stride; packed row n at
// n * time_stride. A state [B, H] uses sequence_stride only. Channels are contiguous.
struct Rows {
    void* data;
    int64 time_stride;
    int64 sequence_stride;
};

struct Sequences {
    int64 timesteps;      // T, or N of packed rows
    int64 batch;          // B
    int64 hidden;         // H
    int64 reverse;        // nonzero: from the last timestep to the first
    const void* offsets;  // [B + 1] of packed rows, or null; with padded_to: lengths [B]
    int64 offset_bytes;   // 4 or 8
    int64 padded_to;      // not 0: sequence b has the first rows of padded_to, from b * padded_to on
};

// One tile of one sequence, or a number that no tile has.
struct Slot {
    int64 row;  // of the first timestep in running order
    int64 sequence;
    int before, after;  // tiles of the sequence before and after this one
    int slot;           // or kNoSlot: there is nothing to do
    short count;  // timesteps
    short flags;  // kValid, kLost
};

constexpr int kNoSlot = -1;

constexpr int kValid = 1;  // of the sequence; where offsets are wrong the results are NaN
constexpr int kLost = 2;   // where offsets are wrong: no slot begins the sequence of this number

struct Work {
    int64 channel_tiles;  // of 32 * V channels
    int64 items;          // channel tiles of all sequences, or of all slots
    uint64* words;        // [slots, H] of zeros where blocks claim tiles, else null
    const Slot* slots;    // of packed sequences, as claimed, where blocks claim tiles, else null
    int64 tiles_each;     // tiles of each dense sequence
    uint64* claimed;      // how many items are claimed: zero, where blocks claim tiles
    uint64 by_channel_tiles, by_batch;  // magic numbers of divisions
};

constexpr int kSteps = 8;  // timesteps of a chunk, which one warp takes
constexpr int kWarps = 8;  // chunks of a tile
constexpr int kTile = kSteps * kWarps;
constexpr int kThreads = 32 * (kWarps + 1);  // one more warp carries the state

__device__ inline int64 offset_at(const Sequences& s, int64 b) {
    return s.offset_bytes == 4 ? (int64)((const int*)s.offsets)[b] : ((const int64*)s.offsets)[b];
}

__device__ inline int64 clamp(int64 value, int64 low, int64 high) {
    return value < low ? low : (value > high ? high : value);
}

// Where the rows of a sequence begin and end, as given.
__device__ inline int64 start_of(const Sequences& s, int64 b) {
    return s.padded_to ? b * s.padded_to : offset_at(s, b);
}
__device__ inline int64 stop_of(const Sequences& s, int64 b) {
    return s.padded_to ? b * s.padded_to + offset_at(s, b) : offset_at(s, b + 1);
}

// The rows of one sequence in running order.
struct Line {
    int64 sequence;
    int64 first_row;  // where running order starts
    int64 direction;  // 1 or -1
    int64 count;
    bool valid;  // false: offsets are wrong here, and the results are NaN

    __device__ Line(const Sequences& s, int64 sequence) : sequence(sequence) {
        direction = s.reverse ? -1 : 1;
        int64 start = 0, stop = s.timesteps;
        valid = true;
        if (s.offsets) {
            // Offsets on a GPU cannot be checked beforehand without stopping the stream. Wrong ones
            // reach no memory outside the tensors and leave no row of a monotone prefix unwritten.
            const bool is_first = sequence == 0;
            const bool is_last = sequence == s.batch - 1 && !s.padded_to;
            const int64 before = is_first ? 0 : start_of(s, sequence - 1);
            const int64 most = s.padded_to ? (sequence + 1) * s.padded_to : s.timesteps;
            start = start_of(s, sequence);
            stop = stop_of(s, sequence);
            valid = 0 <= before && before <= start && start <= stop && stop <= most;
            valid = valid && (!is_first || start == 0) && (!is_last || stop == s.timesteps);
            start = is_first ? 0 : clamp(start, 0, s.timesteps);
            stop = is_last ? s.timesteps : clamp(stop, start, most);
        }
        count = stop - start;
        first_row = s.reverse ? stop - 1 : start;
    }

    __device__ int64 row(int64 position) const { return first_row + direction * position; }
};

// Tiles of packed sequences are numbered without knowing all lengths: sequence b, which starts at
// row s, has the slots from s / kTile + b on, as many as it has tiles or one more.
__device__ inline int64 first_slot(const Sequences& s, int64 b) {
    if (s.offsets == nullptr) return b;
    return (int64)((uint64)(b == 0 ? 0 : clamp(start_of(s, b), 0, s.timesteps)) / kTile) + b;
}

// From a tile's slot to that of the next tile of its sequence.
__device__ inline int64 slot_step(const Sequences& s) { return s.offsets ? 1 : s.batch; }

// The last sequence whose first slot is not after `slot`. The whole warp looks, at 32 places.
__device__ inline int64 sequence_of_slot(const Sequences& s, int64 slot, int lane) {
    int64 low = 0;
    for (int64 size = s.batch; size > 1;) {
        const int64 step = (size + 31) / 32, ahead = lane * step;
        const bool before = ahead < size && first_slot(s, low + ahead) <= slot;
        const int count = bits_in(lanes_of_warp(before));
        const int64 passed = (count > 0 ? count - 1 : 0) * step;
        low += passed;
        size = step < size - passed ? step : size - passed;
    }
    return low;
}

// Of a sequence of so many timesteps; an empty one has one too.
__device__ inline int64 tiles_of(int64 count) { return count > 0 ? (count - 1) / kTile + 1 : 1; }

__device__ inline Slot slot_of(const Sequences& s, int64 sequence, int64 number) {
    const Line line(s, sequence);
    const int64 tile = number - first_slot(s, sequence), tiles = tiles_of(line.count);
    Slot slot;
    slot.row = line.row(tile * kTile);
    slot.sequence = sequence;
    slot.slot = (int)number;
    slot.flags = line.valid ? kValid : 0;
    if (0 <= tile && tile < tiles) {
        slot.before = (int)tile;
        slot.after = (int)(tiles - 1 - tile);
        slot.count = (short)clamp(line.count - tile * kTile, 0, kTile);
    } else {
        slot.before = slot.after = 1;
        slot.count = 0;
    }
    return slot;
}

__device__ inline Slot find_slot(const Sequences& s, int64 number, int lane) {
    Slot slot = slot_of(s, sequence_of_slot(s, number, lane), number);
    const bool lost = number < s.batch && sequence_of_slot(s, first_slot(s, number), lane) != number;
    if (lost) slot.flags |= kLost;
    return slot;
}

// What a block does at a time: a tile of a sequence, for some channels.
struct Job {
    int64 row;  // of the first timestep in running order
    int64 sequence;
    int64 slot;
    int64 channel;      // the first of the block
    int count;          // timesteps, or kNoJob
    int before, after;  // tiles of the sequence before and after it
    int flags;
};

constexpr int kNoJob = -1;  // there are no more

#ifdef QRNN_FAR
typedef int64 Step;  // rows of one chunk lie further apart than 32 bits can say
__device__ inline const char* stepped(const char* address, int64 step, int k) {
    return address + step * k;
}
#else
typedef int Step;
#endif

// V channels of a tensor of rows, along one job: element k is its timestep k.
template <class Byte>
struct Strip {
    Byte* start;
    Step step;  // in bytes

    __device__ Strip() {}

    __device__ Strip(const Rows& rows, const Sequences& s, const Job& job, int64 channel) {
        const int64 base = s.offsets ? 0 : job.sequence * rows.sequence_stride;
        const int64 element = base + job.row * rows.time_stride + channel;
        start = rows.data ? (Byte*)rows.data + element * (int64)sizeof(Storage) : nullptr;
        step = (Step)((s.reverse ? -rows.time_stride : rows.time_stride) * (int64)sizeof(Storage));
    }

    __device__ Byte* at(int64 position) const { return start + position * step; }
    // From an address given by `at`, `k` timesteps on.
    __device__ Byte* after(const char* address, int k) const {
        return (Byte*)stepped(address, step, k);
    }
};

typedef Strip<const char> Input;
typedef Strip<char> Output;

// The state of one channel.
__device__ inline Wide read_state(const Rows& state, const Job& job, int64 channel) {
    if ((job.flags & kValid) == 0) return not_a_number();
    if (state.data == nullptr) return 0;
    const int64 element = job.sequence * state.sequence_stride + channel;
    Compute value[1];
    widen<1>(load<1>((const char*)state.data + element * (int64)sizeof(Storage)), value);
    return (Wide)value[0];
}

__device__ inline void write_state(const Rows& state, int64 sequence, int64 channel, Wide value) {
    const int64 element = sequence * state.sequence_stride + channel;
    const Compute values[1] = {(Compute)value};
    store<1>((char*)state.data + element * (int64)sizeof(Storage), narrow<1>(values));
}
