// The forward scan of short sequences: a launch, and little else. A block has a warp for each chunk of
// up to kTilesAtOnce tiles of one sequence. Inputs go straight to registers, and the state stays in the
// block. Chunks and tiles are joined as in carry.cuh, so the bits are those of the other kernels.
#pragma once

#include "forward.cuh"

constexpr int kTilesAtOnce = 2;

template <int V>
struct ShortMemory {
    // Used in turns, so that one can be filled while the other is read.
    struct Half {
        Stretch chunks[kTilesAtOnce][kWarps][V][32];  // and later what comes before each in its tile
        Stretch tiles[kTilesAtOnce][V][32];
    } halves[2];
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
__device__ inline void join_chunks(typename ShortMemory<V>::Half& half, int tile, int present,
                                   int lane) {
    Stretch all[V];
    keep_state<V>(all);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            Stretch own = {(Wide)1, (Wide)0};
            if (w < present) {
                own = half.chunks[tile][w][i][lane];
                half.chunks[tile][w][i][lane] = all[i];
            }
            all[i] = joined(all[i], own);
        }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) half.tiles[tile][i][lane] = all[i];
}

template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_short(const Sequences& s, const Work& work, Compute* starts,
                                  Compute keep, const Rows& initial, const Rows& final,
                                  const MakeStrips& make_strips) {
    auto& memory = block_memory<ShortMemory<V>>();
    const int warps = threads_of_block() / 32;
    const int warp = thread_of_block() / 32, lane = thread_of_block() % 32;
    const int tile = warp / kWarps, chunk = warp % kWarps, at_once = (warps - 1) / kWarps + 1;
    const Compute closed = activate ? (Compute)minus_infinity() : (Compute)0;
    int turn = 0;
    for (int64 item = block_of_grid(); item < work.items; item += blocks_of_grid()) {
        const unsigned sequence = quotient((unsigned)item, work.by_channel_tiles);
        const Line line(s, sequence);
        const int64 tiles = tiles_of(line.count);
        Job job;
        job.sequence = sequence;
        job.channel = Jobs<V>::channel_of(work, (unsigned)item, sequence);
        job.flags = line.valid ? kValid : 0;
        const Channels<V> at(s, job, lane);
        const auto take = [&](int64 number) {
            job.before = (int)number;
            job.row = line.row(number * kTile);
            job.count = (int)clamp(line.count - number * kTile, 0, kTile);
            return steps_of(chunk, job.count);
        };
        Wide state[V];
#pragma unroll
        for (int i = 0; i < V; ++i) state[i] = read_state(initial, job, at.channel + i);
        ForwardInputs<output_gate, V> inputs;
        int count = take(tile);
        inputs.start(make_strips(job, at.channel), chunk, count, closed);
        for (int64 first = 0; first < tiles; first += at_once, ++turn) {
            ForwardChunk<activate, output_gate, V> own;
            Stretch stretch[V];
            if (count > 0) {
                own.run(inputs, chunk, lane, keep, stretch);
            } else {
                keep_state<V>(stretch);
            }
            auto& half = memory.halves[turn % 2];
#pragma unroll
            for (int i = 0; i < V; ++i) half.chunks[tile][chunk][i][lane] = stretch[i];
            // Of the next tile, while this one is joined.
            ForwardInputs<output_gate, V> next = inputs;
            const int next_count = take(first + at_once + tile);
            if (next_count > 0) next.start(make_strips(job, at.channel), chunk, next_count, closed);
            barrier();
            if (chunk == 0) join_chunks<V>(half, tile, warps - tile * kWarps, lane);
            barrier();
            Compute before[V];
            for (int t = 0; t < at_once && first + t < tiles; ++t) {
#pragma unroll
                for (int i = 0; i < V; ++i) {
                    if (t == tile) {
                        before[i] = (Compute)applied(half.chunks[tile][chunk][i][lane], state[i]);
                    }
                    if (line.count > 0) state[i] = advanced(state[i], half.tiles[t][i][lane]);
                }
            }
            if (count > 0) {
                take(first + tile);
                const ForwardStrips strips = make_strips(job, at.channel);
                if (strips.h.start) {
                    own.write(inputs, chunk, lane, strips.h, at.active ? count : 0, before);
                }
                if (starts && at.active) {
                    job.slot = first_slot(s, sequence) + job.before * slot_step(s);
                    Compute* start = at.start(starts, s, job, chunk);
#pragma unroll
                    for (int i = 0; i < V; ++i) start[i] = before[i];
                }
            }
            inputs = next;
            count = next_count;
        }
        if (final.data && warp == 0 && at.active) {
#pragma unroll
            for (int i = 0; i < V; ++i) write_state(final, sequence, at.channel + i, state[i]);
        }
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
