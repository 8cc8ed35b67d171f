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
                fresh[k] = load<V>(x.after(x_at, k));
                forget[k] = load<V>(f.after(f_at, k));
                if (output_gate) output[k] = load<V>(o.after(o_at, k));
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
                fresh[k] = load<V>(x.after(x_at, k));
                forget[k] = load<V>(f.after(f_at, k));
                if (output_gate) output[k] = load<V>(o.after(o_at, k));
            }
        }
    }
};

template <int V>
__device__ inline void write_rows(const Output& to, int64 position, int count,
                                  const Vector<V> (&rows)[kSteps]) {
    char* at = to.at(position);
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

// Where a thread's channels lie in the tensors of one span; `o` may start nowhere.
struct ForwardStrips {
    Input x, f, o;
    Output h;
    Compute keep;

    __device__ void fetch(int64 position) const {
        fetch_ahead(x.at(position));
        fetch_ahead(f.at(position));
        if (o.start != nullptr) fetch_ahead(o.at(position));
    }
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
        Vector<V> rows[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute out[V];
            if (output_gate) widen<V>(gates.output[k], out);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute cell = fma(decay[k][i], before[i], local[k][i]);
                out[i] = output_gate ? output_gate_of(out[i]) * cell : cell;
            }
            rows[k] = narrow<V>(out);
        }
        write_rows<V>(h, position, count, rows);
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
    for (int i = 0; i < V; ++i) {
        before[i] = (Compute)applied(memory.chunks[warp][i][lane], memory.state[i][lane]);
    }
}

// A block's part, and a thread's channels in it.
template <int V>
struct Place {
    int lane, warp;
    Span span;
    int64 tile_channel;  // the first of the block
    bool active;         // the thread's channels exist
    int64 channel;  // threads past the last one read it again, so that all of a warp do the same

    __device__ Place(const Sequences& s, const Work& work, unsigned item)
        : lane(thread_of_block() % 32),
          warp(thread_of_block() / 32),
          span(s, work, quotient(item, work.by_channel_tiles)) {
        const unsigned index = quotient(item, work.by_channel_tiles);
        tile_channel = (int64)(item - index * (unsigned)work.channel_tiles) * (32 * V);
        const int64 own = tile_channel + lane * V;
        active = own < s.hidden;
        channel = active ? own : s.hidden - V;
    }

    // Where the state before this warp's chunk is kept for a backward pass.
    template <class T>
    __device__ T* start(T* starts, const Sequences& s, int64 slot) const {
        return starts + (slot * kWarps + warp) * s.hidden + channel;
    }
};

// The warps of a block that have a chunk of each tile. With `starts` only the states before the
// chunks are kept, for a backward pass.
template <bool activate, bool output_gate, bool record, int V>
__device__ inline void scan_chunks(const Sequences& s, const Place<V>& at, Compute* starts,
                                   BlockMemory<V>& memory, const ForwardStrips& strip) {
    int64 slot = at.span.slot;
    for (int64 tile = 0; tile < at.span.count; tile += kTile) {
        const int64 position = tile + at.warp * kSteps;
        const int count = steps_in(position, at.span.count);
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

// Fetches up to one tile of a span, from timestep `from` on.
template <class Strips>
__device__ inline void fetch_tile(const Strips& strips, int64 from, int64 count, int lane) {
    for (int64 t = from + lane; t < from + kTile && t < count; t += 32) strips.fetch(t);
}

// The carrying warp, beside the others of a forward or `backwards` scan: `initial` is the state at
// the scan's start, `final` where the one at its end goes, or no data. `make_strips(span, channel)`
// says what to fetch.
template <int V, class MakeStrips>
__device__ inline void carry_state(const Sequences& s, const Work& work, const Place<V>& at,
                                   BlockMemory<V>& memory, const Rows& initial, const Rows& final,
                                   bool backwards, unsigned next, const MakeStrips& make_strips) {
    const Span& span = at.span;
    Carry<V> carry{memory, at.lane, at.active};
    carry.count = backwards ? span.after : span.before;
    carry.step = span.slot_step * s.hidden * (backwards ? -1 : 1);
    if (work.words) carry.words = work.words + span.slot * s.hidden + at.channel;
    if (carry.count == 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) carry.state[i] = read_state(initial, span, at.channel + i);
    }
    if (work.words && next < work.items) {
        const Place<V> later(s, work, next);
        fetch_tile(make_strips(later.span, later.tile_channel), 0, later.span.count, at.lane);
    }
    const auto strips = make_strips(span, at.tile_channel);
    for (int64 tile = 0; tile < span.count; tile += kTile) {
        const int64 last = (span.count - 1) / kTile * kTile;
        const int64 following = backwards ? last - tile - kTile : tile + kTile;
        if (following >= 0) fetch_tile(strips, following, span.count, at.lane);
        barrier();
        carry.join(backwards);
        barrier();
    }
    // Others wait for the word of an empty slot only where offsets are wrong.
    if (span.count == 0) carry.publish();
    if (final.data == nullptr || !at.active) return;
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const int64 channel = at.channel + i;
        if ((backwards ? span.before : span.after) == 0) {
            write_state(final, span.sequence, channel, carry.state[i]);
        }
        if (span.flags & kLost) write_state(final, span.slot, channel, not_a_number());
    }
}

template <bool activate, bool output_gate, bool record, int V, class MakeStrips>
__device__ inline void scan(const Sequences& s, const Work& work, Compute* starts,
                            const Rows& initial, const Rows& final,
                            const MakeStrips& make_strips) {
    BlockMemory<V>& memory = block_memory<BlockMemory<V>>();
    for (unsigned item = block_of_grid(); item < work.items; item += blocks_of_grid()) {
        const Place<V> at(s, work, item);
        if (at.warp < kWarps) {
            scan_chunks<activate, output_gate, record, V>(s, at, starts, memory,
                                                          make_strips(at.span, at.channel));
        } else {
            carry_state<V>(s, work, at, memory, initial, final, false,
                           item + (unsigned)work.ahead, make_strips);
        }
    }
}

template <int V, bool record>
__device__ inline void forget_mult(const ForgetMultArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Span& span, int64 channel) {
        ForwardStrips strip;
        strip.x = Input(a.x, s, span, channel);
        strip.f = Input(a.f, s, span, channel);
        strip.o.start = nullptr;
        strip.h = Output(a.h, s, span, channel);
        strip.keep = 1;
        return strip;
    };
    scan<false, false, record, V>(s, a.work, a.starts, a.h0, Rows{nullptr, 0, 0}, make_strips);
}

template <bool output_gate, int V, bool record>
__device__ inline void fo_pool(const FoPoolArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Span& span, int64 channel) {
        ForwardStrips strip;
        strip.x = Input(a.gates, s, span, channel);
        strip.f = Input(a.gates, s, span, channel + s.hidden);
        strip.o.start = nullptr;
        if (output_gate && !record) strip.o = Input(a.gates, s, span, channel + 2 * s.hidden);
        strip.h = Output(a.h, s, span, channel);
        strip.keep = (Compute)(1.0 - a.zoneout);
        return strip;
    };
    scan<true, output_gate, record, V>(s, a.work, a.starts, a.c0, a.c, make_strips);
}
