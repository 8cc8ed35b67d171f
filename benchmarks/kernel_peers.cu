// Kernels that ours are compared with, written for this benchmark. 16-bit elements are bfloat16.

struct Bfloat16 {
    unsigned short bits;
};

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(Bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ inline void narrow(float value, float& to) { to = value; }
__device__ inline void narrow(float value, Bfloat16& to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
}

// Does nothing: what launching costs.
extern "C" __global__ void empty() {}

// The original way: a thread walks one channel of one sequence, elements read one by one.
// f and x are [timesteps, channels]; h has one row more, the first of which is the initial state.
template <class T>
__global__ void channel_scan(const T* f, const T* x, T* h, long long timesteps,
                             long long channels) {
    const long long channel = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    float state = widen(h[channel]);
    for (long long t = 0; t < timesteps; ++t) {
        const long long at = t * channels + channel;
        const float forget = widen(f[at]);
        state = forget * widen(x[at]) + (1.0f - forget) * state;
        narrow(state, h[at + channels]);
    }
}

template <class T>
__global__ void channel_scan_backward(const T* grad_h, const T* f, const T* x, const T* h,
                                      T* grad_f, T* grad_x, long long timesteps,
                                      long long channels) {
    const long long channel = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    float grad = 0.0f;
    for (long long t = timesteps - 1; t >= 0; --t) {
        const long long at = t * channels + channel;
        const float forget = widen(f[at]);
        grad += widen(grad_h[at]);
        narrow((widen(x[at]) - widen(h[at])) * grad, grad_f[at]);  // h[at] is the state before t
        narrow(forget * grad, grad_x[at]);
        grad *= 1.0f - forget;
    }
}

// The method of accelerated-scan: time lies innermost, f, x and h are [rows, timesteps]. A block
// walks one row in chunks. Each thread folds a few timesteps that it read at once into a pair
// (product of 1 - f, state from 0); pairs are scanned by shuffles within a warp, and through shared
// memory between warps.
template <class T>
__global__ void block_scan(const T* f, const T* x, T* h, long long timesteps) {
    constexpr int STEPS = 16 / sizeof(T);
    struct alignas(16) Line {
        T at[STEPS];
    };
    __shared__ float warp_decay[32], warp_state[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const long long row = (long long)blockIdx.x * timesteps;
    const bool aligned = timesteps % STEPS == 0;
    float carried = 0.0f;
    for (long long chunk = 0; chunk < timesteps; chunk += (long long)blockDim.x * STEPS) {
        const long long first = chunk + threadIdx.x * STEPS;
        const bool whole = aligned && first + STEPS <= timesteps;
        Line forget, value;
        if (whole) {
            forget = *reinterpret_cast<const Line*>(f + row + first);
            value = *reinterpret_cast<const Line*>(x + row + first);
        }
        float decays[STEPS], states[STEPS];
        float decay = 1.0f, state = 0.0f;
        for (int step = 0; step < STEPS; ++step) {
            const bool inside = first + step < timesteps;
            if (!whole && inside) {
                forget.at[step] = f[row + first + step];
                value.at[step] = x[row + first + step];
            }
            if (inside) {
                const float keep = 1.0f - widen(forget.at[step]);
                state = widen(forget.at[step]) * widen(value.at[step]) + keep * state;
                decay *= keep;
            }
            decays[step] = decay;
            states[step] = state;
        }
        for (int distance = 1; distance < 32; distance *= 2) {
            const float decay_before = __shfl_up_sync(0xFFFFFFFFu, decay, distance);
            const float state_before = __shfl_up_sync(0xFFFFFFFFu, state, distance);
            if (lane >= distance) {
                state += decay * state_before;
                decay *= decay_before;
            }
        }
        if (lane == 31) {
            warp_decay[warp] = decay;
            warp_state[warp] = state;
        }
        float decay_before = __shfl_up_sync(0xFFFFFFFFu, decay, 1);
        float state_before = __shfl_up_sync(0xFFFFFFFFu, state, 1);
        if (lane == 0) {
            decay_before = 1.0f;
            state_before = 0.0f;
        }
        __syncthreads();
        float entering = carried;
        for (int w = 0; w < warps; ++w) {
            if (w == warp) entering = carried;
            carried = warp_decay[w] * carried + warp_state[w];
        }
        entering = state_before + decay_before * entering;
        Line out;
        for (int step = 0; step < STEPS; ++step)
            narrow(states[step] + decays[step] * entering, out.at[step]);
        if (whole) {
            *reinterpret_cast<Line*>(h + row + first) = out;
        } else {
            for (int step = 0; step < STEPS; ++step)
                if (first + step < timesteps) h[row + first + step] = out.at[step];
        }
        __syncthreads();  // the next chunk writes warp_decay again
    }
}
