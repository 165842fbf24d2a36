// The passes over memory, once for each vector width, and the table by which they are found.
#pragma once

#include "abi.h"

// One tensor of one call.
struct Job {
    int32_t rule;
    bool wide;  // float64 arithmetic
    const Tensor* tensor;
    const void* options;
    Outcome* outcome;
    char* own;   // scratch that lasts from stage to stage
    char* work;  // scratch for partial sums
};

// How a tensor is cut. It depends on nothing but its shape, so sums do not depend on the threads.
struct Cut {
    int64_t tasks;                        // of all stages
    int64_t slices, height, tall, width, wide;  // factored: matrices, and how each is cut into tasks
};

constexpr int64_t BLOCK = 16384;   // elements of a task
constexpr int64_t WIDEST = 2048;   // columns of a task
constexpr int64_t MOST_AFTER = 128;  // elements behind a factored column that are served
constexpr int SUMS = 3;

// Standard normal numbers for `count` elements from `position` on, as rules/noise.py makes them.
struct Noise {
    void* out;
    bool wide;
    int64_t count;
    uint64_t position;
    uint32_t keys[2], t;
};

struct Passes {
    const char* name;
    void (*normal)(const Noise&, int64_t begin, int64_t end);
    // Stage 0: sums, and the moments where they may be written at once.
    void (*measure)(const Job&, const Cut&, int64_t task, double* sums);
    // Stage 0, factored tensors: from sums of rows and columns to the factors.
    void (*factor)(const Job&, const Cut&);
    // Stage 1: Adafactor's u, or (dry) what would be written, and whether that is finite.
    bool (*rehearse)(const Job&, const Cut&, int64_t task, double* sums, bool dry);
    // Stage 2: write.
    void (*write)(const Job&, const Cut&, int64_t task);
    void (*finish)(const Job&, const Cut&);
};

// Elements that are taken at a time from a row of a factored tensor: whole columns, and whole vectors if they can be.
inline int64_t piece_of(int64_t after) {
    const int64_t unit = after <= 32 ? 32 * after : after;
    return unit * (unit < 256 ? 256 / unit : 1);
}

inline bool is_factored(const Job& job) { return job.rule == ADAFACTOR && job.tensor->rows > 0; }

inline const Handling& handling_of(const Job& job) {
    return *static_cast<const Handling*>(job.options);  // the first member of all options
}

// Whether state may be written while it is measured: nothing can go wrong, and nothing is rounded.
inline bool is_eager(const Job& job) {
    const uint8_t dtype = job.wide ? FLOAT64 : FLOAT32;
    const Tensor& t = *job.tensor;
    if (handling_of(job).guarded) return false;
    if (job.rule == LAMB) return t.state_dtype[0] == dtype && t.state_dtype[1] == dtype;
    return job.rule == ADAFACTOR && t.rows == 0 && t.state_dtype[0] == dtype;
}

// Without a trust ratio everything is known from the start, and one pass does it.
inline bool is_single_pass(const Job& job) {
    return (job.rule == LARS || job.rule == LAMB) && !handling_of(job).adapt && !handling_of(job).guarded;
}
