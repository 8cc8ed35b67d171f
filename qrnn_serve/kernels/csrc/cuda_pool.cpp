// qrnn_cuda_fo_pool: the CUDA pool kernels for hosts without Python. They are compiled from the same
// source as in Python (cuda_src), when a device first needs them, and kept on disk (cuda_cache.h).

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "cuda_cache.h"
#include "cuda_driver.h"
#include "cuda_plan.h"
#include "qrnn_kernels.h"

namespace qrnn {
namespace {

struct Source {
    const char* name;
    const char* text;
};

// Every file of cuda_src that the pool kernels include; the first is the one to compile.
constexpr Source kSources[] = {
#include "cuda_sources.inc"
};

// What went wrong, for the caller to read.
class Failure {
   public:
    [[gnu::format(printf, 2, 3)]] explicit Failure(const char* format, ...) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
    }
    char text[2048];
};

// A file of kSources with what it includes in place, each once: what is kept on disk is named by it.
void append_source(const std::string& name, std::set<std::string>& seen, std::string& whole) {
    const auto source = std::find_if(std::begin(kSources), std::end(kSources),
                                     [&name](const Source& each) { return name == each.name; });
    if (source == std::end(kSources)) throw Failure("%s is not in this library", name.c_str());
    if (!seen.insert(name).second) return;
    static const std::string include = "#include \"";
    std::istringstream lines(source->text);
    for (std::string line; std::getline(lines, line);) {
        if (line == "#pragma once") continue;
        if (line.compare(0, include.size(), include) == 0) {
            append_source(line.substr(include.size(), line.size() - include.size() - 1), seen, whole);
        } else {
            whole += line + '\n';
        }
    }
}

std::string whole_source() {
    std::set<std::string> seen;
    std::string whole;
    append_source(kSources[0].name, seen, whole);
    return whole;
}

// The argument blocks of cuda_src/sequences.cuh, forward.cuh and prepare.cuh.
struct Sequences {
    int64_t timesteps, batch, hidden, reverse;
    const void* offsets;
    int64_t offset_bytes, padded_to;
};
struct Work {
    int64_t channel_tiles, items;
    CUdeviceptr words, slots;
    int64_t tiles_each;
    CUdeviceptr claimed;
    uint64_t by_channel_tiles, by_batch;
};
struct PoolArguments {
    Sequences sequences;
    Work work;
    double zoneout;
    qrnn_rows gates, c0, h, c;
    void* starts;
};
struct PrepareArguments {
    Sequences sequences;
    CUdeviceptr slots;
    int64_t slot_count;
    CUdeviceptr words;
    int64_t word_count;
};

struct KernelKey {
    const char* name;
    int code;  // QRNN_ONLY of qrnn.cu
    int dtype, channels, row_bytes;
    bool far;

    bool operator<(const KernelKey& other) const {
        return std::tie(code, dtype, channels, row_bytes, far) <
               std::tie(other.code, other.dtype, other.channels, other.row_bytes, other.far);
    }
};

struct Kernel {
    CUfunction function;
    unsigned shared_bytes;
    int64_t resident_blocks;
};

class Device {
   public:
    Device(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {
        check(driver_.cuDeviceGet(&device_, ordinal), "find the device");
        check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "use the device");
        processors = attribute(kAttributeProcessors);
        architecture_ = 10 * attribute(kAttributeMajor) + attribute(kAttributeMinor);
        CUmemPoolProps properties{};
        properties.allocation_type = 1;
        properties.location_type = 1;
        properties.location = ordinal;
        check(driver_.cuMemPoolCreate(&pool_, &properties), "make a memory pool");
        // Else the pool gives its memory back at every synchronisation, and allocations are slow.
        uint64_t all = ~uint64_t{0};
        check(driver_.cuMemPoolSetAttribute(pool_, kPoolReleaseThreshold, &all), "keep memory");
    }

    int processors;

    void check(CUresult result, const char* what) const {
        if (result == 0) return;
        const char* text = nullptr;
        driver_.cuGetErrorString(result, &text);
        throw Failure("cuda:%d: cannot %s: %s", ordinal_, what, text ? text : "unknown error");
    }

    // Older devices do not copy into shared memory by themselves, or have no room for two channels.
    int widest_channels(int itemsize) const {
        return architecture_ >= 80 ? qrnn::widest_channels(itemsize) : 1;
    }

    void make_current() { check(driver_.cuCtxPushCurrent(context_), "use the device"); }
    void make_previous_current() {
        CUcontext own;
        driver_.cuCtxPopCurrent(&own);
    }

