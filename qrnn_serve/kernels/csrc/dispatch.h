// The instruction set in use.
#pragma once

#include "kernel_table.h"

namespace qrnn {

const KernelTable& active_kernels();

// Null when this build or this processor does not have the set.
const KernelTable* find_kernels(const char* name);

void use_kernels(const KernelTable& table);

}  // namespace qrnn
