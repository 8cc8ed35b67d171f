// What blocks that take single tiles of packed sequences need beforehand.
#pragma once

#include "sequences.cuh"

struct PrepareArgs {
    Sequences sequences;
    Slot* slots;
    int64 slot_count;
    uint64* words;  // to be filled with zeros
    int64 word_count;
};

__device__ inline void prepare(const PrepareArgs& a) {
    const int64 threads = (int64)blocks_of_grid() * kThreads;
    const int64 thread = (int64)block_of_grid() * kThreads + thread_of_block();
    for (int64 i = thread; i < a.word_count; i += threads) a.words[i] = 0;
    // A warp finds a slot.
    const int lane = thread_of_block() % 32;
    for (int64 slot = thread / 32; slot < a.slot_count; slot += threads / 32) {
        const Slot found = find_slot(a.sequences, slot, lane);
        if (lane == 0) a.slots[slot] = found;
    }
}