    // Memory that work queued on `stream` may use until it is given back on it.
    CUdeviceptr allocate(int64_t bytes, CUstream stream) {
        CUdeviceptr address = 0;
        check(driver_.cuMemAllocFromPoolAsync(&address, static_cast<size_t>(bytes), pool_, stream),
              "allocate working memory");
        return address;
    }
    void give_back(CUdeviceptr address, CUstream stream) {
        driver_.cuMemFreeAsync(address, stream);
    }
    void fill_with_zeros(CUdeviceptr address, int64_t bytes, CUstream stream) {
        check(driver_.cuMemsetD8Async(address, 0, static_cast<size_t>(bytes), stream),
              "clear memory");
    }

    template <class Arguments>
    void launch(const KernelKey& key, int64_t blocks, Arguments arguments, CUstream stream,
                unsigned threads = kThreadsPerBlock) {
        const Kernel& kernel = loaded(key);
        // More would find nothing left to do.
        const auto grid = static_cast<unsigned>(std::min(blocks, kernel.resident_blocks));
        void* parameters[] = {&arguments};
        const CUresult result =
            driver_.cuLaunchKernel(kernel.function, grid, 1, 1, threads, 1, 1,
                                   kernel.shared_bytes, stream, parameters, nullptr);
        check(result, key.name);
    }

   private:
    int attribute(int which) const {
        int value = 0;
        check(driver_.cuDeviceGetAttribute(&value, which, device_), "ask the device");
        return value;
    }

    const Kernel& loaded(const KernelKey& key) {
        const std::lock_guard<std::mutex> guard(lock_);
        auto found = kernels_.find(key);
        if (found == kernels_.end()) found = kernels_.emplace(key, load(key)).first;
        return found->second;
    }

    Kernel load(const KernelKey& key) const {
        const std::string image = compiled(key);
        CUmodule module = nullptr;
        Kernel kernel{};
        check(driver_.cuModuleLoadData(&module, image.data()), "load what NVRTC compiled");
        check(driver_.cuModuleGetFunction(&kernel.function, module, key.name), key.name);
        CUdeviceptr address = 0;
        size_t bytes = 0;
        const std::string name = std::string(key.name) + "_shared_bytes";
        check(driver_.cuModuleGetGlobal(&address, &bytes, module, name.c_str()), name.c_str());
        check(driver_.cuMemcpyDtoH(&kernel.shared_bytes, address, sizeof kernel.shared_bytes),
              name.c_str());
        // The driver loads code lazily, and a CUDA graph must not be the first to ask for it.
        int value = 0;
        check(driver_.cuFuncGetAttribute(&value, kFunctionRegisters, kernel.function), key.name);
        check(driver_.cuFuncSetAttribute(kernel.function, kFunctionMostSharedBytes,
                                         static_cast<int>(kernel.shared_bytes)),
              "set the shared memory of a kernel");
        check(driver_.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                  &value, kernel.function, kThreadsPerBlock, kernel.shared_bytes),
              "ask how many blocks fit");
        kernel.resident_blocks = static_cast<int64_t>(value) * processors;
        return kernel;
    }

    std::string compiled(const KernelKey& key) const {
        const char* why = nullptr;
        const Compiler* compiler = cuda_compiler(&why);
        if (!compiler) {
            throw Failure("cuda:%d: %s cannot be compiled: %s. Install nvidia-cuda-nvrtc of the "
                          "driver's CUDA release, or put its folder on the loader's path",
                          ordinal_, key.name, why);
        }
        // In the order of kernels/cuda_compile.py, whose names of kept files these share.
        std::vector<std::string> options = {
            "--gpu-architecture=sm_" + std::to_string(architecture_),
            "-DQRNN_DTYPE=" + std::to_string(key.dtype),
            "-DQRNN_CHANNELS=" + std::to_string(key.channels),
            "-DQRNN_ONLY=" + std::to_string(key.code),
            "-DQRNN_ROW_BYTES=" + std::to_string(key.row_bytes),
        };
        if (key.far) options.push_back("-DQRNN_FAR");
        options.push_back("--std=c++17");
        int major = 0, minor = 0;
        compiler->nvrtcVersion(&major, &minor);
        const std::string source = whole_source();
        std::vector<std::string> made_of = {source};
        made_of.insert(made_of.end(), options.begin(), options.end());
        made_of.push_back(std::to_string(major) + "." + std::to_string(minor));
        const std::string path = cache_path(architecture_, made_of);
        std::string image = kept_image(path);
        if (image.empty()) {
            image = compile(*compiler, key, source, options);
            keep_image(path, image);
        }
        return image;
    }

