// Tiles: a few hundred elements at a time, widened to the precision of the arithmetic, computed, and rounded on
// the way back.
//
// Every result is the same on every vector width: no contraction, and sums have a fixed order.
#pragma once

#include <cmath>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "abi.h"

namespace {

constexpr int64_t TILE = 2048;


template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline int64_t bytes_of(uint8_t dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype < INT8 ? 2 : 1; }

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

// The random bits of one stream, tensor and step. shift: 16 to be rounded by the high half of them.
struct Chances {
    uint32_t key, step, shift;

    Chances(uint32_t key, uint32_t t, uint32_t shift = 0) : key(key), step(mix(key ^ t)), shift(shift) {}
    Chances(const Tensor& tensor, int which, uint32_t t)
        : Chances(tensor.key[which], t, (tensor.high >> which & 1) * 16) {}

    // The high half of a position is the same for many elements; so is what becomes of it.
    uint32_t place(uint64_t position) const { return mix(uint32_t(position >> 32) ^ key ^ 0x27d4eb2fu); }
    uint32_t bits(uint32_t low, uint32_t place) const { return mix(mix(low ^ place) ^ step); }
    // 16 random bits n, for a chance of (n + 1/2) 2^-16.
    uint32_t half(uint32_t low, uint32_t place) const { return bits(low, place) >> shift & 0xffff; }
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

// To one of the two neighbours, so that the average is right: upwards if the share of the way that x has come is more
// than the chance of these 16 bits.
inline float stochastic_bfloat16(float x, uint32_t half) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t moved = (bits + (bits >> 31 ? half : 0xffff - half)) & 0xffff0000;
    const uint32_t rounded = moved == 0x80000000 ? 0 : moved;  // no negative zero comes of this
    return (bits & 0x7fffffff) > 0x7f800000 ? x : bits_as<float>(rounded);
}

inline float stochastic_float16(float x, uint32_t half) {
    const uint32_t exponent = bits_as<uint32_t>(x) >> 23 & 0xff;  // x is finite below 2^(exponent - 126)
    const uint32_t held = exponent < 113 ? 113 : exponent;
    const float distance = bits_as<float>((held - 10) << 23);
    const float below = std::floor(x / distance);
    const float rounded = (below + (x / distance - below > (float(int32_t(half)) + 0.5f) * 0x1p-16f ? 1.0f : 0.0f)) * distance;
    return exponent == 0xff ? x : rounded;
}

inline void round_stochastically(float* x, int64_t n, const Tensor& tensor, int which, uint32_t t, int64_t begin) {
    const uint8_t dtype = tensor.dtype[which];
    if (dtype != BFLOAT16 && dtype != FLOAT16) return;
    const Chances chances(tensor, which, t);
    by_high_half(chances, uint64_t(tensor.position + begin), n, [&](int64_t first, int64_t count, uint32_t low, uint32_t place) {
        float* y = x + first;
        if (dtype == BFLOAT16) {
            for (int64_t i = 0; i < count; i++)
                y[i] = stochastic_bfloat16(y[i], chances.half(low + uint32_t(i), place));
        } else {
            for (int64_t i = 0; i < count; i++)
                y[i] = stochastic_float16(y[i], chances.half(low + uint32_t(i), place));
        }
    });
}

inline void round_stochastically(double*, int64_t, const Tensor&, int, uint32_t, int64_t) {}

// ---- loops over vectors of the compiler, which become registers of whatever width there is

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

template <class T>
struct Wide {
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int WIDTH = VECTOR_BYTES / int(sizeof(T));
    // Sums have as many lanes on every machine, so that they are the same to the bit.
    static constexpr int LANES = 64 / int(sizeof(T)), COUNT = LANES / WIDTH;
};

// One formula serves vectors and, at the end of a tile, single numbers: X is either.
template <class X, class T>
inline X load(const T* x) {
    X v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

template <class X, class T>
inline void store(T* to, X v) { std::memcpy(to, &v, sizeof v); }

inline float root(float x) { return std::sqrt(x); }
inline double root(double x) { return std::sqrt(x); }

template <class V>
inline V root(V x) {
    constexpr bool single = sizeof(x[0]) == 4;
#if defined(__AVX512F__)
    if constexpr (single) return (V)_mm512_sqrt_ps((__m512)x);
    else return (V)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX__)
    if constexpr (single) return (V)_mm256_sqrt_ps((__m256)x);
    else return (V)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
    if constexpr (single) return (V)_mm_sqrt_ps((__m128)x);
    else return (V)_mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
    if constexpr (single) return (V)vsqrtq_f32((float32x4_t)x);
    else return (V)vsqrtq_f64((float64x2_t)x);
#else
    for (size_t l = 0; l < sizeof x / sizeof x[0]; l++) x[l] = std::sqrt(x[l]);
    return x;
#endif
}

// Calls body(X, i, k) for all i < n: for vectors, which are those of lanes k of a sum, and then for single numbers.
template <class T, class Body>
inline void over(int64_t n, Body body) {
    using W = Wide<T>;
    const typename W::type vector = {};
    int64_t i = 0;
    for (; i + W::LANES <= n; i += W::LANES)
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 8
#endif
        for (int k = 0; k < W::COUNT; k++) body(vector, i + k * W::WIDTH, k);
    for (const int64_t whole = i; i < n; i++) body(T(0), i, int(i - whole));
}

// A sum in lanes, joined as a tree.
template <class T>
class Sum {
  public:
    void add(typename Wide<T>::type x, int k) { sums[k] += x; }
    void add(T x, int lane) { rest[lane] += x; }
    double total() const {
        T lanes[LANES];
        std::memcpy(lanes, sums, sizeof lanes);
        double tree[LANES];
        for (int l = 0; l < LANES; l++) tree[l] = double(lanes[l]) + double(rest[l]);
        for (int half = LANES / 2; half >= 1; half /= 2)
            for (int l = 0; l < half; l++) tree[l] += tree[l + half];
        return tree[0];
    }

  private:
    static constexpr int LANES = Wide<T>::LANES;
    typename Wide<T>::type sums[Wide<T>::COUNT] = {};
    T rest[LANES] = {};
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace
