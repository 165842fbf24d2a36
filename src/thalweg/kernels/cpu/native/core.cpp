// The C ABI: one call steps a whole model, or takes it through some of the stages of a step.
//
// Stages: all passes but the last, each followed by what its sums decide; then (under a guard) a look at what the last
// would write; then the last. Small tensors go through all stages while they are in the cache, each by one thread. Large
// ones are cut into tasks for all threads, and every other stage goes through them backwards, since their end is what
// the cache still holds.

#include <cmath>
#include <cstring>
#include <vector>

#include "codecs.h"
#include "emitted_names.h"
#include "passes.h"
#include "scalars.h"
#include "threads.h"
#include "vectors.h"

#if defined(THALWEG_ONLY)  // compiled for one level
extern const Passes THALWEG_ONLY;
#else
extern const Passes passes_baseline;
#endif
#if defined(THALWEG_X86)
extern const Passes passes_avx2, passes_avx512;
#endif

namespace {

constexpr int REHEARSE = 8, WRITE = 9;  // the stages after those of passes that measure
constexpr int64_t SMALL = 65536;        // elements of a tensor that one thread steps by itself
constexpr int64_t MOST_TALL = 64, LEAST_HEIGHT = 64;
constexpr int64_t LINE = 64;            // bytes of a cache line

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

char* aligned(char* at) { return at + (LINE - reinterpret_cast<uintptr_t>(at) % LINE) % LINE; }

Cut cut_of(const Tensor& t) {
    Cut cut{};
    if (!is_factored(t)) {
        cut.tasks = most(1, up(t.size, BLOCK));
        return cut;
    }
    const int64_t run = t.columns * t.after;
    cut.slices = t.before * t.between;
    // few and tall, so that partial sums of columns stay a small share of the tensor
    const int64_t tall = most(1, least(MOST_TALL / most(1, cut.slices), t.rows / LEAST_HEIGHT));
    cut.height = up(t.rows, tall);
    cut.tall = up(t.rows, cut.height);
    cut.width = piece_of(t.after) * (WIDEST / piece_of(t.after));
    cut.wide = up(run, cut.width);
    cut.tasks = cut.slices * cut.tall * cut.wide;
    return cut;
}

bool is_wide(const Tensor& t) { return t.dtype[0] == FLOAT64; }

int64_t own_bytes(const Program& program, const Tensor& t, const Cut& cut) {
    if (!is_factored(t)) return 0;
    const Between& between = *program.between;
    return cut.slices * t.after * (between.rows * t.rows + between.columns * t.columns) * (is_wide(t) ? 8 : 4);
}

int64_t work_bytes(const Program& program, const Tensor& t, const Cut& cut) {
    int64_t doubles = cut.tasks * SUMS;
    if (is_factored(t)) {
        const Pass& pass = program.passes[program.between->after_pass];
        doubles += cut.slices * t.after *
                   (pass.column_sums * cut.tall * t.columns + pass.row_sums * cut.wide * t.rows);
    }
    return 8 * doubles;
}

// What the pass before the last keeps of a tensor that fits into a cache together with it, so that the last is short.
int64_t kept_bytes(const Program& program, const Tensor& t) {
    if (!program.has_short || t.size > BLOCK) return 0;
    return BLOCK * program.passes[program.count].kept * (is_wide(t) ? 8 : 4);
}

// ---- a call

struct Call {
    const Passes* passes;
    const Options* options;
    const Tensor* tensors;
    double* registers;
    int64_t register_count;  // of one tensor
    Outcome* outcomes;
    int64_t count;
    char *scratch, *small_work;  // of the whole call: for large tensors, and for each thread's small ones
    int64_t small_bytes;
    int first, last;
    std::atomic<int> threads_seen;

