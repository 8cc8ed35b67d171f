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
};

// Output gates of float64 are read where they are used: beside three columns a fourth does not fit
// into the 64 kB that a block of sm_75 can have.
constexpr bool kCopiesOutputGates = sizeof(Compute) < 8;

template <bool output_gate, int V>
struct BackwardMemory {
    static constexpr bool kOutputGates = output_gate && kCopiesOutputGates;

    BlockMemory<V> shared;
    Column<V> columns[kOutputGates ? 4 : 3];  // fresh values, forget gates, gradients, output gates
    struct alignas(V * sizeof(Compute)) {
        Compute values[V];
    } starts[kWarps][32];  // the state before each chunk

    __device__ void start(const Sequences& s, const Job& job, int warp, int lane,
                          const BackwardStrips& from, int count, Compute closed) {
        columns[0].start(s, job, warp, lane, from.x, count, 0);
        columns[1].start(s, job, warp, lane, from.f, count, closed);
        columns[2].start(s, job, warp, lane, from.grad, from.grad.start ? count : 0, 0);
        if constexpr (kOutputGates) columns[3].start(s, job, warp, lane, from.o, count, 0);
    }
};

// The gradient of a state is decay * (the one that comes into the chunk) + local.
template <bool activate, bool output_gate, int V>
struct BackwardChunk {
    Compute decay[kSteps][V], local[kSteps][V];
    Compute to_x[kSteps][V], to_f[kSteps][V];  // what they make of the gradient of the state

    // Writes the gradient of the output gate, which needs no other chunk.
    __device__ void run(const BackwardMemory<output_gate, V>& memory, int warp, int lane,
                        Compute keep, const BackwardStrips& strips, int to_write,
                        Stretch (&stretch)[V]) {
        char* o_at = output_gate ? strips.grad_o.at(warp * kSteps) : nullptr;
        Compute cell[V];
#pragma unroll
        for (int i = 0; i < V; ++i) cell[i] = memory.starts[warp][lane].values[i];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Compute fresh[V], forget[V], grad[V], gate[V];
            memory.columns[0].read(warp, k, lane, fresh);
            memory.columns[1].read(warp, k, lane, forget);
            memory.columns[2].read(warp, k, lane, grad);
            if constexpr (output_gate) output_gates(memory, warp, k, lane, strips.o, to_write, gate);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const Compute open = activate ? sigmoid(forget[i]) : forget[i];
                const Compute f = activate ? open * keep : open;
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
            if (output_gate && k < to_write) {
                store<V>(strips.grad_o.after(o_at, k), narrow<V>(gate));
            }
        }
        join_steps(stretch);
    }

    // Where nothing is written, any number will do.
    __device__ static void output_gates(const BackwardMemory<output_gate, V>& memory, int warp,
                                        int k, int lane, const Input& o, int to_write,
                                        Compute (&gate)[V]) {
        if constexpr (kCopiesOutputGates) {
            memory.columns[3].read(warp, k, lane, gate);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) gate[i] = 0;
            if (k < to_write) widen<V>(load<V>(o.after(o.at(warp * kSteps), k)), gate);
        }
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

    __device__ void write(const BackwardStrips& strips, int warp, int count,
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
        write_rows<V>(strips.grad_x, warp, count, x_rows);
        write_rows<V>(strips.grad_f, warp, count, f_rows);
    }
};

// The state before a chunk: as a forward pass kept it, or else the row of h before it.
template <int V>
__device__ inline void start_state(Compute (&to)[V], const Sequences& s, const Compute* starts,
                                   const Rows& initial, const Input& h, const Job& job,
                                   const Channels<V>& at, int warp) {
    const void* from = nullptr;
    if (starts) {
        from = at.start(starts, s, job, warp);
    } else if ((job.flags & kValid) == 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) to[i] = not_a_number();
        return;
    } else if (warp > 0 || job.before > 0) {
        from = h.at(warp * kSteps - 1);
    } else if (initial.data) {
        from = (Compute*)initial.data + job.sequence * initial.sequence_stride + at.channel;
    }
    if (from) {
        start_copy<V * sizeof(Compute)>(to, from);
    } else {
#pragma unroll
        for (int i = 0; i < V; ++i) to[i] = 0;
    }
}

