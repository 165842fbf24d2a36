// What is done once for each tensor, between passes: operations of registers, in double precision.
#pragma once

#include <cmath>

#include "abi.h"

namespace {

// In the order of `OPERATIONS` in programs/operations.py.
enum Operation : int32_t {
    ADD, SUB, MUL, DIV, POW, GT, GE, LT, LE, EQ, NE, AND, NEG, ABS, SQRT, EXP, LOG, EXPM1, COS, FLOOR, ISFINITE,
    MAXIMUM, MINIMUM, WHERE,
};

inline double result_of(int32_t op, double a, double b, double c) {
    switch (op) {
        case ADD: return a + b;
        case SUB: return a - b;
        case MUL: return a * b;
        case DIV: return a / b;
        case POW: return std::pow(a, b);
        case GT: return a > b;
        case GE: return a >= b;
        case LT: return a < b;
        case LE: return a <= b;
        case EQ: return a == b;
        case NE: return a != b;
        case AND: return a != 0 && b != 0;
        case NEG: return -a;
        case ABS: return std::fabs(a);
        case SQRT: return std::sqrt(a);
        case EXP: return std::exp(a);
        case LOG: return std::log(a);
        case EXPM1: return std::expm1(a);
        case COS: return std::cos(a);
        case FLOOR: return std::floor(a);
        case ISFINITE: return std::isfinite(a);
        case MAXIMUM: return a != a || a > b ? a : b;  // NaN stays
        case MINIMUM: return a != a || a < b ? a : b;
        default: return a != 0 ? b : c;
    }
}

inline void compute(const Program& program, int32_t begin, int32_t end, double* registers) {
    for (int32_t i = begin; i < end; i++) {
        const Instruction& step = program.code[i];
        registers[step.to] = result_of(step.op, registers[step.a], registers[step.b], registers[step.c]);
    }
}

// What follows from the sums of a pass.
inline void decide(const Program& program, int pass, double* registers) {
    compute(program, pass == 0 ? program.code_begin : program.code_end[pass - 1], program.code_end[pass], registers);
}

}  // namespace