    Job job(int64_t index, char* work) const {
        const Tensor& t = tensors[index];
        return {is_wide(t), &t, options + t.options, registers + index * register_count, &outcomes[index],
                scratch + t.scratch, work, nullptr};
    }
    bool is_small(int64_t index) const { return tensors[index].size <= SMALL; }
};

void begin(const Call& call, const Job& job) {
    std::memcpy(job.registers, job.options->numbers, size_t(job.options->count) * sizeof(double));
    job.registers[COUNT] = double(most(1, job.tensor->whole));
    job.registers[LARGEST] = codecs::TRUSTED[job.tensor->dtype[0]];
    call.passes->read_numbers(job);
    compute(job.program(), 0, job.program().code_begin, job.registers);
    job.outcome->finite = 1;
}

// What follows from the sums of a pass that measures.
void decide_after(const Job& job, int pass) {
    const Program& program = job.program();
    decide(program, pass, job.registers);
    if (pass == program.count - 2 && program.finite >= 0) job.outcome->finite = job.registers[program.finite] != 0;
}

// The pass of a stage, or null if the stage has nothing to do for this tensor.
const Pass* pass_of(const Job& job, int stage) {
    const Program& program = job.program();
    const Pass* last = program.passes + program.count - 1;
    if (stage < REHEARSE) return stage < program.count - 1 ? program.passes + stage : nullptr;
    if (stage == WRITE) return job.outcome->skip ? nullptr : job.kept ? last + 1 : last;
    // whether the new parameter is finite whatever its single elements are, by the norms alone
    bool bounded = program.bounded >= 0 && job.registers[program.bounded] != 0;
    for (int k = 2; k < OPERANDS; k++) bounded &= !job.tensor->operand[k] || job.tensor->dtype[k] != FLOAT16;
    return job.options->guarded && job.outcome->finite && !bounded ? last : nullptr;
}

void add_up(const Job& job, const Cut& cut, int pass) {
    const Program& program = job.program();
    const double* partial = reinterpret_cast<const double*>(job.work);
    for (int k = 0; k < program.passes[pass].sums; k++) {
        double sum = 0;
        for (int64_t task = 0; task < cut.tasks; task++) sum += partial[task * SUMS + k];
        const int place = program.first_sum[pass] + k;
        if (job.tensor->is_slice && !job.wide) {
            const double count = program.is_mean[place - program.first_sum[0]] ? job.registers[COUNT] : 1.0;
            const float kept = float(sum / count);
            if (std::isinf(kept) || kept == 0) sum = double(kept);
        }
        job.registers[place] = sum;
    }
}

void do_task(const Call& call, const Job& job, const Cut& cut, const Pass& pass, int64_t task, bool dry) {
    double* sums = reinterpret_cast<double*>(job.work) + task * SUMS;
    for (int k = 0; k < SUMS; k++) sums[k] = 0;
    if (!call.passes->run(job, cut, pass, task, sums, dry)) sums[SUMS - 1] = 1;
}

// After all tasks of a stage.
void conclude(const Call& call, const Job& job, const Cut& cut, int stage) {
    const Program& program = job.program();
    const bool between = is_factored(*job.tensor);
    if (stage == REHEARSE) {
        const double* partial = reinterpret_cast<const double*>(job.work);
        for (int64_t task = 0; task < cut.tasks; task++)
            if (partial[task * SUMS + SUMS - 1] != 0) job.outcome->finite = 0;
        if (between && !call.passes->keep_between(job, cut, true)) job.outcome->finite = 0;
        if (!call.passes->keep_numbers(job, true)) job.outcome->finite = 0;
        return;
    }
    const int pass = stage == WRITE ? program.count - 1 : stage;
    add_up(job, cut, pass);
    decide_after(job, pass);
    if (between && program.between->after_pass == pass) call.passes->compute_between(job, cut);
    if (stage == WRITE && between) call.passes->keep_between(job, cut, false);
    if (stage == WRITE) call.passes->keep_numbers(job, false);
}

void step_alone(const Call& call, int64_t index, char* work) {
    Job job = call.job(index, work);
    const Cut cut = cut_of(*job.tensor);
    const Program& program = job.program();
    const bool keeps = call.first == 0 && call.last > WRITE && kept_bytes(program, *job.tensor) > 0;
    for (int stage = call.first; stage < call.last; stage++) {
        if (keeps && stage == program.count - 2) job.kept = aligned(work + work_bytes(program, *job.tensor, cut));
        const Pass* pass = pass_of(job, stage);
        if (!pass) continue;
        for (int64_t task = 0; task < cut.tasks; task++) do_task(call, job, cut, *pass, task, stage == REHEARSE);
        conclude(call, job, cut, stage);
    }
}

void step_together(const Call& call, int64_t index, Team& team) {
    const Job job = call.job(index, call.scratch);
    const Cut cut = cut_of(*job.tensor);
    bool backwards = false;
    for (int stage = call.first; stage < call.last; stage++) {
        const Pass* pass = pass_of(job, stage);
        if (!pass) continue;
        for (int64_t k = team.claim(); k < cut.tasks; k = team.claim())
            do_task(call, job, cut, *pass, backwards ? cut.tasks - 1 - k : k, stage == REHEARSE);
        team.barrier([&] { conclude(call, job, cut, stage); });
        backwards = !backwards;
    }
}

void body(void* data, Team& team) {
    Call& call = *static_cast<Call*>(data);
    const int thread = call.threads_seen.fetch_add(1);
    for (int64_t index = 0; index < call.count; index++)
        if (!call.is_small(index)) step_together(call, index, team);
    char* work = call.small_work + thread * call.small_bytes;
    int64_t turn = team.claim(), small = 0;
    for (int64_t index = 0; index < call.count; index++) {
        if (!call.is_small(index)) continue;
        if (small++ == turn) {
            step_alone(call, index, work);
            turn = team.claim();
        }
    }
}

// Sums of squares: one for each block of each tensor, added up in their order.
struct Squaring {
    const Passes* passes;
    const Tensor* tensors;
    int64_t count;
    double* partial;
};

void add_squares(void* data, Team& team) {
    const auto& call = *static_cast<Squaring*>(data);
    int64_t turn = team.claim(), first = 0;
    for (int64_t index = 0; index < call.count; index++) {
        const Tensor& t = call.tensors[index];
        const int64_t blocks = up(t.size, BLOCK);
        for (; turn < first + blocks; turn = team.claim()) {
            const int64_t begin = (turn - first) * BLOCK;
            call.passes->squares(t, begin, least(begin + BLOCK, t.size), call.partial + turn);
        }
        first += blocks;
    }
}

struct Filling {
    const Passes* passes;
    const Noise* noise;
};

void fill(void* data, Team& team) {
    const auto& filling = *static_cast<Filling*>(data);
    const int64_t count = filling.noise->count;
    for (int64_t begin = team.claim() * BLOCK; begin < count; begin = team.claim() * BLOCK)
        filling.passes->normal(*filling.noise, begin, least(begin + BLOCK, count));
}

const Passes* const* levels(int* count) {
#if defined(THALWEG_X86)
    static const Passes* const all[] = {&passes_baseline, &passes_avx2, &passes_avx512};
    *count = vector_levels();
#elif defined(THALWEG_ONLY)
    static const Passes* const all[] = {&THALWEG_ONLY};
    *count = 1;
#else
    static const Passes* const all[] = {&passes_baseline};
    *count = 1;
#endif
    return all;
}

int chosen_level = -1;

const Passes* chosen() {
    int available;
    const Passes* const* all = levels(&available);
    return all[chosen_level < 0 ? available - 1 : chosen_level];
}

}  // namespace

// The sizes of the structures, so that both sides can see that they mean the same.
EXPORTED int64_t thalweg_sizeof(int32_t which) {
    const int64_t sizes[] = {sizeof(Tensor),  sizeof(Pass),    sizeof(Between), sizeof(Instruction),
                             sizeof(Program), sizeof(Options), sizeof(Outcome)};
    return which >= 0 && which < 7 ? sizes[which] : -1;
}

// The place of an emitted pass of this name, -1 if there is none.
EXPORTED int32_t thalweg_find(const char* name) {
    for (int32_t i = 0; i < int32_t(sizeof EMITTED_NAMES / sizeof *EMITTED_NAMES); i++)
        if (!std::strcmp(name, EMITTED_NAMES[i])) return i;
    return -1;
}

EXPORTED int32_t thalweg_levels(void) {
    int count;
    levels(&count);
    return count;
}

EXPORTED const char* thalweg_level(int32_t level) {
    int count;
    const Passes* const* all = levels(&count);
    return level >= 0 && level < count ? all[level]->name : nullptr;
}

// Use this vector width from now on; -1: the widest. False if this machine does not have it.
EXPORTED int32_t thalweg_choose_level(int32_t level) {
    int count;
    levels(&count);
    if (level < -1 || level >= count) return 0;
    chosen_level = level;
    return 1;
}

EXPORTED void thalweg_borrow_threads(void* run_all, void* count) {
    Threads::instance().borrow(reinterpret_cast<RunAll>(run_all), reinterpret_cast<CountThreads>(count));
}

namespace {

// Bytes of partial sums: of the largest tensor that all threads share, and of the largest that one has to itself.
struct Areas {
    int64_t large = 0, small = 0;

    Areas(const Options* options, const Tensor* tensors, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const Tensor& t = tensors[i];
            int64_t& area = t.size <= SMALL ? small : large;
            const Program& program = *options[t.options].program;
            const int64_t kept = kept_bytes(program, t), work = work_bytes(program, t, cut_of(t));
            area = most(area, up(work, LINE) * LINE + (kept ? kept + LINE : 0));
        }
    }
};

}  // namespace

// Place each tensor's scratch. The answer is how many bytes of it a call with so many threads needs.
EXPORTED int64_t thalweg_layout(const Options* options, Tensor* tensors, int64_t count, int32_t threads) {
    threads = threads > 1 ? threads : 1;
    const Areas areas(options, tensors, count);
    int64_t total = areas.large + areas.small * threads;
    for (int64_t i = 0; i < count; i++) {
        tensors[i].scratch = total;
        total += up(own_bytes(*options[tensors[i].options].program, tensors[i], cut_of(tensors[i])), 64) * 64;
    }
    return total;
}

// Gradients have moved: row i belongs to the gradient owners[i], and begins so many bytes behind its base.
EXPORTED void thalweg_point(Tensor* tensors, int64_t count, const int64_t* owners, const int64_t* offsets,
                            const uint64_t* bases) {
    for (int64_t i = 0; i < count; i++) tensors[i].operand[1] = reinterpret_cast<void*>(bases[owners[i]] + offsets[i]);
}

