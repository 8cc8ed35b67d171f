#include "cuda_driver.h"

#include <dlfcn.h>

#include <string>
#include <vector>

namespace qrnn {
namespace {

// A library and what was found in it.
template <class Functions>
struct Loaded {
    Functions functions{};
    std::string why;  // not empty: it cannot be used

    // The first of some names that the process has loaded, wherever it lies; else the first that the
    // loader finds.
    Loaded(const char* what, const std::vector<std::string>& names) {
        for (const int mode : {RTLD_NOLOAD, 0}) {
            for (const std::string& name : names) {
                handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | mode);
                if (handle_) return;
            }
        }
        const char* said = dlerror();
        why = std::string("cannot load ") + what + ": " + (said ? said : "no reason given");
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
    Loaded<Driver> loaded("the CUDA driver", {"libcuda.so.1", "libcuda.so"});
    Driver& d = loaded.functions;
#define QRNN_FIND(function) loaded.find(d.function, #function)
#define QRNN_FIND_V2(function) loaded.find(d.function, #function "_v2", #function)
    QRNN_FIND(cuInit);
    QRNN_FIND(cuDriverGetVersion);
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

// A driver takes what the compilers of its own CUDA release and of older ones make, not that of newer
// ones: of the releases the kernels compile with, those up to the driver's, the newest first.
std::vector<std::string> compiler_names() {
    constexpr int oldest = 12;
    const char* why = nullptr;
    const Driver* driver = cuda_driver(&why);
    int version = 0;
    if (driver) driver->cuDriverGetVersion(&version);
    std::vector<std::string> names;
    for (int release = version / 1000; release >= oldest; --release)
        names.push_back("libnvrtc.so." + std::to_string(release));
    return names;
}

Loaded<Compiler> load_compiler() {
    const std::vector<std::string> names = compiler_names();
    Loaded<Compiler> loaded("CUDA's run-time compiler NVRTC", names);
    if (names.empty()) loaded.why = "the CUDA driver is older than CUDA 12; update it";
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
