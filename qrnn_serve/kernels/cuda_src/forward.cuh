// The scan over time: what a thread does with the timesteps of its chunk.
#pragma once

#include "carry.cuh"

struct ForgetMultArgs {
    Sequences sequences;
    Work work;
    Rows f, x, h0, h;
    Compute* starts;  // [slots, kWarps, H] for the state before each chunk, or null; then h is not
                      // written
};

struct FoPoolArgs {
    Sequences sequences;
    Work work;
    double zoneout;
    Rows gates, c0, h, c;
    Compute* starts;  // as above
};

// Loads the gates of a chunk. Timesteps past the end get a forget gate of zero: they keep the
// state.
template <bool activate, bool output_gate, int V>
struct Gates {
    Vector<V> fresh[kSteps], forget[kSteps], output[output_gate ? kSteps : 1];

    __device__ void read(const Input& x, const Input& f, const Input& o, int64 position, int count) {
        const char *x_at = x.at(position), *f_at = f.at(position);
        const char* o_at = output_gate ? o.at(position) : nullptr;
        if (count == kSteps) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                fresh[k] = load<V>(x_at + (int64)x.step * k);
                forget[k] = load<V>(f_at + (int64)f.step * k);
                if (output_gate) output[k] = load<V>(o_at + (int64)o.step * k);
            }
            return;
        }
        const Vector<V> closed = everywhere<V>(activate ? (Compute)minus_infinity() : (Compute)0);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            fresh[k] = everywhere<V>(0);
            forget[k] = closed;
            if (output_gate) output[k] = everywhere<V>(0);
            if (k < count) {
                fresh[k] = load<V>(x_at + (int64)x.step * k);
                forget[k] = load<V>(f_at + (int64)f.step * k);
                if (output_gate) output[k] = load<V>(o_at + (int64)o.step * k);
            }
        }
    }
};

// Where a thread's channels lie in the tensors of one sequence.
struct ForwardStrips {
    Input x, f, o;
    Output h;
    Compute keep;
};

// The state of every timestep is decay * (state before the chunk) + local.
template <bool activate, bool output_gate, int V>
struct ForwardChunk {
    Compute decay[kSteps][V], local[kSteps][V];
    Gates<activate, output_gate, V> gates;

    __device__ void run(Compute keep, Stretch (&stretch)[V]) {
        Compute all[V], fall[V], end[V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            all[i] = 1;
            fall[i] = end[i] = 0;
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute fresh[V], forget[V];
            widen<V>(gates.fresh[k], fresh);
            widen<V>(gates.forget[k], forget);
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

    __device__ void write(const Output& h, int64 position, int count, const Compute (&before)[V]) {
        char* h_at = h.at(position);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute out[V];
            if (output_gate) widen<V>(gates.output[k], out);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute cell = fma(decay[k][i], before[i], local[k][i]);
                out[i] = output_gate ? output_gate_of(out[i]) * cell : cell;
            }
            if (k < count) store<V>(h_at + (int64)h.step * k, narrow<V>(out));
        }
    }
};

__device__ inline int steps_in(int64 position, int64 end) {
    return (int)clamp(end - position, 0, kSteps);
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
    for (int i = 0; i < V; ++i) before[i] = memory.before[warp][i][lane];
}

// A block's part, and a thread's channels in it.
template <int V>
struct Place {
    int lane, warp;
    Span span;
    Line line;
    bool active;      // the channels exist
    int64 channel;    // threads past the last one read it again, so that all of a warp do the same

    __device__ Place(const Sequences& s, const Work& work, unsigned item)
        : lane(thread_of_block() % 32),
          warp(thread_of_block() / 32),
          span(s, work, quotient(item, work.by_channel_tiles), lane),
          line(s, span.sequence) {
        span.cut(work, line.count);
        const unsigned index = quotient(item, work.by_channel_tiles);
        const unsigned channel_tile = item - index * (unsigned)work.channel_tiles;
        const int64 own = ((int64)channel_tile * 32 + lane) * V;
        active = own < s.hidden;
        channel = active ? own : s.hidden - V;
    }

    __device__ uint64* words(const Sequences& s, const Work& work) const {
        return work.words ? work.words + span.slot * s.hidden + channel : nullptr;
    }

    // Where the state before this warp's chunk is kept for a backward pass.
    template <class T>
    __device__ T* start(T* starts, const Sequences& s, int64 slot) const {
        return starts + (slot * kWarps + warp) * s.hidden + channel;
    }
};