    std::string compile(const Compiler& compiler, const KernelKey& key, const std::string& source,
                        const std::vector<std::string>& options) const {
        std::vector<const char*> chosen;
        for (const std::string& option : options) chosen.push_back(option.c_str());
        nvrtcProgram program = nullptr;
        int result = compiler.nvrtcCreateProgram(&program, source.c_str(), kSources[0].name, 0,
                                                 nullptr, nullptr);
        if (result == 0) {
            result = compiler.nvrtcCompileProgram(program, static_cast<int>(chosen.size()),
                                                  chosen.data());
        }
        if (result != 0) throw refused(compiler, result, program, key);
        size_t bytes = 0;
        compiler.nvrtcGetCUBINSize(program, &bytes);
        std::string image(bytes, '\0');
        result = compiler.nvrtcGetCUBIN(program, image.data());
        if (result != 0) throw refused(compiler, result, program, key);
        compiler.nvrtcDestroyProgram(&program);
        return image;
    }

    Failure refused(const Compiler& compiler, int result, nvrtcProgram program,
                    const KernelKey& key) const {
        int major = 0, minor = 0;
        compiler.nvrtcVersion(&major, &minor);
        std::string log;
        size_t bytes = 0;
        if (program && compiler.nvrtcGetProgramLogSize(program, &bytes) == 0 && bytes > 1) {
            log.resize(bytes);
            compiler.nvrtcGetProgramLog(program, log.data());
        }
        if (program) compiler.nvrtcDestroyProgram(&program);
        return Failure("cuda:%d: NVRTC %d.%d cannot compile %s for sm_%d: %s\n%s", ordinal_, major,
                       minor, key.name, architecture_, compiler.nvrtcGetErrorString(result),
                       log.c_str());
    }

    const Driver& driver_;
    const int ordinal_;
    CUdevice device_ = 0;
    CUcontext context_ = nullptr;
    CUmemoryPool pool_ = nullptr;
    int architecture_ = 0;
    std::mutex lock_;
    std::map<KernelKey, Kernel> kernels_;
};

// The device that holds what `address` points to. Devices live as long as the process: sessions may end
// after everything else.
Device& device_of(const void* address) {
    static std::mutex lock;
    static auto& devices = *new std::map<int, std::unique_ptr<Device>>;
    const char* why = nullptr;
    const Driver* driver = cuda_driver(&why);
    if (!driver) throw Failure("%s", why);
    int ordinal = 0;
    const auto where = reinterpret_cast<CUdeviceptr>(address);
    if (driver->cuPointerGetAttribute(&ordinal, kPointerDevice, where) != 0) {
        throw Failure("expected tensors in the memory of a GPU");
    }
    const std::lock_guard<std::mutex> guard(lock);
    std::unique_ptr<Device>& device = devices[ordinal];
    if (!device) device = std::make_unique<Device>(*driver, ordinal);
    return *device;
}

// One call's place on its device and stream, and the working memory that it gives back there.
class Call {
   public:
    Call(Device& device, CUstream stream) : device_(device), stream_(stream) {
        device_.make_current();
    }
    ~Call() {
        for (const CUdeviceptr address : memory_) device_.give_back(address, stream_);
        device_.make_previous_current();
    }
    Call(const Call&) = delete;

    void run(const qrnn_cuda_fo_pool_args& args) {
        const qrnn_sequences& given = args.sequences;
        const int itemsize = bytes_of(given.dtype);
        PoolArguments block{};
        block.sequences = {given.timesteps, given.batch, given.hidden, given.reverse, nullptr, 0, 0};
        if (given.lengths) {
            // Padded rows are rows of one line, of which each sequence has the first of its share.
            block.sequences.timesteps *= given.batch;
            block.sequences.padded_to = given.timesteps;
            const int64_t elements = block.sequences.timesteps * given.hidden;
            if (elements) fill_with_zeros(args.h.data, elements * itemsize);
        }
        const void* bounds = given.lengths ? given.lengths : given.offsets;
        if (bounds) block.sequences.offsets = bounds, block.sequences.offset_bytes = 8;
        const Plan plan =
            plan_scan(block.sequences.timesteps, given.batch, given.hidden, bounds != nullptr,
                      given.timesteps, itemsize,
                      row_bytes(args, itemsize) ? device_.widest_channels(itemsize) : 1);
        if (plan.blocks() == 0) return;
        block.work = prepared(plan, block.sequences);
        block.zoneout = args.zoneout;
        block.gates = args.gates;
        block.c0 = args.c0;
        block.h = args.h;
        block.c = args.c;
        const bool far = farthest(args) * itemsize >= kFarBytes;
        KernelKey key{args.output_gate ? "qrnn_fo_pool" : "qrnn_f_pool", args.output_gate ? 3 : 4,
                      static_cast<int>(given.dtype), plan.channels, kRowBytes[0], far};
        if (plan.at_once) {
            key.name = args.output_gate ? "qrnn_fo_pool_short" : "qrnn_f_pool_short";
            key.code = args.output_gate ? 12 : 13;
        }
        if (plan.channels > 1) key.row_bytes = row_bytes(args, itemsize);
        device_.launch(key, plan.blocks(), block, stream_, plan.threads);
    }

