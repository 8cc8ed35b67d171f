// The window of a layer: the inputs of the timesteps before, laid beside each timestep's own, and the
// gradient of that. Here `hidden` of the sequences is the width I of an input.
#pragma once

#include "sequences.cuh"

struct WindowArgs {
    Sequences sequences;
    int64 lags;  // timesteps before its own that a timestep sees
    Rows values, previous, columns, carried;  // previous, carried: [B, lags, I], by both strides
};

struct WindowBackwardArgs {
    Sequences sequences;
    int64 lags;
    Rows grad_columns, grad_carried, grad_values, grad_previous;
};

// What one thread copies: V channels of a timestep, or of one of the `lags` places beside a sequence.
// `position` counts timesteps of the sequence; for a place it is left to the kernel.
template <int V>
struct WindowItem {
    int64 row, sequence, position, channel, place;  // place: -1 for a timestep
    Line line;

    __device__ WindowItem(const Sequences& s, int64 lags, int64 item)
        : line(s, 0) {
        const int64 pieces = s.hidden / V, index = item / pieces;
        const int64 rows = rows_of(s);
        channel = (item - index * pieces) * V;
        place = -1;
        row = 0;
        if (index >= rows) {
            sequence = (index - rows) / lags;
            place = index - rows - sequence * lags;
            line = Line(s, sequence);
            position = 0;
        } else if (s.offsets) {
            row = index;
            sequence = sequence_of_row(s, row);
            line = Line(s, sequence);
            position = (row - line.first_row) * line.direction;
        } else {
            row = index / s.batch;
            sequence = index - row * s.batch;
            line = Line(s, sequence);
            position = (row - line.first_row) * line.direction;
        }
    }

    // Where offsets are wrong a row can belong to no sequence.
    __device__ bool valid() const {
        return line.valid && (place >= 0 || (position >= 0 && position < line.count));
    }

    __device__ static int64 rows_of(const Sequences& s) {
        return s.offsets ? s.timesteps : s.timesteps * s.batch;
    }

    __device__ static int64 items(const Sequences& s, int64 lags) {
        return (rows_of(s) + s.batch * lags) * (s.hidden / V);
    }

    // The last sequence that starts at the row or before it.
    __device__ static int64 sequence_of_row(const Sequences& s, int64 row) {
        int64 low = 0;
        for (int64 high = s.batch - 1; low < high;) {
            const int64 middle = low + (high - low + 1) / 2;
            if (start_of(s, middle) <= row) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
};

// V channels of a row, or of a place beside a sequence; null where there is no tensor.
__device__ inline char* row_at(const Rows& rows, const Sequences& s, int64 row, int64 sequence,
                               int64 channel) {
    if (rows.data == nullptr) return nullptr;
    const int64 base = s.offsets ? 0 : sequence * rows.sequence_stride;
    return (char*)rows.data +
           (base + row * rows.time_stride + channel) * (int64)sizeof(Storage);
}
__device__ inline char* place_at(const Rows& rows, int64 place, int64 sequence, int64 channel) {
    if (rows.data == nullptr) return nullptr;
    const int64 element = sequence * rows.sequence_stride + place * rows.time_stride + channel;
    return (char*)rows.data + element * (int64)sizeof(Storage);
}

template <int V>
__device__ inline void window(const WindowArgs& a) {
    const Sequences& s = a.sequences;
    const int64 threads = (int64)blocks_of_grid() * kThreads;
    const int64 items = WindowItem<V>::items(s, a.lags);
    for (int64 i = (int64)block_of_grid() * kThreads + thread_of_block(); i < items; i += threads) {
        const WindowItem<V> item(s, a.lags, i);
        const auto value_at = [&](int64 position) {
            const char* from = position >= 0
                ? row_at(a.values, s, item.line.row(position), item.sequence, item.channel)
                : place_at(a.previous, a.lags + position, item.sequence, item.channel);
            return from ? load<V>(from) : everywhere<V>(0);
        };
        if (item.place >= 0) {
            char* to = place_at(a.carried, item.place, item.sequence, item.channel);
            const int64 position = item.line.count - a.lags + item.place;
            store<V>(to, item.valid() ? value_at(position) : everywhere<V>(not_a_number()));
            continue;
        }
        for (int64 lag = 0; lag <= a.lags; ++lag) {
            const int64 channel = lag * s.hidden + item.channel;
            char* to = row_at(a.columns, s, item.row, item.sequence, channel);
            store<V>(to, item.valid() ? value_at(item.position - lag)
                                      : everywhere<V>(not_a_number()));
        }
    }
}

template <int V>
__device__ inline void window_backward(const WindowBackwardArgs& a) {
    const Sequences& s = a.sequences;
    const int64 threads = (int64)blocks_of_grid() * kThreads;
    const int64 items = WindowItem<V>::items(s, a.lags);
    for (int64 i = (int64)block_of_grid() * kThreads + thread_of_block(); i < items; i += threads) {
        const WindowItem<V> item(s, a.lags, i);
        const bool before = item.place >= 0;
        const int64 position = before ? item.place - a.lags : item.position;
        Compute sum[V];
#pragma unroll
        for (int j = 0; j < V; ++j) sum[j] = item.valid() ? (Compute)0 : (Compute)not_a_number();
        const auto add = [&](const char* from) {
            if (from == nullptr || !item.valid()) return;
            Compute part[V];
            widen<V>(load<V>(from), part);
#pragma unroll
            for (int j = 0; j < V; ++j) sum[j] += part[j];
        };
        for (int64 lag = before ? -position : 0; lag <= a.lags; ++lag) {
            if (position + lag >= item.line.count) break;
            const int64 channel = lag * s.hidden + item.channel;
            add(row_at(a.grad_columns, s, item.line.row(position + lag), item.sequence, channel));
        }
        const int64 place = position - (item.line.count - a.lags);
        if (place >= 0) add(place_at(a.grad_carried, place, item.sequence, item.channel));
        char* to = before ? place_at(a.grad_previous, item.place, item.sequence, item.channel)
                          : row_at(a.grad_values, s, item.row, item.sequence, item.channel);
        if (to) store<V>(to, narrow<V>(sum));
    }
}
