// What Python hands over and gets back. `structs.py` mirrors it, and the loader compares the sizes.
#pragma once

#include <cstdint>

enum Rule : int32_t { SQUARES = 0, LARS = 1, LAMB = 2, ADAFACTOR = 3 };
enum DType : uint8_t { NOTHING = 0, FLOAT32 = 1, FLOAT64 = 2, BFLOAT16 = 3, FLOAT16 = 4 };

// One tensor: where it lies and how it is stored. Stacked parameters have one for each slice.
struct Tensor {
    void* p;
    const void* g;
    void* state[3];  // LARS: momentum. LAMB: two moments. Adafactor: rows or all squares, columns, momentum
    int64_t size;
    // Seen as (before, rows, between, columns, after) where Adafactor factors it; else rows is 0.
    int64_t before, rows, between, columns, after;
    int64_t position;  // of the first element in the whole parameter, for random bits
    int64_t scratch;   // where its own scratch begins; set by thalweg_layout
    int32_t options;   // which options hold
    uint32_t key;      // of its random bits
    uint8_t p_dtype, g_dtype, state_dtype[3];
    uint8_t is_slice;  // of a stack: its sums must fit the precision of the arithmetic
    uint8_t unused[2];
};

// What all rules have in common.
struct Handling {
    double gradient_scale;  // its sign included: minus to climb
    double lr;
    double weight_decay;
    uint32_t t;
    int32_t stochastic;  // rounding of parameters of 16 bits
    int32_t guarded;     // nothing may be written before all of it is known to be finite
    int32_t adapt;       // whether there is a trust ratio
};

struct LarsOptions {
    Handling handling;
    double momentum, trust_coefficient, eps, zero_ratio;
    int32_t combined, lr_inside, nesterov, clip;
};

enum LambDecay : int32_t { IN_UPDATE = 0, DECOUPLED = 1, L2 = 2 };

struct LambOptions {
    Handling handling;
    double b1, gain1, b2, gain2;        // old and new values' shares of the moments
    double correction1, correction2;    // what the moments are divided by
    double eps, eps_root;
    double phi_low, phi_high, trust_low, trust_high;
    int32_t has_phi, has_trust_clip;
    int32_t decay_mode, unused;
};

enum AdafactorDecay : int32_t { BY_ALPHA = 0, BY_LR = 1, INDEPENDENT = 2 };

struct AdafactorOptions {
    Handling handling;
    double weight;       // of new squares
    double eps, floor;   // eps[0] and eps[1]
    double clip_threshold, rho, nominal, lr_scale, momentum;
    int32_t has_clip, scaled, clamp, after_lr;
    int32_t decay_mode, unused;
};

// What came of one tensor.
struct Outcome {
    double sums[3];
    double stats[4];
    int32_t finite;
    int32_t skip;  // set by Python before the last stage
};
