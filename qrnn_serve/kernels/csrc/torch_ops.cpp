// qrnn::forget_mult and qrnn::fo_pool for programs with libtorch and no Python: the schemas of
// kernels/ops.py, checked as in kernels/checks.py, over the C functions of qrnn_kernels.h. For inference:
// no gradients are registered.
//
// Only torch's stable interface is used (torch/csrc/stable), so a library built against one release loads
// in others, from 2.10 on. `qrnn-export ops-library` builds it.
//
// Letters: T timesteps, B sequences, H channels, G gates (3 with an output gate, else 2), N timesteps of all
// sequences laid end to end.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "qrnn_kernels.h"

namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::runtime_error(message.str());
}

std::string shape_of(const Tensor& tensor) {
    std::ostringstream text;
    for (const int64_t size : tensor.sizes()) text << (text.tellp() > 0 ? ", " : "") << size;
    return "[" + text.str() + "]";
}

int32_t dtype_of(const Tensor& tensor) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

int32_t device_type_of(const Tensor& tensor) {
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type;
}

std::string device_name(const Tensor& tensor) {
    const int32_t type = device_type_of(tensor);
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    if (type == aoti_torch_device_type_meta()) return "meta";
    const char* name = type == aoti_torch_device_type_cuda() ? "cuda:" : "another device:";
    return name + std::to_string(tensor.get_device_index());
}

std::string dtype_name(const Tensor& tensor) {
    const int32_t dtype = dtype_of(tensor);
    const std::pair<int32_t, const char*> names[] = {
        {aoti_torch_dtype_float32(), "float32"},     {aoti_torch_dtype_float16(), "float16"},
        {aoti_torch_dtype_bfloat16(), "bfloat16"},   {aoti_torch_dtype_float64(), "float64"},
        {aoti_torch_dtype_int64(), "int64"},         {aoti_torch_dtype_int32(), "int32"},
        {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_bool(), "bool"},
    };
    for (const auto& [each, name] : names)
        if (dtype == each) return std::string("torch.") + name;
    return "another dtype";
}

qrnn_dtype kernel_dtype(const char* op, const char* name, const Tensor& tensor) {
    const int32_t dtype = dtype_of(tensor);
    if (dtype == aoti_torch_dtype_float32()) return QRNN_FLOAT32;
    if (dtype == aoti_torch_dtype_float16()) return QRNN_FLOAT16;
    if (dtype == aoti_torch_dtype_bfloat16()) return QRNN_BFLOAT16;
    if (dtype == aoti_torch_dtype_float64()) return QRNN_FLOAT64;
    refuse(op, ": ", name, " must be float32, float16, bfloat16 or float64, got ", dtype_name(tensor));
}

void check_device(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                  const Tensor& other) {
    if (device_type_of(tensor) != device_type_of(other) ||
        tensor.get_device_index() != other.get_device_index())
        refuse(op, ": ", other_name, " is on ", device_name(other), " and ", name, " on ", device_name(tensor),
               "; move them to one device");
}

void check_like(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                const Tensor& other) {
    if (dtype_of(tensor) != dtype_of(other))
        refuse(op, ": ", name, " and ", other_name, " must have one dtype, got ", name, " ", dtype_name(tensor),
               " and ", other_name, " ", dtype_name(other));
    check_device(op, name, tensor, other_name, other);
}

// Checks dtype and rank of the values, and of offsets if there are any.
void check_values(const char* op, const char* name, const Tensor& values, const std::string& width,
                  const MaybeTensor& offsets) {
    kernel_dtype(op, name, values);
    if (!offsets) {
        if (values.dim() != 3)
            refuse(op, ": ", name, " must be [T, B, ", width, "], or packed [N, ", width, "] with offsets, got ",
                   values.dim(), " dimensions ", shape_of(values), " without offsets");
        return;
    }
    if (values.dim() != 2)
        refuse(op, ": with offsets, ", name, " must be packed [N, ", width, "], got ", values.dim(),
               " dimensions ", shape_of(values));
    const int32_t dtype = dtype_of(*offsets);
    if (dtype != aoti_torch_dtype_int64() && dtype != aoti_torch_dtype_int32())
        refuse(op, ": offsets must be int32 or int64, got ", dtype_name(*offsets));
    if (offsets->dim() != 1 || offsets->size(0) < 1)
        refuse(op, ": offsets must be [B + 1] with at least the entry 0, got ", shape_of(*offsets));
    check_device(op, "offsets", *offsets, name, values);
}