   private:
    // A word for each slot and channel and one for how many tiles are claimed, all zero; for packed
    // sequences also the slots.
    Work prepared(const Plan& plan, const Sequences& sequences) {
        Work work{};
        work.channel_tiles = plan.channel_tiles;
        work.items = plan.blocks();
        work.tiles_each = plan.tiles / sequences.batch;
        work.by_channel_tiles = magic(plan.channel_tiles);
        work.by_batch = magic(sequences.batch);
        if (!plan.single_tiles) return work;
        const int64_t words = plan.slots * sequences.hidden + 1;
        work.words = allocate(8 * words);
        work.claimed = work.words + 8 * static_cast<CUdeviceptr>(words - 1);
        if (!sequences.offsets) {
            fill_with_zeros(reinterpret_cast<void*>(work.words), 8 * words);
            return work;
        }
        work.slots = allocate(kSlotBytes * plan.slots);
        const PrepareArguments arguments{sequences, work.slots, plan.slots, work.words, words};
        // A warp for each slot, and enough of them to fill memory at its speed.
        const int64_t blocks = std::max<int64_t>((plan.slots + kChunks - 1) / kChunks,
                                                 4 * static_cast<int64_t>(device_.processors));
        device_.launch(KernelKey{"qrnn_prepare", 8, QRNN_FLOAT32, 1, kRowBytes[0], false}, blocks, arguments,
                       stream_);
        return work;
    }

    void fill_with_zeros(void* address, int64_t bytes) {
        device_.fill_with_zeros(reinterpret_cast<CUdeviceptr>(address), bytes, stream_);
    }

    CUdeviceptr allocate(int64_t bytes) {
        memory_.push_back(device_.allocate(bytes, stream_));
        return memory_.back();
    }

    // The most of kRowBytes that all rows begin at multiples of; 0 for neither.
    static int row_bytes(const qrnn_cuda_fo_pool_args& args, int64_t itemsize) {
        uint64_t together = static_cast<uint64_t>(args.sequences.hidden * itemsize);
        for (const qrnn_rows& rows : {args.gates, args.c0, args.h, args.c}) {
            together |= reinterpret_cast<uintptr_t>(rows.data);
            together |= static_cast<uint64_t>((rows.time_stride | rows.sequence_stride) * itemsize);
        }
        for (const int64_t bytes : kRowBytes) {
            if (together % static_cast<uint64_t>(bytes) == 0) return static_cast<int>(bytes);
        }
        return 0;
    }

    static int64_t farthest(const qrnn_cuda_fo_pool_args& args) {
        return std::max(std::abs(args.gates.time_stride), std::abs(args.h.time_stride));
    }

    Device& device_;
    CUstream stream_;
    std::vector<CUdeviceptr> memory_;
};

bool side_by_side(const qrnn_rows& rows, const qrnn_sequences& s) {
    return rows.sequence_stride == s.timesteps * rows.time_stride;
}

const char* wrong_argument(const qrnn_cuda_fo_pool_args& args) {
    const qrnn_sequences& s = args.sequences;
    if (s.dtype < QRNN_FLOAT32 || s.dtype > QRNN_FLOAT64) return "unknown dtype";
    if (s.timesteps < 0 || s.batch < 0 || s.hidden < 1) return "a size is out of range";
    if (s.lengths && (s.offsets || !side_by_side(args.gates, s) || !side_by_side(args.h, s))) {
        return "lengths are for batch-major rows without gaps, and exclude offsets";
    }
    if (!(args.zoneout >= 0 && args.zoneout <= 1)) return "zoneout: expected 0 to 1";
    const bool empty = s.batch == 0;
    const bool no_rows = empty || s.timesteps == 0;
    if ((!no_rows && (!args.gates.data || !args.h.data)) || (!empty && !args.c.data)) {
        return "a tensor is missing";
    }
    return nullptr;
}

}  // namespace
}  // namespace qrnn

extern "C" int32_t qrnn_cuda_fo_pool(const qrnn_cuda_fo_pool_args* args) {
    const auto report = [args](const char* text) {
        if (args->message && args->message_bytes > 0) {
            std::snprintf(args->message, static_cast<size_t>(args->message_bytes), "fo_pool: %s", text);
        }
    };
    if (const char* wrong = qrnn::wrong_argument(*args)) {
        report(wrong);
        return QRNN_BAD_ARGUMENT;
    }
    try {
        if (args->sequences.batch == 0) return QRNN_OK;
        qrnn::Call call(qrnn::device_of(args->c.data), static_cast<qrnn::CUstream>(args->stream));
        call.run(*args);
        return QRNN_OK;
    } catch (const qrnn::Failure& failure) {
        report(failure.text);
        return QRNN_CUDA_FAILED;
    } catch (const std::bad_alloc&) {
        report("out of memory");
        return QRNN_OUT_OF_MEMORY;
    }
}
