// The scan over time: what a thread does with the timesteps of its chunk.
#pragma once

#include "carry.cuh"

// Of what goes out, what is null is not written.
struct ForgetMultArgs {
    Sequences sequences;
    Work work;
    Rows f, x, h0, h;
    Compute* starts;  // [slots, kWarps, H] for the state before each chunk, or null
};

struct FoPoolArgs {
    Sequences sequences;
    Work work;
    double zoneout;
    Rows gates, c0, h, c;
    Compute* starts;  // as above
};

// Timesteps of a warp's chunk, of a tile that has `count`.
__device__ inline int steps_of(int warp, int count) {
    return (int)clamp(count - warp * kSteps, 0, kSteps);
}

// One tensor's part of a tile, in the block's memory. A warp copies and reads its own chunk; a
// `warp_barrier` must stand between.
template <int V>
struct alignas(16) Column {
    Vector<V> steps[kWarps][kSteps][32];

    // Of a chunk of `count` timesteps, for the channels of a job; the others are filled.
    __device__ void start(const Sequences& s, const Job& job, int warp, int lane,
                          const Input& from, int count, Compute filler) {
        if constexpr (V == 1) {
            // Rows begin anywhere: a thread copies its own channel.
            const char* at = from.at(warp * kSteps);
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                if (k < count) start_load<V>(steps[warp][k][lane], from.after(at, k));
            }
        } else {
            // Rows are aligned: so many bytes at once, whatever channels they are.
            constexpr int kBytes = QRNN_ROW_BYTES;
            constexpr int kPieces = 32 * sizeof(Vector<V>) / kBytes;  // of a row
            constexpr int kRows = 32 / kPieces;                       // that a warp copies at once
            const int row = lane / kPieces, piece = lane % kPieces;
            const char* at = from.at(warp * kSteps + row) + kBytes * piece;
            const bool exists = job.channel + piece * (kBytes / (int)sizeof(Storage)) < s.hidden;
#pragma unroll
            for (int k = 0; k < kSteps; k += kRows) {
                if (exists && k + row < count) {
                    char* to = (char*)steps[warp][k + row] + kBytes * piece;
                    start_copy<kBytes>(to, from.after(at, k));
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            if (k >= count) steps[warp][k][lane] = everywhere<V>(filler);
        }
    }

    __device__ void read(int warp, int k, int lane, Compute (&out)[V]) const {
        widen<V>(steps[warp][k][lane], out);
    }
};

template <int V>
__device__ inline void write_rows(const Output& to, int warp, int count,
                                  const Vector<V> (&rows)[kSteps]) {
    char* at = to.at(warp * kSteps);
    if (count == kSteps) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) store<V>(to.after(at, k), rows[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        if (k < count) store<V>(to.after(at, k), rows[k]);
    }
}

// Where a thread's channels lie in the tensors of one job; what starts nowhere is left out.
struct ForwardStrips {
    Input x, f, o;
    Output h;
};

template <bool output_gate, int V>
struct ForwardMemory {
    BlockMemory<V> shared;
    Column<V> columns[output_gate ? 3 : 2];  // fresh values, forget gates, output gates

    // Timesteps past the end get a forget gate of zero: they keep the state.
    __device__ void start_gates(const Sequences& s, const Job& job, int warp, int lane,
                                const ForwardStrips& from, Compute closed) {
        const int count = steps_of(warp, job.count);
        if (count > 0) {
            columns[0].start(s, job, warp, lane, from.x, count, 0);
            columns[1].start(s, job, warp, lane, from.f, count, closed);
        }
        end_of_copies();
    }

    __device__ void start_output(const Sequences& s, const Job& job, int warp, int lane,
                                 const ForwardStrips& from) {
        const int count = steps_of(warp, job.count);
        if (output_gate && count > 0) {
            columns[output_gate ? 2 : 0].start(s, job, warp, lane, from.o, count, 0);
        }
        end_of_copies();
    }
};

// The state of every timestep is decay * (state before the chunk) + local.
template <bool activate, bool output_gate, int V>
struct ForwardChunk {
    Compute decay[kSteps][V], local[kSteps][V];

