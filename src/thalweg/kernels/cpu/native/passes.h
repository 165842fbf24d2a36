// How passes over memory are run, once for each vector width, and the table by which they are found.
#pragma once

#include "abi.h"

// One tensor of one call.
struct Job {
    bool wide;  // float64 arithmetic
    const Tensor* tensor;
    const Options* options;
    double* registers;
    Outcome* outcome;
    char* own;   // scratch that lasts from stage to stage
    char* work;  // scratch for partial sums
    char* kept;  // where what passes keep is left for the short one; null: it is not, and there is none

    const Program& program() const { return *options->program; }
};

// How a tensor is cut. It depends on nothing but its shape, so sums do not depend on the threads.
struct Cut {
    int64_t tasks;                        // of all stages
    int64_t slices, height, tall, width, wide;  // factored: matrices, and how each is cut into tasks
};

constexpr int64_t BLOCK = 16384;   // elements of a task
constexpr int64_t WIDEST = 2048;   // columns of a task
constexpr int SUMS = 6;            // of a pass, and one more for what is not finite

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
    // Run one pass over one task: add to its sums, and write or (dry) see whether what would be written is finite.
    bool (*run)(const Job&, const Cut&, const Pass&, int64_t task, double* sums, bool dry);
    // Between passes over a factored tensor: rows and columns, from their sums.
    void (*compute_between)(const Job&, const Cut&);
    // At the end: keep the state of rows and columns, or (dry) see whether it can be kept.
    bool (*keep_between)(const Job&, const Cut&, bool dry);
    // Entries of the state that are one number: read them; at the end keep them, or (dry) see whether they can be kept.
    void (*read_numbers)(const Job&);
    bool (*keep_numbers)(const Job&, bool dry);
    void (*squares)(const Tensor&, int64_t begin, int64_t end, double* sum);
};

// Elements that are taken at a time from a row of a factored tensor: whole columns, and whole vectors if they can be.
inline int64_t piece_of(int64_t after) {
    const int64_t unit = after <= 32 ? 32 * after : after;
    return unit * (unit < 1024 ? 1024 / unit : 1);
}

inline bool is_factored(const Tensor& tensor) { return tensor.rows > 0; }

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
