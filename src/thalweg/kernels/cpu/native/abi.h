// What Python hands over and gets back. `structs.py` mirrors it, and the loader compares the sizes.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

enum DType : uint8_t { NOTHING = 0, FLOAT32 = 1, FLOAT64 = 2, BFLOAT16 = 3, FLOAT16 = 4, INT8 = 5, UINT8 = 6 };

constexpr int ROOM = 6;             // entries of the state that a tensor may have
constexpr int OPERANDS = 2 + ROOM;  // p, g and the state
constexpr int MOST_PASSES = 6;
constexpr int SLOTS = 2;            // rows, and columns, of a factored tensor that a pass may ask for, or sum
constexpr int MOST_SUMS = 9;        // of a pass: of tensors, rows and columns
constexpr int64_t MOST_AFTER = 128;  // elements behind a factored column that are served

// One tensor: where it lies and how it is stored. Stacked parameters have one for each slice.
struct Tensor {
    void* operand[OPERANDS];
    float* scales[OPERANDS];  // of operands that are codes
    int8_t* record;           // of what rounding has cost p; null: none is kept
    int64_t size;
    int64_t whole;  // elements of the whole parameter, where this is a shard of it
    // Seen as (before, rows, between, columns, after) where statistics are factored; else rows is 0.
    int64_t before, rows, between, columns, after;
    int64_t position;  // of the first element in the whole parameter, for random bits
    int64_t scratch;   // where its own scratch begins; set by thalweg_layout
    int32_t options;   // which options hold
    int32_t group;     // elements that share a scale: 64, 32 or 16; all tiles begin and end with a group
    uint32_t key[OPERANDS];  // of random bits
    uint8_t dtype[OPERANDS];
    uint8_t is_slice;  // of a stack: its sums must fit the precision of the arithmetic
    uint8_t high;      // bit k: the k-th is rounded by the high half of its random bits
};

// One emitted pass: what it wants, and where its code is.
struct Pass {
    int32_t index;                // among the emitted passes of this library
    int32_t operands, written;    // how many operands it has; bit k: the k-th is written
    int32_t numbers, sums;        // how many it has of each
    int32_t kept, squared;        // what it keeps of each element (a short pass: what the one before it keeps); bit k:
                                  // the k-th sum is of squares
    int32_t row_sums, column_sums, rows, columns;  // of factored tensors: sums it makes, slots it reads
    uint8_t operand[8];           // of the tensor
    uint8_t row[SLOTS], column[SLOTS];  // which slots
    // of sums (of tensors, then of rows, then of columns): an operand of the pass that it reads alone, or OPERANDS and
    // which of what it keeps
    uint8_t summed[MOST_SUMS];
    const int32_t* registers;     // of its numbers
    const void* functions;        // of a pass that was compiled elsewhere; null: see index
};

// What is computed of rows and columns when their sums are complete.
struct Between {
    int32_t index, after_pass;    // after_pass: the pass whose sums it waits for, -1 if there is nothing to compute
    int32_t numbers, rows, columns;  // numbers, and slots of rows and of columns
    int32_t unused;
    int8_t row_state[4], column_state[4];  // the operand that is read into a slot and written from it, -1: none
    const int32_t* registers;
    const void* functions;
};

// Arithmetic of single numbers: one operation of registers.
struct Instruction {
    int32_t op, to, a, b, c;
};

// An entry of the state that is one number for each tensor: an operand, and the registers it is read into and written
// from.
struct Kept {
    int32_t operand, before, after;
};

constexpr int SCALE = 0, COUNT = 1, LARGEST = 2, NUMBERS = 3;  // registers; then numbers of the options, and the rest

struct Program {
    const Pass* passes;
    const Between* between;
    const Instruction* code;
    const uint8_t* is_mean;       // by sum
    const Kept* kept;
    int32_t count;                // passes
    int32_t kept_count;
    int32_t code_begin;           // of the instructions that follow passes: those before it come before all passes
    int32_t code_end[MOST_PASSES];  // of the instructions that follow each pass
    int32_t first_sum[MOST_PASSES];  // the register of a pass's first sum
    int32_t finite, bounded;      // registers; -1: always, and never
    int32_t has_short;            // whether one more pass follows: the last, for where what the one before kept is left
};

// What holds for some tensors in one step.
struct Options {
    const Program* program;
    const double* numbers;
    int32_t count;
    uint32_t t;
    int32_t stochastic;  // rounding of parameters of 16 bits
    int32_t guarded;     // nothing may be written before all of it is known to be finite
    int32_t state_stochastic;  // rounding of state as large as its parameter
    int32_t unused;
};

// What came of one tensor.
struct Outcome {
    int32_t finite;
    int32_t skip;  // set by Python before the last stage
};
