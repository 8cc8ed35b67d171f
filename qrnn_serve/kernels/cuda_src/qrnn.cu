// The CUDA pool kernels. The maths stands in reference.py; csrc/backward.h has the adjoint's.
//
// Compiled once per dtype, with QRNN_DTYPE given on the command line (the codes of
// csrc/qrnn_kernels.h), by NVRTC or nvcc. Includes nothing of CUDA's, so that no header need be
// installed.
//
// One thread owns one channel of one sequence and walks its timesteps; neighbouring threads own
// neighbouring channels, so that a warp reads whole rows.

#include "backward.cuh"
#include "forward.cuh"

// Every channel of every sequence is some thread's, however many threads were launched.
#define QRNN_FOR_EACH_LINE(index, sequences)                         \
    for (int64 index = (int64)blockIdx.x * blockDim.x + threadIdx.x; \
         index < (sequences).batch * (sequences).hidden; index += (int64)gridDim.x * blockDim.x)

extern "C" __global__ void qrnn_forget_mult(const __grid_constant__ ForgetMultArgs a) {
    const Sequences& s = a.sequences;
    QRNN_FOR_EACH_LINE(index, s) {
        const Line line(s, index);
        const int64 channel = line.channel;
        ForgetMult body{{a.f, s, line, channel},
                        {a.x, s, line, channel},
                        {a.h, s, line, channel},
                        read_state(a.h0, line)};
        walk_up(body, line.count);
    }
}

extern "C" __global__ void qrnn_forget_mult_backward(
    const __grid_constant__ ForgetMultBackwardArgs a) {
    const Sequences& s = a.sequences;
    QRNN_FOR_EACH_LINE(index, s) {
        const Line line(s, index);
        const int64 channel = line.channel;
        const Strip<const Storage> f(a.f, s, line, channel), x(a.x, s, line, channel);
        const State initial = read_state(a.h0, line);
        Strip<const Compute> cells(a.h, s, line, channel);
        if (a.cells) {
            Recorder<false> recorder{f, x, {a.cells, s, line}, (Compute)1, initial};
            walk_up(recorder, line.count);
            cells = Strip<const Compute>(a.cells, s, line);
        }
        ForgetMultBackward body{{a.grad_h, s, line, channel},
                                f,
                                x,
                                {a.grad_f, s, line, channel},
                                {a.grad_x, s, line, channel},
                                cells,
                                (Compute)initial,
                                line.valid ? (State)0 : not_a_number()};
        walk_down(body, line.count);
        write_state(a.grad_h0, line, body.adjoint);
    }
}

template <bool output_gate>
__device__ inline void fo_pool(const FoPoolArgs& a) {
    const Sequences& s = a.sequences;
    QRNN_FOR_EACH_LINE(index, s) {
        const Line line(s, index);
        const int64 z = line.channel, f = z + s.hidden, o = output_gate ? f + s.hidden : f;
        FoPool<output_gate> body{{a.gates, s, line, z},      {a.gates, s, line, f},
                                 {a.gates, s, line, o},      {a.h, s, line, line.channel},
                                 (Compute)(1.0 - a.zoneout), read_state(a.c0, line)};
        walk_up(body, line.count);
        write_state(a.c, line, body.state);
    }
}

template <bool output_gate>
__device__ inline void fo_pool_backward(const FoPoolBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const Compute keep = (Compute)(1.0 - a.zoneout);
    QRNN_FOR_EACH_LINE(index, s) {
        const Line line(s, index);
        const int64 z = line.channel, f = z + s.hidden, o = output_gate ? f + s.hidden : f;
        const Strip<const Storage> z_strip(a.gates, s, line, z), f_strip(a.gates, s, line, f);
        const State initial = read_state(a.c0, line);
        Recorder<true> recorder{f_strip, z_strip, {a.cells, s, line}, keep, initial};
        walk_up(recorder, line.count);
        FoPoolBackward<output_gate> body{{a.grad_h, s, line, line.channel},
                                         z_strip,
                                         f_strip,
                                         {a.gates, s, line, o},
                                         {a.grad_gates, s, line, z},
                                         {a.grad_gates, s, line, f},
                                         {a.grad_gates, s, line, o},
                                         {a.cells, s, line},
                                         keep,
                                         (Compute)initial,
                                         read_state(a.grad_c, line)};
        walk_down(body, line.count);
        write_state(a.grad_c0, line, body.adjoint);
    }
}

extern "C" __global__ void qrnn_fo_pool(const __grid_constant__ FoPoolArgs a) { fo_pool<true>(a); }

extern "C" __global__ void qrnn_f_pool(const __grid_constant__ FoPoolArgs a) { fo_pool<false>(a); }

extern "C" __global__ void qrnn_fo_pool_backward(const __grid_constant__ FoPoolBackwardArgs a) {
    fo_pool_backward<true>(a);
}

extern "C" __global__ void qrnn_f_pool_backward(const __grid_constant__ FoPoolBackwardArgs a) {
    fo_pool_backward<false>(a);
}
