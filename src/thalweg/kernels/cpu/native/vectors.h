// Which vector levels this machine and its system have: 1 for the plainest alone, 2 with AVX2, 3 with AVX-512 too.
#pragma once

#if defined(THALWEG_X86)

namespace {

#if defined(_WIN32)

// The compiler's own question needs a library that clang-cl does not link.
inline void cpuid(unsigned leaf, unsigned (&found)[4]) {
    asm volatile("cpuid" : "=a"(found[0]), "=b"(found[1]), "=c"(found[2]), "=d"(found[3]) : "a"(leaf), "c"(0));
}

inline int vector_levels() {
    const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
    unsigned found[4];
    cpuid(0, found);
    const unsigned last = found[0];
    cpuid(1, found);
    const bool saved = has(found[2], 27), f16c = has(found[2], 29);  // saved: the system keeps wide registers
    if (last < 7 || !saved || !f16c) return 1;
    unsigned kept, above;
    asm volatile("xgetbv" : "=a"(kept), "=d"(above) : "c"(0));
    cpuid(7, found);
    if ((kept & 0x6) != 0x6 || !has(found[1], 5)) return 1;
    const bool wide = has(found[1], 16) && has(found[1], 17) && has(found[1], 30) && has(found[1], 31);
    return (kept & 0xe6) == 0xe6 && wide ? 3 : 2;
}

#else

inline int vector_levels() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? 3 : avx2 ? 2 : 1;
}

#endif

}  // namespace

#endif
