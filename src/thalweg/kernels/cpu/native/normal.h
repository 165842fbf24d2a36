// Standard normal numbers from random bits: Box and Muller's transform, as rules/noise.py has it.
#pragma once

#include "passes.h"
#include "tiles.h"

namespace {

// log(u) for float32 in (0, 1), in operations that the compiler can vectorise; about 1e-7 off, relative.
inline float log_of_chance(float u) {
    const uint32_t bits = bits_as<uint32_t>(u);
    const uint32_t shifted = bits - 0x3f3504f3;  // so that the mantissa lies between sqrt(1/2) and sqrt(2)
    const float exponent = float(int32_t(shifted) >> 23);
    const float m = bits_as<float>((shifted & 0x7fffff) + 0x3f3504f3);
    const float s = (m - 1) / (m + 1), q = s * s;  // log(m) = 2 atanh(s)
    const float series = 1 + q * (1 / 3.0f + q * (1 / 5.0f + q * (1 / 7.0f + q * (1 / 9.0f))));
    return exponent * 0.69314718f + 2 * s * series;
}

inline double log_of_chance(double u) { return std::log(u); }

// cos(2 pi v) for v in (0, 1): minus the sine of a quarter turn at most.
inline float cos_of_turns(float v) {
    const float quarter = 0.25f - std::fabs(v - 0.5f);  // exact
    const float x = 6.28318531f * quarter, q = x * x;
    const float a = -1 / 6.0f, b = 1 / 120.0f, c = -1 / 5040.0f, d = 1 / 362880.0f, e = -1 / 39916800.0f;
    return -(x + x * q * (a + q * (b + q * (c + q * (d + q * e)))));
}

inline double cos_of_turns(double v) { return std::cos(6.283185307179586 * v); }

template <class T>
void normal_as(const Noise& noise, int64_t begin, int64_t end) {
    T* out = static_cast<T*>(noise.out);
    const Chances radius(noise.keys[0], noise.t), angle(noise.keys[1], noise.t);
    const T unit = T(0x1p-24);
    by_high_half(radius, noise.position + uint64_t(begin), end - begin,
                 [&](int64_t first, int64_t count, uint32_t low, uint32_t place) {
                     const uint32_t other = angle.place(noise.position + uint64_t(begin + first));
                     T* x = out + begin + first;
                     for (int64_t i = 0; i < count; i++) {
                         const T u = T(int32_t(Chances::chance(radius.bits(low + uint32_t(i), place)))) * unit;
                         const T v = T(int32_t(Chances::chance(angle.bits(low + uint32_t(i), other)))) * unit;
                         x[i] = std::sqrt(T(-2) * log_of_chance(u)) * cos_of_turns(v);
                     }
                 });
}

}  // namespace
