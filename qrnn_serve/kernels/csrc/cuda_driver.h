// The parts of CUDA's driver interface and of its run-time compiler that we call, declared by us and
// found when they are first needed: the library builds without a toolkit, and loads without a GPU.
#ifndef QRNN_CUDA_DRIVER_H
#define QRNN_CUDA_DRIVER_H

#include <cstddef>
#include <cstdint>

namespace qrnn {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUmempool_st;
using CUcontext = CUctx_st*;
using CUmodule = CUmod_st*;
using CUfunction = CUfunc_st*;
using CUstream = CUstream_st*;
using CUmemoryPool = CUmempool_st*;

constexpr int kAttributeProcessors = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kFunctionMostSharedBytes = 8;
constexpr int kFunctionRegisters = 4;
constexpr int kPoolReleaseThreshold = 4;
constexpr int kPointerDevice = 9;

// CUmemPoolProps: memory of one device, for this process alone.
struct CUmemPoolProps {
    int allocation_type;  // 1: pinned
    int handle_types;
    int location_type;  // 1: device
    int location;
    void* windows_attributes;
    size_t most_bytes;
    unsigned short usage;
    unsigned char reserved[54];
};
static_assert(sizeof(CUmemPoolProps) == 88, "as in cuda.h");

struct Driver {
    CUresult (*cuInit)(unsigned flags);
    CUresult (*cuDriverGetVersion)(int* version);
    CUresult (*cuGetErrorString)(CUresult, const char** text);
    CUresult (*cuDeviceGet)(CUdevice*, int ordinal);
    CUresult (*cuDeviceGetAttribute)(int*, int attribute, CUdevice);
    CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
    CUresult (*cuPointerGetAttribute)(void*, int attribute, CUdeviceptr);
    CUresult (*cuCtxPushCurrent)(CUcontext);
    CUresult (*cuCtxPopCurrent)(CUcontext*);
    CUresult (*cuModuleLoadData)(CUmodule*, const void* image);
    CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char* name);
    CUresult (*cuModuleGetGlobal)(CUdeviceptr*, size_t* bytes, CUmodule, const char* name);
    CUresult (*cuMemcpyDtoH)(void*, CUdeviceptr, size_t);
    CUresult (*cuFuncGetAttribute)(int*, int attribute, CUfunction);
    CUresult (*cuFuncSetAttribute)(CUfunction, int attribute, int value);
    CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int*, CUfunction, int threads,
                                                            size_t shared_bytes);
    CUresult (*cuMemPoolCreate)(CUmemoryPool*, const CUmemPoolProps*);
    CUresult (*cuMemPoolSetAttribute)(CUmemoryPool, int attribute, void* value);
    CUresult (*cuMemAllocFromPoolAsync)(CUdeviceptr*, size_t, CUmemoryPool, CUstream);
    CUresult (*cuMemFreeAsync)(CUdeviceptr, CUstream);
    CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*cuLaunchKernel)(CUfunction, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, CUstream, void** parameters, void** extra);
};

using nvrtcProgram = struct nvrtcProgram_st*;

struct Compiler {
    const char* (*nvrtcGetErrorString)(int);
    int (*nvrtcVersion)(int* major, int* minor);
    int (*nvrtcCreateProgram)(nvrtcProgram*, const char* source, const char* name, int headers,
                              const char* const* header_texts, const char* const* header_names);
    int (*nvrtcCompileProgram)(nvrtcProgram, int count, const char* const* options);
    int (*nvrtcGetCUBINSize)(nvrtcProgram, size_t*);
    int (*nvrtcGetCUBIN)(nvrtcProgram, char*);
    int (*nvrtcGetProgramLogSize)(nvrtcProgram, size_t*);
    int (*nvrtcGetProgramLog)(nvrtcProgram, char*);
    int (*nvrtcDestroyProgram)(nvrtcProgram*);
};

// Null, with the reason in `why`, where there is none. The same result at every call. The compiler is
// one that the process has loaded already, where its code suits the driver.
const Driver* cuda_driver(const char** why);
const Compiler* cuda_compiler(const char** why);

}  // namespace qrnn

#endif
