#include "dispatch.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qrnn {
namespace {

#ifdef QRNN_HAVE_AVX2
bool processor_has_avx2() {
    unsigned int a = 0, b = 0, c = 0, d = 0;
    const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#ifdef QRNN_HAVE_AVX512
bool processor_has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const KernelTable& best_kernels() {
    for (const char* name : {"avx512", "avx2"})
        if (const KernelTable* table = find_kernels(name)) return *table;
    return kPortableKernels;
}

std::atomic<const KernelTable*> active{nullptr};

}  // namespace

const KernelTable& active_kernels() {
    const KernelTable* table = active.load(std::memory_order_acquire);
    if (table == nullptr) {
        table = &best_kernels();
        active.store(table, std::memory_order_release);
    }
    return *table;
}

const KernelTable* find_kernels(const char* name) {
#ifdef QRNN_HAVE_AVX512
    if (std::strcmp(name, "avx512") == 0 && processor_has_avx512()) return &kAvx512Kernels;
#endif
#ifdef QRNN_HAVE_AVX2
    if (std::strcmp(name, "avx2") == 0 && processor_has_avx2()) return &kAvx2Kernels;
#endif
    return std::strcmp(name, "portable") == 0 ? &kPortableKernels : nullptr;
}

void use_kernels(const KernelTable& table) { active.store(&table, std::memory_order_release); }

}  // namespace qrnn
