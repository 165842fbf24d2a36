// Passes inside programs of XLA: a handler of its foreign functions, compiled at first use beside jaxlib's headers.
#include <cstring>
#include <type_traits>

#include "body.h"
#include "calls.h"

using Run = void (*)(const Options*, const Tensor*, double*, int64_t, Outcome*, int64_t, void*, int32_t, int32_t,
                     int32_t);

// What was laid out for a call. `kernels/cpu/xla.py` mirrors it.
struct Plan {
    Run run;
    const Options* options;
    const Tensor* tensors;   // with places
    const uint64_t* small;   // of each tensor: the place of its rows and columns; 0: it has none
    const int64_t* written;  // the arguments that are written, which come first among the results
    const int64_t* moves;    // of each copy: the place of what is copied, where to, and how many bytes
    int64_t option_count, count, width, written_count, move_count;
    int32_t threads, stage;  // the stages are those of tables.py
};

namespace {

// Results have the places behind the arguments.
char* address(const XLA_FFI_CallFrame* frame, uint64_t place) {
    const int64_t buffer = int64_t(place >> PLACE_BITS) - 1, args = frame->args.size;
    const auto& found = buffer < args ? argument(frame, buffer) : result(frame, buffer - args);
    return static_cast<char*>(found.data) + (place & ((1ull << PLACE_BITS) - 1));
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

// The last arguments: the registers of each tensor, the number of the step, whether it may be taken. Results: what is
// written and the registers (the same buffers), what is told of rows and columns, whether each tensor's step is finite,
// the workspace.
void step(const XLA_FFI_CallFrame* frame, const Plan& plan) {
    const int64_t args = frame->args.size, last = frame->rets.size - 1;
    if (!*static_cast<const int32_t*>(argument(frame, args - 1).data)) return;
    Workspace work{static_cast<char*>(result(frame, last).data)};
    auto* tensors = work.take<Tensor>(plan.count);
    auto* options = work.take<Options>(plan.option_count);
    auto* outcomes = work.take<Outcome>(plan.count);
    char* scratch = work.take<char>(0);
    std::memcpy(tensors, plan.tensors, size_t(plan.count) * sizeof(Tensor));
    std::memcpy(options, plan.options, size_t(plan.option_count) * sizeof(Options));
    const auto place = [&](auto*& pointer) {
        const auto bits = reinterpret_cast<uint64_t>(pointer);
        // what XLA computes has no buffer, and its slices lie behind the beginning of none
        pointer = bits >> PLACE_BITS ? reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(address(frame, bits))
                                     : nullptr;
    };
    for (int64_t i = 0; i < plan.count; i++) {
        for (auto& operand : tensors[i].operand) place(operand);
        for (auto& scales : tensors[i].scales) place(scales);
        place(tensors[i].record);
        if (plan.small[i]) tensors[i].scratch = address(frame, plan.small[i]) - scratch;
        outcomes[i] = {1, 0};
    }
    for (int64_t i = 0; i < plan.option_count; i++)
        options[i].t = *static_cast<const uint32_t*>(argument(frame, args - 2).data);
    auto* registers = static_cast<double*>(result(frame, plan.written_count).data);
    plan.run(options, tensors, registers, plan.width, outcomes, plan.count, scratch, plan.stage, plan.stage + 1,
             plan.threads);
    auto* finite = static_cast<int32_t*>(result(frame, last - 1).data);
    for (int64_t i = 0; i < plan.count; i++) finite[i] = outcomes[i].finite;
}

// What comes of sums of rows and columns: their means, for XLA to go on from.
template <class T, int ROWS, int COLUMNS>
void tell(const void* given) {
    const Matrix<T>& matrix = *static_cast<const Matrix<T>*>(given);
    for (int64_t r = 0; r < matrix.rows; r++)
        for (int64_t k = 0; k < matrix.after; k++)
            for (int i = 0; i < ROWS; i++)
                matrix.row[i][r * matrix.row_stride + k] =
                    T(matrix.row_sums[i][r * matrix.after + k] / double(matrix.columns));
    for (int64_t c = 0; c < matrix.columns * matrix.after; c++)
        for (int i = 0; i < COLUMNS; i++) matrix.column[i][c] = T(matrix.column_sums[i][c] / double(matrix.rows));
}

template <int ROWS, int COLUMNS>
constexpr Functions TELL{tell<float, ROWS, COLUMNS>, tell<double, ROWS, COLUMNS>};
constexpr const Functions* TOLD[SLOTS][SLOTS] = {{&TELL<1, 1>, &TELL<1, 2>}, {&TELL<2, 1>, &TELL<2, 2>}};

}  // namespace

// The function between passes for so many sums of rows and of columns.
EXPORTED const Functions* thalweg_tell(int32_t rows, int32_t columns) { return TOLD[rows - 1][columns - 1]; }

EXPORTED XLA_FFI_Error* thalweg_step(XLA_FFI_CallFrame* frame) {
    if (is_asked(frame, 0)) return nullptr;
    const Plan* plan = nullptr;
    if (XLA_FFI_Error* error = find_plan(frame, &plan)) return error;
    for (int64_t i = 0; i < plan->written_count; i++)
        if (XLA_FFI_Error* error = check_in_place(frame, plan->written[i], i)) return error;
    step(frame, *plan);
    return nullptr;
}

EXPORTED XLA_FFI_Error* thalweg_move(XLA_FFI_CallFrame* frame) {
    if (is_asked(frame, 0)) return nullptr;
    const Plan* plan = nullptr;
    if (XLA_FFI_Error* error = find_plan(frame, &plan)) return error;
    for (const int64_t* move = plan->moves; move < plan->moves + 3 * plan->move_count; move += 3)
        std::memcpy(address(frame, uint64_t(move[1])), address(frame, uint64_t(move[0])), size_t(move[2]));
    return nullptr;
}
