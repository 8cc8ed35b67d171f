// The producer warps: inputs from global memory into the ring of stages.
#pragma once

#include "layer_tiles.cuh"

// Arrives at a full stage's barrier when this thread's copies have landed.
__device__ inline void signal_full(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    // Copies order nothing else: this is for the tile that this thread describes.
    if ((threadIdx.x & 127) == 0) barrier_arrive(barrier);
}

// An empty sequence ends in the state it started with.
__device__ inline void keep_state(const LayerArgs& a, const Line& line, int64 b, int set) {
    const int64 channel = (int64)set * kChannels + (threadIdx.x & 127);
    if ((threadIdx.x & 127) >= kChannels || channel >= a.hidden) return;
    unsigned short value = a.c0 ? a.c0[b * a.c0_sequence + channel] : 0;
    if (!line.valid) value = 0x7FFF;  // NaN in both types
    a.c[b * a.c_sequence + channel] = value;
}

// Copies tiles of inputs into the ring until there are no more sequences.
__device__ inline void produce(const LayerArgs& a, unsigned char* shared, Shared s, int set,
                               int worker) {
    const int thread = threadIdx.x & 127;
    const int part = thread & 7;
    const int row = thread >> 3;  // of the 16 rows of one step: column 8 * (row / 8) + row % 8
    const int offset = ((row >> 1) & 3) * kRun + 2 * (row >> 3) + (row & 1);
    const uint32 to = s.base + kStagesAt + row * 128 + ((part ^ (row & 7)) << 4);
    const int64 direction = a.reverse ? -1 : 1;
    const int64 stride = direction * a.x_time;
    const int lags = (int)a.window - 1, inputs = (int)a.inputs;
    volatile int* ticket = (volatile int*)(shared + kTicketAt);
    Tile* tiles = (Tile*)(shared + kTilesAt);
    Place place = {0, 0};
    uint32 tile = 0;

    for (int64 b = worker; b < a.batch;) {
        const Line line(a, b);
        if (line.count == 0) keep_state(a, line, b, set);
        const unsigned short* x =
            a.x + line.base_sequence * a.x_sequence + line.first_row * a.x_time;
        for (int first = 0; first < line.count; first += kTile, ++tile) {
            int column = part * 8, lag = 0;
            const int left = line.count - first - offset;
            for (int k = 0; k < kChunks; ++k, place.next()) {
                while (lag < lags && column >= inputs) column -= inputs, ++lag;
                barrier_wait(s.empty(place.stage), place.parity ^ 1);
                if (k == 0 && thread == 0) {
                    const int64 out_row = line.first_row + direction * first;
                    tiles[tile % kStages] = {
                        (int)b, first, line.count - first, line.valid,
                        line.base_sequence * a.h_sequence + out_row * a.h_time, 0};
                }
                // The timestep of step i lies i * 4 - before after the sequence's start.
                const int before = lag - first - offset;
                const unsigned short* from = x - before * stride + column;
                const int steps = column < inputs ? left : 0;
                const uint32 at = to + place.stage * kStageBytes;
                if (before <= 0) {
#pragma unroll
                    for (int i = 0; i < kTile / 16; ++i, from += 4 * stride)
                        copy16(at + i * 2048, from, 4 * i < steps);
                } else {
                    for (int i = 0; i < kTile / 16; ++i, from += 4 * stride) {
                        const unsigned short* old = a.previous + b * a.previous_sequence +
                                                    (lags - before + 4 * i) * a.previous_time +
                                                    column;
                        const bool inside = 4 * i >= before;
                        copy16(at + i * 2048, inside ? from : old,
                               4 * i < steps && (inside || a.previous));
                    }
                }
                signal_full(s.full(place.stage));
                column += kChunk;
            }
        }
        if (a.tickets == nullptr) {
            b += a.workers;
        } else {
            meet(kProducersMeet, 128);
            if (thread == 0) *ticket = atomicAdd(a.tickets + set, 1);
            meet(kProducersMeet, 128);
            b = a.workers + *ticket;
        }
    }
    // One empty tile for each consumer says that there are no more.
    for (int end = 0; end < kConsumers; ++end, ++tile) {
        for (int k = 0; k < kChunks; ++k, place.next()) {
            barrier_wait(s.empty(place.stage), place.parity ^ 1);
            if (k == 0 && thread == 0) tiles[tile % kStages] = {-1, 0, 0, 0, 0, 0};
            signal_full(s.full(place.stage));
        }
    }
}
