// ai.qrnn::FoPool for ONNX Runtime: checks the tensors, then calls the pool kernel on the runtime's own
// thread pool. The maths stands in qrnn_serve/kernels/reference.py (fo_pool), the standard-operator form
// of the same operator in qrnn_export/onnx_pool.py.
//
// Letters: B rows, T timesteps (padded), H channels, G gates (3 with an output gate, else 2).

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <new>
#include <string>
#include <thread>

#include "ort_abi.h"
#include "qrnn_kernels.h"

namespace {

using namespace ort_abi;

constexpr char kDomain[] = "ai.qrnn";
constexpr int kDomainVersion = 1;

constexpr char kCpu[] = "CPUExecutionProvider";
constexpr char kCuda[] = "CUDAExecutionProvider";

// One entry for each provider and dtype; the runtime joins entries of one name into one operator.
struct PoolOp : CustomOp {
    const char* provider;
    ElementType element_type;
    qrnn_dtype dtype;
};

struct PoolKernel {
    Api api;
    bool on_gpu;
    qrnn_dtype dtype;
    int64_t output_gate;
    int64_t reverse;
    double zoneout;
};

struct PoolSizes {
    int64_t batch;
    int64_t timesteps;
    int64_t hidden;
};

Status* refuse(const Api& api, const char* format, ...) {
    char message[512];
    const int start = std::snprintf(message, sizeof message, "%s::FoPool: ", kDomain);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message + start, sizeof message - static_cast<size_t>(start), format, arguments);
    va_end(arguments);
    return api.create_status(kInvalidArgument, message);
}

// Reads the sizes of one input of a known rank.
Status* read_sizes(const Api& api, const Value* value, const char* name, size_t rank, int64_t* sizes) {
    ShapeInfo* info = nullptr;
    if (Status* status = api.shape_info(value, &info)) return status;
    size_t found = 0;
    Status* status = api.dimension_count(info, &found);
    if (!status) {
        status = found == rank
                     ? api.dimensions(info, sizes, rank)
                     : refuse(api, "%s: expected %zu axes, got %zu", name, rank, found);
    }
    api.release(info);
    return status;
}

