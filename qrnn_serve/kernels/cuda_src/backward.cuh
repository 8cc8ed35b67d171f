// Backward: what a thread does at each timestep, from the last to the first.
#pragma once

#include "lines.cuh"

// Keeps the states that a backward pass needs: of fo_pool, and of forget_mult with half types,
// whose stored h is rounded.
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
