// The C ABI: one call steps a whole model, or takes it through some of the stages of a step.
//
// Stages: 0 measures, 1 looks at what would be written (Adafactor: at u), 2 writes. Small tensors go
// through all stages while they are in the cache, each by one thread. Large ones are cut into tasks for all
// threads, and every other stage goes through them backwards, since their end is what the cache still holds.

#include <cmath>
#include <cstring>

#include "passes.h"
#include "threads.h"

extern const Passes passes_baseline;
#if defined(THALWEG_X86)
extern const Passes passes_avx2, passes_avx512;
#endif

namespace {

constexpr int64_t SMALL = 65536;  // elements of a tensor that one thread steps by itself
constexpr int64_t MOST_TALL = 64, LEAST_HEIGHT = 64;

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

Cut cut_of(int32_t rule, const Tensor& t) {
    Cut cut{};
    if (rule != ADAFACTOR || t.rows == 0) {
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

bool is_wide(int32_t rule, const Tensor& t) { return rule == SQUARES || t.p_dtype == FLOAT64; }

int64_t own_bytes(int32_t rule, const Tensor& t, const Cut& cut) {
    if (rule != ADAFACTOR || t.rows == 0) return 0;
    return 2 * cut.slices * t.after * (t.rows + t.columns) * (is_wide(rule, t) ? 8 : 4);
}

int64_t work_bytes(int32_t rule, const Tensor& t, const Cut& cut) {
    int64_t doubles = cut.tasks * SUMS;
    if (rule == ADAFACTOR && t.rows > 0)
        doubles += cut.slices * t.after * (cut.tall * t.columns + cut.wide * t.rows);
    return 8 * doubles;
}

// ---- what is decided between stages, from the sums

double lars_ratio(const LarsOptions& o, double p_norm, double g_norm) {
    const double lr = o.handling.lr;
    double above = o.trust_coefficient * p_norm;
    double below = g_norm + (o.combined ? 0.0 : o.handling.weight_decay * p_norm) + o.eps;
    bool undefined = p_norm <= 0 || g_norm <= 0;
    if (o.clip) {
        above = above < lr * below || std::isnan(above) ? above : lr * below;
        below *= lr;
        undefined |= lr <= 0;
    }
    if (std::isnan(p_norm) || std::isnan(g_norm)) undefined = false;
    return undefined ? o.zero_ratio : above / below;
}

double clipped(double x, double low, double high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

double lamb_ratio(const LambOptions& o, double p_norm, double u_norm) {
    if (o.has_phi) p_norm = clipped(p_norm, o.phi_low, o.phi_high);
    const bool unknown = std::isnan(p_norm) || std::isnan(u_norm);
    double ratio = !unknown && (p_norm <= 0 || u_norm <= 0) ? 1.0 : p_norm / u_norm;
    return o.has_trust_clip ? clipped(ratio, o.trust_low, o.trust_high) : ratio;
}


void decide(const Job& job) {
    Outcome& out = *job.outcome;
    const double p_norm = std::sqrt(out.sums[0]), norm = std::sqrt(out.sums[1]);
    if (job.rule == LARS) {
        const auto& o = *static_cast<const LarsOptions*>(job.options);
        out.stats[0] = o.handling.adapt ? lars_ratio(o, p_norm, norm) : 1.0;
        out.stats[1] = p_norm, out.stats[2] = norm;
        out.finite = std::isfinite(out.sums[1]);
    } else if (job.rule == LAMB) {
        const auto& o = *static_cast<const LambOptions*>(job.options);
        const double kept =
            o.decay_mode == DECOUPLED ? std::fabs(1 - o.handling.lr * o.handling.weight_decay) : 1.0;
        out.stats[0] = o.handling.adapt ? lamb_ratio(o, kept * p_norm, norm) : 1.0;
        out.stats[1] = p_norm, out.stats[2] = norm, out.stats[3] = std::sqrt(out.sums[2]);
        out.finite = std::isfinite(out.sums[1] + out.sums[2]);
    }
}

void decide_adafactor(const Job& job) {
    Outcome& out = *job.outcome;
    const auto& o = *static_cast<const AdafactorOptions*>(job.options);
    const double count = double(most(1, job.tensor->size));
    const double p_rms = std::sqrt(out.sums[0] / count), u_rms = std::sqrt(out.sums[1] / count);
    const double excess = u_rms / o.clip_threshold;
    const double clip = o.has_clip ? 1 / (excess < 1 ? 1.0 : excess) : 1.0;
    const double scale = o.scaled ? (p_rms < o.floor ? o.floor : p_rms) : 1.0;
    const double stats[] = {u_rms, clip, p_rms, o.rho * scale * o.lr_scale};
    std::memcpy(out.stats, stats, sizeof stats);
    out.finite = std::isfinite(out.sums[1] + out.sums[2]);
}

// Whether the new parameter is finite whatever its single elements are, by the norms alone.
bool is_bounded(const Job& job) {
    const Tensor& t = *job.tensor;
    const Outcome& out = *job.outcome;
    for (int k = 0; k < 3; k++)
        if (t.state[k] && t.state_dtype[k] == FLOAT16) return false;
    const double largest = t.p_dtype == FLOAT16 ? 6e4 : t.p_dtype == FLOAT64 ? 1e307 : 1e38;
    const Handling& h = handling_of(job);
    // the factors too: each is rounded to the precision of the arithmetic before it multiplies anything
    if (job.rule == LAMB) {
        const double rate = std::fabs(out.stats[0] * h.lr), decay = h.lr * h.weight_decay;
        return rate < largest && decay < largest && out.stats[1] * (1 + decay) + rate * out.stats[2] < largest;
    }
    if (job.rule == ADAFACTOR && !t.state[2]) {
        const auto& o = *static_cast<const AdafactorOptions*>(job.options);
        const double root = std::sqrt(double(most(1, t.size)));
        const double rates[] = {out.stats[3], o.nominal, 1.0};
        const double rate = std::fabs(out.stats[3] * out.stats[1]), decay = rates[o.decay_mode] * h.weight_decay;
        const double bound = (out.stats[2] * (1 + decay) + rate * out.stats[0]) * root;
        return rate < largest && decay < largest && bound < largest;
    }
    return false;
}

// ---- a call

struct Call {
    const Passes* passes;
    int32_t rule;
    const char* options;
    int64_t option_bytes;
    const Tensor* tensors;
    Outcome* outcomes;
    int64_t count;
    char *scratch, *small_work;  // of the whole call: for large tensors, and for each thread's small ones
    int64_t small_bytes;
    int first, last;
    std::atomic<int> threads_seen;

    Job job(int64_t index, char* work) const {
        const Tensor& t = tensors[index];
        return {rule, is_wide(rule, t), &t, options + t.options * option_bytes, &outcomes[index],
                scratch + t.scratch, work};
    }
    bool is_small(int64_t index) const { return tensors[index].size <= SMALL; }
};

void add_up(const Job& job, const Cut& cut) {
    const double* partial = reinterpret_cast<const double*>(job.work);
    for (int k = 0; k < SUMS; k++)
        for (int64_t task = 0; task < cut.tasks; task++) job.outcome->sums[k] += partial[task * SUMS + k];
    if (!job.tensor->is_slice || job.wide) return;
    const double count = job.rule == ADAFACTOR ? double(most(1, job.tensor->size)) : 1.0;  // it has means
    for (double& sum : job.outcome->sums) {
        const float kept = float(sum / count);
        if (std::isinf(kept) || kept == 0) sum = double(kept);
    }
}

void do_task(const Call& call, const Job& job, const Cut& cut, int stage, int64_t task, bool dry) {
    double* sums = reinterpret_cast<double*>(job.work) + task * SUMS;
    if (stage < 2)
        for (int k = 0; k < SUMS; k++) sums[k] = 0;
    if (stage == 0) call.passes->measure(job, cut, task, sums);
    if (stage == 1 && !call.passes->rehearse(job, cut, task, sums, dry)) sums[2] = INFINITY;
    if (stage == 2) call.passes->write(job, cut, task);
}

// After all tasks of a stage.
void conclude(const Call& call, const Job& job, const Cut& cut, int stage, bool dry) {
    if (stage == 0) {
        std::memset(job.outcome->sums, 0, sizeof job.outcome->sums);
        add_up(job, cut);
        if (is_factored(job)) call.passes->factor(job, cut);
        else if (job.rule == ADAFACTOR) decide_adafactor(job);
        else decide(job);
    } else if (stage == 1 && !dry) {
        add_up(job, cut);
        decide_adafactor(job);
    } else if (stage == 1) {
        const double* partial = reinterpret_cast<const double*>(job.work);
        for (int64_t task = 0; task < cut.tasks; task++)
            if (partial[task * SUMS + 2] != 0) job.outcome->finite = 0;
    } else {
        call.passes->finish(job, cut);
    }
}

// Adafactor's factored tensors have two rounds in stage 1: u, and under guard what would be written.
int rounds_of(const Job& job, int stage) { return stage == 1 && is_factored(job) ? 2 : 1; }

bool is_dry(const Job& job, int round) { return !is_factored(job) || round == 1; }

// Whether a round of a stage goes over the tensor at all.
bool takes_place(const Job& job, int stage, int round) {
    if (job.rule == SQUARES) return stage == 0;
    if (stage == 0) return true;
    if (stage == 2) return !job.outcome->skip && !is_single_pass(job);
    if (!is_dry(job, round)) return true;
    return handling_of(job).guarded && job.outcome->finite && !is_bounded(job);
}

void step_alone(const Call& call, int64_t index, char* work) {
    const Job job = call.job(index, work);
    const Cut cut = cut_of(call.rule, *job.tensor);
    for (int stage = call.first; stage < call.last; stage++)
        for (int round = 0; round < rounds_of(job, stage); round++) {
            if (!takes_place(job, stage, round)) continue;
            for (int64_t task = 0; task < cut.tasks; task++) do_task(call, job, cut, stage, task, is_dry(job, round));
            conclude(call, job, cut, stage, is_dry(job, round));
        }
}

void step_together(const Call& call, int64_t index, Team& team) {
    const Job job = call.job(index, call.scratch);
    const Cut cut = cut_of(call.rule, *job.tensor);
    bool backwards = false;
    for (int stage = call.first; stage < call.last; stage++)
        for (int round = 0; round < rounds_of(job, stage); round++) {
            if (!takes_place(job, stage, round)) continue;
            const bool dry = is_dry(job, round);
            for (int64_t k = team.claim(); k < cut.tasks; k = team.claim())
                do_task(call, job, cut, stage, backwards ? cut.tasks - 1 - k : k, dry);
            team.barrier([&] { conclude(call, job, cut, stage, dry); });
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
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    *count = avx512 ? 3 : avx2 ? 2 : 1;
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

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

// The sizes of the structures, so that both sides can see that they mean the same.
EXPORTED int64_t thalweg_sizeof(int32_t which) {
    const int64_t sizes[] = {sizeof(Tensor), sizeof(LarsOptions), sizeof(LambOptions), sizeof(AdafactorOptions),
                             sizeof(Outcome)};
    return which >= 0 && which < 5 ? sizes[which] : -1;
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

    Areas(int32_t rule, const Tensor* tensors, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            int64_t& area = tensors[i].size <= SMALL ? small : large;
            area = most(area, up(work_bytes(rule, tensors[i], cut_of(rule, tensors[i])), 64) * 64);
        }
    }
};

}  // namespace

// Place each tensor's scratch. The answer is how many bytes of it a call with so many threads needs.
EXPORTED int64_t thalweg_layout(int32_t rule, Tensor* tensors, int64_t count, int32_t threads) {
    threads = threads > 1 ? threads : 1;
    const Areas areas(rule, tensors, count);
    int64_t total = areas.large + areas.small * threads;
    for (int64_t i = 0; i < count; i++) {
        tensors[i].scratch = total;
        total += up(own_bytes(rule, tensors[i], cut_of(rule, tensors[i])), 64) * 64;
    }
    return total;
}

// Take tensors through the stages from `first` up to, not including, `last`.
EXPORTED void thalweg_run(int32_t rule, const void* options, const Tensor* tensors, Outcome* outcomes, int64_t count,
                          void* scratch, int32_t first, int32_t last, int32_t threads) {
    threads = threads > 1 ? threads : 1;
    const int64_t bytes[] = {sizeof(Handling), sizeof(LarsOptions), sizeof(LambOptions), sizeof(AdafactorOptions)};
    const Areas areas(rule, tensors, count);
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += tensors[i].size;
    Call call{chosen(), rule, static_cast<const char*>(options),
              bytes[rule], tensors, outcomes, count, static_cast<char*>(scratch),
              static_cast<char*>(scratch) + areas.large, areas.small, first, last, {}};
    // waking a thread takes about as long as stepping a small tensor
    Threads::instance().run(total <= SMALL ? 1 : threads, body, &call);
}

// Decide anew what follows from the sums of stage 0, which somebody has made those of parts elsewhere too.
EXPORTED void thalweg_decide(int32_t rule, const void* options, const Tensor* tensors, Outcome* outcomes,
                             int64_t count) {
    const int64_t bytes[] = {sizeof(Handling), sizeof(LarsOptions), sizeof(LambOptions), sizeof(AdafactorOptions)};
    for (int64_t i = 0; i < count; i++) {
        const Tensor& t = tensors[i];
        const char* own = static_cast<const char*>(options) + t.options * bytes[rule];
        decide({rule, is_wide(rule, t), &t, own, &outcomes[i], nullptr, nullptr});
    }
}

// Fill `out` (float64 if `wide`) with standard normal numbers.
EXPORTED void thalweg_normal(void* out, int32_t wide, int64_t count, int64_t position, uint32_t key0, uint32_t key1,
                             uint32_t t, int32_t threads) {
    const Noise noise{out, wide != 0, count, uint64_t(position), {key0, key1}, t};
    Filling filling{chosen(), &noise};
    Threads::instance().run(count <= BLOCK ? 1 : threads, fill, &filling);
}
