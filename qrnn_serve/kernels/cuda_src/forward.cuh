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
        const Vector<V> closed = everywhere<V>(activate ? (Compute)minus_infinity() : (Compute)0);
        const Vector<V> zero = everywhere<V>(0);
        const char *x_at = x.at(position), *f_at = f.at(position), *o_at = nullptr;
        if (output_gate) o_at = o.at(position);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const bool there = k < count;
            fresh[k] = there ? load<V>(x_at) : zero;
            forget[k] = there ? load<V>(f_at) : closed;
            if (output_gate) output[k] = there ? load<V>(o_at) : zero;
            x_at += x.step;
            f_at += f.step;
            if (output_gate) o_at += o.step;
        }
    }
};

// Where a thread's channels lie in the tensors of one sequence.
struct ForwardStrips {
    Input x, f, o;
    Output h;
    Rows initial, final;
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
            if (k < count) store<V>(h_at, narrow<V>(out));
            h_at += h.step;
        }
    }
};

__device__ inline int steps_in(int64 position, int64 end) {
    return (int)clamp(end - position, 0, kSteps);
}

template <int V>
__device__ inline void write_starts(Compute* at, const Compute (&before)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) at[i] = before[i];
}

// `strips(line, channel)` makes the ForwardStrips of one sequence. With `starts` only the states
// before the chunks are kept, for a backward pass.
template <bool activate, bool output_gate, bool record, int V, class MakeStrips>
__device__ inline void scan(const Sequences& s, const Work& work, Compute* starts,
                            const MakeStrips& strips) {
    CarryMemory<V>& memory = block_memory<CarryMemory<V>>();
    const int lane = thread_of_block() % 32, warp = thread_of_block() / 32;
    const int64 items = work.slots * work.channel_tiles;
    for (int64 item = block_of_grid(); item < items; item += blocks_of_grid()) {
        const int64 channel = (item % work.channel_tiles * 32 + lane) * V;
        const bool active = channel < s.hidden;
        Span span(s, work, item / work.channel_tiles);
        const Line line(s, span.sequence);
        span.cut(work, line.count);
        const ForwardStrips strip = strips(line, channel);
        Carry<V> carry{memory, warp, lane, active};
        read_state<V>(strip.initial, line, channel, active && span.first, carry.state);
        uint64* words = work.words ? work.words + span.slot * s.hidden + channel : nullptr;

        int64 slot = span.slot;
        for (int64 tile = span.begin; tile < span.end; tile += kTile) {
            const int64 position = tile + warp * kSteps;
            const int count = active ? steps_in(position, span.end) : 0;
            ForwardChunk<activate, output_gate && !record, V> chunk;
            chunk.gates.read(strip.x, strip.f, strip.o, position, count);
            Stretch stretch[V];
            chunk.run(strip.keep, stretch);
            carry.join_chunks(stretch, warp);
            if (!span.first) {
                carry.publish_tile(words);
                carry.look_back(words, span.slot_step * s.hidden, span.begin / kTile);
            }
            Compute before[V];
#pragma unroll
            for (int i = 0; i < V; ++i) before[i] = carry.at_chunk(i);
            carry.finish_tile();
            if (work.words) carry.publish_state(words);
            if (!record) {
                chunk.write(strip.h, position, count, before);
            } else if (count > 0) {
                write_starts<V>(starts + (slot * kWarps + warp) * s.hidden + channel, before);
            }
            slot += span.slot_step;
        }
        // Others wait for the word of an empty slot only where offsets are wrong.
        if (work.words && span.begin >= span.end) carry.publish_state(words);
        if (!record && strip.final.data && span.last && warp == 0 && active) {
            write_state<V>(strip.final, span.sequence, channel, carry.state);
        }
        if (!record && strip.final.data && work.words && s.offsets) {
            spoil_lost_sequence<V>(s, span.slot, strip.final, channel, active && warp == 0);
        }
        barrier();
    }
}

template <int V, bool record>
__device__ inline void forget_mult(const ForgetMultArgs& a) {
    const Sequences& s = a.sequences;
    scan<false, false, record, V>(s, a.work, a.starts, [&](const Line& line, int64 channel) {
        ForwardStrips strips;
        strips.x = Input(a.x, s, line, channel);
        strips.f = Input(a.f, s, line, channel);
        strips.h = Output(a.h, s, line, channel);
        strips.initial = a.h0;
        strips.final = Rows{nullptr, 0, 0};
        strips.keep = 1;
        return strips;
    });
}

template <bool output_gate, int V, bool record>
__device__ inline void fo_pool(const FoPoolArgs& a) {
    const Sequences& s = a.sequences;
    scan<true, output_gate, record, V>(s, a.work, a.starts, [&](const Line& line, int64 channel) {
        ForwardStrips strips;
        strips.x = Input(a.gates, s, line, channel);
        strips.f = Input(a.gates, s, line, channel + s.hidden);
        if (output_gate) strips.o = Input(a.gates, s, line, channel + 2 * s.hidden);
        strips.h = Output(a.h, s, line, channel);
        strips.initial = a.c0;
        strips.final = a.c;
        strips.keep = (Compute)(1.0 - a.zoneout);
        return strips;
    });
}