Status* check_sizes(const PoolKernel& kernel, const int64_t gates[3], int64_t lengths,
                    const int64_t c0[2]) {
    const int64_t gate_count = kernel.output_gate ? 3 : 2;
    if (gates[2] != gate_count * c0[1]) {
        return refuse(kernel.api,
                      "gates: expected [batch, time, %" PRId64 " * %" PRId64
                      "] for c0 of width %" PRId64 " and output_gate %" PRId64
                      ", got [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                      gate_count, c0[1], c0[1], kernel.output_gate, gates[0], gates[1], gates[2]);
    }
    if (lengths != gates[0]) {
        return refuse(kernel.api,
                      "lengths: expected one for each of %" PRId64 " rows of gates, got %" PRId64,
                      gates[0], lengths);
    }
    if (c0[0] != gates[0]) {
        return refuse(kernel.api,
                      "c0: expected one row for each of %" PRId64 " rows of gates, got %" PRId64,
                      gates[0], c0[0]);
    }
    return nullptr;
}

Status* refuse_lengths(const Api& api, const int64_t* lengths, const PoolSizes& sizes) {
    for (int64_t row = 0; row < sizes.batch; ++row) {
        if (lengths[row] < 0 || lengths[row] > sizes.timesteps) {
            return refuse(api, "lengths[%" PRId64 "]: expected 0 to %" PRId64 ", got %" PRId64, row,
                          sizes.timesteps, lengths[row]);
        }
    }
    return refuse(api, "the kernel refused lengths that are right. This is a bug.");
}

// Hands the kernel's tasks to the runtime's thread pool, so that a session's thread setting holds.
struct RuntimePool {
    const Api& api;
    KernelContext* context;
    Status* status;

    static void run(void* self, qrnn_task task, int64_t count, void* data) {
        struct Call {
            qrnn_task task;
            void* data;
        } call{task, data};
        auto& pool = *static_cast<RuntimePool*>(self);
        const auto adapter = [](void* opaque, size_t index) {
            const Call& each = *static_cast<Call*>(opaque);
            each.task(each.data, static_cast<int64_t>(index));
        };
        pool.status =
            pool.api.parallel_for(pool.context, adapter, static_cast<size_t>(count), &call);
    }
};

// Pointers to the data of all tensors; outputs are allocated by the runtime here.
struct PoolData {
    void* gates = nullptr;
    void* lengths = nullptr;
    void* c0 = nullptr;
    void* h = nullptr;
    void* c = nullptr;
};

Status* read_data(const Api& api, const Value* const inputs[3], PoolData* data) {
    void** const targets[] = {&data->gates, &data->lengths, &data->c0};
    for (size_t i = 0; i < 3; ++i) {
        // The accessor of the runtime wants a mutable value; we only read from inputs.
        if (Status* status = api.mutable_data(const_cast<Value*>(inputs[i]), targets[i])) {
            return status;
        }
    }
    return nullptr;
}

Status* allocate_outputs(const Api& api, KernelContext* context, const PoolSizes& sizes,
                         PoolData* data) {
    const int64_t hidden_sizes[] = {sizes.batch, sizes.timesteps, sizes.hidden};
    const int64_t cell_sizes[] = {sizes.batch, sizes.hidden};
    Value* hidden = nullptr;
    Value* cell = nullptr;
    if (Status* status = api.output(context, 0, hidden_sizes, 3, &hidden)) return status;
    if (Status* status = api.output(context, 1, cell_sizes, 2, &cell)) return status;
    if (Status* status = api.mutable_data(hidden, &data->h)) return status;
    return api.mutable_data(cell, &data->c);
}

// Fills the fields that the arguments of both devices have.
template <class Arguments>
void describe(const PoolKernel& kernel, const PoolSizes& sizes, const PoolData& data,
              Arguments* args) {
    const int64_t gate_channels = (kernel.output_gate ? 3 : 2) * sizes.hidden;
    args->sequences.dtype = kernel.dtype;
    args->sequences.timesteps = sizes.timesteps;
    args->sequences.batch = sizes.batch;
    args->sequences.hidden = sizes.hidden;
    args->sequences.reverse = kernel.reverse;
    args->sequences.lengths = static_cast<const int64_t*>(data.lengths);
    args->output_gate = kernel.output_gate;
    args->zoneout = kernel.zoneout;
    args->gates = {data.gates, gate_channels, sizes.timesteps * gate_channels};
    args->c0 = {data.c0, 0, sizes.hidden};
    args->h = {data.h, sizes.hidden, sizes.timesteps * sizes.hidden};
    args->c = {data.c, 0, sizes.hidden};
}

Status* run_on_gpu(const PoolKernel& kernel, KernelContext* context, const PoolSizes& sizes,
                   const PoolData& data) {
    qrnn_cuda_fo_pool_args args{};
    describe(kernel, sizes, data, &args);
    if (Status* status = kernel.api.gpu_stream(context, &args.stream)) return status;
    char message[2048] = "";
    args.message = message;
    args.message_bytes = sizeof message;
    if (qrnn_cuda_fo_pool(&args) == QRNN_OK) return nullptr;
    return kernel.api.create_status(kFail, (std::string(kDomain) + "::FoPool: " + message).c_str());
}

Status* run_on_cpu(const PoolKernel& kernel, KernelContext* context, const PoolSizes& sizes,
                   const PoolData& data) {
    RuntimePool pool{kernel.api, context, nullptr};
    qrnn_fo_pool_args args{};
    describe(kernel, sizes, data, &args);
    // The runtime does not say how many threads its pool has; tasks beyond them wait their turn.
    args.parallel = {static_cast<int64_t>(std::thread::hardware_concurrency()), RuntimePool::run, &pool};
    const int32_t outcome = qrnn_fo_pool(&args);
    if (pool.status) return pool.status;
    switch (outcome) {
        case QRNN_OK:
            return nullptr;
        case QRNN_BAD_LENGTHS:
            return refuse_lengths(kernel.api, args.sequences.lengths, sizes);
        case QRNN_OUT_OF_MEMORY:
            return kernel.api.create_status(kFail, "ai.qrnn::FoPool: out of memory");
        default:
            return refuse(kernel.api, "the kernel refused its arguments (status %d). This is a bug.",
                          static_cast<int>(outcome));
    }
}

Status* compute(void* opaque, KernelContext* context) {
    const PoolKernel& kernel = *static_cast<const PoolKernel*>(opaque);
    const Api& api = kernel.api;
    const Value* inputs[3] = {};
    for (size_t i = 0; i < 3; ++i) {
        if (Status* status = api.input(context, i, &inputs[i])) return status;
    }
    int64_t gates[3];
    int64_t lengths;
    int64_t c0[2];
    if (Status* status = read_sizes(api, inputs[0], "gates", 3, gates)) return status;
    if (Status* status = read_sizes(api, inputs[1], "lengths", 1, &lengths)) return status;
    if (Status* status = read_sizes(api, inputs[2], "c0", 2, c0)) return status;
    if (Status* status = check_sizes(kernel, gates, lengths, c0)) return status;
    const PoolSizes sizes{gates[0], gates[1], c0[1]};
    PoolData data;
    if (Status* status = read_data(api, inputs, &data)) return status;
    if (Status* status = allocate_outputs(api, context, sizes, &data)) return status;
    const auto run = kernel.on_gpu ? run_on_gpu : run_on_cpu;
    return run(kernel, context, sizes, data);
}

Status* create_kernel(const CustomOp* base, Table table, const KernelInfo* info, void** out) {
    const Api api(table);
    int64_t output_gate = 0;
    int64_t reverse = 0;
    float zoneout = 0;
    if (Status* status = api.attribute(info, "output_gate", &output_gate)) return status;
    if (Status* status = api.attribute(info, "reverse", &reverse)) return status;
    if (Status* status = api.attribute(info, "zoneout", &zoneout)) return status;
    if (!(zoneout >= 0 && zoneout <= 1)) {
        return refuse(api, "zoneout: expected 0 to 1, got %g", static_cast<double>(zoneout));
    }
    const auto& op = static_cast<const PoolOp&>(*base);
    const bool on_gpu = op.provider == kCuda;
    auto* kernel =
        new (std::nothrow) PoolKernel{api, on_gpu, op.dtype, output_gate, reverse, zoneout};
    if (!kernel) return api.create_status(kFail, "ai.qrnn::FoPool: out of memory");
    *out = kernel;
    return nullptr;
}

PoolOp make_pool_op(const char* provider, ElementType element_type, qrnn_dtype dtype) {
    PoolOp op{};
    op.version = kApiVersion;
    op.provider = provider;
    op.element_type = element_type;
    op.dtype = dtype;
    op.get_name = [](const CustomOp*) { return "FoPool"; };
    op.get_provider = [](const CustomOp* self) { return static_cast<const PoolOp*>(self)->provider; };
    op.get_input_count = [](const CustomOp*) -> size_t { return 3; };
    op.get_input_type = [](const CustomOp* self, size_t index) {
        return index == 1 ? kInt64 : static_cast<const PoolOp*>(self)->element_type;
    };
    op.get_output_count = [](const CustomOp*) -> size_t { return 2; };
    op.get_output_type = [](const CustomOp* self, size_t) {
        return static_cast<const PoolOp*>(self)->element_type;
    };
    op.get_input_characteristic = [](const CustomOp*, size_t) { return kRequired; };
    op.get_output_characteristic = [](const CustomOp*, size_t) { return kRequired; };
    op.get_input_memory_type = [](const CustomOp*, size_t) { return kDefaultMemory; };
    op.get_variadic_input_min_arity = [](const CustomOp*) { return 1; };
    op.get_variadic_input_homogeneity = [](const CustomOp*) { return 1; };
    op.get_variadic_output_min_arity = [](const CustomOp*) { return 1; };
    op.get_variadic_output_homogeneity = [](const CustomOp*) { return 1; };
    op.get_start_version = [](const CustomOp*) { return kDomainVersion; };
    op.get_end_version = [](const CustomOp*) { return kDomainVersion; };
    op.create_kernel_v2 = create_kernel;
    op.compute_v2 = compute;
    op.destroy_kernel = [](void* kernel) { delete static_cast<PoolKernel*>(kernel); };
    return op;
}

// The domain and its operators, made once and shared by all sessions of the process: sessions keep
// pointers to them for as long as they live.
class SharedDomain {
   public:
    Status* add_to(SessionOptions* options, const Api& api) {
        const std::lock_guard<std::mutex> guard(lock_);
        if (!domain_) {
            Domain* made = nullptr;
            if (Status* status = api.create_domain(kDomain, &made)) return status;
            for (const PoolOp& op : ops_) {
                if (Status* status = api.add_op(made, &op)) return status;
            }
            domain_ = made;
        }
        return api.add_domain(options, domain_);
    }

   private:
    std::mutex lock_;
    Domain* domain_ = nullptr;
    const PoolOp ops_[8] = {
        make_pool_op(kCpu, kFloat, QRNN_FLOAT32),      make_pool_op(kCpu, kDouble, QRNN_FLOAT64),
        make_pool_op(kCpu, kFloat16, QRNN_FLOAT16),    make_pool_op(kCpu, kBFloat16, QRNN_BFLOAT16),
        make_pool_op(kCuda, kFloat, QRNN_FLOAT32),     make_pool_op(kCuda, kDouble, QRNN_FLOAT64),
        make_pool_op(kCuda, kFloat16, QRNN_FLOAT16),   make_pool_op(kCuda, kBFloat16, QRNN_BFLOAT16),
    };
};

}  // namespace

// Called by ONNX Runtime for each session whose options register this library; null is success.
extern "C" QRNN_API Status* RegisterCustomOps(SessionOptions* options, const ApiBase* base) {
    static SharedDomain domain;
    const Table table = base->get_api(kApiVersion);
    if (!table) {
        char message[160];
        std::snprintf(message, sizeof message,
                      "%s operators: expected ONNX Runtime %s or newer, this is %s", kDomain,
                      kOldestRuntime, base->get_version_string());
        return Api(base->get_api(1)).create_status(kFail, message);
    }
    return domain.add_to(options, Api(table));
}