    // Inputs lie in the block's memory, or in registers.
    template <class Inputs>
    __device__ void run(const Inputs& memory, int warp, int lane, Compute keep,
                        Stretch (&stretch)[V]) {
        Compute all[V], fall[V], end[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            all[i] = 1;
            fall[i] = end[i] = 0;
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute fresh[V], forget[V];
            memory.columns[0].read(warp, k, lane, fresh);
            memory.columns[1].read(warp, k, lane, forget);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute f = activate ? sigmoid(forget[i]) * keep : forget[i];
                const Compute x = activate ? fresh_value(fresh[i]) : fresh[i];
                // f * x + (1 - f) * h: f = 1 resets the state exactly and f = 0 keeps it exactly.
                end[i] = fma((Compute)1 - f, end[i], f * x);
                all[i] *= (Compute)1 - f;
                fall[i] = fma(f, (Compute)1 - fall[i], fall[i]);
                decay[k][i] = all[i];
                local[k][i] = end[i];
            }
        }
#pragma unroll
        for (int i = 0; i < V; ++i) stretch[i] = stretch_of(all[i], fall[i], end[i]);
    }

    template <class Inputs>
    __device__ void write(const Inputs& memory, int warp, int lane, const Output& h, int count,
                          const Compute (&before)[V]) {
        Vector<V> rows[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute out[V];
            if (output_gate) memory.columns[output_gate ? 2 : 0].read(warp, k, lane, out);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute cell = fma(decay[k][i], before[i], local[k][i]);
                out[i] = output_gate ? output_gate_of(out[i]) * cell : cell;
            }
            rows[k] = narrow<V>(out);
        }
        write_rows<V>(h, warp, count, rows);
    }
};

// Of no timesteps.
template <int V>
__device__ inline void keep_state(Stretch (&stretch)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) stretch[i] = {(Wide)1, (Wide)0};
}

template <int V>
__device__ inline void hand_in(BlockMemory<V>& memory, int warp, int lane,
                               const Stretch (&stretch)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) memory.chunks[warp][i][lane] = stretch[i];
}

template <int V>
__device__ inline void take_back(const BlockMemory<V>& memory, int warp, int lane,
                                 Compute (&before)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        before[i] = (Compute)applied(memory.chunks[warp][i][lane], memory.state[i][lane]);
    }
}

// A thread's channels in a job.
template <int V>
struct Channels {
    bool active;    // they exist
    int64 channel;  // threads past the last one read it again, so that all of a warp do the same

    __device__ Channels(const Sequences& s, const Job& job, int lane) {
        const int64 own = job.channel + lane * V;
        active = own < s.hidden;
        channel = active ? own : s.hidden - V;
    }

    // Where the state before a warp's chunk is kept for a backward pass.
    template <class T>
    __device__ T* start(T* starts, const Sequences& s, const Job& job, int warp) const {
        return starts + (job.slot * kWarps + warp) * s.hidden + channel;
    }
};

// The warps of a block that have a chunk of each tile. Between the two barriers of a job the
// carrying warp makes what comes before each chunk; what the next job needs is copied meanwhile.
template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_chunks(const Sequences& s, ForwardMemory<output_gate, V>& memory,
                                   Compute* starts, Compute keep, const MakeStrips& make_strips) {
    const int warp = thread_of_block() / 32, lane = thread_of_block() % 32;
    const Compute closed = activate ? (Compute)minus_infinity() : (Compute)0;
    const auto copied_from = [&](const Job& job) {
        return make_strips(job, V == 1 ? Channels<V>(s, job, lane).channel : job.channel);
    };
    barrier();
    const Job* job = &memory.shared.job(0);
    memory.start_gates(s, *job, warp, lane, copied_from(*job), closed);
    memory.start_output(s, *job, warp, lane, copied_from(*job));
    for (int number = 1; job->count != kNoJob; ++number) {
        const int count = steps_of(warp, job->count);
        ForwardChunk<activate, output_gate, V> chunk;
        Stretch stretch[V];
        wait_for_copies<1>();
        warp_barrier();
        if (count > 0) {
            chunk.run(memory, warp, lane, keep, stretch);
        } else {
            keep_state(stretch);
        }
        hand_in<V>(memory.shared, warp, lane, stretch);
        barrier();
        const Job* next = &memory.shared.job(number);
        memory.start_gates(s, *next, warp, lane, copied_from(*next), closed);
        barrier();
        if (count > 0) {
            Compute before[V];
            take_back<V>(memory.shared, warp, lane, before);
            const Channels<V> at(s, *job, lane);
            const ForwardStrips strips = make_strips(*job, at.channel);
            wait_for_copies<1>();
            warp_barrier();
            if (strips.h.start) {
                chunk.write(memory, warp, lane, strips.h, at.active ? count : 0, before);
            }
            if (starts && at.active) {
                Compute* start = at.start(starts, s, *job, warp);
#pragma unroll
                for (int i = 0; i < V; ++i) start[i] = before[i];
            }
        }
        warp_barrier();
        memory.start_output(s, *next, warp, lane, copied_from(*next));
        job = next;
    }
}

