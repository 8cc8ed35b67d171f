// The forward scan of few short sequences: a launch, and little else. A block has a warp for each chunk
// of a sequence, which has at most kTilesAtOnce tiles. Inputs go straight to registers, and the state
// stays in the block. Chunks and tiles are joined as in carry.cuh, so the bits are those of the other
// kernels.
#pragma once

#include "forward.cuh"

constexpr int kTilesAtOnce = 2;  // scan_short knows that there are no more

template <int V>
struct ShortMemory {
    Stretch chunks[kTilesAtOnce][kWarps][V][32];  // and later what comes before each in its tile
    Stretch tiles[kTilesAtOnce][V][32];
};

// A thread's inputs of a chunk.
template <bool output_gate, int V>
struct ForwardInputs {
    struct Steps {
        Vector<V> steps[kSteps];

        __device__ void start(const Input& from, int chunk, int count, Compute filler) {
            const char* at = from.at(chunk * kSteps);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                steps[k] = k < count ? load<V>(from.after(at, k)) : everywhere<V>(filler);
            }
        }
        __device__ void read(int, int k, int, Compute (&out)[V]) const {
            widen<V>(steps[k], out);
        }
    } columns[output_gate ? 3 : 2];

    __device__ void start(const ForwardStrips& from, int chunk, int count, Compute closed) {
        columns[0].start(from.x, chunk, count, 0);
        columns[1].start(from.f, chunk, count, closed);
        if constexpr (output_gate) columns[2].start(from.o, chunk, count, 0);
    }
};

// What comes before each chunk of a tile, and what the whole tile does. Chunks from `present` on have
// no warp, and keep the state.
template <int V>
__device__ inline void join_chunks(ShortMemory<V>& memory, int tile, int present, int lane) {
    Stretch all[V];
    keep_state<V>(all);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            Stretch own = {(Wide)1, (Wide)0};
            if (w < present) {
                own = memory.chunks[tile][w][i][lane];
                memory.chunks[tile][w][i][lane] = all[i];
            }
            all[i] = joined(all[i], own);
        }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) memory.tiles[tile][i][lane] = all[i];
}

template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_short(const Sequences& s, const Work& work, Compute* starts,
                                  Compute keep, const Rows& initial, const Rows& final,
                                  const MakeStrips& make_strips) {
    auto& memory = block_memory<ShortMemory<V>>();
    const int warps = threads_of_block() / 32;
    const int warp = thread_of_block() / 32, lane = thread_of_block() % 32;
    const int tile = warp / kWarps, chunk = warp % kWarps;
    for (int64 item = block_of_grid(); item < work.items; item += blocks_of_grid()) {
        const unsigned sequence = quotient((unsigned)item, work.by_channel_tiles);
        const Line line(s, sequence);
        Job job;
        job.sequence = sequence;
        job.slot = first_slot(s, sequence) + tile * slot_step(s);
        job.row = line.row(tile * kTile);
        job.channel = Jobs<V>::channel_of(work, (unsigned)item, sequence);
        job.flags = line.valid ? kValid : 0;
        const int count = steps_of(warp, (int)clamp(line.count, 0, kTilesAtOnce * kTile));
        const Channels<V> at(s, job, lane);
        const ForwardStrips strips = make_strips(job, at.channel);
        ForwardInputs<output_gate, V> inputs;
        ForwardChunk<activate, output_gate, V> own;
        Stretch stretch[V];
        if (count > 0) {
            inputs.start(strips, chunk, count, activate ? (Compute)minus_infinity() : (Compute)0);
            own.run(inputs, chunk, lane, keep, stretch);
        } else {
            keep_state<V>(stretch);
        }
        Wide state[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            state[i] = read_state(initial, job, at.channel + i);
            memory.chunks[tile][chunk][i][lane] = stretch[i];
        }
        barrier();
        if (chunk == 0) join_chunks<V>(memory, tile, warps - tile * kWarps, lane);
        barrier();
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (tile > 0) state[i] = advanced(state[i], memory.tiles[0][i][lane]);
        }
        if (count > 0) {
            Compute before[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                before[i] = (Compute)applied(memory.chunks[tile][chunk][i][lane], state[i]);
            }
            if (strips.h.start) {
                own.write(inputs, chunk, lane, strips.h, at.active ? count : 0, before);
            }
            if (starts && at.active) {
                Compute* start = at.start(starts, s, job, chunk);
#pragma unroll
                for (int i = 0; i < V; ++i) start[i] = before[i];
            }
        }
        // The first warp of the last tile, or of the only one where there are no timesteps.
        const bool last = chunk == 0 && tile == tiles_of(line.count) - 1;
        if (final.data && last && at.active) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                if (line.count > 0) state[i] = advanced(state[i], memory.tiles[tile][i][lane]);
                write_state(final, sequence, at.channel + i, state[i]);
            }
        }
        if (item + blocks_of_grid() < work.items) barrier();
    }
}

template <int V>
__device__ inline void forget_mult_short(const ForgetMultArgs& a) {
    scan_short<false, false, V>(a.sequences, a.work, a.starts, 1, a.h0, Rows{nullptr, 0, 0},
                                ForgetMultStrips{a});
}

template <bool output_gate, int V>
__device__ inline void fo_pool_short(const FoPoolArgs& a) {
    scan_short<true, output_gate, V>(a.sequences, a.work, a.starts, (Compute)(1.0 - a.zoneout),
                                     a.c0, a.c, FoPoolStrips<output_gate>{a});
}
