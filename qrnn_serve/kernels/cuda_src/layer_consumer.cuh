// The consumer warpgroups: products, activations, scan, output gate and stores of tiles.
#pragma once

#include "layer_tiles.cuh"

// The weight rows of the block's channels, chunk by chunk, [3 * 64 rows][64 columns], swizzled.
__device__ inline void load_weights(const LayerArgs& a, uint32 base, int64 channel0) {
    const int width = (int)(a.inputs * a.window);
    for (int piece = threadIdx.x; piece < kChunks * 192 * 8; piece += kConsumers * 128) {
        const int part = piece & 7, row = (piece >> 3) % 192, chunk = piece / (192 * 8);
        const int64 channel = channel0 + (row & 63);
        const int column = chunk * kChunk + part * 8;
        const bool valid = channel < a.hidden && column < width;
        const int64 from = ((row >> 6) * a.hidden + channel) * a.weight_row + column;
        const uint32 to = base + chunk * kWeightChunkBytes + row * 128 + ((part ^ (row & 7)) << 4);
        copy16(to, a.weight + (valid ? from : 0), valid);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_proxy();
    meet(kWeightsLoaded, kConsumers * 128);
}

// 8 channels of h, or the `left` that there are.
__device__ inline void store_some(unsigned short* to, uint4 value, int64 left, bool aligned) {
    if (left >= 8 && aligned) {
        store16(to, value);
        return;
    }
    uint64 low = value.x | (uint64)value.y << 32, high = value.z | (uint64)value.w << 32;
#pragma unroll 1
    for (int n = 0; n < left && n < 8; ++n) {
        to[n] = (unsigned short)low;
        low = low >> 16 | high << 48;
        high >>= 16;
    }
}

// Biases of one channel, with the factors of the activations.
struct Bias {
    float z, f, o;

    __device__ Bias(const LayerArgs& a, int64 channel) : z(0), f(0), o(0) {
        if (a.bias == nullptr || channel >= a.hidden) return;
        z = widen(a.bias[channel]);
        f = widen(a.bias[a.hidden + channel]) * -kLog2E;
        o = widen(a.bias[2 * a.hidden + channel]) * 0.5f;
    }
};

// Pre-activations of Z, F and O. Of a thread's element i, the channel is its first or second
// (channel_of) and the timestep quarter * kRun + place_of.
typedef float Accumulators[3][kTile / 2];
__device__ constexpr int channel_of(int i) { return i >> 1 & 1; }
__device__ constexpr int place_of(int i) { return (i >> 2) * 2 + (i & 1); }

// A run of timesteps as a function of the state before it: local + product * state. Two channels.
struct Run {
    float product[2], local[2];
};

// One consumer warpgroup.
struct Consumer {
    const LayerArgs& a;
    const Shared s;
    const int group, warp, lane;
    const int quarter;  // which run of a tile
    const int64 channel0, channel;
    const Bias bias[2];
    Place place;

    __device__ Consumer(const LayerArgs& a, Shared s, int group, int64 channel0)
        : a(a),
          s(s),
          group(group),
          warp((threadIdx.x & 127) >> 5),
          lane(threadIdx.x & 31),
          quarter(lane & 3),
          channel0(channel0),
          channel(channel0 + warp * 16 + (lane >> 2)),
          bias{{a, channel}, {a, channel + 8}},
          place{0, 0} {
        if (group == 1) place.skip_tile();
    }

    // One lane of each warp says it, when the whole warp is so far.
    __device__ void arrive(uint32 barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ void multiply_tile(Accumulators& acc) {
        const uint64 weights = operand(s.base), inputs = operand(s.base + kStagesAt);
        uint32 before = 0;
#pragma unroll
        for (int k = 0; k < kChunks; ++k, place.next()) {
            if (k > 0) barrier_wait(s.full(place.stage), place.parity);
            // The copies were ordinary writes, and the tensor cores read through another proxy.
            fence_proxy();
            products_begin();
            const uint64 x = inputs + place.stage * (kStageBytes >> 4);
            const uint64 w = weights + k * (kWeightChunkBytes >> 4);
#pragma unroll
            for (int part = 0; part < kChunk / 16; ++part) {
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
                    multiply(acc[gate], w + ((gate * kChannels * 128 + part * 32) >> 4),
                             x + (part * 32 >> 4), k > 0 || part > 0);
            }
            products_commit();
            if (k > 0) {
                products_wait<1>();
                arrive(s.empty(before));
            }
            before = place.stage;
        }
        arrive(s.turn(group));
        products_wait<0>();
        arrive(s.empty(before));
    }

    // Frees the stages of the empty tile that ends the work.
    __device__ void pass_tile() {
        for (int k = 0; k < kChunks; ++k, place.next()) {
            barrier_wait(s.full(place.stage), place.parity);
            arrive(s.empty(place.stage));
        }
        arrive(s.turn(group));
    }

    // f = 0 keeps the state through timesteps that are not there.
    __device__ void mask(Accumulators& acc, int count) const {
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i)
            if (quarter * kRun + place_of(i) >= count) acc[1][i] = -1e30f;
    }

    // Activations, and the scan of this thread's run: acc[0] and acc[1] become the local state and
    // the product of 1 - f after each timestep.
    __device__ Run scan(Accumulators& acc) const {
        Run run = {{1.0f, 1.0f}, {0.0f, 0.0f}};
        const float scale = a.scale;
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
            const int c = channel_of(i);
            const float z = tanh_approx(acc[0][i] + bias[c].z);
            // An approximate f would lose long memory, so it is a sigmoid of two accurate steps.
            const float e = exp2_approx(fmaf(acc[1][i], -kLog2E, bias[c].f));
            const float f = reciprocal(fmaf(e, scale, scale));
            run.local[c] = fmaf(f, z - run.local[c], run.local[c]);
            run.product[c] = fmaf(-f, run.product[c], run.product[c]);
            acc[0][i] = run.local[c];
            acc[1][i] = run.product[c];
        }
        return run;
    }

    // Of the runs of four lanes: `run` becomes this lane's and all before it; returns all before.
    __device__ Run join(Run& run) const {
        Run before;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const float product = __shfl_up_sync(~0u, run.product[c], step, 4);
                const float local = __shfl_up_sync(~0u, run.local[c], step, 4);
                if (quarter >= step) {
                    run.local[c] = fmaf(run.product[c], local, run.local[c]);
                    run.product[c] *= product;
                }
            }
            before.product[c] = __shfl_up_sync(~0u, run.product[c], 1, 4);
            before.local[c] = __shfl_up_sync(~0u, run.local[c], 1, 4);
            if (quarter == 0) before.product[c] = 1.0f, before.local[c] = 0.0f;
        }
        return before;
    }

    // Takes the state before the tile from the other consumer, or the sequence's first state, and
    // hands on the state after it. Returns the one before.
    __device__ void pass_state(float (&state)[2], const Run& whole, const Tile& tile, uint32 number,
                               float* carries) const {
        const int place = warp * 16 + (lane >> 2);
        // Only the lanes that have the end of a tile read and write what is handed on, so that each
        // arrives for its own accesses.
        const bool at_end = quarter == 3;
        if (number > 0) barrier_wait(s.carry(group ^ 1, warp), ((number - 1) >> 1) & 1);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (tile.first > 0) {
                if (at_end) state[c] = carries[(group ^ 1) * kChannels + place + 8 * c];
                state[c] = __shfl_sync(~0u, state[c], 3, 4);
            } else {
                const bool given = a.c0 && channel + 8 * c < a.hidden;
                state[c] =
                    given ? widen(a.c0[tile.sequence * a.c0_sequence + channel + 8 * c]) : 0.0f;
                if (!tile.valid) state[c] = not_a_number();
            }
            if (!at_end) continue;
            const float after = fmaf(whole.product[c], state[c], whole.local[c]);
            carries[group * kChannels + place + 8 * c] = after;
            if (tile.count <= kTile && channel + 8 * c < a.hidden)
                a.c[tile.sequence * a.c_sequence + channel + 8 * c] =
                    (unsigned short)narrow2(after, 0.0f);
        }
        if (at_end) barrier_arrive(s.carry(group, warp));
    }

    // Output gate, and h in shared memory as rows of 64 channels: that of a timestep is 4 * (place
    // in its run) + quarter, so that a matrix of stmatrix fills 8 rows side by side.
    __device__ void stage_part(const Accumulators& acc, const float (&state)[2], int part,
                               uint32 out) const {
        // Each lane gives the address of one row of one of four matrices.
        const int matrix = lane >> 3;
        const int row = (matrix >> 1) * 8 + (lane & 1) * 4 + ((lane >> 1) & 3);
        const uint32 to = out + row * 128 + (((warp * 2 + (matrix & 1)) ^ (row & 7)) << 4);
#pragma unroll
        for (int pair = 0; pair < kPartGroups; pair += 2) {
            uint32 packed[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float h[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = (part * kPartGroups + pair + (m >> 1)) * 4 + (m & 1) * 2 + e;
                    const int c = channel_of(i);
                    const float t = tanh_approx(fmaf(acc[2][i], 0.5f, bias[c].o));
                    const float cell = fmaf(acc[1][i], state[c], acc[0][i]);
                    h[e] = cell * fmaf(t, 0.5f, 0.5f);
                }
                packed[m] = narrow2(h[0], h[1]);
            }
            store_matrices(to + pair * 1024, packed);
        }
    }

    // From shared memory to h, 8 threads for each timestep.
    __device__ void store_part(const Tile& tile, int part, uint32 out) const {
        const int thread = warp * 32 + lane, piece = thread & 7, row = thread >> 3;
        const uint32 from = out + row * 128 + ((piece ^ (row & 7)) << 4);
        const int64 left = a.hidden - (channel0 + piece * 8);
        const int64 stride = a.reverse ? -a.h_time : a.h_time;
        const int position = (row & 3) * kRun + part * (kRun / kParts) + (row >> 2);
        unsigned short* to = a.h + tile.out + channel0 + piece * 8 + position * stride;
        if (tile.count >= kTile && left >= 8 && a.aligned) {
            uint4 value[kSteps];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) value[i] = load16(from + i * 2048);
#pragma unroll
            for (int i = 0; i < kSteps; ++i, to += 4 * stride) store16(to, value[i]);
        } else {
#pragma unroll 1
            for (int i = 0; i < kSteps; ++i, to += 4 * stride)
                if (position + 4 * i < tile.count)
                    store_some(to, load16(from + i * 2048), left, a.aligned);
        }
    }
};

