// Tiles: a few hundred elements at a time, widened to the precision of the arithmetic, computed
// in plain loops that the compiler vectorises, and rounded on the way back.
//
// Every result is the same on every vector width: no contraction, and sums have a fixed order.
#pragma once

#include <cmath>
#include <cstring>

#include "abi.h"

namespace {

constexpr int64_t TILE = 1024;
constexpr int LANES = 64;  // so many sums side by side, that none waits for another

#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline int64_t bytes_of(uint8_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

template <class T>
constexpr uint8_t dtype_of() { return sizeof(T) == 8 ? FLOAT64 : FLOAT32; }

inline float from_bfloat16(uint16_t h) { return bits_as<float>(uint32_t(h) << 16); }

inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

inline float from_float16(uint16_t h) {
    const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
    const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    const uint32_t unsigned_bits = (h & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : scaled;
    return bits_as<float>(unsigned_bits | uint32_t(h & 0x8000) << 16);
}

inline uint16_t to_float16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
    // below 2^-14 neighbours are 2^-24 apart, as they are for numbers near 0.5 in float32
    const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
    uint32_t h = magnitude < 0x38800000 ? small : normal;
    h = magnitude >= 0x477ff000 ? 0x7c00 : h;  // from 65520 on
    h = magnitude > 0x7f800000 ? 0x7e00 : h;
    return uint16_t(h | (bits >> 16 & 0x8000));
}

// To float32 so that rounding again, to fewer bits, gives what rounding once would: inexact results get an odd last bit.
inline float rounded_to_odd(double x) {
    const float nearest = float(x);
    const uint32_t bits = bits_as<uint32_t>(nearest);
    const bool exact = double(nearest) == x || x != x, away = std::fabs(double(nearest)) > std::fabs(x);
    return exact ? nearest : bits_as<float>((bits - (away ? 1 : 0)) | 1);
}

inline float rounded_to_odd(float x) { return x; }

template <class T>
void widen(T* out, const void* from, uint8_t dtype, int64_t n) {
    if (dtype == dtype_of<T>()) {
        std::memcpy(out, from, size_t(n) * sizeof(T));
        return;
    }
    constexpr int64_t PIECE = 256;  // through a buffer, since tensors may lie at any address
    union { float f[PIECE]; double d[PIECE]; uint16_t h[PIECE]; } piece;
    const char* bytes = static_cast<const char*>(from);
    for (int64_t begin = 0; begin < n; begin += PIECE) {
        const int64_t count = n - begin < PIECE ? n - begin : PIECE;
        T* to = out + begin;
        std::memcpy(&piece, bytes + begin * bytes_of(dtype), size_t(count * bytes_of(dtype)));
        switch (dtype) {
            case FLOAT32: for (int64_t i = 0; i < count; i++) to[i] = T(piece.f[i]); break;
            case FLOAT64: for (int64_t i = 0; i < count; i++) to[i] = T(piece.d[i]); break;
            case BFLOAT16: for (int64_t i = 0; i < count; i++) to[i] = T(from_bfloat16(piece.h[i])); break;
            default: for (int64_t i = 0; i < count; i++) to[i] = T(from_float16(piece.h[i])); break;
        }
    }
}

template <class T>
void narrow(void* to, uint8_t dtype, const T* from, int64_t n) {
    if (dtype == dtype_of<T>()) {
        std::memcpy(to, from, size_t(n) * sizeof(T));
        return;
    }
    constexpr int64_t PIECE = 256;
    union { float f[PIECE]; double d[PIECE]; uint16_t h[PIECE]; } piece;
    char* bytes = static_cast<char*>(to);
    for (int64_t begin = 0; begin < n; begin += PIECE) {
        const int64_t count = n - begin < PIECE ? n - begin : PIECE;
        const T* x = from + begin;
        switch (dtype) {
            case FLOAT32: for (int64_t i = 0; i < count; i++) piece.f[i] = float(x[i]); break;
            case FLOAT64: for (int64_t i = 0; i < count; i++) piece.d[i] = double(x[i]); break;
            case BFLOAT16: for (int64_t i = 0; i < count; i++) piece.h[i] = to_bfloat16(float(x[i])); break;
            default: for (int64_t i = 0; i < count; i++) piece.h[i] = to_float16(rounded_to_odd(x[i])); break;
        }
        std::memcpy(bytes + begin * bytes_of(dtype), &piece, size_t(count * bytes_of(dtype)));
    }
}

// ---- stochastic rounding, with the random bits of rules/noise.py

inline uint32_t mix(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return h ^ (h >> 16);
}

// The random bits of one stream, tensor and step.
struct Chances {
    uint32_t key, step;

