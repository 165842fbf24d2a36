// Kernels that Triton compiled, launched inside programs of XLA through the driver: no wait, and no memory of our own.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/c_api.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct Kernel {
    const void* image;
    const char* name;
    int64_t shared;
};

struct Launch {
    int32_t kernel, threads, first, count;  // arguments from `first` on
    int32_t grid[3], unused;
};

struct Argument {
    int64_t buffer, value;  // buffer: among arguments, then results, `value` bytes behind its beginning; -1: the value
};

struct Plan {
    const Kernel* kernels;
    const Launch* launches;
    const Argument* arguments;
    const int64_t* values;  // of the table; at `places` they are a buffer's number, from 1, above 44 bits, and bytes
    const int32_t* places;
    int64_t launch_count, value_count, place_count, written, table;
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
                get(attribute, "cuFuncSetAttribute") && get(launch, "cuLaunchKernel") && get(error, "cuGetErrorName");
    }
};

const Driver& driver() {
    static const Driver* found = new Driver;
    return *found;
}

std::mutex mutex;
std::unordered_map<std::string, const Plan*> plans;
std::map<std::pair<Context, const void*>, Function> functions;

constexpr int MOST = 32;   // parameters of a kernel
constexpr int ROOM = 496;  // numbers that fit into the parameters of the kernel below
const char* const UPLOAD = R"(
.version 7.8
.target sm_70
.address_size 64
.visible .entry upload(.param .u64 dst, .param .u32 count, .param .align 8 .b8 values[3968])
{
  .reg .pred %p;
  .reg .b32 %r<4>;
  .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [dst];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %tid.x;
  setp.ge.u32 %p, %r2, %r1;
  @%p bra done;
  mul.wide.u32 %rd2, %r2, 8;
  mov.b64 %rd3, values;
  add.s64 %rd4, %rd3, %rd2;
  ld.param.u64 %rd5, [%rd4];
  cvta.to.global.u64 %rd6, %rd1;
  add.s64 %rd7, %rd6, %rd2;
  st.global.u64 [%rd7], %rd5;
done:
  ret;
}
)";

XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, const std::string& message) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message.c_str(),
                                   XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
}

char* data(const XLA_FFI_CallFrame* frame, int64_t index) {
    void* found = index < frame->args.size ? frame->args.args[index] : frame->rets.rets[index - frame->args.size];
    return static_cast<char*>(static_cast<const XLA_FFI_Buffer*>(found)->data);
}

// Functions are loaded once for each device, under the lock.
int function_of(Context context, const Kernel& kernel, Function* found) {
    std::lock_guard<std::mutex> lock(mutex);
    Function& known = functions[{context, kernel.image}];
    if (!known) {
        void* module;
        if (int code = driver().load(&module, kernel.image)) return code;
        if (int code = driver().find(&known, module, kernel.name)) return code;
        if (kernel.shared > 48 * 1024)
            if (int code = driver().attribute(known, 8, int(kernel.shared))) return code;
    }
    *found = known;
    return 0;
}

int run(const XLA_FFI_CallFrame* frame, const Plan& plan, Context context, void* stream) {
    static const Kernel upload{UPLOAD, "upload", 0};
    std::vector<int64_t> values(plan.values, plan.values + plan.value_count);
    for (int64_t i = 0; i < plan.place_count; i++) {
        int64_t& own = values[size_t(plan.places[i])];
        if (own) own = reinterpret_cast<int64_t>(data(frame, (own >> 44) - 1)) + (own & ((int64_t(1) << 44) - 1));
    }
    Function function;
    if (int code = function_of(context, upload, &function)) return code;
    for (int64_t first = 0; first < plan.value_count; first += ROOM) {
        char* to = data(frame, plan.table) + 8 * first;
        auto count = unsigned(std::min<int64_t>(ROOM, plan.value_count - first));
        int64_t part[ROOM] = {};
        std::memcpy(part, values.data() + first, 8 * count);
        void* params[] = {&to, &count, part};
        if (int code = driver().launch(function, 1, 1, 1, 512, 1, 1, 0, stream, params, nullptr)) return code;
    }
    for (int64_t i = 0; i < plan.launch_count; i++) {
        const Launch& launch = plan.launches[i];
        const Kernel& kernel = plan.kernels[launch.kernel];
        if (int code = function_of(context, kernel, &function)) return code;
        int64_t numbers[MOST] = {};  // behind its own, Triton gives a kernel pointers to scratch that ours do not use
        void* params[MOST];
        for (int k = 0; k < MOST; k++) {
            params[k] = numbers + k;
            if (k >= launch.count) continue;
            const Argument& argument = plan.arguments[launch.first + k];
            const int64_t base = argument.buffer < 0 ? 0 : reinterpret_cast<int64_t>(data(frame, argument.buffer));
            numbers[k] = base + argument.value;
        }
        const auto [x, y, z] = launch.grid;
        if (int code = driver().launch(function, unsigned(x), unsigned(y), unsigned(z), unsigned(launch.threads), 1, 1,
                                       unsigned(kernel.shared), stream, params, nullptr))
            return code;
    }
    return 0;
}

XLA_FFI_Error* launch_all(XLA_FFI_CallFrame* frame) {
    for (auto* extension = frame->extension_start; extension; extension = extension->next)
        if (extension->type == XLA_FFI_Extension_Metadata) {
            auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
            metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
            metadata->traits = 0;
            return nullptr;
        }
    if (!driver().found) return fail(frame, "thalweg: the driver of the GPU cannot be loaded");
    const auto* key = static_cast<const XLA_FFI_ByteSpan*>(frame->attrs.attrs[0]);
    const Plan* plan = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex);
        const auto found = plans.find(std::string(key->ptr, key->len));
        if (found != plans.end()) plan = found->second;
    }
    if (!plan)
        return fail(frame, "thalweg: this program was compiled in another process, and native code is laid out in "
                           "each: trace the step here, or compile it with engine='xla'");
    for (int64_t i = 0; i < plan->written; i++)
        if (data(frame, i) != data(frame, frame->args.size + i))
            return fail(frame, "thalweg: XLA gave a buffer that is to be written in place another place");
    XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, nullptr};
    if (XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&args)) return error;
    Context context, popped;
    int code = driver().stream_context(args.stream, &context);
    if (!code) code = driver().push(context);
    if (!code) {
        code = run(frame, *plan, context, args.stream);
        driver().pop(&popped);
    }
    if (!code) return nullptr;
    const char* name = "?";
    driver().error(code, &name);
    return fail(frame, std::string("thalweg: a kernel cannot be launched: ") + name);
}

}  // namespace

EXPORTED void thalweg_plan(const char* key, const Plan* plan) {
    std::lock_guard<std::mutex> lock(mutex);
    plans[key] = plan;
}

EXPORTED XLA_FFI_Error* thalweg_launch(XLA_FFI_CallFrame* frame) { return launch_all(frame); }