// Takes every second tile until there are no more.
__device__ inline void consume(const LayerArgs& a, unsigned char* shared, Shared s, int group,
                               int64 channel0) {
    Consumer consumer(a, s, group, channel0);
    const uint32 out = s.base + kOutAt + group * kOutBytes;
    const Tile* tiles = (const Tile*)(shared + kTilesAt);
    for (uint32 number = group;; number += kConsumers, consumer.place.skip_tile()) {
        if (number > 0) barrier_wait(s.turn(group ^ 1), ((number - 1) >> 1) & 1);
        barrier_wait(s.full(consumer.place.stage), consumer.place.parity);
        const Tile tile = tiles[number % kStages];
        if (tile.sequence < 0) break;
        Accumulators acc;
        consumer.multiply_tile(acc);
        if (tile.count < kTile) consumer.mask(acc, tile.count);
        Run run = consumer.scan(acc);
        const Run before = consumer.join(run);
        float state[2] = {0.0f, 0.0f};
        consumer.pass_state(state, run, tile, number, (float*)(shared + kCarryAt));
#pragma unroll
        for (int c = 0; c < 2; ++c)
            state[c] = fmaf(before.product[c], state[c], before.local[c]);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            consumer.stage_part(acc, state, part, out);
            meet(kGroupMeets + group, 128);
            consumer.store_part(tile, part, out);
            meet(kGroupMeets + group, 128);
        }
    }
    consumer.pass_tile();
}
