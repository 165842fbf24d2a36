// Steps inside programs of XLA: a handler of its foreign functions, compiled at first use beside jaxlib's headers.
#include <cstring>
#include <type_traits>

#include "calls.h"

using Run = void (*)(const Options*, const Tensor*, double*, int64_t, Outcome*, int64_t, void*, int32_t, int32_t,
                     int32_t);

// What was laid out for a program. `kernels/cpu/xla.py` mirrors it.
struct Plan {
    Run run;
    const Options* options;  // without their numbers
    const Tensor* tensors;   // with places
    const int64_t* figures;  // registers that are told
    int64_t option_count, count, width, figure_count, written;
    int32_t threads, guarded, write, end;  // the stages are those of tables.py
};

namespace {

void write_number(const XLA_FFI_Buffer& to, int64_t index, double x) {
    if (to.dtype == XLA_FFI_DataType_F64) static_cast<double*>(to.data)[index] = x;
    else static_cast<float*>(to.data)[index] = float(x);
}

// Parts of a buffer, each at a multiple of 64 bytes.
struct Workspace {
    char* next;

    template <class T>
    T* take(int64_t count) {
        next = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(next) + 63) / 64 * 64);
        T* found = reinterpret_cast<T*>(next);
        next += count * int64_t(sizeof(T));
        return found;
    }
};

// Arguments: what is written, gradients, numbers, the step. Results: what is written (the same buffers), whether all is
// finite, figures, the workspace.
void step(const XLA_FFI_CallFrame* frame, const Plan& plan) {
    const XLA_FFI_Buffer &given = argument(frame, frame->args.size - 2), &told = result(frame, plan.written + 1);
    Workspace work{static_cast<char*>(result(frame, plan.written + 2).data)};
    auto* tensors = work.take<Tensor>(plan.count);
    auto* options = work.take<Options>(plan.option_count);
    auto* outcomes = work.take<Outcome>(plan.count);
    auto* registers = work.take<double>(plan.count * plan.width);
    auto* numbers = work.take<double>(given.dims[0]);
    void* scratch = work.take<char>(0);
    std::memcpy(tensors, plan.tensors, size_t(plan.count) * sizeof(Tensor));
    std::memcpy(options, plan.options, size_t(plan.option_count) * sizeof(Options));
    std::memset(outcomes, 0, size_t(plan.count) * sizeof(Outcome));
    for (int64_t i = 0; i < given.dims[0]; i++)
        numbers[i] = given.dtype == XLA_FFI_DataType_F64 ? static_cast<const double*>(given.data)[i]
                                                         : double(static_cast<const float*>(given.data)[i]);
    const auto place = [&](auto*& pointer) {
        const auto bits = reinterpret_cast<uint64_t>(pointer);
        if (!bits) return;
        char* base = static_cast<char*>(argument(frame, int64_t(bits >> PLACE_BITS) - 1).data);
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + (bits & ((1ull << PLACE_BITS) - 1)));
    };
    for (int64_t i = 0; i < plan.count; i++) {
        for (auto& operand : tensors[i].operand) place(operand);
        for (auto& scales : tensors[i].scales) place(scales);
        place(tensors[i].record);
    }
    const auto t = *static_cast<const int32_t*>(argument(frame, frame->args.size - 1).data);
    const double* next = numbers;
    for (int64_t i = 0; i < plan.option_count; i++) {
        options[i].numbers = next, options[i].t = uint32_t(t);
        next += options[i].count;
    }
    const auto run = [&](int first, int last) {
        plan.run(options, tensors, registers, plan.width, outcomes, plan.count, scratch, first, last, plan.threads);
    };
    int32_t fine = 1;
    if (plan.guarded) {
        run(0, plan.write);
        for (int64_t i = 0; i < plan.count; i++) fine &= outcomes[i].finite;
        for (int64_t i = 0; i < plan.count; i++) outcomes[i].skip = !fine;
    }
    run(plan.guarded ? plan.write : 0, plan.end);
    *static_cast<int32_t*>(result(frame, plan.written).data) = fine;
    for (int64_t i = 0; i < plan.figure_count; i++) write_number(told, i, registers[plan.figures[i]]);
}

}  // namespace

EXPORTED XLA_FFI_Error* thalweg_step(XLA_FFI_CallFrame* frame) {
    if (is_asked(frame, 0)) return nullptr;
    const Plan* plan = nullptr;
    if (XLA_FFI_Error* error = find_plan(frame, &plan)) return error;
    if (XLA_FFI_Error* error = check_in_place(frame, 0, plan->written)) return error;
    step(frame, *plan);
    return nullptr;
}
