// Kernels that Triton compiled, launched inside programs of XLA through the driver: no wait, and no memory of our own.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <type_traits>
#include <vector>

#include "calls.h"

struct Kernel {
    const void* image;
    const char* name;
    int64_t shared;
};

struct Launch {
    int32_t kernel, threads, first, count;  // arguments from `first` on
    int32_t grid[3], unused;
};

// How the GPU fetches tiles of a stack of matrices by itself, from the last axis to the first.
struct Map {
    int32_t type, width, swizzle;  // width: bytes of an element
    uint32_t shape[3], block[3];
};

struct Argument {
    int64_t buffer, value;  // `value` bytes behind the beginning of a buffer; -1: the value itself
    const Map* map;         // of a buffer; null: its address
};

// Buffers are those that are read alone, the first arguments, and then the results, with which all other arguments share
// their memory. The last result is the table of addresses.
struct Plan {
    const Kernel* kernels;
    const Launch* launches;
    const Argument* arguments;
    const int64_t* values;  // of the table; all that are 2 ** PLACE_BITS or more are places
    int64_t launch_count, value_count, inputs;
};

namespace {

using Context = void*;
using Function = void*;

struct Driver {
    int (*stream_context)(void*, Context*);
    int (*push)(Context);
    int (*pop)(Context*);
    int (*load)(void**, const void*);
    int (*find)(Function*, void*, const char*);
    int (*attribute)(Function, int, int);
    int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                  void**);
    int (*error)(int, const char**);
    int (*exchange_mode)(int*);
    int (*describe)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                    int, int, int);  // which drivers before CUDA 12 do not have
    bool found = false;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) return;
        const auto get = [&](auto& to, const char* name) {
            to = reinterpret_cast<std::decay_t<decltype(to)>>(dlsym(library, name));
            return to != nullptr;
        };
        found = get(stream_context, "cuStreamGetCtx") && get(push, "cuCtxPushCurrent_v2") &&
                get(pop, "cuCtxPopCurrent_v2") && get(load, "cuModuleLoadData") && get(find, "cuModuleGetFunction") &&
                get(attribute, "cuFuncSetAttribute") && get(launch, "cuLaunchKernel") && get(error, "cuGetErrorName") &&
                get(exchange_mode, "cuThreadExchangeStreamCaptureMode");
        get(describe, "cuTensorMapEncodeTiled");
    }
};

const Driver& driver() {
    static const Driver* found = new Driver;
    return *found;
}

std::map<std::pair<Context, const void*>, Function> functions;

constexpr int MOST = 40, MAPS = 4;   // parameters of a kernel, and how many of them are maps

// A kernel that writes its parameters to memory, so many numbers at most. Older drivers do not load the wider one.
template <int NUMBERS>
const char* upload_source(const char* version) {
    static const std::string text = std::string(".version ") + version + R"(
.target sm_70
.address_size 64
.visible .entry upload(.param .u64 dst, .param .u32 count, .param .align 8 .b8 values[)" +
                                    std::to_string(8 * NUMBERS) + R"(])
{
  .reg .pred %p;
  .reg .b32 %r<4>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [dst];
  ld.param.u32 %r1, [count];
  cvta.to.global.u64 %rd6, %rd1;
  mov.b64 %rd3, values;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
  mad.lo.u32 %r2, %r3, 128, %r2;
  setp.ge.u32 %p, %r2, %r1;
  @%p bra done;
  mul.wide.u32 %rd2, %r2, 8;
  add.s64 %rd4, %rd3, %rd2;
  ld.param.u64 %rd5, [%rd4];
  add.s64 %rd7, %rd6, %rd2;
  st.global.u64 [%rd7], %rd5;
done:
  ret;
}
)";
    return text.c_str();
}

char* data(const XLA_FFI_CallFrame* frame, const Plan& plan, int64_t index) {
    const auto& found = index < plan.inputs ? argument(frame, index) : result(frame, index - plan.inputs);
    return static_cast<char*>(found.data);
}

int load(const Kernel& kernel, Function* found) {
    void* module;
    if (int code = driver().load(&module, kernel.image)) return code;
    if (int code = driver().find(found, module, kernel.name)) return code;
    return kernel.shared > 48 * 1024 ? driver().attribute(*found, 8, int(kernel.shared)) : 0;
}

// Functions are loaded once for each device, under the lock, also while XLA captures a stream.
int function_of(Context context, const Kernel& kernel, Function* found) {
    std::lock_guard<std::mutex> lock(mutex);
    Function& known = functions[{context, kernel.image}];
    int code = 0;
    if (!known) {
        int mode = 2;  // relaxed
        driver().exchange_mode(&mode);
        code = load(kernel, &known);
        driver().exchange_mode(&mode);
    }
    *found = known;
    return code;
}

