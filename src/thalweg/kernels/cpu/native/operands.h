// Operands of a tile: how they come out of memory and go back into it, in whatever form they are kept there.
#pragma once

#include <type_traits>

#include "codecs.h"
#include "tiles.h"

namespace {

// ---- state in eight bits; the formulas are those of thalweg/codecs.py, from which the build takes the constants

inline bool is_coded(uint8_t dtype) { return dtype == INT8 || dtype == UINT8; }

// From the bits of 1 on.
struct Signed : codecs::Int8 {
    using Code = int8_t;

    static float ratio(Code code) {
        const int32_t steps = code;
        const float ratio = bits_as<float>(FIRST + (steps < 0 ? -steps : steps) * STEP) - 1.0f;
        return steps < 0 ? -ratio : ratio;
    }
    static int32_t steps(float ratio, int32_t up) { return (bits_as<int32_t>(ratio + 1.0f) - FIRST + up) >> SHIFT; }
    static Code code(int32_t steps, float x) { return Code(x < 0 ? -steps : steps); }
};

// Up to the bits of 1. The step is five times a power of two.
struct Unsigned : codecs::Uint8 {
    using Code = uint8_t;

    static float ratio(Code code) { return bits_as<float>(FIRST + int32_t(code) * STEP); }
    static int32_t steps(float ratio, int32_t up) {
        const int32_t bits = bits_as<int32_t>(ratio) - FIRST + up;
        return ((bits > 0 ? bits : 0) >> SHIFT) * codecs::FIFTH >> codecs::FIFTH_SHIFT;
    }
    static Code code(int32_t steps, float) { return Code(steps); }
};

// One group, through buffers: codes are bytes, and compilers must expect bytes to overlap with anything.
template <class Format, int GROUP, class T>
void decode_group(T* out, const typename Format::Code* codes, float scale) {
    typename Format::Code own[GROUP];
    float x[GROUP];
    std::memcpy(own, codes, sizeof own);
    for (int i = 0; i < GROUP; i++) x[i] = Format::ratio(own[i]) * scale;
    for (int i = 0; i < GROUP; i++) out[i] = T(x[i]);
}

// The answer is the scale. position: of the first element in the whole tensor. chances: null to round to the nearest.
template <class Format, int GROUP, class T>
float encode_group(typename Format::Code* codes, const T* from, uint64_t position, const Chances* chances) {
    float x[GROUP];
    int32_t up[GROUP], steps[GROUP], peak = 0;
    typename Format::Code own[GROUP];
    for (int i = 0; i < GROUP; i++) x[i] = float(from[i]);
    for (int i = 0; i < GROUP; i++) {  // magnitudes are ordered as their bits are, and NaN is the largest
        const int32_t bits = bits_as<int32_t>(x[i]) & 0x7fffffff;
        peak = bits > peak ? bits : peak;
    }
    const float share = bits_as<float>(peak) * Format::SHARE;
    const float scale = share < codecs::LEAST_SCALE ? 0.0f : share, divisor = scale > 0 ? scale : INFINITY;
    if (chances) {
        const uint32_t place = chances->place(position);
        for (int i = 0; i < GROUP; i++) {
            const int32_t half = int32_t(chances->half(uint32_t(position) + uint32_t(i), place));
            up[i] = half * (Format::STEP >> 16) + (Format::STEP >> 17);
        }
    } else {
        for (int i = 0; i < GROUP; i++) up[i] = Format::STEP / 2;
    }
    for (int i = 0; i < GROUP; i++) {
        const float quotient = std::fabs(x[i]) / divisor, ratio = quotient < INFINITY ? quotient : 0.0f;
        const int32_t found = Format::steps(ratio, up[i]);
        steps[i] = found < Format::MOST ? found : Format::MOST;
    }
    for (int i = 0; i < GROUP; i++) own[i] = Format::code(steps[i], x[i]);
    std::memcpy(codes, own, sizeof own);
    return scale;
}

// Calls each(GROUP, first, scale) for the groups of a tile, which begins and ends with one.
template <class Each>
void over_groups(const Tensor& tensor, int which, int64_t begin, int64_t n, Each each) {
    const int64_t group = tensor.group;
    float* scales = tensor.scales[which] + begin / group;
    for (int64_t first = 0; first < n; first += group, scales++) {
        if (group == 64) each(std::integral_constant<int, 64>(), first, scales);
        else if (group == 32) each(std::integral_constant<int, 32>(), first, scales);
        else each(std::integral_constant<int, 16>(), first, scales);
    }
}

template <class Format, class T>
void decode(T* out, const Tensor& tensor, int which, int64_t begin, int64_t n) {
    const auto* codes = static_cast<const typename Format::Code*>(tensor.operand[which]) + begin;
    over_groups(tensor, which, begin, n, [&](auto group, int64_t first, const float* scale) {
        decode_group<Format, decltype(group)::value>(out + first, codes + first, *scale);
    });
}

template <class Format, class T>
void encode(const Tensor& tensor, int which, int64_t begin, int64_t n, const T* x, const Chances* chances) {
    auto* codes = static_cast<typename Format::Code*>(tensor.operand[which]) + begin;
    const uint64_t position = uint64_t(tensor.position + begin);
    over_groups(tensor, which, begin, n, [&](auto group, int64_t first, float* scale) {
        *scale = encode_group<Format, decltype(group)::value>(codes + first, x + first, position + uint64_t(first), chances);
    });
}

// ---- parameters of 16 bits with a record of what rounding has cost them

// The unit of a record: 2^-8 of the distance between neighbours of p.
inline float recorded_unit(float p, uint8_t dtype) {
    const uint32_t bits = bits_as<uint32_t>(p) & 0x7fffffff, exponent = bits >> 23;
    const uint32_t least = dtype == BFLOAT16 ? 1 : 113, held = exponent < least ? least : exponent;
    const float unit = bits_as<float>(held << 23) * (dtype == BFLOAT16 ? 0x1p-15f : 0x1p-18f);
    const float of_zero = dtype == BFLOAT16 ? 0x1p-16f : 0x1p-19f;
    return exponent == 0xff ? 0.0f : bits == 0 ? of_zero : unit;
}

inline void add_record(float* p, const int8_t* record, uint8_t dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] += float(record[i]) * recorded_unit(p[i], dtype);
}

