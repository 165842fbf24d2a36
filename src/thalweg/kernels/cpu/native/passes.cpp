// Compiled once for each vector width: THALWEG_LEVEL names the result.

#include "passes.h"

#include "body.h"
#include "matrices.h"
#include "normal.h"

extern const Functions* const NAMED(emitted_, THALWEG_LEVEL);

namespace {

const Functions& functions_of(const void* own, int32_t index) {
    return own ? *static_cast<const Functions*>(own) : NAMED(emitted_, THALWEG_LEVEL)[index];
}

template <class T>
bool run_as(const Job& job, const Cut& cut, const Pass& pass, Code code, int64_t task, double* sums, bool dry) {
    if (is_factored(*job.tensor)) return run_window<T>(job, cut, pass, code, task, sums, dry);
    return run_block<T>(job, pass, code, task * BLOCK, least((task + 1) * BLOCK, job.tensor->size), sums, dry);
}

bool run(const Job& job, const Cut& cut, const Pass& pass, int64_t task, double* sums, bool dry) {
    const Functions& code = functions_of(pass.functions, pass.index);
    return job.wide ? run_as<double>(job, cut, pass, code.wide, task, sums, dry)
                    : run_as<float>(job, cut, pass, code.narrow, task, sums, dry);
}

void compute_between(const Job& job, const Cut& cut) {
    const Between& between = *job.program().between;
    const Functions& code = functions_of(between.functions, between.index);
    job.wide ? compute_rows_and_columns<double>(job, cut, code.wide)
             : compute_rows_and_columns<float>(job, cut, code.narrow);
}

bool keep_between(const Job& job, const Cut& cut, bool dry) {
    return job.wide ? keep_rows_and_columns<double>(job, cut, dry) : keep_rows_and_columns<float>(job, cut, dry);
}

void read_numbers(const Job& job) { job.wide ? read_kept<double>(job) : read_kept<float>(job); }

bool keep_numbers(const Job& job, bool dry) {
    return job.wide ? write_kept<double>(job, dry) : write_kept<float>(job, dry);
}

void normal(const Noise& noise, int64_t begin, int64_t end) {
    noise.wide ? normal_as<double>(noise, begin, end) : normal_as<float>(noise, begin, end);
}

}  // namespace

#define TEXT(a) #a
#define QUOTED(a) TEXT(a)

extern const Passes NAMED(passes_, THALWEG_LEVEL);
const Passes NAMED(passes_, THALWEG_LEVEL) = {QUOTED(THALWEG_LEVEL), normal, run, compute_between, keep_between,
                                              read_numbers, keep_numbers, squares_of};