struct Sizes {
    int64_t timesteps;  // T, or N of packed values
    int64_t batch;
    int64_t hidden;
};

Sizes sizes_of(const Tensor& values, const MaybeTensor& offsets, int64_t hidden) {
    return {values.size(0), offsets ? offsets->size(0) - 1 : values.size(1), hidden};
}

void check_state(const char* op, const char* name, const MaybeTensor& state, const char* other_name,
                 const Tensor& other, const Sizes& sizes) {
    if (!state) return;
    check_like(op, name, *state, other_name, other);
    if (state->dim() != 2 || state->size(0) != sizes.batch || state->size(1) != sizes.hidden)
        refuse(op, ": ", name, " must be [B, H] = [", sizes.batch, ", ", sizes.hidden, "], got ",
               shape_of(*state));
}

Sizes check_forget_mult(const Tensor& f, const Tensor& x, const MaybeTensor& h0, const MaybeTensor& offsets) {
    const char* op = "forget_mult";
    check_values(op, "f", f, "H", offsets);
    check_like(op, "x", x, "f", f);
    if (shape_of(x) != shape_of(f))
        refuse(op, ": x must have the shape of f, got x ", shape_of(x), " and f ", shape_of(f));
    const Sizes sizes = sizes_of(f, offsets, f.size(f.dim() - 1));
    check_state(op, "h0", h0, "f", f, sizes);
    return sizes;
}

Sizes check_fo_pool(const Tensor& gates, const MaybeTensor& c0, const MaybeTensor& offsets, bool output_gate,
                    double zoneout) {
    const char* op = "fo_pool";
    const int64_t count = output_gate ? 3 : 2;
    check_values(op, "gates", gates, std::to_string(count) + "*H", offsets);
    const int64_t width = gates.size(gates.dim() - 1);
    if (width % count)
        refuse(op, ": the last dimension of gates must be ", count, "*H with output_gate=",
               output_gate ? "True" : "False", ", got ", width, ", which is not a multiple of ", count);
    if (!(zoneout >= 0.0 && zoneout <= 1.0)) refuse(op, ": zoneout must be from 0 to 1, got ", zoneout);
    const Sizes sizes = sizes_of(gates, offsets, width / count);
    check_state(op, "c0", c0, "gates", gates, sizes);
    return sizes;
}

// The kernels take any stride but that of the channels.
Tensor unit(const Tensor& tensor) {
    return tensor.stride(tensor.dim() - 1) == 1 ? tensor : torch::stable::contiguous(tensor);
}

MaybeTensor unit(const MaybeTensor& tensor) {
    return tensor ? MaybeTensor(unit(*tensor)) : std::nullopt;
}

qrnn_rows rows(const Tensor& tensor) {
    return {tensor.data_ptr(), tensor.stride(0), tensor.dim() == 3 ? tensor.stride(1) : 0};
}

qrnn_rows state_rows(const MaybeTensor& state) {
    return state ? qrnn_rows{state->data_ptr(), 0, state->stride(0)} : qrnn_rows{};
}

Tensor new_values(const Tensor& like, int64_t hidden) {
    std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
    shape.back() = hidden;
    return torch::stable::new_empty(like, shape);
}

Tensor new_state(const Tensor& like, const Sizes& sizes) {
    return torch::stable::new_empty(like, {sizes.batch, sizes.hidden});
}

// Offsets as the kernels read them: [B + 1] int64 side by side.
MaybeTensor int64_offsets(const MaybeTensor& offsets) {
    if (!offsets) return std::nullopt;
    return unit(torch::stable::to(*offsets, torch::headeronly::ScalarType::Long));
}