inline void add_record(double*, const int8_t*, uint8_t, int64_t) {}

// new: what was to be written; p: the same as it was rounded.
inline void keep_record(int8_t* record, const float* unrounded, const float* p, uint8_t dtype, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float steps = std::floor((unrounded[i] - p[i]) / recorded_unit(p[i], dtype) + 0.5f);
        const float held = steps > 127 ? 127.0f : steps < -127 ? -127.0f : steps;
        record[i] = int8_t(std::fabs(steps) <= 128 ? int32_t(held) : 0);
    }
}

inline void keep_record(int8_t*, const double*, const double*, uint8_t, int64_t) {}

// ---- any of them

template <class T>
void read_tile(T* out, const Tensor& tensor, int which, int64_t begin, int64_t n) {
    const uint8_t dtype = tensor.dtype[which];
    if (dtype == INT8) return decode<Signed>(out, tensor, which, begin, n);
    if (dtype == UINT8) return decode<Unsigned>(out, tensor, which, begin, n);
    widen(out, static_cast<const char*>(tensor.operand[which]) + begin * bytes_of(dtype), dtype, n);
    if (which == 0 && tensor.record) add_record(out, tensor.record + begin, dtype, n);
}

// x is changed where it is rounded to a neighbour that chance decides.
template <class T>
void write_tile(const Tensor& tensor, int which, int64_t begin, int64_t n, T* x, const Options& options) {
    const uint8_t dtype = tensor.dtype[which];
    const Chances chances(tensor, which, options.t);
    const Chances* drawn = options.state_stochastic ? &chances : nullptr;
    if (dtype == INT8) return encode<Signed>(tensor, which, begin, n, x, drawn);
    if (dtype == UINT8) return encode<Unsigned>(tensor, which, begin, n, x, drawn);
    if (which != 0 && drawn) round_stochastically(x, n, tensor, which, options.t, begin);
    char* at = static_cast<char*>(tensor.operand[which]) + begin * bytes_of(dtype);
    narrow(at, dtype, x, n);
    if (which != 0 || !tensor.record) return;
    constexpr int64_t PIECE = 256;
    T rounded[PIECE];
    for (int64_t done = 0; done < n; done += PIECE) {
        const int64_t count = n - done < PIECE ? n - done : PIECE;
        widen(rounded, at + done * bytes_of(dtype), dtype, count);
        keep_record(tensor.record + begin + done, x + done, rounded, dtype, count);
    }
}

template <class T>
bool is_direct(const Tensor& tensor, int which, int64_t begin) {
    const char* at = static_cast<const char*>(tensor.operand[which]) + begin * bytes_of(tensor.dtype[which]);
    return tensor.dtype[which] == dtype_of<T>() && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
}

// Where a tile of an operand can be read: in place, or widened into the buffer.
template <class T>
const T* input(const Tensor& tensor, int which, int64_t begin, int64_t n, T* buffer) {
    if (is_direct<T>(tensor, which, begin)) return static_cast<const T*>(tensor.operand[which]) + begin;
    read_tile(buffer, tensor, which, begin, n);
    return buffer;
}

// A tile that is read, changed and written back: in place where that is possible and wanted.
template <class T>
class InOut {
  public:
    InOut() = default;
    InOut(const Tensor& tensor, int which, int64_t begin, int64_t n, bool dry, T* buffer)
        : tensor(&tensor), which(which), begin(begin), n(n), dry(dry), x(buffer) {
        if (!tensor.operand[which]) return;
        direct = !dry && is_direct<T>(tensor, which, begin);
        if (direct)
            x = static_cast<T*>(tensor.operand[which]) + begin;
        else
            read_tile(x, tensor, which, begin, n);
    }
    T* data() { return x; }

    // Write the tile back, or (dry) answer whether what would have been written is finite.
    bool close(const Options& options) {
        if (which == 0 && options.stochastic) round_stochastically(x, n, *tensor, 0, options.t, begin);
        const uint8_t dtype = tensor->dtype[which];
        // rules ask it of state of float16 alone, which ends at 65504
        if (dry) return (which != 0 && dtype != FLOAT16) || stays_finite(dtype);
        if (tensor->operand[which] && !direct) write_tile(*tensor, which, begin, n, x, options);
        return true;
    }

  private:
    bool stays_finite(uint8_t dtype) const {
        // the least magnitude that is rounded to infinity
        const T largest = dtype == FLOAT16                      ? T(65520)
                          : dtype == BFLOAT16                   ? T(0x1.ffp127)
                                                                : T(INFINITY);
        bool fine = true;
        for (int64_t i = 0; i < n; i++) fine &= std::fabs(x[i]) < largest;
        return fine;
    }

    const Tensor* tensor = nullptr;
    int which = 0;
    int64_t begin = 0, n = 0;
    bool dry = false, direct = false;
    T* x = nullptr;
};

}  // namespace
