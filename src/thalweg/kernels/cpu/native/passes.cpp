// Compiled once for each vector width: THALWEG_LEVEL names the result.

#include "passes.h"

#include "adafactor.h"
#include "elementwise.h"
#include "normal.h"

namespace {

template <class T>
bool elementwise(const Job& job, int64_t task, Tasks tasks) {
    const int64_t begin = task * BLOCK, end = least(begin + BLOCK, job.tensor->size);
    switch (job.rule) {
        case LARS: return lars<T>(job, begin, end, tasks);
        case LAMB: return lamb<T>(job, begin, end, tasks);
        case ADAFACTOR: return all_squares<T>(job, begin, end, tasks);
        default: squares(job, begin, end, tasks.sums); return true;
    }
}

template <class T>
void measure_as(const Job& job, const Cut& cut, int64_t task, double* sums) {
    if (is_factored(job))
        measure_factored<T>(job, cut, task, sums);
    else
        elementwise<T>(job, task, {sums, is_single_pass(job), false});
}

template <class T>
bool rehearse_as(const Job& job, const Cut& cut, int64_t task, double* sums, bool dry) {
    if (!is_factored(job)) return elementwise<T>(job, task, {nullptr, true, true});
    const bool storable = !dry || task > 0 || factors_storable<T>(job, cut);
    return factored<T>(job, cut, task, dry ? nullptr : sums, dry, dry) && storable;
}

template <class T>
void write_as(const Job& job, const Cut& cut, int64_t task) {
    if (is_factored(job))
        factored<T>(job, cut, task, nullptr, true, false);
    else
        elementwise<T>(job, task, {nullptr, true, false});
}

void measure(const Job& job, const Cut& cut, int64_t task, double* sums) {
    job.wide ? measure_as<double>(job, cut, task, sums) : measure_as<float>(job, cut, task, sums);
}

void make_factors(const Job& job, const Cut& cut) {
    job.wide ? factor<double>(job, cut) : factor<float>(job, cut);
}

bool rehearse(const Job& job, const Cut& cut, int64_t task, double* sums, bool dry) {
    return job.wide ? rehearse_as<double>(job, cut, task, sums, dry) : rehearse_as<float>(job, cut, task, sums, dry);
}

void write(const Job& job, const Cut& cut, int64_t task) {
    job.wide ? write_as<double>(job, cut, task) : write_as<float>(job, cut, task);
}

void finish(const Job& job, const Cut& cut) {
    if (!is_factored(job)) return;
    job.wide ? store_factors<double>(job, cut) : store_factors<float>(job, cut);
}

void normal(const Noise& noise, int64_t begin, int64_t end) {
    noise.wide ? normal_as<double>(noise, begin, end) : normal_as<float>(noise, begin, end);
}

}  // namespace

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define TEXT(a) #a
#define QUOTED(a) TEXT(a)

extern const Passes NAMED(passes_, THALWEG_LEVEL);
const Passes NAMED(passes_, THALWEG_LEVEL) = {QUOTED(THALWEG_LEVEL), normal, measure, make_factors, rehearse, write, finish};