    Chances(uint32_t key, uint32_t t) : key(key), step(mix(key ^ t)) {}

    // The high half of a position is the same for many elements; so is what becomes of it.
    uint32_t place(uint64_t position) const { return mix(uint32_t(position >> 32) ^ key ^ 0x27d4eb2fu); }
    uint32_t bits(uint32_t low, uint32_t place) const { return mix(mix(low ^ place) ^ step); }
    // An odd multiple of 2^-24, in that unit.
    static uint32_t chance(uint32_t bits) { return (bits >> 9) * 2 + 1; }
};

// Calls each(first, count, low, place) for runs of elements whose positions have the same high half.
template <class Each>
void by_high_half(const Chances& chances, uint64_t position, int64_t n, Each each) {
    for (int64_t begin = 0; begin < n;) {
        const uint64_t at = position + uint64_t(begin);
        const uint64_t left = (uint64_t(1) << 32) - (at & 0xffffffff);
        const int64_t count = uint64_t(n - begin) < left ? n - begin : int64_t(left);
        each(begin, count, uint32_t(at), chances.place(at));
        begin += count;
    }
}

// To one of the two neighbours, so that the average is right. An odd multiple of 2^-24 decides.
inline float stochastic_bfloat16(float x, uint32_t chance) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t part = (bits & 0xffff) << 8;
    const bool away = bits >> 31 ? part >= (1u << 24) - chance : part > chance;
    const uint32_t moved = (bits & 0xffff0000) + (away ? 0x10000 : 0);
    const uint32_t rounded = moved == 0x80000000 ? 0 : moved;  // no negative zero comes of this
    return (bits & 0x7fffffff) > 0x7f800000 ? x : bits_as<float>(rounded);
}

inline float stochastic_float16(float x, uint32_t chance) {
    const uint32_t exponent = bits_as<uint32_t>(x) >> 23 & 0xff;  // x is finite below 2^(exponent - 126)
    const uint32_t held = exponent < 113 ? 113 : exponent;
    const float distance = bits_as<float>((held - 10) << 23);
    const float below = std::floor(x / distance);
    const float rounded = (below + (x / distance - below > float(chance) * 0x1p-24f ? 1.0f : 0.0f)) * distance;
    return exponent == 0xff ? x : rounded;
}

inline void round_stochastically(float* x, int64_t n, const Tensor& tensor, uint32_t t, int64_t begin) {
    const uint8_t dtype = tensor.p_dtype;
    if (dtype != BFLOAT16 && dtype != FLOAT16) return;
    const Chances chances(tensor.key, t);
    by_high_half(chances, uint64_t(tensor.position + begin), n, [&](int64_t first, int64_t count, uint32_t low, uint32_t place) {
        float* y = x + first;
        if (dtype == BFLOAT16) {
            for (int64_t i = 0; i < count; i++)
                y[i] = stochastic_bfloat16(y[i], Chances::chance(chances.bits(low + uint32_t(i), place)));
        } else {
            for (int64_t i = 0; i < count; i++)
                y[i] = stochastic_float16(y[i], Chances::chance(chances.bits(low + uint32_t(i), place)));
        }
    });
}

inline void round_stochastically(double*, int64_t, const Tensor&, uint32_t, int64_t) {}

// ---- operands of a tile

// Where a tile of an operand can be read: in place, or widened into the buffer.
template <class T>
const T* input(const void* base, uint8_t dtype, int64_t begin, int64_t n, T* buffer) {
    const char* at = static_cast<const char*>(base) + begin * bytes_of(dtype);
    if (dtype == dtype_of<T>() && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0)
        return reinterpret_cast<const T*>(at);
    widen(buffer, at, dtype, n);
    return buffer;
}

