// The part of ONNX Runtime's C interface that a custom operator needs, declared by us, so that the
// library builds without ONNX Runtime's headers.
//
// The interface is a table of function pointers that only grows: a library that asks for API version 17
// finds the same functions in the same slots of every later runtime. Each slot below names the function
// of the public onnxruntime_c_api.h that it holds.
#ifndef QRNN_ORT_ABI_H
#define QRNN_ORT_ABI_H

#include <cstddef>
#include <cstdint>

namespace ort_abi {

constexpr uint32_t kApiVersion = 17;
constexpr char kOldestRuntime[] = "1.17";

struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct ShapeInfo;
struct CustomOp;

using AnyFunction = void (*)();
using Table = const AnyFunction*;

struct ApiBase {
    Table (*get_api)(uint32_t version);
    const char* (*get_version_string)();
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
    kFloat = 1,
    kInt64 = 7,
    kFloat16 = 10,
    kDouble = 11,
    kBFloat16 = 16,
};

enum Characteristic : int { kRequired = 0 };
enum MemoryType : int { kDefaultMemory = 0 };

// OrtCustomOp. Pointers that may be null are set to null by CustomOp{}.
struct CustomOp {
    uint32_t version;
    void* (*create_kernel)(const CustomOp*, Table, const KernelInfo*);
    const char* (*get_name)(const CustomOp*);
    const char* (*get_provider)(const CustomOp*);
    ElementType (*get_input_type)(const CustomOp*, size_t index);
    size_t (*get_input_count)(const CustomOp*);
    ElementType (*get_output_type)(const CustomOp*, size_t index);
    size_t (*get_output_count)(const CustomOp*);
    void (*compute)(void* kernel, KernelContext*);
    void (*destroy_kernel)(void* kernel);
    Characteristic (*get_input_characteristic)(const CustomOp*, size_t index);
    Characteristic (*get_output_characteristic)(const CustomOp*, size_t index);
    MemoryType (*get_input_memory_type)(const CustomOp*, size_t index);
    int (*get_variadic_input_min_arity)(const CustomOp*);
    int (*get_variadic_input_homogeneity)(const CustomOp*);
    int (*get_variadic_output_min_arity)(const CustomOp*);
    int (*get_variadic_output_homogeneity)(const CustomOp*);
    Status* (*create_kernel_v2)(const CustomOp*, Table, const KernelInfo*, void** kernel);
    Status* (*compute_v2)(void* kernel, KernelContext*);
    AnyFunction infer_output_shape;
    int (*get_start_version)(const CustomOp*);
    int (*get_end_version)(const CustomOp*);
    AnyFunction get_may_inplace;
    AnyFunction release_may_inplace;
    AnyFunction get_alias_map;
    AnyFunction release_alias_map;
};

static_assert(sizeof(CustomOp) == 26 * sizeof(void*), "OrtCustomOp is 26 machine words");

// The functions of OrtApi that we call, by slot.
class Api {
   public:
    explicit Api(Table table) : table_(table) {}

    Status* create_status(ErrorCode code, const char* message) const {
        return call<0, Status*>(static_cast<int>(code), message);
    }
    Status* create_domain(const char* name, Domain** out) const {
        return call<26, Status*>(name, out);  // CreateCustomOpDomain
    }
    Status* add_op(Domain* domain, const CustomOp* op) const {
        return call<27, Status*>(domain, op);  // CustomOpDomain_Add
    }
    Status* add_domain(SessionOptions* options, Domain* domain) const {
        return call<28, Status*>(options, domain);  // AddCustomOpDomain
    }
    Status* mutable_data(Value* value, void** out) const {
        return call<51, Status*>(value, out);  // GetTensorMutableData
    }
    Status* dimension_count(const ShapeInfo* info, size_t* out) const {
        return call<61, Status*>(info, out);  // GetDimensionsCount
    }
    Status* dimensions(const ShapeInfo* info, int64_t* out, size_t count) const {
        return call<62, Status*>(info, out, count);  // GetDimensions
    }
    Status* shape_info(const Value* value, ShapeInfo** out) const {
        return call<65, Status*>(value, out);  // GetTensorTypeAndShape
    }
    Status* attribute(const KernelInfo* info, const char* name, float* out) const {
        return call<85, Status*>(info, name, out);  // KernelInfoGetAttribute_float
    }
    Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
        return call<86, Status*>(info, name, out);  // KernelInfoGetAttribute_int64
    }
    Status* input(const KernelContext* context, size_t index, const Value** out) const {
        return call<90, Status*>(context, index, out);  // KernelContext_GetInput
    }
    Status* output(KernelContext* context, size_t index, const int64_t* sizes, size_t count,
                   Value** out) const {
        return call<91, Status*>(context, index, sizes, count, out);  // KernelContext_GetOutput
    }
    void release(Status* status) const { call<93, void>(status); }      // ReleaseStatus
    void release(ShapeInfo* info) const { call<99, void>(info); }       // ReleaseTensorTypeAndShapeInfo
    Status* gpu_stream(const KernelContext* context, void** out) const {
        return call<193, Status*>(context, out);  // KernelContext_GetGPUComputeStream
    }
    Status* parallel_for(const KernelContext* context, void (*task)(void*, size_t), size_t count,
                         void* data) const {
        // KernelContext_ParallelFor; 0 batches: the runtime decides.
        return call<274, Status*>(context, task, count, size_t{0}, data);
    }

   private:
    template <size_t Slot, typename Result, typename... Arguments>
    Result call(Arguments... arguments) const {
        using Function = Result (*)(Arguments...);
        return reinterpret_cast<Function>(table_[Slot])(arguments...);
    }

    Table table_;
};

}  // namespace ort_abi

#endif  // QRNN_ORT_ABI_H