// The warps that have chunks. Tiles, chunks and timesteps are taken from the last to the first;
// where they begin is as in the forward scan.
template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_chunks_back(const Sequences& s,
                                        BackwardMemory<output_gate, V>& memory,
                                        const Compute* starts, Compute keep, const Rows& initial,
                                        const MakeStrips& make_strips) {
    const int warp = thread_of_block() / 32, lane = thread_of_block() % 32;
    const Compute closed = activate ? (Compute)minus_infinity() : (Compute)0;
    const auto start = [&](const Job& job) {
        const int count = steps_of(warp, job.count);
        if (count > 0) {
            const Channels<V> at(s, job, lane);
            memory.start(s, job, warp, lane, make_strips(job, V == 1 ? at.channel : job.channel),
                         count, closed);
            start_state<V>(memory.starts[warp][lane].values, s, starts, initial,
                           make_strips(job, at.channel).h, job, at, warp);
        }
        end_of_copies();
    };
    barrier();
    const Job* job = &memory.shared.job(0);
    start(*job);
    for (int number = 1; job->count != kNoJob; ++number) {
        const Channels<V> at(s, *job, lane);
        const int count = steps_of(warp, job->count), to_write = at.active ? count : 0;
        BackwardChunk<activate, output_gate, V> chunk;
        Stretch stretch[V];
        wait_for_copies<0>();
        warp_barrier();
        if (count > 0) {
            chunk.run(memory, warp, lane, keep, make_strips(*job, at.channel), to_write, stretch);
        } else {
            keep_state(stretch);
        }
        hand_in<V>(memory.shared, warp, lane, stretch);
        barrier();
        const Job* next = &memory.shared.job(number);
        start(*next);
        barrier();
        if (count > 0) {
            Compute after[V];
            take_back<V>(memory.shared, warp, lane, after);
            chunk.write(make_strips(*job, at.channel), warp, to_write, after);
        }
        job = next;
    }
}

template <bool activate, bool output_gate, int V, class MakeStrips>
__device__ inline void scan_back(const Sequences& s, const Work& work, const Compute* starts,
                                 Compute keep, const Rows& initial, const Rows& grad_final,
                                 const Rows& grad_initial, const MakeStrips& make_strips) {
    auto& memory = block_memory<BackwardMemory<output_gate, V>>();
    if (thread_of_block() < kWarps * 32) {
        scan_chunks_back<activate, output_gate, V>(s, memory, starts, keep, initial, make_strips);
    } else {
        carry_state<V>(s, work, memory.shared, grad_final, grad_initial, true);
    }
}

template <int V>
__device__ inline void forget_mult_backward(const ForgetMultBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Job& job, int64 channel) {
        BackwardStrips strips;
        strips.grad = Input(a.grad_h, s, job, channel);
        strips.x = Input(a.x, s, job, channel);
        strips.f = Input(a.f, s, job, channel);
        strips.h = Input(a.h, s, job, channel);
        strips.grad_x = Output(a.grad_x, s, job, channel);
        strips.grad_f = Output(a.grad_f, s, job, channel);
        return strips;
    };
    scan_back<false, false, V>(s, a.work, a.starts, 1, a.h0, Rows{nullptr, 0, 0}, a.grad_h0,
                               make_strips);
}

template <bool output_gate, int V>
__device__ inline void fo_pool_backward(const FoPoolBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const auto make_strips = [&](const Job& job, int64 channel) {
        const int64 f_channel = channel + s.hidden, o_channel = channel + 2 * s.hidden;
        BackwardStrips strips;
        strips.grad = Input(a.grad_h, s, job, channel);
        strips.x = Input(a.gates, s, job, channel);
        strips.f = Input(a.gates, s, job, f_channel);
        strips.grad_x = Output(a.grad_gates, s, job, channel);
        strips.grad_f = Output(a.grad_gates, s, job, f_channel);
        if (output_gate) {
            strips.o = Input(a.gates, s, job, o_channel);
            strips.grad_o = Output(a.grad_gates, s, job, o_channel);
        }
        return strips;
    };
    const Compute keep = (Compute)(1.0 - a.zoneout);
    scan_back<true, output_gate, V>(s, a.work, a.starts, keep, Rows{nullptr, 0, 0}, a.grad_c,
                                    a.grad_c0, make_strips);
}
