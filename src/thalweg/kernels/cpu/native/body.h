// What emitted code is given, and what it may call.
#pragma once

#include "tiles.h"

// An emitted function, for float32 and float64.
struct Functions {
    void (*narrow)(const void*);
    void (*wide)(const void*);
};

namespace {

// Some elements of one tensor, one pass.
template <class T>
struct Tile {
    int64_t n;
    T* x[OPERANDS];          // the operands of the pass, in its order
    const T* numbers;
    T* kept;                 // TILE for each value that is summed
    double* sums;            // of this tile alone: for its tensor, and for its row
    const T* across[SLOTS];  // rows: one for each element where something lies behind the columns, else null
    T row[SLOTS];
    const T* column[SLOTS];
    T* column_sums[SLOTS];
};

// Rows and columns of one matrix of a factored tensor, when their sums are complete.
template <class T>
struct Matrix {
    int64_t rows, columns, after, row_stride;  // row_stride: from row to row, in slots of rows
    const T* numbers;
    T *row[SLOTS * 2], *column[SLOTS * 2];  // slots: state, and what passes ask for
    const double *row_sums[SLOTS], *column_sums[SLOTS];
};

// ---- arithmetic of vectors and of single numbers alike

template <class X, class A>
inline X widened(A a) {
    if constexpr (sizeof(A) == sizeof(X)) return a;
    else return X{} + a;
}

template <class X, class A, class B>
inline auto is_greater(A a, B b) { return widened<X>(a) > widened<X>(b); }
template <class X, class A, class B>
inline auto is_at_least(A a, B b) { return widened<X>(a) >= widened<X>(b); }
template <class X, class A, class B>
inline auto is_equal(A a, B b) { return widened<X>(a) == widened<X>(b); }
template <class X, class A, class B>
inline auto is_other(A a, B b) { return widened<X>(a) != widened<X>(b); }

template <class X, class C, class A, class B>
inline X chosen_of(C condition, A a, B b) { return condition ? widened<X>(a) : widened<X>(b); }

// NaN stays.
template <class X, class A, class B>
inline X larger(A a, B b) {
    const X x = widened<X>(a), y = widened<X>(b);
    return ((y != y) | (x < y)) ? y : x;
}
template <class X, class A, class B>
inline X smaller(A a, B b) {
    const X x = widened<X>(a), y = widened<X>(b);
    return ((y != y) | (y < x)) ? y : x;
}

template <class X, class A>
inline auto is_finite(A a) {
    const X x = widened<X>(a);
    return x - x == X{};
}

// Lane by lane, by the standard library.
template <class X, class Function>
inline X by_lane(X x, Function function) {
    if constexpr (sizeof(X) <= 8) return function(x);
    else {
        for (size_t lane = 0; lane < sizeof x / sizeof x[0]; lane++) x[lane] = function(x[lane]);
        return x;
    }
}

template <class X> inline X magnitude(X x) { return by_lane(x, [](auto v) { return std::fabs(v); }); }
template <class X> inline X rounded_down(X x) { return by_lane(x, [](auto v) { return std::floor(v); }); }
template <class X> inline X exponential(X x) { return by_lane(x, [](auto v) { return std::exp(v); }); }
template <class X> inline X exponential_less_1(X x) { return by_lane(x, [](auto v) { return std::expm1(v); }); }
template <class X> inline X logarithm(X x) { return by_lane(x, [](auto v) { return std::log(v); }); }
template <class X> inline X cosine(X x) { return by_lane(x, [](auto v) { return std::cos(v); }); }
template <class X, class A, class B>
inline X power(A a, B b) {
    X x = widened<X>(a);
    const X y = widened<X>(b);
    if constexpr (sizeof(X) <= 8) return std::pow(x, y);
    else {
        for (size_t lane = 0; lane < sizeof x / sizeof x[0]; lane++) x[lane] = std::pow(x[lane], y[lane]);
        return x;
    }
}

}  // namespace