template <int NUMBERS>
int upload(const std::vector<int64_t>& values, char* to, Context context, void* stream, const char* version) {
    static const Kernel kernel{upload_source<NUMBERS>(version), "upload", 0};
    Function function;
    if (int code = function_of(context, kernel, &function)) return code;
    for (size_t first = 0; first < values.size(); first += NUMBERS) {
        auto count = unsigned(std::min<size_t>(NUMBERS, values.size() - first));
        int64_t part[NUMBERS];
        std::memcpy(part, values.data() + first, 8 * count);
        void* params[] = {&to, &count, part};
        const unsigned blocks = (count + 127) / 128;
        if (int code = driver().launch(function, blocks, 1, 1, 128, 1, 1, 0, stream, params, nullptr)) return code;
        to += 8 * count;
    }
    return 0;
}

int describe(const Map& map, void* data, void* to) {
    if (!driver().describe) return 801;  // not supported
    const uint64_t shape[] = {map.shape[0], map.shape[1], map.shape[2]};
    const uint64_t row = shape[0] * uint64_t(map.width), strides[] = {row, row * shape[1]};
    const uint32_t each[] = {1, 1, 1};
    return driver().describe(to, map.type, 3, data, shape, strides, map.block, each, 0, map.swizzle, 2, 0);
}

constexpr int FEW = 496, MANY = 4080;  // as many as fit into 4 and 32 KB

int run(const XLA_FFI_CallFrame* frame, const Plan& plan, Context context, void* stream) {
    std::vector<int64_t> values(plan.values, plan.values + plan.value_count);
    for (int64_t& value : values)
        if (value >> PLACE_BITS)
            value = reinterpret_cast<int64_t>(data(frame, plan, (value >> PLACE_BITS) - 1)) +
                    (value & ((int64_t(1) << PLACE_BITS) - 1));
    char* table = data(frame, plan, plan.inputs + frame->rets.size - 1);
    if (plan.value_count <= FEW || upload<MANY>(values, table, context, stream, "8.1"))
        if (int code = upload<FEW>(values, table, context, stream, "7.8")) return code;
    Function function;
    for (int64_t i = 0; i < plan.launch_count; i++) {
        const Launch& launch = plan.launches[i];
        const Kernel& kernel = plan.kernels[launch.kernel];
        if (int code = function_of(context, kernel, &function)) return code;
        int64_t numbers[MOST] = {};  // behind its own, Triton gives a kernel pointers to scratch that ours do not use
        alignas(64) char maps[MAPS][128];
        void* params[MOST];
        for (int k = 0, described = 0; k < MOST; k++) {
            params[k] = numbers + k;
            if (k >= launch.count) continue;
            const Argument& argument = plan.arguments[launch.first + k];
            char* base = argument.buffer < 0 ? nullptr : data(frame, plan, argument.buffer);
            numbers[k] = reinterpret_cast<int64_t>(base) + argument.value;
            if (!argument.map) continue;
            params[k] = maps[described++];
            if (int code = describe(*argument.map, base + argument.value, params[k])) return code;
        }
        const auto [x, y, z] = launch.grid;
        if (int code = driver().launch(function, unsigned(x), unsigned(y), unsigned(z), unsigned(launch.threads), 1, 1,
                                       unsigned(kernel.shared), stream, params, nullptr))
            return code;
    }
    return 0;
}

// Does some work on the stream of a call, in the context of its device. code: the driver's or the work's, 0 if done.
template <class Work>
XLA_FFI_Error* run_on_stream(const XLA_FFI_CallFrame* frame, int* code, const Work& work) {
    XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, nullptr};
    if (XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&args)) return error;
    Context context, popped;
    *code = driver().stream_context(args.stream, &context);
    if (!*code) *code = driver().push(context);
    if (*code) return nullptr;
    *code = work(context, args.stream);
    driver().pop(&popped);
    return nullptr;
}

XLA_FFI_Error* launch_all(const XLA_FFI_CallFrame* frame) {
    if (!driver().found) return fail(frame, "thalweg: the driver of the GPU cannot be loaded");
    const Plan* plan = nullptr;
    if (XLA_FFI_Error* error = find_plan(frame, &plan)) return error;
    for (int64_t i = plan->inputs; i < frame->args.size; i++)
        if (XLA_FFI_Error* error = check_in_place(frame, i, i - plan->inputs)) return error;
    int code = 0;
    const auto launch = [&](Context context, void* stream) { return run(frame, *plan, context, stream); };
    if (XLA_FFI_Error* error = run_on_stream(frame, &code, launch)) return error;
    if (!code) return nullptr;
    const char* name = "?";
    driver().error(code, &name);
    return fail(frame, std::string("thalweg: a kernel cannot be launched: ") + name);
}

}  // namespace

EXPORTED XLA_FFI_Error* thalweg_launch(XLA_FFI_CallFrame* frame) {
    return is_asked(frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) ? nullptr : launch_all(frame);
}
