// Stands for libcuda and libnvrtc where there is no GPU: memory is the host's, and a launch runs the
// kernels as cuda_on_host.cpp does. QRNN_HOST_KERNELS is the folder of their libraries, named by
// dtype, channels and far. QRNN_RELEASE, when it is built, is the compiler's CUDA release; of the
// environment QRNN_DRIVER_RELEASE is the driver's, and QRNN_COMPILED a file that gets a line for each
// compilation.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace {

using Launch = int (*)(const char* name, long long blocks, int threads, int resident, const void*);

struct Program {
    std::string source, options;
};

struct Module {
    std::string options;
};

struct Function {
    std::string name;
    Launch launch;
};

unsigned shared_bytes = 1000;
int most_shared_bytes = 0;

std::string option(const std::string& options, const char* name) {
    const size_t at = options.find(name), start = at + std::strlen(name);
    return at == std::string::npos ? "" : options.substr(start, options.find(' ', start) - start);
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) { return *major = QRNN_RELEASE, *minor = 0, 0; }
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
int nvrtcCreateProgram(Program** out, const char* source, const char*, int headers,
                       const char* const* texts, const char* const* names) {
    *out = new Program{source, ""};
    // Every header that is included must be there.
    for (int i = -1; i < headers; ++i) {
        std::string text = i < 0 ? source : texts[i];
        for (size_t at = 0; (at = text.find("\n#include \"", at)) != std::string::npos; ++at) {
            const size_t start = at + 11, stop = text.find('"', start);
            bool found = false;
            for (int j = 0; j < headers; ++j) found |= text.substr(start, stop - start) == names[j];
            if (!found) return 4;
        }
    }
    return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    for (int i = 0; i < count; ++i) program->options += std::string(options[i]) + " ";
    if (const char* log = std::getenv("QRNN_COMPILED"))
        std::ofstream(log, std::ios::app) << QRNN_RELEASE << " " + program->options + "\n";
    return std::getenv("QRNN_COMPILER_FAILS") ? 6 : 0;
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    return *bytes = program->options.size() + 1, 0;
}
int nvrtcGetCUBIN(Program* program, char* out) {
    std::memcpy(out, program->options.c_str(), program->options.size() + 1);
    return 0;
}
int nvrtcGetProgramLogSize(Program*, size_t* bytes) { return *bytes = 9, 0; }
int nvrtcGetProgramLog(Program*, char* out) { return std::strcpy(out, "line one"), 0; }
int nvrtcDestroyProgram(Program** program) { return delete *program, 0; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
    const char* release = std::getenv("QRNN_DRIVER_RELEASE");
    return *version = 1000 * (release ? std::atoi(release) : 13), 0;
}
int cuGetErrorString(int, const char** text) { return *text = "invalid argument", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &shared_bytes, 0; }
int cuPointerGetAttribute(void* out, int, unsigned long long address) {
    if (!address) return 1;
    *static_cast<int*>(out) = 1;
    return 0;
}
int cuCtxPushCurrent(void*) { return 0; }
int cuCtxPopCurrent(void**) { return 0; }
int cuModuleLoadData(Module** out, const void* image) {
    *out = new Module{static_cast<const char*>(image)};
    return 0;
}
int cuModuleGetFunction(Function** out, Module* module, const char* name) {
    const std::string& options = module->options;
    const std::string path = std::string(std::getenv("QRNN_HOST_KERNELS")) + "/" +
                             option(options, "DTYPE=") + option(options, "CHANNELS=") +
                             (options.find("FAR") == std::string::npos ? "-" : "far-") +
                             option(options, "ROW_BYTES=") + ".so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 500;
    *out = new Function{name, reinterpret_cast<Launch>(dlsym(library, "launch"))};
    return 0;
}
int cuModuleGetGlobal(unsigned long long* address, size_t* bytes, Module*, const char*) {
    *address = reinterpret_cast<unsigned long long>(&shared_bytes);
    *bytes = sizeof shared_bytes;
    return 0;
}
int cuMemcpyDtoH(void* to, unsigned long long from, size_t bytes) {
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return 0;
}
int cuFuncGetAttribute(int* value, int, Function*) { return *value = 0, 0; }
int cuFuncSetAttribute(Function*, int attribute, int value) {
    if (attribute == 8) most_shared_bytes = value;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int, size_t) {
    return *blocks = 1, 0;
}
int cuMemPoolCreate(void** pool, const void*) { return *pool = nullptr, 0; }
int cuMemPoolSetAttribute(void*, int, void*) { return 0; }
int cuMemAllocFromPoolAsync(unsigned long long* out, size_t bytes, void*, void*) {
    void* memory = std::malloc(bytes);
    std::memset(memory, 0xFF, bytes);
    return *out = reinterpret_cast<unsigned long long>(memory), 0;
}
int cuMemFreeAsync(unsigned long long address, void*) {
    return std::free(reinterpret_cast<void*>(address)), 0;
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void*) {
    return std::memset(reinterpret_cast<void*>(address), value, bytes), 0;
}
int cuLaunchKernel(Function* function, unsigned grid, unsigned, unsigned, unsigned threads,
                   unsigned, unsigned, unsigned shared, void*, void** parameters, void**) {
    if (shared != shared_bytes || most_shared_bytes != static_cast<int>(shared_bytes)) return 1;
    return function->launch(function->name.c_str(), grid, static_cast<int>(threads), 3,
                            parameters[0]) > 0 ? 0 : 1;
}

}  // extern "C"
