// The C entry points: check the arguments, cut the work into blocks, run them in parallel.

#include "qrnn_kernels.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dispatch.h"
#include "thread_pool.h"

namespace qrnn {
namespace {

// Below this many elements a task is cheaper to run than to hand to another thread.
constexpr int64_t kSmallestTask = 65536;
// Tasks a thread gets on average, so that uneven sequences even out.
constexpr int64_t kTasksPerThread = 4;
// Blocks stay whole cache lines of every dtype, so that two threads do not write to one line.
constexpr int64_t kNarrowestBlock = 64;
// Cell states one task of the backward pass keeps, about a share of the second-level cache.
constexpr int64_t kScratchElements = 1 << 18;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

int check_sequences(const qrnn_sequences& s) {
    if (s.dtype < QRNN_FLOAT32 || s.dtype > QRNN_FLOAT64) return QRNN_BAD_ARGUMENT;
    if (s.timesteps < 0 || s.batch < 0 || s.hidden < 0) return QRNN_BAD_ARGUMENT;
    if (s.offsets && s.lengths) return QRNN_BAD_ARGUMENT;
    if (s.offsets) {
        if (s.offsets[0] != 0 || s.offsets[s.batch] != s.timesteps) return QRNN_BAD_OFFSETS;
        for (int64_t b = 0; b < s.batch; ++b)
            if (s.offsets[b + 1] < s.offsets[b]) return QRNN_BAD_OFFSETS;
    }
    if (s.lengths)
        for (int64_t b = 0; b < s.batch; ++b)
            if (s.lengths[b] < 0 || s.lengths[b] > s.timesteps) return QRNN_BAD_LENGTHS;
    return QRNN_OK;
}

bool is_zoneout(double zoneout) { return zoneout >= 0.0 && zoneout <= 1.0; }

// How the work of a call is cut: groups of sequences by blocks of channels.
struct Cut {
    int64_t sequences;
    int64_t channels;
};

int64_t tasks_of(const qrnn_sequences& s, const Cut& cut) {
    return divide_up(s.batch, cut.sequences) * divide_up(s.hidden, cut.channels);
}

// Halve the cut until every thread has work worth its while.
Cut refine(const qrnn_sequences& s, int64_t threads, Cut cut) {
    const int64_t rows = s.offsets ? s.timesteps : s.timesteps * s.batch;
    const int64_t worthwhile = std::max<int64_t>(1, rows * s.hidden / kSmallestTask);
    const int64_t wanted =
        threads <= 1
            ? 1
            : std::min(worthwhile, threads * (s.offsets || s.lengths ? kTasksPerThread : 1));
    while (tasks_of(s, cut) < wanted) {
        if (cut.sequences > 1)
            cut.sequences = divide_up(cut.sequences, 2);
        else if (cut.channels > kNarrowestBlock)
            cut.channels = round_up(divide_up(cut.channels, 2), kNarrowestBlock);
        else
            break;
    }
    return cut;
}

template <class Work>
struct Tasks {
    const Work& work;
    const qrnn_sequences& sequences;
    Cut cut;

    static void run(void* data, int64_t index) {
        const Tasks& self = *static_cast<const Tasks*>(data);
        const int64_t across = divide_up(self.sequences.hidden, self.cut.channels);
        const int64_t b = index / across * self.cut.sequences;
        const int64_t channel = index % across * self.cut.channels;
        self.work({b, std::min(b + self.cut.sequences, self.sequences.batch), channel,
                   std::min(channel + self.cut.channels, self.sequences.hidden)});
    }
};

template <class Work>
void run_blocks(const qrnn_sequences& s, const qrnn_parallel& parallel, const Cut& cut,
                const Work& work) {
    Tasks<Work> tasks{work, s, cut};
    const int64_t count = tasks_of(s, cut);
    if (count > 1 && parallel.run)
        parallel.run(parallel.context, Tasks<Work>::run, count, &tasks);
    else
        run_on_pool(parallel.threads, Tasks<Work>::run, count, &tasks);
}

bool is_empty(const qrnn_sequences& s) { return s.batch == 0 || s.hidden == 0; }

// Blocks of channels that are as equal as whole cache lines allow, none wider than `widest`.
int64_t equal_channels(int64_t hidden, int64_t widest) {
    const int64_t blocks = divide_up(hidden, widest);
    return std::min(hidden, round_up(divide_up(hidden, blocks), kNarrowestBlock));
}

Cut cut_for_scan(const qrnn_sequences& s, const qrnn_parallel& parallel, bool time_outer) {
    Cut cut{s.batch, equal_channels(s.hidden, kStateElements)};
    if (time_outer) cut.sequences = std::min(s.batch, kStateElements / padded_width(cut.channels));
    return refine(s, parallel.threads, cut);
}

// A large output is mostly memory that nobody has touched, which the system hands out page by page
// while the kernel writes: with pages of 4 kB that takes longer than the kernel itself. This is
// advice: where the system does not follow it, nothing changes.
void advise_large_pages(const qrnn_sequences& s, const qrnn_rows& out) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 2 << 20;
    if (output_bytes(s) < kLargeBytes) return;
    const auto start = reinterpret_cast<uintptr_t>(out.data);
    const uintptr_t first = (start + page - 1) / page * page;
    const uintptr_t last = (start + static_cast<uintptr_t>(output_bytes(s))) / page * page;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)s;
    (void)out;
#endif
}

