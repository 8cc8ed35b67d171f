// What blocks that claim tiles of packed sequences need beforehand.
#pragma once

#include "sequences.cuh"

struct PrepareArgs {
    Sequences sequences;
    Slot* slots;  // in the order in which they are to be claimed
    int64 slot_count;
    uint64* words;  // to be filled with zeros
    int64 word_count;
};

// Sequences of which all first tiles come before all second ones, and so on: then the block that
// has the tile before is done, as a rule, when a block needs its state.
constexpr int kGroup = 256;

// The slot to be claimed at a place, where no offset is wrong. The whole warp looks.
__device__ inline Slot slot_at(const Sequences& s, int64 place, int lane) {
    constexpr int kEach = kGroup / 32;
    const int64 group = sequence_of_slot(s, place, lane) / kGroup * kGroup;
    unsigned tiles[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int64 b = group + i * 32 + lane;
        tiles[i] = b < s.batch ? (unsigned)tiles_of(stop_of(s, b) - start_of(s, b)) : 0;
    }
    const auto before_tile = [&](unsigned tile) {
        unsigned sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += tiles[i] < tile ? tiles[i] : tile;
        return sum_of_warp(sum);
    };
    unsigned rank = (unsigned)(place - first_slot(s, group));
    Slot slot = {};
    if (rank >= before_tile(~0u)) {
        // One of those that are left over, since some sequences have a slot too many.
        slot.slot = kNoSlot;
        return slot;
    }
    // The last tile number of which all earlier ones come before this place.
    unsigned low = 0;
    for (unsigned high = rank; low < high;) {
        const unsigned middle = low + (high - low + 1) / 2;
        if (before_tile(middle) <= rank) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    rank -= before_tile(low);
    unsigned sequence = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const bool has = tiles[i] > low;
        const unsigned lanes = lanes_of_warp(has);
        const bool own = has && (unsigned)bits_in(lanes & ((1u << lane) - 1)) == rank;
        sequence += own ? i * 32 + lane : 0;
        rank -= (unsigned)bits_in(lanes);  // once found, no lane's number again
    }
    const int64 found = group + sum_of_warp(sequence);
    return slot_of(s, found, first_slot(s, found) + low);
}

__device__ inline bool bounds_are_right(const Sequences& s) {
    bool right = s.padded_to || (offset_at(s, 0) == 0 && offset_at(s, s.batch) == s.timesteps);
    for (int64 b = thread_of_block(); b < s.batch; b += kThreads) {
        const int64 count = stop_of(s, b) - start_of(s, b);
        right = right && count >= 0 && (!s.padded_to || count <= s.padded_to);
    }
    return all_of_block(right);
}

__device__ inline void prepare(const PrepareArgs& a) {
    const Sequences& s = a.sequences;
    const int64 threads = (int64)blocks_of_grid() * kThreads;
    const int64 thread = (int64)block_of_grid() * kThreads + thread_of_block();
    for (int64 i = thread; i < a.word_count; i += threads) a.words[i] = 0;
    // Where bounds are wrong, every slot is claimed at its own place, so that none is left out.
    const bool grouped = bounds_are_right(s);
    // A warp finds a slot.
    const int lane = thread_of_block() % 32;
    for (int64 place = thread / 32; place < a.slot_count; place += threads / 32) {
        const Slot found = grouped ? slot_at(s, place, lane) : find_slot(s, place, lane);
        if (lane == 0) a.slots[place] = found;
    }
}