// `strips(line, channel)` makes the ForwardStrips of one sequence. With `starts` only the states
// before the chunks are kept, for a backward pass.
template <bool activate, bool output_gate, bool record, int V, class MakeStrips>
__device__ inline void scan_chunks(const Sequences& s, const Place<V>& at, Compute* starts,
                                   BlockMemory<V>& memory, const MakeStrips& strips) {
    const ForwardStrips strip = strips(at.line, at.channel);
    int64 slot = at.span.slot;
    for (int64 tile = at.span.begin; tile < at.span.end; tile += kTile) {
        const int64 position = tile + at.warp * kSteps;
        const int count = steps_in(position, at.span.end);
        ForwardChunk<activate, output_gate && !record, V> chunk;
        chunk.gates.read(strip.x, strip.f, strip.o, position, count);
        Stretch stretch[V];
        chunk.run(strip.keep, stretch);
        hand_in<V>(memory, at.warp, at.lane, stretch);
        barrier();
        barrier();
        Compute before[V];
        take_back<V>(memory, at.warp, at.lane, before);
        if (!record) {
            chunk.write(strip.h, position, at.active ? count : 0, before);
        } else if (at.active && count > 0) {
            Compute* start = at.start(starts, s, slot);
#pragma unroll
            for (int i = 0; i < V; ++i) start[i] = before[i];
        }
        slot += at.span.slot_step;
    }
}

// The carrying warp, beside `scan_chunks` or the backward one: `initial` is the state at the
// scan's start, `final` where the one at its end goes, or no data.
template <int V>
__device__ inline void carry_state(const Sequences& s, const Work& work, const Place<V>& at,
                                   BlockMemory<V>& memory, const Rows& initial, const Rows& final,
                                   bool backwards) {
    const Span& span = at.span;
    const bool starts = backwards ? span.last : span.first;
    const bool ends = backwards ? span.first : span.last;
    Carry<V> carry{memory, at.lane, at.active};
    carry.words = at.words(s, work);
    carry.step = span.slot_step * s.hidden * (backwards ? -1 : 1);
    if (starts) {
#pragma unroll
        for (int i = 0; i < V; ++i) carry.state[i] = read_state(initial, at.line, at.channel + i);
    } else {
        const int64 tile = span.begin / kTile;
        carry.count = backwards ? (at.line.count - 1) / kTile - tile : tile;
    }
    carry.look_early();
    for (int64 tile = span.begin; tile < span.end; tile += kTile) {
        barrier();
        carry.join(backwards);
        barrier();
    }
    // Others wait for the word of an empty slot only where offsets are wrong.
    if (span.begin >= span.end) carry.publish();
    if (final.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const int64 channel = at.channel + i;
        if (ends && at.active) write_state(final, span.sequence, channel, carry.state[i]);
        if (work.words && s.offsets) {
            spoil_lost_sequence(s, span.slot, final, channel, at.lane, at.active);
        }
    }
}

template <bool activate, bool output_gate, bool record, int V, class MakeStrips>
__device__ inline void scan(const Sequences& s, const Work& work, Compute* starts,
                            const Rows& initial, const Rows& final, const MakeStrips& strips) {
    BlockMemory<V>& memory = block_memory<BlockMemory<V>>();
    for (unsigned item = block_of_grid(); item < work.items; item += blocks_of_grid()) {
        const Place<V> at(s, work, item);
        if (at.warp < kWarps) {
            scan_chunks<activate, output_gate, record, V>(s, at, starts, memory, strips);
        } else {
            carry_state<V>(s, work, at, memory, initial, record ? Rows{nullptr, 0, 0} : final,
                           false);
        }
    }
}

template <int V, bool record>
__device__ inline void forget_mult(const ForgetMultArgs& a) {
    const Sequences& s = a.sequences;
    const auto strips = [&](const Line& line, int64 channel) {
        ForwardStrips strip;
        strip.x = Input(a.x, s, line, channel);
        strip.f = Input(a.f, s, line, channel);
        strip.h = Output(a.h, s, line, channel);
        strip.keep = 1;
        return strip;
    };
    scan<false, false, record, V>(s, a.work, a.starts, a.h0, Rows{nullptr, 0, 0}, strips);
}

template <bool output_gate, int V, bool record>
__device__ inline void fo_pool(const FoPoolArgs& a) {
    const Sequences& s = a.sequences;
    const auto strips = [&](const Line& line, int64 channel) {
        ForwardStrips strip;
        strip.x = Input(a.gates, s, line, channel);
        strip.f = Input(a.gates, s, line, channel + s.hidden);
        if (output_gate) strip.o = Input(a.gates, s, line, channel + 2 * s.hidden);
        strip.h = Output(a.h, s, line, channel);
        strip.keep = (Compute)(1.0 - a.zoneout);
        return strip;
    };
    scan<true, output_gate, record, V>(s, a.work, a.starts, a.c0, a.c, strips);
}
