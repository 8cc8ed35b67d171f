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
    Rows initial;
    Compute keep;

    __device__ void fetch(int64 position) const {
        fetch_ahead(x.at(position));
        fetch_ahead(f.at(position));
        if (o.start != nullptr) fetch_ahead(o.at(position));
        if (grad.start != nullptr) fetch_ahead(grad.at(position));
    }
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
        const int given = strip.grad.start != nullptr ? count : 0;
        const char* at = strip.grad.at(position);
        if (given == kSteps) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) grads[k] = load<V>(strip.grad.after(at, k));
            return;
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            grads[k] = everywhere<V>(0);
            if (k < given) grads[k] = load<V>(strip.grad.after(at, k));
        }
    }

    // `cell` is the state before the chunk. Writes the gradient of the output gate, which needs no
    // other chunk.
    __device__ void run(const BackwardStrips& strip, int64 position, int to_write,
                        Compute (&cell)[V], Stretch (&stretch)[V]) {
        Vector<V> rows[kSteps];
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
            if (output_gate) rows[k] = narrow<V>(gate);
        }
        if (output_gate) write_rows<V>(strip.grad_o, position, to_write, rows);
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

    __device__ void write(const BackwardStrips& strip, int64 position, int to_write,
                          const Compute (&after)[V]) {
        Vector<V> x_rows[kSteps], f_rows[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute grad_x[V], grad_f[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute adjoint = fma(decay[k][i], after[i], local[k][i]);
                grad_x[i] = adjoint * to_x[k][i];
                grad_f[i] = adjoint * to_f[k][i];
            }
            x_rows[k] = narrow<V>(grad_x);
            f_rows[k] = narrow<V>(grad_f);
        }
        write_rows<V>(strip.grad_x, position, to_write, x_rows);
        write_rows<V>(strip.grad_f, position, to_write, f_rows);
    }
};

template <int V>
__device__ inline void state_before_chunk(const Compute* start, const BackwardStrips& strip,
                                          const Span& span, int64 channel, int64 position,
                                          int count, Compute (&out)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = 0;
    if (count == 0) return;
    if (start != nullptr) {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = start[i];
    } else if ((position > 0 || span.before > 0) && (span.flags & kValid)) {
        widen<V>(load<V>(strip.h.at(position - 1)), out);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) out[i] = (Compute)read_state(strip.initial, span, channel + i);
    }
}

// The warps that have chunks. Tiles, chunks and timesteps are taken from the last to the first;
// where they begin is as in the forward scan.
template <bool activate, bool output_gate, int V>
__device__ inline void scan_chunks_back(const Sequences& s, const Place<V>& at,
                                        const Compute* starts, BlockMemory<V>& memory,
                                        const BackwardStrips& strip) {
    const Span& span = at.span;
    const int64 tiles = (span.count + kTile - 1) / kTile;
    for (int64 tile = tiles - 1; tile >= 0; --tile) {
        const int64 position = tile * kTile + at.warp * kSteps;
        const int count = steps_in(position, span.count);
        const Compute* start = nullptr;
        if (starts) start = at.start(starts, s, span.slot + tile * span.slot_step);
        BackwardChunk<activate, output_gate, V> chunk;
        Compute cell[V];
        chunk.read(strip, position, count);
        state_before_chunk<V>(start, strip, span, at.channel, position, count, cell);
        Stretch stretch[V];
        chunk.run(strip, position, at.active ? count : 0, cell, stretch);
        hand_in<V>(memory, at.warp, at.lane, stretch);
        barrier();
        barrier();
        Compute after[V];
        take_back<V>(memory, at.warp, at.lane, after);
        chunk.write(strip, position, at.active ? count : 0, after);
    }
}

template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_back(const Sequences& s, const Work& work, const Compute* starts,
                                 const Rows& grad_final, const Rows& grad_initial,
                                 const MakeStrips& make_strips) {
    BlockMemory<V>& memory = block_memory<BlockMemory<V>>();
    for (unsigned item = block_of_grid(); item < work.items; item += blocks_of_grid()) {
        // The last slots come first: blocks wait for blocks that have started before them.
        const unsigned mirrored = (unsigned)work.items - 1 - item;
        const Place<V> at(s, work, mirrored);
        if (at.warp < kWarps) {
            scan_chunks_back<activate, output_gate, V>(s, at, starts, memory,
                                                       make_strips(at.span, at.channel));
        } else {
            // Below zero it is past the last item, like any that is too large.
            carry_state<V>(s, work, at, memory, grad_final, grad_initial, true,
                           mirrored - (unsigned)work.ahead, make_strips);
        }
    }
}

template <int V>
__device__ inline void forget_mult_backward(const ForgetMultBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Span& span, int64 channel) {
        BackwardStrips strip;
        strip.grad = Input(a.grad_h, s, span, channel);
        strip.x = Input(a.x, s, span, channel);
        strip.f = Input(a.f, s, span, channel);
        strip.h = Input(a.h, s, span, channel);
        strip.grad_x = Output(a.grad_x, s, span, channel);
        strip.grad_f = Output(a.grad_f, s, span, channel);
        strip.o.start = nullptr;
        strip.initial = a.h0;
        strip.keep = 1;
        return strip;
    };
    scan_back<false, false, V>(s, a.work, a.starts, Rows{nullptr, 0, 0}, a.grad_h0, make_strips);
}

template <bool output_gate, int V>
__device__ inline void fo_pool_backward(const FoPoolBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Span& span, int64 channel) {
        const int64 f_channel = channel + s.hidden, o_channel = channel + 2 * s.hidden;
        BackwardStrips strip;
        strip.grad = Input(a.grad_h, s, span, channel);
        strip.x = Input(a.gates, s, span, channel);
        strip.f = Input(a.gates, s, span, f_channel);
        strip.grad_x = Output(a.grad_gates, s, span, channel);
        strip.grad_f = Output(a.grad_gates, s, span, f_channel);
        strip.o.start = nullptr;
        if (output_gate) {
            strip.o = Input(a.gates, s, span, o_channel);
            strip.grad_o = Output(a.grad_gates, s, span, o_channel);
        }
        strip.initial = a.c0;
        strip.keep = (Compute)(1.0 - a.zoneout);
        return strip;
    };
    scan_back<true, output_gate, V>(s, a.work, a.starts, a.grad_c, a.grad_c0, make_strips);
}