qrnn_sequences sequences(const char* op, const Tensor& like, const Sizes& sizes, const MaybeTensor& offsets,
                         bool reverse) {
    qrnn_sequences s{};
    s.dtype = kernel_dtype(op, "values", like);
    s.timesteps = sizes.timesteps;
    s.batch = sizes.batch;
    s.hidden = sizes.hidden;
    s.reverse = reverse;
    s.offsets = offsets ? static_cast<const int64_t*>(offsets->data_ptr()) : nullptr;
    return s;
}

// Torch's number of threads, on the kernels' own pool.
qrnn_parallel cpu_threads() {
    qrnn_parallel parallel{};
    parallel.threads = torch::stable::get_num_threads();
    return parallel;
}

[[noreturn]] void refuse_offsets(const char* op, const int64_t* offsets, const Sizes& sizes) {
    if (offsets[0] != 0) refuse(op, ": offsets must start at 0, got ", offsets[0]);
    if (offsets[sizes.batch] != sizes.timesteps)
        refuse(op, ": offsets must end at N = ", sizes.timesteps, ", the rows of the packed input, got ",
               offsets[sizes.batch]);
    int64_t b = 0;
    while (offsets[b + 1] >= offsets[b]) ++b;
    refuse(op, ": offsets must not decrease, got ", offsets[b], " at ", b, " and ", offsets[b + 1], " at ", b + 1);
}

void check_cpu(int32_t status, const char* op, const Sizes& sizes, const qrnn_sequences& sequences) {
    if (status == QRNN_OK) return;
    if (status == QRNN_BAD_OFFSETS) refuse_offsets(op, sequences.offsets, sizes);
    if (status == QRNN_OUT_OF_MEMORY) refuse(op, ": no memory for the cell states of one sequence");
    refuse(op, ": the CPU kernel refused its arguments with status ", status, ". This is a bug.");
}

Tensor forget_mult_cpu(const Tensor& f_given, const Tensor& x_given, const MaybeTensor& h0_given,
                       const MaybeTensor& offsets_given, bool reverse) {
    const Sizes sizes = check_forget_mult(f_given, x_given, h0_given, offsets_given);
    const Tensor f = unit(f_given), x = unit(x_given);
    const MaybeTensor h0 = unit(h0_given), offsets = int64_offsets(offsets_given);
    const Tensor h = new_values(f, sizes.hidden);
    qrnn_forget_mult_args args{};
    args.sequences = sequences("forget_mult", f, sizes, offsets, reverse);
    args.parallel = cpu_threads();
    args.f = rows(f);
    args.x = rows(x);
    args.h0 = state_rows(h0);
    args.h = rows(h);
    check_cpu(qrnn_forget_mult(&args), "forget_mult", sizes, args.sequences);
    return h;
}

// What a call of fo_pool takes and gives, as the kernels want it.
struct Pool {
    Sizes sizes;
    Tensor gates;
    MaybeTensor c0, offsets;
    Tensor h, c;
};

Pool make_pool(const Tensor& gates, const MaybeTensor& c0, const MaybeTensor& offsets, const Sizes& sizes) {
    return {sizes, unit(gates), unit(c0), int64_offsets(offsets), new_values(gates, sizes.hidden),
            new_state(gates, sizes)};
}

template <class Arguments>
Arguments pool_arguments(const Pool& pool, bool output_gate, bool reverse, double zoneout) {
    Arguments args{};
    args.sequences = sequences("fo_pool", pool.gates, pool.sizes, pool.offsets, reverse);
    args.output_gate = output_gate;
    args.zoneout = zoneout;
    args.gates = rows(pool.gates);
    args.c0 = state_rows(pool.c0);
    args.h = rows(pool.h);
    args.c = state_rows(pool.c);
    return args;
}