// A tile that is read, changed and written back: in place where that is possible and wanted.
template <class T>
class InOut {
  public:
    InOut(void* base, uint8_t dtype, int64_t begin, int64_t n, bool dry, T* buffer)
        : dtype(dtype), n(n), dry(dry), x(buffer) {
        if (!base) return;
        at = static_cast<char*>(base) + begin * bytes_of(dtype);
        direct = !dry && dtype == dtype_of<T>() && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
        if (direct)
            x = reinterpret_cast<T*>(at);
        else
            widen(x, at, dtype, n);
    }
    T* data() { return x; }

    // Write the tile back, or (dry) answer whether what would have been written is finite.
    bool close() {
        if (dry) return stays_finite();
        if (at && !direct) narrow(at, dtype, x, n);
        return true;
    }
    // The same for state: rules ask it of float16 alone, which ends at 65504.
    bool close_state() { return dry ? dtype != FLOAT16 || stays_finite() : close(); }

  private:
    bool stays_finite() const {
        // the least magnitude that is rounded to infinity
        const T largest = dtype == FLOAT16                      ? T(65520)
                          : dtype == BFLOAT16                   ? T(0x1.ffp127)
                          : dtype == FLOAT32 && sizeof(T) == 8 ? T(0x1.ffffffp127)
                                                                : T(INFINITY);
        bool fine = true;
        for (int64_t i = 0; i < n; i++) fine &= std::fabs(x[i]) < largest;
        return fine;
    }

    char* at = nullptr;
    uint8_t dtype;
    int64_t n;
    bool dry, direct = false;
    T* x;
};

// ---- sums

// LANES sums side by side, in vectors of the compiler that become registers of whatever width there is.
template <class T>
class Lanes {
  public:
    void add_squares(const T* x, T scale) {
        for (int k = 0; k < COUNT; k++) {
            Vector y;
            std::memcpy(&y, x + k * WIDTH, sizeof y);
            y *= scale;
            sums[k] += y * y;
        }
    }
    // The same, adding the squares to totals as well.
    void add_squares(const T* x, T scale, T* totals) {
        for (int k = 0; k < COUNT; k++) {
            Vector y, total;
            std::memcpy(&y, x + k * WIDTH, sizeof y);
            std::memcpy(&total, totals + k * WIDTH, sizeof total);
            y *= scale;
            y *= y;
            sums[k] += y;
            total += y;
            std::memcpy(totals + k * WIDTH, &total, sizeof total);
        }
    }
    // The sum of all lanes and of a rest that did not fill them, as a tree.
    double joined(const T* rest, int64_t n) const {
        T lanes[LANES];
        std::memcpy(lanes, sums, sizeof lanes);
        for (int64_t i = 0; i < n; i++) lanes[i] += rest[i];
        double tree[LANES / 2];
        for (int l = 0; l < LANES / 2; l++) tree[l] = double(lanes[l]) + double(lanes[l + LANES / 2]);
        for (int half = LANES / 4; half >= 1; half /= 2)
            for (int l = 0; l < half; l++) tree[l] += tree[l + half];
        return tree[0];
    }

  private:
    typedef T Vector __attribute__((vector_size(64)));
    static constexpr int WIDTH = 64 / int(sizeof(T)), COUNT = LANES / WIDTH;

    Vector sums[COUNT] = {};
};

// The sum of at most TILE squares. Lanes of float32 are enough for that many; where they overflow or
// vanish, squares are summed again in float64 (and if all are 0 even so, squared in it, as rules do).
template <class T>
double sum_squares(const T* x, int64_t n, T scale = T(1)) {
    Lanes<T> lanes;
    T rest[LANES];
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) lanes.add_squares(x + i, scale);
    for (int64_t i = whole; i < n; i++) rest[i - whole] = (scale * x[i]) * (scale * x[i]);
    const double total = lanes.joined(rest, n - whole);
    if (sizeof(T) == 8 || (total > 0x1p-90 && total < 0x1p126)) return total;
    double careful = 0;
    for (int64_t i = 0; i < n; i++) {
        const T y = scale * x[i];
        careful += double(T(y * y));
    }
    if (careful != 0) return careful;
    for (int64_t i = 0; i < n; i++) careful += double(scale * x[i]) * double(scale * x[i]);
    return careful;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace
