// Backward kernels. With a_t the gradient of the loss with respect to the state after timestep t:
//
//   a_t = (gradient through the outputs at t) + (1 - f_{t+1}) * a_{t+1}
//   grad_x_t = a_t * f_t      grad_f_t = a_t * (x_t - h_{t-1})      grad_h0 = (1 - f_0) * a_0
#pragma once

#include "forward.h"

namespace {

template <class D>
struct ForgetMultBackward {
    using Storage = typename D::Storage;
    using Vector = typename D::Vector;

    ForgetMultBackward(const qrnn_forget_mult_backward_args& a, const qrnn::Block& block)
        : grad_h(a.grad_h, a.sequences, block.first_channel),
          f(a.f, a.sequences, block.first_channel),
          x(a.x, a.sequences, block.first_channel),
          h(a.h, a.sequences, block.first_channel),
          grad_f(a.grad_f, a.sequences, block.first_channel),
          grad_x(a.grad_x, a.sequences, block.first_channel),
          h0(a.h0, block.first_channel),
          grad_h0(a.grad_h0, block.first_channel),
          width(block.last_channel - block.first_channel),
          stride(qrnn::padded_width(width)) {}

    void begin(int64_t, int64_t slot) {
        std::memset(adjoint + slot * stride, 0, static_cast<std::size_t>(stride) * sizeof(double));
    }

    void step(const Step& at) {
        const int64_t b = at.sequence;
        const Storage* before = at.previous < 0 ? h0.at(b) : h.at(at.previous, b);
        const Storage* g_row = grad_h.at(at.row, b);
        const Storage* f_row = f.at(at.row, b);
        const Storage* x_row = x.at(at.row, b);
        Storage* grad_f_row = grad_f.at(at.row, b);
        Storage* grad_x_row = grad_x.at(at.row, b);
        double* own = adjoint + at.slot * stride;
        for (int64_t i = 0; i < width; i += D::lanes) {
            const int64_t left = width - i;
            Vector previous{};
            if (before) previous = load<D>(before + i, left);
            const Vector forget = load<D>(f_row + i, left);
            const Vector a = retreat(own + i, forget, load<D>(g_row + i, left));
            store<D>(grad_x_row + i, a * forget, left);
            store<D>(grad_f_row + i, a * (load<D>(x_row + i, left) - previous), left);
        }
    }

    void pad(int64_t b, int64_t t) {
        write_zeros<D>(grad_f.at(t, b), width);
        write_zeros<D>(grad_x.at(t, b), width);
    }

    void end(int64_t b, int64_t slot) {
        write_state<D>(grad_h0, b, adjoint + slot * stride, width);
    }

    Rows<Storage> grad_h, f, x, h, grad_f, grad_x;
    States<Storage> h0, grad_h0;
    int64_t width, stride;
    alignas(64) double adjoint[qrnn::kStateElements];
};

// Runs one sequence forward and keeps its cell states for the backward pass.
template <class D>
struct CellRecorder {
    using Storage = typename D::Storage;
    using Vector = typename D::Vector;
    using Recorded = typename D::Recorded;

    CellRecorder(const qrnn_fo_pool_backward_args& a, const qrnn::Block& block, void* scratch)
        : gates(a.gates, a.sequences, block.first_channel),
          c0(a.c0, block.first_channel),
          hidden(a.sequences.hidden),
          width(block.last_channel - block.first_channel),
          stride(qrnn::padded_width(width)),
          keep(static_cast<Recorded>(1.0 - a.zoneout)),
          cells(static_cast<Recorded*>(scratch)) {}

    // Row 0 holds c0, row p + 1 the state after the timestep at position p.
    Recorded* before(int64_t position) const { return cells + position * stride; }

    Vector cell_before(int64_t position, int64_t channel) const {
        Vector v;
        std::memcpy(&v, before(position) + channel, sizeof(v));
        return v;
    }

    void begin(int64_t b, int64_t) {
        read_state<D>(c0, b, state, width);
        for (int64_t i = 0; i < width; i += D::lanes) keep_cell(0, i, get<Vector>(state + i));
    }

    void step(const Step& at) {
        const Storage* row = gates.at(at.row, at.sequence);
        for (int64_t i = 0; i < width; i += D::lanes) {
            const Vector z = tanh(load<D>(row + i, width - i));
            const Vector f = sigmoid(load<D>(row + hidden + i, width - i)) * keep;
            keep_cell(at.position + 1, i, advance(state + i, f, z));
        }
    }

    void pad(int64_t, int64_t) {}

    void end(int64_t, int64_t) {}

    void keep_cell(int64_t position, int64_t channel, const Vector& v) {
        std::memcpy(before(position) + channel, &v, sizeof(v));
    }

    Rows<Storage> gates;
    States<Storage> c0;
    int64_t hidden, width, stride;
    Recorded keep;
    Recorded* cells;
    alignas(64) double state[qrnn::kStateElements];
};

template <class D, bool output_gate>
struct FoPoolBackward {
    using Storage = typename D::Storage;
    using Vector = typename D::Vector;

    FoPoolBackward(const qrnn_fo_pool_backward_args& a, const qrnn::Block& block,
                   const CellRecorder<D>& recorded)
        : grad_h(a.grad_h, a.sequences, block.first_channel),
          grad_gates(a.grad_gates, a.sequences, block.first_channel),
          grad_c(a.grad_c, block.first_channel),
          grad_c0(a.grad_c0, block.first_channel),
          cells(recorded) {}

    void begin(int64_t b, int64_t) { read_state<D>(grad_c, b, adjoint, cells.width); }

    void step(const Step& at) {
        const int64_t b = at.sequence, hidden = cells.hidden, width = cells.width;
        const Storage* row = cells.gates.at(at.row, b);
        const Storage* grad_row = grad_h.data ? grad_h.at(at.row, b) : nullptr;
        Storage* out = grad_gates.at(at.row, b);
        for (int64_t i = 0; i < width; i += D::lanes) {
            const int64_t left = width - i;
            const Vector z = tanh(load<D>(row + i, left));
            const Vector s = sigmoid(load<D>(row + hidden + i, left));
            Vector grad{};
            if (grad_row) grad = load<D>(grad_row + i, left);
            if constexpr (output_gate) {
                const Vector o = sigmoid(load<D>(row + 2 * hidden + i, left));
                store<D>(out + 2 * hidden + i,
                         grad * cells.cell_before(at.position + 1, i) * o * (1.0f - o), left);
                grad = grad * o;
            }
            const Vector f = s * cells.keep;
            const Vector a = retreat(adjoint + i, f, grad);
            const Vector previous = cells.cell_before(at.position, i);
            store<D>(out + i, a * f * (1.0f - z * z), left);
            store<D>(out + hidden + i, a * (z - previous) * f * (1.0f - s), left);
        }
    }

    void pad(int64_t b, int64_t t) {
        for (int gate = 0; gate < (output_gate ? 3 : 2); ++gate)
            write_zeros<D>(grad_gates.at(t, b) + gate * cells.hidden, cells.width);
    }

    void end(int64_t b, int64_t) { write_state<D>(grad_c0, b, adjoint, cells.width); }

    Rows<Storage> grad_h, grad_gates;
    States<Storage> grad_c, grad_c0;
    const CellRecorder<D>& cells;
    alignas(64) double adjoint[qrnn::kStateElements];
};

}  // namespace