std::tuple<Tensor, Tensor> fo_pool_cpu(const Tensor& gates, const MaybeTensor& c0, const MaybeTensor& offsets,
                                       bool output_gate, bool reverse, double zoneout) {
    const Sizes sizes = check_fo_pool(gates, c0, offsets, output_gate, zoneout);
    const Pool pool = make_pool(gates, c0, offsets, sizes);
    auto args = pool_arguments<qrnn_fo_pool_args>(pool, output_gate, reverse, zoneout);
    args.parallel = cpu_threads();
    check_cpu(qrnn_fo_pool(&args), "fo_pool", sizes, args.sequences);
    return {pool.h, pool.c};
}

using CurrentStream = AOTITorchError (*)(int32_t device, void** stream);

// Of libtorch_cuda, which a process with CUDA tensors has loaded. It is looked up, not linked, so that this
// library also loads where torch was built for CPUs.
CurrentStream find_current_stream() {
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    link_map* place = nullptr;
    if (torch_cuda && dlinfo(torch_cuda, RTLD_DI_LINKMAP, &place) == 0) {
        // This loads the NVRTC that came with torch, from where only torch knows, for our kernels to find.
        const std::string path = place->l_name;
        dlopen((path.substr(0, path.rfind('/') + 1) + "libcaffe2_nvrtc.so").c_str(), RTLD_LAZY);
    }
    void* const found = dlsym(torch_cuda ? torch_cuda : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<CurrentStream>(found);
}

void* current_stream(int32_t device) {
    static const CurrentStream ask = find_current_stream();
    if (!ask) refuse("this libtorch does not say what its current CUDA stream is");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(ask(device, &stream));
    return stream;
}

std::tuple<Tensor, Tensor> fo_pool_cuda(const Tensor& gates, const MaybeTensor& c0, const MaybeTensor& offsets,
                                        bool output_gate, bool reverse, double zoneout) {
    const Sizes sizes = check_fo_pool(gates, c0, offsets, output_gate, zoneout);
    const Pool pool = make_pool(gates, c0, offsets, sizes);
    auto args = pool_arguments<qrnn_cuda_fo_pool_args>(pool, output_gate, reverse, zoneout);
    char message[4096] = "";
    args.stream = current_stream(gates.get_device_index());
    args.message = message;
    args.message_bytes = sizeof message;
    if (sizes.hidden > 0 && qrnn_cuda_fo_pool(&args) != QRNN_OK) refuse(message);
    return {pool.h, pool.c};
}

Tensor forget_mult_cuda(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, bool) {
    refuse("forget_mult: the operator library runs it on CPUs only. Exported models call it in training alone; "
           "call eval() on the model, or use Python's qrnn_serve.kernels");
}

// The namespace can be defined once in a process: by this library, or by Python's qrnn_serve.kernels.
bool define_namespace() {
    // Kept until the process ends, as the operators are.
    static TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_def("qrnn", __FILE__, __LINE__, &library) == TORCH_SUCCESS) return true;
    std::fputs(
        "qrnn operator library: this process has the operators qrnn::* already, from Python's "
        "qrnn_serve.kernels or from another copy of this library. Those are used; this copy does nothing.\n",
        stderr);
    return false;
}

const bool kFirst = define_namespace();

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(qrnn, library) {
    if (!kFirst) return;
    library.def(
        "forget_mult(Tensor f, Tensor x, Tensor? h0=None, Tensor? offsets=None, bool reverse=False)"
        " -> Tensor");
    library.def(
        "fo_pool(Tensor gates, Tensor? c0=None, Tensor? offsets=None, bool output_gate=True,"
        " bool reverse=False, float zoneout=0.0) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(qrnn, CPU, library) {
    if (!kFirst) return;
    library.impl("forget_mult", TORCH_BOX(&forget_mult_cpu));
    library.impl("fo_pool", TORCH_BOX(&fo_pool_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(qrnn, CUDA, library) {
    if (!kFirst) return;
    library.impl("forget_mult", TORCH_BOX(&forget_mult_cuda));
    library.impl("fo_pool", TORCH_BOX(&fo_pool_cuda));
}
