// The gradient: the scan from the last timestep to the first. With a_t the gradient of the loss
// with respect to the state after timestep t:
//
//   a_t = (gradient through the outputs at t) + (1 - f_{t+1}) * a_{t+1}
//   grad_x_t = a_t * f_t      grad_f_t = a_t * (x_t - h_{t-1})      grad_h0 = (1 - f_0) * a_0
//
// States are computed again, chunk by chunk, from the state before each chunk.
#pragma once

#include "forward.cuh"

struct ForgetMultBackwardArgs {
    Sequences sequences;
    Work work;
    Rows grad_h, f, x, h, h0, grad_f, grad_x, grad_h0;
    const Compute* starts;  // [slots, kWarps, H], or null: the states stand in h
};

struct FoPoolBackwardArgs {
    Sequences sequences;
    Work work;
    double zoneout;
    Rows grad_h, grad_c, gates, c0, grad_gates, grad_c0;
    const Compute* starts;  // [slots, kWarps, H]
};

struct BackwardStrips {
    Input grad, x, f, o, h;
    Output grad_x, grad_f, grad_o;
    Rows initial, grad_final, grad_initial;
    Compute keep;
};

// The gradient of a state is decay * (the one that comes into the chunk) + local.
template <bool activate, bool output_gate, int V>
struct BackwardChunk {
    Compute decay[kSteps][V], local[kSteps][V];
    Compute to_x[kSteps][V], to_f[kSteps][V];  // what they make of the gradient of the state
    Gates<activate, output_gate, V> gates;
    Vector<V> grads[kSteps];

    __device__ void read(const BackwardStrips& strip, int64 position, int count) {
        gates.read(strip.x, strip.f, strip.o, position, count);
        const Vector<V> zero = everywhere<V>(0);
        const bool given = strip.grad.start != nullptr;
        const char* at = strip.grad.at(position);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            grads[k] = given && k < count ? load<V>(at) : zero;
            at += strip.grad.step;
        }
    }

    // `cell` is the state before the chunk. Writes the gradient of the output gate, which needs no
    // other chunk.
    __device__ void run(const BackwardStrips& strip, int64 position, int count, Compute (&cell)[V],
                        Stretch (&stretch)[V]) {
        char* grad_o_at = output_gate ? strip.grad_o.at(position) : nullptr;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute fresh[V], forget[V], grad[V], gate[V];
            widen<V>(gates.fresh[k], fresh);
            widen<V>(gates.forget[k], forget);
            widen<V>(grads[k], grad);
            if (output_gate) widen<V>(gates.output[k], gate);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute open = activate ? sigmoid(forget[i]) : forget[i];
                const Compute f = activate ? open * strip.keep : open;
                const Compute x = activate ? tanh_of(fresh[i]) : fresh[i];
                to_x[k][i] = activate ? f * ((Compute)1 - x * x) : f;
                to_f[k][i] = (x - cell[i]) * (activate ? f * ((Compute)1 - open) : (Compute)1);
                cell[i] = fma((Compute)1 - f, cell[i], f * x);
                decay[k][i] = f;
                if (output_gate) {
                    const Compute o = sigmoid(gate[i]);
                    gate[i] = grad[i] * cell[i] * o * ((Compute)1 - o);
                    grad[i] *= o;
                }
                local[k][i] = grad[i];
            }
            if (output_gate) {
                if (k < count) store<V>(grad_o_at, narrow<V>(gate));
                grad_o_at += strip.grad_o.step;
            }
        }
        join_steps(stretch);
    }

    // Turns forget gates and gradients of the states alone into `decay` and `local`.
    __device__ void join_steps(Stretch (&stretch)[V]) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            Compute all = 1, fall = 0, adjoint = 0;
#pragma unroll
            for (int k = kSteps - 1; k >= 0; --k) {
                const Compute f = decay[k][i];
                adjoint += local[k][i];
                decay[k][i] = all;
                local[k][i] = adjoint;
                adjoint *= (Compute)1 - f;
                all *= (Compute)1 - f;
                fall = fma(f, (Compute)1 - fall, fall);
            }
            stretch[i] = stretch_of(all, fall, adjoint);
        }
    }

    __device__ void write(const BackwardStrips& strip, int64 position, int count,
                          const Compute (&after)[V]) {
        char *x_at = strip.grad_x.at(position), *f_at = strip.grad_f.at(position);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute grad_x[V], grad_f[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute adjoint = fma(decay[k][i], after[i], local[k][i]);
                grad_x[i] = adjoint * to_x[k][i];
                grad_f[i] = adjoint * to_f[k][i];
            }
            if (k < count) {
                store<V>(x_at, narrow<V>(grad_x));
                store<V>(f_at, narrow<V>(grad_f));
            }
            x_at += strip.grad_x.step;
            f_at += strip.grad_f.step;
        }
    }
};

