// Runs the CUDA kernels' own source as plain C++, so that its arithmetic, indexing and hand-over
// between blocks are tested where there is no GPU. Built by support/cuda_on_host.py with QRNN_DTYPE,
// QRNN_CHANNELS and QRNN_SOURCE.
//
// Each thread of a block is a fiber; a barrier or a wait switches to the next one. Several blocks
// are resident at once and take turns, the last started first, so that they do wait for each other.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define QRNN_ON_HOST
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

typedef long long int64;
typedef unsigned long long uint64;

namespace host {

constexpr std::size_t kStack = 128 * 1024;

// Threads that wait for each other.
struct Meeting {
    int members, waiting = 0;
    unsigned sum = 0, mask = 0, last_sum = 0, last_mask = 0;
    std::int64_t round = 0;
};

struct Block {
    int64 index;
    Meeting whole;
    std::vector<Meeting> warps;
    std::vector<char> memory;
};

// A copy under way, or an end of copies where `to` is null.
struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStack]};
    Block* block;
    int thread;
    bool done;
    std::vector<Copy> copies;
};

// All but the copies of the last `ends` ends.
static void finish_copies(Fiber& fiber, int ends) {
    std::size_t stop = fiber.copies.size();
    while (stop > 0) {
        if (fiber.copies[stop - 1].to == nullptr && ends-- == 0) break;
        --stop;
    }
    for (std::size_t i = 0; i < stop; ++i) {
        const Copy& copy = fiber.copies[i];
        if (copy.to) std::memcpy(copy.to, copy.from, copy.bytes);
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + stop);
}

static ucontext_t scheduler;
static Fiber* current;
static int64 grid;
static const std::function<void()>* work;

static void yield() { swapcontext(&current->context, &scheduler); }

static void enter() {
    (*work)();
    current->done = true;
    yield();
}

// Waits for all members; `last_sum` and `last_mask` are then those of what all gave.
static void meet(Meeting& meeting, unsigned value, unsigned bit) {
    const std::int64_t round = meeting.round;
    meeting.sum += value;
    meeting.mask |= bit;
    if (++meeting.waiting == meeting.members) {
        meeting.last_sum = meeting.sum;
        meeting.last_mask = meeting.mask;
        meeting.sum = meeting.mask = 0;
        meeting.waiting = 0;
        ++meeting.round;
    }
    while (meeting.round == round) yield();
}

static Meeting& own_warp() { return current->block->warps[current->thread / 32]; }

// Blocks `first` to `first + count - 1` at once.
static void run_blocks(std::vector<Fiber>& fibers, int64 first, int count, int threads) {
    std::vector<Block> blocks(count);
    for (int b = 0; b < count; ++b) {
        blocks[b].index = first + b;
        blocks[b].whole.members = threads;
        blocks[b].warps.assign(threads / 32, Meeting{32});
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[b * threads + t];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = kStack;
            fiber.context.uc_link = nullptr;
            fiber.block = &blocks[b];
            fiber.thread = t;
            fiber.done = false;
            fiber.copies.clear();
            makecontext(&fiber.context, enter, 0);
        }
    }
    for (int left = count * threads; left > 0;) {
        left = 0;
        for (int i = count * threads - 1; i >= 0; --i) {
            if (fibers[i].done) continue;
            current = &fibers[i];
            swapcontext(&scheduler, &current->context);
            left += !current->done;
        }
    }
}

static void run(int64 blocks, int threads, int resident, const std::function<void()>& kernel) {
    // As on a GPU that holds few blocks, so that each does much.
    blocks = std::min<int64>(blocks, 2 * resident);
    std::vector<Fiber> fibers(static_cast<std::size_t>(std::min<int64>(resident, blocks)) *
                              threads);
    grid = blocks;
    work = &kernel;
    for (int64 first = 0; first < blocks; first += resident) {
        run_blocks(fibers, first, static_cast<int>(std::min<int64>(resident, blocks - first)),
                   threads);
    }
}

}  // namespace host

static unsigned thread_of_block() { return host::current->thread; }
static unsigned threads_of_block() { return host::current->block->whole.members; }
static unsigned block_of_grid() { return host::current->block->index; }
static unsigned blocks_of_grid() { return host::grid; }
static void barrier() { host::meet(host::current->block->whole, 0, 0); }
static bool all_of_block(bool yes) {
    host::Meeting& block = host::current->block->whole;
    host::meet(block, yes, 0);
    return block.last_sum == static_cast<unsigned>(block.members);
}
static void warp_barrier() { host::meet(host::own_warp(), 0, 0); }
static unsigned lanes_of_warp(bool yes) {
    host::meet(host::own_warp(), 0, yes ? 1u << host::current->thread % 32 : 0u);
    return host::own_warp().last_mask;
}
static int bits_in(unsigned word) { return __builtin_popcount(word); }
static unsigned sum_of_warp(unsigned value) {
    host::meet(host::own_warp(), value, 0);
    return host::own_warp().last_sum;
}
static unsigned quotient(unsigned n, uint64 magic) {
    return magic ? static_cast<unsigned>(static_cast<unsigned __int128>(n) * magic >> 64) : n;
}

