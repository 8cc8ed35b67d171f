// The kernels of one instruction set, as the dispatcher sees them.
#pragma once

#include <cstdint>

#include "qrnn_kernels.h"

namespace qrnn {

// One task: sequences [first_sequence, last_sequence) and channels [first_channel, last_channel).
struct Block {
    int64_t first_sequence;
    int64_t last_sequence;
    int64_t first_channel;
    int64_t last_channel;
};

// States that one task keeps on its stack, counted in channels padded by padded_width: with the
// rows of a timestep about a first-level cache.
constexpr int64_t kStateElements = 2048;

struct KernelTable {
    const char* name;
    void (*forget_mult)(const qrnn_forget_mult_args&, const Block&);
    void (*forget_mult_backward)(const qrnn_forget_mult_backward_args&, const Block&);
    void (*fo_pool)(const qrnn_fo_pool_args&, const Block&);
    // `scratch` holds the longest sequence plus one times padded_width of float64 or else float32.
    void (*fo_pool_backward)(const qrnn_fo_pool_backward_args&, const Block&, void* scratch);
};

// Channels rounded up to whole vectors of the widest instruction set.
constexpr int64_t padded_width(int64_t channels) { return (channels + 15) / 16 * 16; }

// True when time is the outer loop: for dense rows with time the slower axis that order reads
// memory from front to back. Then a task holds the state of all its sequences at once.
inline bool time_is_outer(const qrnn_sequences& s, const qrnn_rows& rows) {
    return s.offsets == nullptr && rows.time_stride >= rows.sequence_stride;
}

// Outputs of this size do not fit in the caches together with what was read for them.
constexpr int64_t kLargeBytes = 16 << 20;

inline int64_t element_bytes(const qrnn_sequences& s) {
    return s.dtype == QRNN_FLOAT64 ? 8 : s.dtype == QRNN_FLOAT32 ? 4 : 2;
}

inline int64_t output_bytes(const qrnn_sequences& s) {
    const int64_t rows = s.offsets ? s.timesteps : s.timesteps * s.batch;
    return rows * s.hidden * element_bytes(s);
}

// True when whole vectors of the output may be written past the caches.
inline bool is_streamed(const qrnn_sequences& s, const qrnn_rows& out) {
    const int64_t widest = 64 / element_bytes(s);
    const bool aligned = reinterpret_cast<uintptr_t>(out.data) % 64 == 0 &&
                         out.time_stride % widest == 0 && out.sequence_stride % widest == 0;
    return aligned && output_bytes(s) >= kLargeBytes;
}

extern const KernelTable kPortableKernels;
#ifdef QRNN_HAVE_AVX2
extern const KernelTable kAvx2Kernels;
#endif
#ifdef QRNN_HAVE_AVX512
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace qrnn
