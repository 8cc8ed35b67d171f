// The CUDA pool kernels. The maths stands in reference.py; csrc/backward.h has the adjoint's.
//
// Compiled once per dtype, with QRNN_DTYPE given on the command line (the codes of csrc/qrnn_kernels.h),
// by NVRTC or nvcc. Includes nothing, so that no CUDA header need be installed.
//
// One thread owns one channel of one sequence and walks its timesteps; neighbouring threads own
// neighbouring channels, so that a warp reads whole rows. Loads of kAhead timesteps are in flight at once.

typedef long long int64;

// Each dtype: how elements are stored, the type they are computed in, and the type of the carried state.
// A float32 state would lose digits over long memory (f near 0.002): see csrc/state_math.h.
#if QRNN_DTYPE == 0
typedef float Storage;
typedef float Compute;
typedef double State;
__device__ inline Compute widen(Storage x) { return x; }
__device__ inline Storage narrow(Compute x) { return x; }
#elif QRNN_DTYPE == 1
typedef unsigned short Storage;
typedef float Compute;
typedef float State;
__device__ inline Compute widen(Storage x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ inline Storage narrow(Compute x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#elif QRNN_DTYPE == 2
typedef unsigned short Storage;
typedef float Compute;
typedef float State;
__device__ inline Compute widen(Storage x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline Storage narrow(Compute x) {
#if __CUDA_ARCH__ >= 800
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#else
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16 : 0x7FC0u;
#endif
}
#elif QRNN_DTYPE == 3
typedef double Storage;
typedef double Compute;
typedef double State;
__device__ inline Compute widen(Storage x) { return x; }
__device__ inline Storage narrow(Compute x) { return x; }
#else
#error "QRNN_DTYPE must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (float64)"
#endif

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }

// f * x + (1 - f) * h, so that f = 1 resets the state exactly and f = 0 keeps it exactly.
__device__ inline State mix(Compute f, Compute x, State h) {
    return (State)f * (State)x + ((State)1 - (State)f) * h;
}

__device__ inline State not_a_number() { return (State)__int_as_float(0x7FC00000); }

// Argument blocks: every field is eight bytes, as the launcher packs them.

// Row (t, b) starts at element t * time_stride + b * sequence_stride; packed row n at n * time_stride.
// A state [B, H] uses sequence_stride only. Channels are contiguous.
struct Rows {
    void* data;
    int64 time_stride;
    int64 sequence_stride;
};

struct Sequences {
    int64 timesteps;      // T, or N of packed rows
    int64 batch;          // B
    int64 hidden;         // H
    int64 reverse;        // nonzero: from the last timestep to the first
    const void* offsets;  // [B + 1] of packed rows, or null
    int64 offset_bytes;   // 4 or 8
};

struct ForgetMultArgs {
    Sequences sequences;
    Rows f, x, h0, h;
};

struct ForgetMultBackwardArgs {
    Sequences sequences;
    Rows grad_h, f, x, h, h0, grad_f, grad_x, grad_h0;
    Compute* cells;  // [rows, H], for the states of half types; else null
};

struct FoPoolArgs {
    Sequences sequences;
    double zoneout;
    Rows gates, c0, h, c;
};

struct FoPoolBackwardArgs {
    Sequences sequences;
    double zoneout;
    Rows grad_h, grad_c, gates, c0, grad_gates, grad_c0;
    Compute* cells;  // [rows, H]
};

constexpr int kAhead = 8;

__device__ inline int64 offset_at(const Sequences& s, int64 b) {
    return s.offset_bytes == 4 ? (int64)((const int*)s.offsets)[b] : ((const int64*)s.offsets)[b];
}

__device__ inline int64 clamp(int64 value, int64 low, int64 high) {
    return value < low ? low : (value > high ? high : value);
}

// The rows of one sequence in running order, for one channel.
struct Line {
    int64 sequence, channel;
    int64 first_row;  // where running order starts
    int64 direction;  // 1 or -1
    int64 count;
    bool valid;  // false: offsets are wrong here, and the results are NaN

    __device__ Line(const Sequences& s, int64 index) {
        sequence = index / s.hidden;
        channel = index % s.hidden;
        direction = s.reverse ? -1 : 1;
        int64 start = 0, stop = s.timesteps;
        valid = true;
        if (s.offsets) {
            // Offsets on a GPU cannot be checked beforehand without stopping the stream. Wrong ones
            // reach no memory outside the tensors and leave no row of a monotone prefix unwritten.
            const bool is_first = sequence == 0, is_last = sequence == s.batch - 1;
            const int64 before = is_first ? 0 : offset_at(s, sequence - 1);
            start = offset_at(s, sequence);
            stop = offset_at(s, sequence + 1);
            valid = 0 <= before && before <= start && start <= stop && stop <= s.timesteps;
            valid = valid && (!is_first || start == 0) && (!is_last || stop == s.timesteps);
            start = is_first ? 0 : clamp(start, 0, s.timesteps);
            stop = is_last ? s.timesteps : clamp(stop, start, s.timesteps);
        }
        count = stop - start;
        first_row = s.reverse ? stop - 1 : start;
    }

    __device__ int64 row(int64 position) const { return first_row + direction * position; }
};

// One channel of a tensor of rows, along one line: element k is the timestep at position k.
template <class T>
struct Strip {
    T* start;
    int64 step;

    __device__ Strip(const Rows& rows, const Sequences& s, const Line& line, int64 channel) {
        const int64 base = s.offsets ? 0 : line.sequence * rows.sequence_stride;
        start = (T*)rows.data + base + line.first_row * rows.time_stride + channel;
        step = line.direction * rows.time_stride;
        if (rows.data == nullptr) start = nullptr;
    }

    __device__ Strip(T* cells, const Sequences& s, const Line& line) {
        const int64 rows_apart = s.offsets ? s.hidden : s.batch * s.hidden;
        const int64 base = s.offsets ? 0 : line.sequence * s.hidden;
        start = cells + base + line.first_row * rows_apart + line.channel;
        step = line.direction * rows_apart;
    }

    __device__ T& at(int64 position) const { return start[position * step]; }
};

__device__ inline State read_state(const Rows& state, const Line& line) {
    if (!line.valid) return not_a_number();
    if (state.data == nullptr) return 0;
    const Storage* data = (const Storage*)state.data;
    return (State)widen(data[line.sequence * state.sequence_stride + line.channel]);
}

__device__ inline void write_state(const Rows& state, const Line& line, State value) {
    Storage* data = (Storage*)state.data;
    data[line.sequence * state.sequence_stride + line.channel] = narrow((Compute)value);
}

// Walks `count` positions in groups of kAhead, then one by one. `body.run<N>(position)` handles the
// positions from `position` on, N of them in ascending order; with `down`, in descending order.
template <class Body>
__device__ inline void walk_up(Body& body, int64 count) {
    int64 position = 0;
    for (; position + kAhead <= count; position += kAhead) body.template run<kAhead>(position);
    for (; position < count; ++position) body.template run<1>(position);
}

template <class Body>
__device__ inline void walk_down(Body& body, int64 count) {
    int64 end = count;
    for (; end >= kAhead; end -= kAhead) body.template run<kAhead>(end - kAhead);
    for (; end > 0; --end) body.template run<1>(end - 1);
}

struct ForgetMult {
    Strip<const Storage> f, x;
    Strip<Storage> h;
    State state;

    template <int N>
    __device__ void run(int64 position) {
        Compute forget[N], fresh[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            forget[k] = widen(f.at(position + k));
            fresh[k] = widen(x.at(position + k));
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            state = mix(forget[k], fresh[k], state);
            h.at(position + k) = narrow((Compute)state);
        }
    }
};

// Keeps the states that a backward pass needs: of fo_pool, and of forget_mult with half types, whose
// stored h is rounded.
template <bool activate>
struct Recorder {
    Strip<const Storage> f, x;
    Strip<Compute> cells;
    Compute keep;
    State state;

    template <int N>
    __device__ void run(int64 position) {
        Compute forget[N], fresh[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            forget[k] = widen(f.at(position + k));
            fresh[k] = widen(x.at(position + k));
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (activate) {
                forget[k] = sigmoid(forget[k]) * keep;
                fresh[k] = tanh_of(fresh[k]);
            }
            state = mix(forget[k], fresh[k], state);
            cells.at(position + k) = (Compute)state;
        }
    }
};

struct ForgetMultBackward {
    Strip<const Storage> grad_h, f, x;
    Strip<Storage> grad_f, grad_x;
    Strip<const Compute> cells;
    Compute initial;
    State adjoint;

    template <int N>
    __device__ void run(int64 position) {
        Compute grad[N], forget[N], fresh[N], before[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            grad[k] = widen(grad_h.at(position + k));
            forget[k] = widen(f.at(position + k));
            fresh[k] = widen(x.at(position + k));
            before[k] = position + k > 0 ? cells.at(position + k - 1) : initial;
        }
#pragma unroll
        for (int k = N - 1; k >= 0; --k) {
            adjoint += (State)grad[k];
            const Compute a = (Compute)adjoint;
            grad_x.at(position + k) = narrow(a * forget[k]);
            grad_f.at(position + k) = narrow(a * (fresh[k] - before[k]));
            adjoint *= (State)1 - (State)forget[k];
        }
    }
};

template <bool output_gate>
struct FoPool {
    Strip<const Storage> z, f, o;
    Strip<Storage> h;
    Compute keep;
    State state;

    template <int N>
    __device__ void run(int64 position) {
        Compute fresh[N], forget[N], gate[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            fresh[k] = widen(z.at(position + k));
            forget[k] = widen(f.at(position + k));
            if (output_gate) gate[k] = widen(o.at(position + k));
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            state = mix(sigmoid(forget[k]) * keep, tanh_of(fresh[k]), state);
            const Compute cell = (Compute)state;
            h.at(position + k) = narrow(output_gate ? sigmoid(gate[k]) * cell : cell);
        }
    }
};

template <bool output_gate>
struct FoPoolBackward {
    Strip<const Storage> grad_h, z, f, o;
    Strip<Storage> grad_z, grad_f, grad_o;
    Strip<const Compute> cells;
    Compute keep, initial;
    State adjoint;

    template <int N>
    __device__ void run(int64 position) {
        Compute grad[N], fresh[N], forget[N], gate[N], cell[N], before[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            grad[k] = grad_h.start ? widen(grad_h.at(position + k)) : (Compute)0;
            fresh[k] = tanh_of(widen(z.at(position + k)));
            forget[k] = sigmoid(widen(f.at(position + k)));
            if (output_gate) gate[k] = sigmoid(widen(o.at(position + k)));
            if (output_gate) cell[k] = cells.at(position + k);
            before[k] = position + k > 0 ? cells.at(position + k - 1) : initial;
        }
#pragma unroll
        for (int k = N - 1; k >= 0; --k) {
            if (output_gate) {
                grad_o.at(position + k) =
                    narrow(grad[k] * cell[k] * gate[k] * ((Compute)1 - gate[k]));
                grad[k] *= gate[k];
            }
            const Compute kept = forget[k] * keep;
            adjoint += (State)grad[k];
            const Compute a = (Compute)adjoint;
            grad_z.at(position + k) = narrow(a * kept * ((Compute)1 - fresh[k] * fresh[k]));
            grad_f.at(position + k) =
                narrow(a * (fresh[k] - before[k]) * kept * ((Compute)1 - forget[k]));
            adjoint *= (State)1 - (State)kept;
        }
    }
};

// Every channel of every sequence is some thread's, however many threads were launched.
#define QRNN_FOR_EACH_LINE(index, sequences)                                                      \
    for (int64 index = (int64)blockIdx.x * blockDim.x + threadIdx.x;                              \
         index < (sequences).batch * (sequences).hidden; index += (int64)gridDim.x * blockDim.x)

extern "C" __global__ void qrnn_forget_mult(const __grid_constant__ ForgetMultArgs a) {
    const Sequences& s = a.sequences;
    QRNN_FOR_EACH_LINE(index, s) {
        const Line line(s, index);
        const int64 channel = line.channel;
        ForgetMult body{{a.f, s, line, channel}, {a.x, s, line, channel}, {a.h, s, line, channel},
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
        ForgetMultBackward body{{a.grad_h, s, line, channel}, f, x,
                                {a.grad_f, s, line, channel}, {a.grad_x, s, line, channel},
                                cells, (Compute)initial, line.valid ? (State)0 : not_a_number()};
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
        FoPool<output_gate> body{{a.gates, s, line, z}, {a.gates, s, line, f}, {a.gates, s, line, o},
                                 {a.h, s, line, line.channel}, (Compute)(1.0 - a.zoneout),
                                 read_state(a.c0, line)};
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
        FoPoolBackward<output_gate> body{{a.grad_h, s, line, line.channel}, z_strip, f_strip,
                                         {a.gates, s, line, o}, {a.grad_gates, s, line, z},
                                         {a.grad_gates, s, line, f}, {a.grad_gates, s, line, o},
                                         {a.cells, s, line}, keep, (Compute)initial,
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
