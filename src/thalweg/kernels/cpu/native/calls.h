// What handlers of XLA's foreign functions share: plans that Python has laid out, found by the key of a call.
// Addresses in them are places: a buffer's number, from 1, above PLACE_BITS; bytes into it below.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "abi.h"
#include "xla/ffi/api/c_api.h"

struct Plan;

namespace {

constexpr int PLACE_BITS = 44;

std::mutex mutex;
std::unordered_map<std::string, const Plan*> plans;

XLA_FFI_Error* fail(const XLA_FFI_CallFrame* frame, const std::string& message) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message.c_str(),
                                   XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
}

const XLA_FFI_Buffer& argument(const XLA_FFI_CallFrame* frame, int64_t index) {
    return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[index]);
}

const XLA_FFI_Buffer& result(const XLA_FFI_CallFrame* frame, int64_t index) {
    return *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[index]);
}

// Whether XLA asks what the handler is, instead of calling it; that is answered.
bool is_asked(const XLA_FFI_CallFrame* frame, uint32_t traits) {
    for (auto* extension = frame->extension_start; extension; extension = extension->next)
        if (extension->type == XLA_FFI_Extension_Metadata) {
            auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
            metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
            metadata->traits = traits;
            return true;
        }
    return false;
}

XLA_FFI_Error* find_plan(const XLA_FFI_CallFrame* frame, const Plan** found) {
    if (frame->attrs.size != 1 || frame->attrs.types[0] != XLA_FFI_AttrType_STRING)
        return fail(frame, "thalweg: a step of native code has one attribute, its key");
    const auto* key = static_cast<const XLA_FFI_ByteSpan*>(frame->attrs.attrs[0]);
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = plans.find(std::string(key->ptr, key->len));
    if (known == plans.end())
        return fail(frame, "thalweg: this program was compiled in another process, and native code is laid out in "
                           "each: trace the step here, or compile it with engine='xla'");
    *found = known->second;
    return nullptr;
}

// Refuses a result that is not the same buffer as an argument.
XLA_FFI_Error* check_in_place(const XLA_FFI_CallFrame* frame, int64_t given, int64_t told) {
    if (argument(frame, given).data == result(frame, told).data) return nullptr;
    return fail(frame, "thalweg: XLA gave a buffer that is to be written in place another place");
}

}  // namespace

EXPORTED void thalweg_plan(const char* key, const Plan* plan) {
    std::lock_guard<std::mutex> lock(mutex);
    plans[key] = plan;
}