template <class T>
static T& block_memory() {
    std::vector<char>& memory = host::current->block->memory;
    // Filled with NaN: what nobody wrote is seen.
    if (memory.empty()) memory.assign(sizeof(T), static_cast<char>(0xFF));
    return *reinterpret_cast<T*>(memory.data());
}

static const char* stepped(const char* address, int step, int k) {
    return address + static_cast<int64>(step) * k;
}

static uint64 read_word(const uint64* address) { return *address; }
static void read_words(const uint64* address, uint64& first, uint64& second) {
    if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) __builtin_trap();
    first = address[0];
    second = address[1];
}
static void write_word(uint64* address, uint64 word) { *address = word; }
static void wait_a_little() { host::yield(); }

static void claim(uint64* counter, bool asks, uint64& ticket) {
    if (asks) ticket = (*counter)++;
}

template <int Bytes>
static void start_copy(void* to, const void* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % Bytes != 0) __builtin_trap();
    if (reinterpret_cast<std::uintptr_t>(to) % Bytes != 0) __builtin_trap();
    // Not there before the wait: what is read too early is seen.
    std::memset(to, 0xFF, Bytes);
    host::current->copies.push_back({to, from, Bytes});
}
static void end_of_copies() { host::current->copies.push_back({nullptr, nullptr, 0}); }
template <int Ends>
static void wait_for_copies() { host::finish_copies(*host::current, Ends); }

template <class Word>
static Word load_once(const void* address) {
    Word word;
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(Word) != 0) __builtin_trap();
    std::memcpy(&word, address, sizeof(word));
    return word;
}

template <class To, class From>
static To same_bits(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from), "sizes differ");
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
static unsigned bits_of(float x) { return same_bits<unsigned>(x); }
static float float_of(unsigned bits) { return same_bits<float>(bits); }
static uint64 bits_of(double x) { return same_bits<uint64>(x); }
static double double_of(uint64 bits) { return same_bits<double>(bits); }

static float exp2_fast(float x) { return std::exp2(x); }
static float reciprocal_fast(float x) { return 1.0f / x; }
static float tanh_fast(float x) { return std::tanh(x); }

static float float16_to_float(unsigned bits) {
    return same_bits<_Float16>(static_cast<unsigned short>(bits));
}
static unsigned floats_to_float16(float low, float high) {
    return same_bits<unsigned short>(static_cast<_Float16>(low)) |
           static_cast<unsigned>(same_bits<unsigned short>(static_cast<_Float16>(high))) << 16;
}

using std::exp;
using std::fma;
using std::tanh;

#include QRNN_SOURCE

// Returns the size of the kernel's argument block, or 0 for an unknown name.
extern "C" int launch(const char* name, int64 blocks, int threads, int resident,
                      const void* raw) {
#define QRNN_CASE(kernel, Arguments)                                           \
    if (std::strcmp(name, #kernel) == 0) {                                     \
        Arguments arguments;                                                   \
        std::memcpy(static_cast<void*>(&arguments), raw, sizeof(arguments));   \
        host::run(blocks, threads, resident, [&] { kernel(arguments); });      \
        return sizeof(Arguments);                                              \
    }
    QRNN_CASE(qrnn_forget_mult, ForgetMultArgs)
    QRNN_CASE(qrnn_forget_mult_backward, ForgetMultBackwardArgs)
    QRNN_CASE(qrnn_fo_pool, FoPoolArgs)
    QRNN_CASE(qrnn_f_pool, FoPoolArgs)
    QRNN_CASE(qrnn_fo_pool_backward, FoPoolBackwardArgs)
    QRNN_CASE(qrnn_f_pool_backward, FoPoolBackwardArgs)
    QRNN_CASE(qrnn_prepare, PrepareArgs)
    QRNN_CASE(qrnn_forget_mult_short, ForgetMultArgs)
    QRNN_CASE(qrnn_fo_pool_short, FoPoolArgs)
    QRNN_CASE(qrnn_f_pool_short, FoPoolArgs)
    QRNN_CASE(qrnn_window, WindowArgs)
    QRNN_CASE(qrnn_window_backward, WindowBackwardArgs)
    return 0;
}
