#include "cuda_driver.h"

#include <dlfcn.h>

#include <string>

namespace qrnn {
namespace {

// A library and what was found in it.
template <class Functions>
struct Loaded {
    Functions functions{};
    std::string why;  // not empty: it cannot be used

    template <size_t Names>
    explicit Loaded(const char* what, const char* const (&names)[Names]) {
        for (const char* name : names) {
            handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (handle_) return;
        }
        why = std::string("cannot load ") + what + ": " + dlerror();
    }

    // The newest variant of a function that a `_v2` name marks.
    template <class Function>
    void find(Function*& function, const char* name, const char* older = nullptr) {
        if (!handle_) return;
        void* address = dlsym(handle_, name);
        if (!address && older) address = dlsym(handle_, older);
        if (!address) why = std::string("it has no function ") + name + "; update it";
        function = reinterpret_cast<Function*>(address);
    }

   private:
    void* handle_ = nullptr;
};

Loaded<Driver> load_driver() {
    static const char* const names[] = {"libcuda.so.1", "libcuda.so"};
    Loaded<Driver> loaded("the CUDA driver", names);
    Driver& d = loaded.functions;
#define QRNN_FIND(function) loaded.find(d.function, #function)
#define QRNN_FIND_V2(function) loaded.find(d.function, #function "_v2", #function)
    QRNN_FIND(cuInit);
    QRNN_FIND(cuGetErrorString);
    QRNN_FIND(cuDeviceGet);
    QRNN_FIND(cuDeviceGetAttribute);
    QRNN_FIND(cuDevicePrimaryCtxRetain);
    QRNN_FIND(cuPointerGetAttribute);
    QRNN_FIND_V2(cuCtxPushCurrent);
    QRNN_FIND_V2(cuCtxPopCurrent);
    QRNN_FIND(cuModuleLoadData);
    QRNN_FIND(cuModuleGetFunction);
    QRNN_FIND_V2(cuModuleGetGlobal);
    QRNN_FIND_V2(cuMemcpyDtoH);
    QRNN_FIND(cuFuncGetAttribute);
    QRNN_FIND(cuFuncSetAttribute);
    QRNN_FIND(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    QRNN_FIND(cuMemPoolCreate);
    QRNN_FIND(cuMemPoolSetAttribute);
    QRNN_FIND(cuMemAllocFromPoolAsync);
    QRNN_FIND(cuMemFreeAsync);
    QRNN_FIND(cuMemsetD8Async);
    QRNN_FIND(cuLaunchKernel);
#undef QRNN_FIND
#undef QRNN_FIND_V2
    if (loaded.why.empty() && d.cuInit(0) != 0) loaded.why = "the CUDA driver finds no GPU";
    return loaded;
}

Loaded<Compiler> load_compiler() {
    // One that the process has loaded is found by its name alone, wherever it lies.
    static const char* const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    Loaded<Compiler> loaded("CUDA's run-time compiler NVRTC", names);
    Compiler& c = loaded.functions;
#define QRNN_FIND(function) loaded.find(c.function, #function)
    QRNN_FIND(nvrtcGetErrorString);
    QRNN_FIND(nvrtcVersion);
    QRNN_FIND(nvrtcCreateProgram);
    QRNN_FIND(nvrtcCompileProgram);
    QRNN_FIND(nvrtcGetCUBINSize);
    QRNN_FIND(nvrtcGetCUBIN);
    QRNN_FIND(nvrtcGetProgramLogSize);
    QRNN_FIND(nvrtcGetProgramLog);
    QRNN_FIND(nvrtcDestroyProgram);
#undef QRNN_FIND
    return loaded;
}

template <class Functions>
const Functions* usable(const Loaded<Functions>& loaded, const char** why) {
    *why = loaded.why.c_str();
    return loaded.why.empty() ? &loaded.functions : nullptr;
}

}  // namespace

const Driver* cuda_driver(const char** why) {
    static const Loaded<Driver> loaded = load_driver();
    return usable(loaded, why);
}

const Compiler* cuda_compiler(const char** why) {
    static const Loaded<Compiler> loaded = load_compiler();
    return usable(loaded, why);
}

}  // namespace qrnn
