// Forward kernels: forget_mult and fo_pool.
#pragma once

#include "walk.h"

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
        double* own = state + at.slot * stride;
        for (int64_t i = 0; i < width; i += D::lanes) {
            const int64_t left = width - i;
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

    FoPool(const qrnn_fo_pool_args& a, const qrnn::Block& block)
        : gates(a.gates, a.sequences, block.first_channel),
          h(a.h, a.sequences, block.first_channel),
          c0(a.c0, block.first_channel),
          c(a.c, block.first_channel),
          hidden(a.sequences.hidden),
          width(block.last_channel - block.first_channel),
          stride(qrnn::padded_width(width)),
          keep(static_cast<typename D::Recorded>(1.0 - a.zoneout)) {}

    void begin(int64_t b, int64_t slot) { read_state<D>(c0, b, state + slot * stride, width); }

    void step(const Step& at) {
        const Storage* row = gates.at(at.row, at.sequence);
        Storage* h_row = h.at(at.row, at.sequence);
        double* own = state + at.slot * stride;
        for (int64_t i = 0; i < width; i += D::lanes) {
            const int64_t left = width - i;
            const Vector z = tanh(load<D>(row + i, left));
            const Vector f = sigmoid(load<D>(row + hidden + i, left)) * keep;
            Vector out = advance(own + i, f, z);
            if constexpr (output_gate) out = out * sigmoid(load<D>(row + 2 * hidden + i, left));
            store<D>(h_row + i, out, left);
        }
    }

    void pad(int64_t b, int64_t t) { write_zeros<D>(h.at(t, b), width); }

    void end(int64_t b, int64_t slot) { write_state<D>(c, b, state + slot * stride, width); }

    Rows<Storage> gates, h;
    States<Storage> c0, c;
    int64_t hidden, width, stride;
    typename D::Recorded keep;
    alignas(64) double state[qrnn::kStateElements];
};

}  // namespace
