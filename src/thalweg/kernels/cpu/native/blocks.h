// Passes over tensors whose sums all go over the whole of them: block by block, in any order.
#pragma once

#include "body.h"
#include "operands.h"
#include "passes.h"

namespace {

// The numbers of a pass in the precision of the arithmetic.
template <class T>
void fetch_numbers(T* to, const int32_t* registers, int32_t count, const double* from) {
    for (int32_t i = 0; i < count; i++) to[i] = T(from[registers[i]]);
}

constexpr int MOST_NUMBERS = 64;

template <class T>
bool storable(const T* x, int64_t n, uint8_t dtype) {
    bool fine = true;
    for (int64_t i = 0; i < n && dtype == FLOAT16; i++) fine &= std::fabs(x[i]) < T(65520);
    return fine;
}

using Code = void (*)(const void*);

// Whether the sum of a tile is right as it came out in the precision of the arithmetic: float32 is enough for so many
// numbers, unless it overflows, or squares vanish.
template <class T>
bool fits(double total) { return sizeof(T) == 8 || std::fabs(total) < 0x1p126; }

// What a sum adds up of a tile when a pass has gone through it.
template <class T>
struct Terms {
    const T* x;
    T scale;
    int64_t n;
    bool squared;

    Terms(const Pass& pass, const Tile<T>& tile, int sum) : n(tile.n), squared(pass.squared >> sum & 1) {
        const int place = pass.summed[sum];
        x = place < OPERANDS ? tile.x[place] : tile.kept + (place - OPERANDS) * TILE;
        scale = place < OPERANDS && pass.operand[place] == 1 ? tile.numbers[0] : T(1);
    }
    T operator[](int64_t i) const { return squared ? (x[i] * scale) * (x[i] * scale) : x[i] * scale; }

    // In float64, as rules do it; if all squares are 0 even so, squared in it.
    double careful_sum() const {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) sum += double((*this)[i]);
        if (!squared || sum != 0) return sum;
        for (int64_t i = 0; i < n; i++) sum += double(x[i] * scale) * double(x[i] * scale);
        return sum;
    }
};

// A pass over `n` elements from `at` on; what only factored tensors have is filled in already. sums: of the tensor.
template <class T>
bool run_tile(const Job& job, const Pass& pass, Code code, int64_t at, Tile<T>& tile, double* sums, bool dry, T* buffers) {
    const Tensor& tensor = *job.tensor;
    InOut<T> written[OPERANDS];
    double found[MOST_SUMS];
    tile.sums = found;
    for (int k = 0; k < pass.operands; k++) {
        const int which = pass.operand[k];
        T* buffer = buffers + k * TILE;
        if (pass.written >> k & 1) {
            written[k] = InOut<T>(tensor, which, at, tile.n, dry, buffer);
            tile.x[k] = written[k].data();
        } else {
            tile.x[k] = const_cast<T*>(input<T>(tensor, which, at, tile.n, buffer));
        }
    }
    code(&tile);
    for (int k = 0; k < pass.sums && !dry; k++) {
        const bool is_lost = sizeof(T) == 4 && pass.squared >> k & 1 && !(found[k] > 0x1p-90);
        sums[k] += fits<T>(found[k]) && !is_lost ? found[k] : Terms<T>(pass, tile, k).careful_sum();
    }
    bool finite = true;
    for (int k = 0; k < pass.operands; k++)
        if (pass.written >> k & 1) finite &= written[k].close(*job.options);
    return finite;
}

template <class T>
bool run_block(const Job& job, const Pass& pass, Code code, int64_t begin, int64_t end, double* sums, bool dry) {
    T numbers[MOST_NUMBERS], buffers[OPERANDS * TILE], kept[SUMS * TILE];
    fetch_numbers(numbers, pass.registers, pass.numbers, job.registers);
    bool finite = true;
    for (int64_t at = begin; at < end; at += TILE) {
        Tile<T> tile;
        tile.n = least(TILE, end - at);
        tile.numbers = numbers;
        tile.kept = job.kept ? reinterpret_cast<T*>(job.kept) + at * pass.kept : kept;
        finite &= run_tile(job, pass, code, at, tile, sums, dry, buffers);
    }
    return finite;
}

// Entries of the state that are one number for the tensor, as registers.
template <class T>
void read_kept(const Job& job) {
    const Program& program = job.program();
    for (const Kept* own = program.kept; own < program.kept + program.kept_count; own++) {
        T x;
        widen(&x, job.tensor->operand[own->operand], job.tensor->dtype[own->operand], 1);
        job.registers[own->before] = double(x);
    }
}

template <class T>
bool write_kept(const Job& job, bool dry) {
    const Program& program = job.program();
    bool fine = true;
    for (const Kept* own = program.kept; own < program.kept + program.kept_count; own++) {
        const T x = T(job.registers[own->after]);
        const uint8_t dtype = job.tensor->dtype[own->operand];
        if (dry) fine &= storable(&x, 1, dtype);
        else narrow(job.tensor->operand[own->operand], dtype, &x, 1);
    }
    return fine;
}

// Squares of gradients alone, in float64 whatever they are.
inline void squares_of(const Tensor& tensor, int64_t begin, int64_t end, double* sum) {
    double buffer[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        const double* g = input(tensor, 1, at, n, buffer);
        Sum<double> squares;
        over<double>(n, [&](auto x, int64_t i, int k) {
            const auto slope = load<decltype(x)>(g + i);
            squares.add(slope * slope, k);
        });
        *sum += squares.total();
    }
}

}  // namespace
