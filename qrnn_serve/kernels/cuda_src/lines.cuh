// Argument blocks, and the way of one thread through the rows of one sequence.
#pragma once

#include "dtypes.cuh"

// Argument blocks: every field is eight bytes, as the launcher packs them.

// Row (t, b) starts at element t * time_stride + b * sequence_stride; packed row n at
// n * time_stride. A state [B, H] uses sequence_stride only. Channels are contiguous.
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

// Timesteps whose loads are in flight at once.
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