// A tensor as DLPack describes it, version 1.
struct Described {
    void* data;
    int32_t device_type, device;
    int32_t axes;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
};

// How the tensors of a Python list are stored: written to `words` as far as there is room, or compared with what is
// there. item: Python's function for an item of a list. describe: the framework's, which answers 0 if it can. addresses:
// where each tensor is; null: that is among the words. Called with the interpreter's lock. The answer is how many words
// there are; -1: they differ, or a tensor cannot be described, and Python has the error.
EXPORTED int64_t thalweg_describe(void* list, int64_t count, void* (*item)(void*, int64_t),
                                  int (*describe)(void*, Described*), int64_t* addresses, int64_t* words, int64_t room,
                                  int32_t compares) {
    int64_t length = 0;
    bool same = true;
    const auto take = [&](int64_t word) {
        if (compares)
            same = same && length < room && words[length] == word;
        else if (length < room)
            words[length] = word;
        length++;
    };
    for (int64_t i = 0; i < count && same; i++) {
        Described tensor;
        if (describe(item(list, i), &tensor)) return -1;
        const auto address = reinterpret_cast<int64_t>(tensor.data) + static_cast<int64_t>(tensor.offset);
        if (addresses)
            addresses[i] = address;
        else
            take(address);
        take(int64_t(tensor.device_type) << 32 | uint32_t(tensor.device));
        take(int64_t(tensor.axes) << 32 | int64_t(tensor.code) << 24 | int64_t(tensor.bits) << 16 | tensor.lanes);
        for (int32_t axis = 0; axis < tensor.axes; axis++) {
            take(tensor.shape[axis]);
            take(tensor.strides ? tensor.strides[axis] : 0);
        }
    }
    return same && (!compares || length == room) ? length : -1;
}

// Whether all these counts of steps are equal; `number` is the first.
EXPORTED int32_t thalweg_counts(const float* const* counts, int64_t count, float* number) {
    *number = count ? *counts[0] : 0;
    for (int64_t i = 1; i < count; i++)
        if (*counts[i] != *number) return 0;
    return 1;
}

// One step more, for all or for those that are chosen.
EXPORTED void thalweg_count(float* const* counts, int64_t count, const char* chosen) {
    for (int64_t i = 0; i < count; i++)
        if (!chosen || chosen[i]) *counts[i] += 1;
}

// Take tensors through the stages from `first` up to, not including, `last`. What was decided before follows from the sums
// that are in the registers now: the caller may have made them those of all shards.
EXPORTED void thalweg_run(const Options* options, const Tensor* tensors, double* registers, int64_t register_count,
                          Outcome* outcomes, int64_t count, void* scratch, int32_t first, int32_t last,
                          int32_t threads) {
    threads = threads > 1 ? threads : 1;
    const Areas areas(options, tensors, count);
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += tensors[i].size;
    Call call{chosen(), options, tensors, registers, register_count, outcomes, count, static_cast<char*>(scratch),
              static_cast<char*>(scratch) + areas.large, areas.small, first, last, {}};
    for (int64_t i = 0; i < count; i++) {
        const Job job = call.job(i, nullptr);
        const int before = int(least(first, job.program().count - 1)) - 1;
        if (first == 0) begin(call, job);
        else if (before >= 0) decide_after(job, before);
    }
    // waking a thread takes about as long as stepping a small tensor
    Threads::instance().run(total <= SMALL ? 1 : threads, body, &call);
}

// The sum of squares of each gradient, in double precision.
EXPORTED void thalweg_squares(const Tensor* tensors, int64_t count, double* sums, int32_t threads) {
    int64_t blocks = 0, total = 0;
    for (int64_t i = 0; i < count; i++) blocks += up(tensors[i].size, BLOCK), total += tensors[i].size;
    std::vector<double> partial(size_t(blocks), 0.0);
    Squaring call{chosen(), tensors, count, partial.data()};
    Threads::instance().run(total <= SMALL ? 1 : threads, add_squares, &call);
    const double* next = partial.data();
    for (int64_t i = 0; i < count; i++) {
        sums[i] = 0;
        for (int64_t k = up(tensors[i].size, BLOCK); k > 0; k--) sums[i] += *next++;
    }
}

// Fill `out` (float64 if `wide`) with standard normal numbers.
EXPORTED void thalweg_normal(void* out, int32_t wide, int64_t count, int64_t position, uint32_t key0, uint32_t key1,
                             uint32_t t, int32_t threads) {
    const Noise noise{out, wide != 0, count, uint64_t(position), {key0, key1}, t};
    Filling filling{chosen(), &noise};
    Threads::instance().run(count <= BLOCK ? 1 : threads, fill, &filling);
}
