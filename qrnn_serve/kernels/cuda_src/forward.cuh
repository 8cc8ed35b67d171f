// Forward: what a thread does at each timestep.
#pragma once

#include "lines.cuh"

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
