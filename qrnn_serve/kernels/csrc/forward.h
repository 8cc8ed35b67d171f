// Forward kernels: forget_mult and fo_pool.
#pragma once

#include "cells.h"

namespace {

template <class D>
struct ForgetMult {
    using Storage = typename D::Storage;

    ForgetMult(const qrnn_forget_mult_args& a, const qrnn::Block& block)
        : f(a.f, a.sequences, block.first_channel),
          x(a.x, a.sequences, block.first_channel),
          h(a.h, a.sequences, block.first_channel),
          h0(a.h0, block.first_channel),
          width(block.last_channel - block.first_channel),
          stride(qrnn::padded_width(width)) {}

    void begin(int64_t b, int64_t slot) { read_state<D>(h0, b, state + slot * stride, width); }

    void step(const Step& at) {
        const Storage* f_row = f.at(at.row, at.sequence);
        const Storage* x_row = x.at(at.row, at.sequence);
        Storage* h_row = h.at(at.row, at.sequence);
        const Storage* f_next = f.at(at.next, at.sequence);
        const Storage* x_next = x.at(at.next, at.sequence);
        double* own = state + at.slot * stride;
        for (int64_t i = 0; i < width; i += D::lanes) {
            const int64_t left = width - i;
            prefetch(f_next + i, D::lanes);
            prefetch(x_next + i, D::lanes);
            store<D>(h_row + i,
                     advance(own + i, load<D>(f_row + i, left), load<D>(x_row + i, left)), left);
        }
    }

    void pad(int64_t b, int64_t t) { write_zeros<D>(h.at(t, b), width); }

    void end(int64_t, int64_t) {}

    Rows<Storage> f, x, h;
    States<Storage> h0;
    int64_t width, stride;
    alignas(64) double state[qrnn::kStateElements];
};

template <class D, bool output_gate>
struct FoPool {
    using Storage = typename D::Storage;
    using Vector = typename D::Vector;
    static constexpr int kGates = output_gate ? 3 : 2;

    FoPool(const qrnn_fo_pool_args& a, const qrnn::Block& block)
        : gates(a.gates, a.sequences, block.first_channel),
          h(a.h, a.sequences, block.first_channel),
          c0(a.c0, block.first_channel),
          c(a.c, block.first_channel),
          hidden(a.sequences.hidden),
          width(block.last_channel - block.first_channel),
          stride(qrnn::padded_width(width)),
          keep(static_cast<typename D::Recorded>(1.0 - a.zoneout)),
          streams(qrnn::is_streamed(a.sequences, a.h)) {}

    void begin(int64_t b, int64_t slot) { cells.read_from(c0, b, slot * stride, width); }

    void step(const Step& at) {
        cells.begin_timestep(at.position, at.slot * stride, width);
        if (streams)
            step_storing<true>(at);
        else
            step_storing<false>(at);
    }

    template <bool streaming>
    void step_storing(const Step& at) {
        const Storage* row = gates.at(at.row, at.sequence);
        const Storage* next = gates.at(at.next, at.sequence);
        Storage* h_row = h.at(at.row, at.sequence);
        const int64_t own = at.slot * stride;
        int64_t i = 0;
        for (; i + 2 * D::lanes <= width; i += 2 * D::lanes) {
            for (int g = 0; g < kGates; ++g) prefetch(next + g * hidden + i, 2 * D::lanes);
            advance<2, true, streaming>(row + i, h_row + i, own + i, 2 * D::lanes);
        }
        for (; i < width; i += D::lanes)
            advance<1, false, false>(row + i, h_row + i, own + i, width - i);
    }

    // One timestep of n vectors of channels, of which `left` channels exist.
    template <int n, bool whole, bool streaming>
    QRNN_INLINE void advance(const Storage* row, Storage* h_row, int64_t own, int64_t left) {
        Vector gate[kGates * n];
        for (int g = 0; g < kGates; ++g)
            for (int v = 0; v < n; ++v) {
                const Storage* from = row + g * hidden + v * D::lanes;
                gate[g * n + v] = whole ? D::load(from) : load<D>(from, left);
            }
        activate<n>(gate, keep);
        for (int v = 0; v < n; ++v) {
            Vector out = cells.advance(own + v * D::lanes, gate[n + v], gate[v]);
            if constexpr (output_gate) out = out * gate[2 * n + v];
            if constexpr (streaming)
                stream<D>(h_row + v * D::lanes, out);
            else if constexpr (whole)
                store<D>(h_row + v * D::lanes, out);
            else
                store<D>(h_row, out, left);
        }
    }

    void pad(int64_t b, int64_t t) { write_zeros<D>(h.at(t, b), width); }

    void end(int64_t b, int64_t slot) {
        cells.write_to(c, b, slot * stride, width);
        if (streams) finish_streams();
    }

    Rows<Storage> gates, h;
    States<Storage> c0, c;
    int64_t hidden, width, stride;
    typename D::Recorded keep;
    bool streams;
    Cells<D> cells;
};

}  // namespace
