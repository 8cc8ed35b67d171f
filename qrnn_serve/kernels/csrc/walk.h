// The order in which a task visits its timesteps, shared by all kernels.
//
// A kernel has four members:
//   begin(b, slot)     take the state of sequence b into slot
//   step(step)         one timestep of one sequence
//   pad(b, t)          a timestep past the sequence's length: write zeros
//   end(b, slot)       give the state back
#pragma once

#include "kernel_table.h"
#include "state_math.h"

namespace {

struct Step {
    int64_t sequence;
    int64_t slot;      // where the task keeps this sequence's state
    int64_t row;       // t of dense rows, n of packed rows
    int64_t previous;  // the row before it in running order, or -1 for the first
    int64_t next;      // the row after it in running order, or itself for the last
    int64_t position;  // number of this timestep in running order, from 0
};

class Walk {
  public:
    // `backward` visits each sequence from the end of its running order to the start.
    Walk(const qrnn_sequences& sequences, const qrnn::Block& block, bool backward)
        : sequences_(sequences), block_(block), backward_(backward) {}

    int64_t length(int64_t b) const {
        if (sequences_.offsets) return sequences_.offsets[b + 1] - sequences_.offsets[b];
        return sequences_.lengths ? sequences_.lengths[b] : sequences_.timesteps;
    }

    template <class Kernel>
    void time_outer(Kernel& kernel) const {
        for (int64_t b = block_.first_sequence; b < block_.last_sequence; ++b)
            kernel.begin(b, b - block_.first_sequence);
        for (int64_t i = 0; i < sequences_.timesteps; ++i) {
            const int64_t position = backward_ ? sequences_.timesteps - 1 - i : i;
            for (int64_t b = block_.first_sequence; b < block_.last_sequence; ++b) {
                if (position < length(b))
                    kernel.step(step(b, b - block_.first_sequence, position));
                else
                    kernel.pad(b, position);
            }
        }
        for (int64_t b = block_.first_sequence; b < block_.last_sequence; ++b)
            kernel.end(b, b - block_.first_sequence);
    }

    template <class Kernel>
    void sequence_outer(Kernel& kernel) const {
        for (int64_t b = block_.first_sequence; b < block_.last_sequence; ++b)
            one_sequence(kernel, b);
    }

    template <class Kernel>
    void one_sequence(Kernel& kernel, int64_t b) const {
        const int64_t count = length(b);
        kernel.begin(b, 0);
        for (int64_t i = 0; i < count; ++i) kernel.step(step(b, 0, backward_ ? count - 1 - i : i));
        if (sequences_.lengths)
            for (int64_t t = count; t < sequences_.timesteps; ++t) kernel.pad(b, t);
        kernel.end(b, 0);
    }

  private:
    Step step(int64_t b, int64_t slot, int64_t position) const {
        const int64_t start = sequences_.offsets ? sequences_.offsets[b] : 0;
        const int64_t direction = sequences_.reverse ? -1 : 1;
        const int64_t first = sequences_.reverse ? start + length(b) - 1 : start;
        const int64_t row = first + direction * position;
        const int64_t previous = position > 0 ? row - direction : -1;
        const int64_t next = position + 1 < length(b) ? row + direction : row;
        return {b, slot, row, previous, next, position};
    }

    const qrnn_sequences& sequences_;
    const qrnn::Block& block_;
    const bool backward_;
};

// A tensor of rows, typed, shifted to the task's first channel.
template <class Storage>
struct Rows {
    Rows(const qrnn_rows& rows, const qrnn_sequences& sequences, int64_t first_channel)
        : data(static_cast<Storage*>(rows.data)),
          time_stride(rows.time_stride),
          // Packed rows are found by their number alone.
          sequence_stride(sequences.offsets ? 0 : rows.sequence_stride) {
        if (data) data += first_channel;
    }

    Storage* at(int64_t row, int64_t b) const {
        return data + row * time_stride + b * sequence_stride;
    }

    Storage* data;
    int64_t time_stride;
    int64_t sequence_stride;
};

// A state [B, H], typed, shifted to the task's first channel; null data reads as zeros.
template <class Storage>
struct States {
    States(const qrnn_rows& rows, int64_t first_channel)
        : data(static_cast<Storage*>(rows.data)), stride(rows.sequence_stride) {
        if (data) data += first_channel;
    }

    Storage* at(int64_t b) const { return data ? data + b * stride : nullptr; }

    Storage* data;
    int64_t stride;
};

template <class D>
inline void read_state(const States<typename D::Storage>& from, int64_t b, double* state,
                       int64_t width) {
    const typename D::Storage* row = from.at(b);
    for (int64_t i = 0; i < width; i += D::lanes)
        put(state + i, row ? load<D>(row + i, width - i) : typename D::Vector{});
}

template <class D>
inline void write_state(const States<typename D::Storage>& to, int64_t b, const double* state,
                        int64_t width) {
    typename D::Storage* row = to.at(b);
    for (int64_t i = 0; i < width; i += D::lanes)
        store<D>(row + i, get<typename D::Vector>(state + i), width - i);
}

// Asks for the cache lines of some channels, all or part of which a later timestep reads. The
// processor does not foresee the way from one timestep's row to the next.
template <class Storage>
inline void prefetch(const Storage* from, int64_t channels) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < channels * static_cast<int64_t>(sizeof(Storage)); i += 64)
        __builtin_prefetch(bytes + i);
}

template <class D>
inline void write_zeros(typename D::Storage* row, int64_t width) {
    std::memset(row, 0, static_cast<std::size_t>(width) * sizeof(*row));
}

}  // namespace