// Dense forget_mult has no order of channels within a row, so rows that touch are one wide row:
// narrow channels then fill whole vectors.
template <class... MoreRows>
bool rows_touch(const qrnn_sequences& s, const MoreRows&... rows) {
    return !s.offsets && !s.lengths &&
           ((rows.data == nullptr || rows.sequence_stride == s.hidden) && ...);
}

void merge_sequences(qrnn_sequences& s) {
    s.hidden *= s.batch;
    s.batch = 1;
}

}  // namespace
}  // namespace qrnn

using namespace qrnn;

int32_t qrnn_forget_mult(const qrnn_forget_mult_args* args) {
    if (const int status = check_sequences(args->sequences)) return status;
    if (is_empty(args->sequences)) return QRNN_OK;
    qrnn_forget_mult_args a = *args;
    if (rows_touch(a.sequences, a.f, a.x, a.h0, a.h)) merge_sequences(a.sequences);
    advise_large_pages(a.sequences, a.h);
    const KernelTable& kernels = active_kernels();
    const Cut cut = cut_for_scan(a.sequences, a.parallel, time_is_outer(a.sequences, a.f));
    run_blocks(a.sequences, a.parallel, cut,
               [&](const Block& block) { kernels.forget_mult(a, block); });
    return QRNN_OK;
}

int32_t qrnn_forget_mult_backward(const qrnn_forget_mult_backward_args* args) {
    if (const int status = check_sequences(args->sequences)) return status;
    if (is_empty(args->sequences)) return QRNN_OK;
    qrnn_forget_mult_backward_args a = *args;
    if (rows_touch(a.sequences, a.grad_h, a.f, a.x, a.h, a.h0, a.grad_f, a.grad_x, a.grad_h0))
        merge_sequences(a.sequences);
    const KernelTable& kernels = active_kernels();
    const Cut cut = cut_for_scan(a.sequences, a.parallel, time_is_outer(a.sequences, a.f));
    run_blocks(a.sequences, a.parallel, cut,
               [&](const Block& block) { kernels.forget_mult_backward(a, block); });
    return QRNN_OK;
}

int32_t qrnn_fo_pool(const qrnn_fo_pool_args* args) {
    const qrnn_fo_pool_args& a = *args;
    if (const int status = check_sequences(a.sequences)) return status;
    if (!is_zoneout(a.zoneout)) return QRNN_BAD_ARGUMENT;
    if (is_empty(a.sequences)) return QRNN_OK;
    advise_large_pages(a.sequences, a.h);
    const KernelTable& kernels = active_kernels();
    const Cut cut = cut_for_scan(a.sequences, a.parallel, time_is_outer(a.sequences, a.gates));
    run_blocks(a.sequences, a.parallel, cut,
               [&](const Block& block) { kernels.fo_pool(a, block); });
    return QRNN_OK;
}

int32_t qrnn_fo_pool_backward(const qrnn_fo_pool_backward_args* args) {
    const qrnn_fo_pool_backward_args& a = *args;
    const qrnn_sequences& s = a.sequences;
    if (const int status = check_sequences(s)) return status;
    if (!is_zoneout(a.zoneout)) return QRNN_BAD_ARGUMENT;
    if (is_empty(s)) return QRNN_OK;
    int64_t longest = s.timesteps;
    if (s.offsets) {
        longest = 0;
        for (int64_t b = 0; b < s.batch; ++b)
            longest = std::max(longest, s.offsets[b + 1] - s.offsets[b]);
    }
    const int64_t fits = round_up(kScratchElements / (longest + 1) + 1, kNarrowestBlock);
    const Cut cut = refine(s, a.parallel.threads,
                           {s.batch, equal_channels(s.hidden, std::min(kStateElements, fits))});
    const int64_t elements = (longest + 1) * padded_width(cut.channels);
    const std::size_t cell_bytes = s.dtype == QRNN_FLOAT64 ? sizeof(double) : sizeof(float);
    const KernelTable& kernels = active_kernels();
    std::atomic<int> status{QRNN_OK};
    run_blocks(s, a.parallel, cut, [&](const Block& block) {
        const std::unique_ptr<void, void (*)(void*)> scratch(
            std::malloc(static_cast<std::size_t>(elements) * cell_bytes), std::free);
        if (scratch)
            kernels.fo_pool_backward(a, block, scratch.get());
        else
            status.store(QRNN_OUT_OF_MEMORY);
    });
    return status.load();
}

int32_t qrnn_abi_version(void) { return QRNN_ABI_VERSION; }

const char* qrnn_instruction_set(void) { return active_kernels().name; }

int32_t qrnn_select_instruction_set(const char* name) {
    const KernelTable* table = find_kernels(name);
    if (table == nullptr) return QRNN_BAD_ARGUMENT;
    use_kernels(*table);
    return QRNN_OK;
}