template <int V>
__device__ inline void state_before_chunk(const Compute* start, const BackwardStrips& strip,
                                          const Line& line, int64 channel, int64 position,
                                          int count, Compute (&out)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = 0;
    if (count == 0) return;
    if (start != nullptr) {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = start[i];
    } else if (position > 0 && line.valid) {
        widen<V>(load<V>(strip.h.at(position - 1)), out);
    } else {
        Wide state[V];
        read_state<V>(strip.initial, line, channel, true, state);
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = (Compute)state[i];
    }
}

// `strips(line, channel)` makes the BackwardStrips of one sequence. Tiles, chunks and timesteps are
// taken from the last to the first; where they begin is as in the forward scan.
template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_back(const Sequences& s, const Work& work, const Compute* starts,
                                 const MakeStrips& strips) {
    CarryMemory<V>& memory = block_memory<CarryMemory<V>>();
    const int lane = thread_of_block() % 32, warp = thread_of_block() / 32;
    const int64 items = work.slots * work.channel_tiles;
    for (int64 item = block_of_grid(); item < items; item += blocks_of_grid()) {
        const int64 channel = (item % work.channel_tiles * 32 + lane) * V;
        const bool active = channel < s.hidden;
        // The last slots come first: blocks wait for blocks that have started before them.
        Span span(s, work, work.slots - 1 - item / work.channel_tiles);
        const Line line(s, span.sequence);
        span.cut(work, line.count);
        const BackwardStrips strip = strips(line, channel);
        Carry<V> carry{memory, warp, lane, active};
        read_state<V>(strip.grad_final, line, channel, active, carry.state);
        uint64* words = work.words ? work.words + span.slot * s.hidden + channel : nullptr;

        const int64 tiles = (span.end - span.begin + kTile - 1) / kTile;
        for (int64 tile = tiles - 1; tile >= 0; --tile) {
            const int64 position = span.begin + tile * kTile + warp * kSteps;
            const int64 slot = span.slot + tile * span.slot_step;
            const int count = active ? steps_in(position, span.end) : 0;
            const Compute* start = nullptr;
            if (starts) start = starts + (slot * kWarps + warp) * s.hidden + channel;
            BackwardChunk<activate, output_gate, V> chunk;
            Compute cell[V];
            chunk.read(strip, position, count);
            state_before_chunk<V>(start, strip, line, channel, position, count, cell);
            Stretch stretch[V];
            chunk.run(strip, position, count, cell, stretch);
            carry.join_chunks(stretch, kWarps - 1 - warp);
            if (!span.last) {
                carry.publish_tile(words);
                const int64 later = (line.count + kTile - 1) / kTile - 1 - span.begin / kTile;
                carry.look_back(words, -span.slot_step * s.hidden, later);
            }
            Compute after[V];
#pragma unroll
            for (int i = 0; i < V; ++i) after[i] = carry.at_chunk(i);
            carry.finish_tile();
            if (work.words) carry.publish_state(words);
            chunk.write(strip, position, count, after);
        }
        if (work.words && tiles <= 0) carry.publish_state(words);
        if (span.first && warp == 0 && active) {
            write_state<V>(strip.grad_initial, span.sequence, channel, carry.state);
        }
        if (work.words && s.offsets) {
            spoil_lost_sequence<V>(s, span.slot, strip.grad_initial, channel, active && warp == 0);
        }
        barrier();
    }
}

template <int V>
__device__ inline void forget_mult_backward(const ForgetMultBackwardArgs& a) {
    const Sequences& s = a.sequences;
    scan_back<false, false, V>(s, a.work, a.starts, [&](const Line& line, int64 channel) {
        BackwardStrips strips;
        strips.grad = Input(a.grad_h, s, line, channel);
        strips.x = Input(a.x, s, line, channel);
        strips.f = Input(a.f, s, line, channel);
        strips.h = Input(a.h, s, line, channel);
        strips.grad_x = Output(a.grad_x, s, line, channel);
        strips.grad_f = Output(a.grad_f, s, line, channel);
        strips.initial = a.h0;
        strips.grad_final = Rows{nullptr, 0, 0};
        strips.grad_initial = a.grad_h0;
        strips.keep = 1;
        return strips;
    });
}

template <bool output_gate, int V>
__device__ inline void fo_pool_backward(const FoPoolBackwardArgs& a) {
    const Sequences& s = a.sequences;
    scan_back<true, output_gate, V>(s, a.work, a.starts, [&](const Line& line, int64 channel) {
        const int64 f_channel = channel + s.hidden, o_channel = channel + 2 * s.hidden;
        BackwardStrips strips;
        strips.grad = Input(a.grad_h, s, line, channel);
        strips.x = Input(a.gates, s, line, channel);
        strips.f = Input(a.gates, s, line, f_channel);
        strips.grad_x = Output(a.grad_gates, s, line, channel);
        strips.grad_f = Output(a.grad_gates, s, line, f_channel);
        if (output_gate) {
            strips.o = Input(a.gates, s, line, o_channel);
            strips.grad_o = Output(a.grad_gates, s, line, o_channel);
        }
        strips.initial = a.c0;
        strips.grad_final = a.grad_c;
        strips.grad_initial = a.grad_c0;
        strips.keep = (Compute)(1.0 - a.zoneout);
        return strips;
    });
}