// The carrying warp of a block, beside the others of a forward or `backwards` scan: `initial` is the
// state at the scan's start, `final` where the one at its end goes, or no data.
template <int V>
__device__ inline void carry_state(const Sequences& s, const Work& work, BlockMemory<V>& memory,
                                   const Rows& initial, const Rows& final, bool backwards) {
    const int lane = thread_of_block() % 32;
    uint64 ticket = 0;
    if (work.words) claim(work.claimed, lane == 0, ticket);
    if (lane == 0) {
        memory.jobs.begin();
        memory.job(0) = memory.jobs.next(s, work, backwards, ticket);
    }
    barrier();
    if (work.words) claim(work.claimed, lane == 0, ticket);
    Carry<V> carry{memory, lane};
    for (int number = 1;; ++number) {
        const Job& job = memory.job(number - 1);
        if (job.count == kNoJob) return;
        const Channels<V> at(s, job, lane);
        carry.active = at.active;
        carry.count = backwards ? job.after : job.before;
        carry.step = slot_step(s) * s.hidden * (backwards ? -1 : 1);
        if (work.words) carry.words = work.words + job.slot * s.hidden + at.channel;
        // The nearest words are read while there is nothing else to do.
        if (carry.looks_back()) carry.template fetch<1>(0);
        if (lane == 0) memory.job(number) = memory.jobs.next(s, work, backwards, ticket);
        if (carry.count == 0) {
#pragma unroll
            for (int i = 0; i < V; ++i) carry.state[i] = read_state(initial, job, at.channel + i);
        }
        if (carry.looks_back() && !carry.knows()) carry.template fetch<kEarly>(0);
        barrier();
        if (work.words) claim(work.claimed, lane == 0, ticket);
        // Others wait for the word of an empty slot only where offsets are wrong.
        if (job.count > 0) {
            carry.join(backwards);
        } else {
            carry.publish();
        }
        barrier();
        if (final.data == nullptr || !at.active) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            const int64 channel = at.channel + i;
            if ((backwards ? job.before : job.after) == 0) {
                write_state(final, job.sequence, channel, carry.state[i]);
            }
            if (job.flags & kLost) write_state(final, job.slot, channel, not_a_number());
        }
    }
}

template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan(const Sequences& s, const Work& work, Compute* starts, Compute keep,
                            const Rows& initial, const Rows& final,
                            const MakeStrips& make_strips) {
    auto& memory = block_memory<ForwardMemory<output_gate, V>>();
    if (thread_of_block() < kWarps * 32) {
        scan_chunks<activate, output_gate, V>(s, memory, starts, keep, make_strips);
    } else {
        carry_state<V>(s, work, memory.shared, initial, final, false);
    }
}

// Where the tensors of an operator lie, for one job.
struct ForgetMultStrips {
    const ForgetMultArgs& a;

    __device__ ForwardStrips operator()(const Job& job, int64 channel) const {
        ForwardStrips strips;
        strips.x = Input(a.x, a.sequences, job, channel);
        strips.f = Input(a.f, a.sequences, job, channel);
        strips.h = Output(a.h, a.sequences, job, channel);
        return strips;
    }
};

template <bool output_gate>
struct FoPoolStrips {
    const FoPoolArgs& a;

    __device__ ForwardStrips operator()(const Job& job, int64 channel) const {
        const Sequences& s = a.sequences;
        ForwardStrips strips;
        strips.x = Input(a.gates, s, job, channel);
        strips.f = Input(a.gates, s, job, channel + s.hidden);
        if (output_gate) strips.o = Input(a.gates, s, job, channel + 2 * s.hidden);
        strips.h = Output(a.h, s, job, channel);
        return strips;
    }
};

template <int V>
__device__ inline void forget_mult(const ForgetMultArgs& a) {
    scan<false, false, V>(a.sequences, a.work, a.starts, 1, a.h0, Rows{nullptr, 0, 0},
                          ForgetMultStrips{a});
}

template <bool output_gate, int V>
__device__ inline void fo_pool(const FoPoolArgs& a) {
    scan<true, output_gate, V>(a.sequences, a.work, a.starts, (Compute)(1.0 - a.zoneout), a.c0, a.c,
                               FoPoolStrips<output_gate>{a});
}
