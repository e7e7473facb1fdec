/* What the kernels share: the name of an exported function, and vector forms of libm. */
#ifndef MIRRORHEAD_NATIVE_H
#define MIRRORHEAD_NATIVE_H

#include <math.h>
#include <stdint.h>

/* EXPORT(solve) is solve_avx2 in the objects compiled for AVX2, and so on. */
#define JOIN_NAMES(name, set) name##_##set
#define JOIN(name, set) JOIN_NAMES(name, set)
#define EXPORT(name) JOIN(name, INSTRUCTIONS)

#if defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && defined(__x86_64__)
/* glibc has vector forms of these; declare them without asking for -ffast-math. */
extern double exp(double) __attribute__((simd("notinbranch"), const));
extern double log(double) __attribute__((simd("notinbranch"), const));
extern double pow(double, double) __attribute__((simd("notinbranch"), const));
#endif

/* The optimizer step works on blocks of this many bytes of weights, with a checksum of each. Keys and
 * tables are filled at load by processor.c: code that runs at load must be baseline code. */
#define BLOCK_BYTES 4096
extern uint32_t checksum_keys[BLOCK_BYTES / 2]; /* a key for each weight of two bytes too */

/* For powers.h, for z from 1 + j/32 to 1 + (j+1)/32: about 1/z, log2 of its inverse, 2^(j/32). */
struct power_tables {
    float reciprocal[32], log2[32], exp2[32];
};
extern struct power_tables power_tables;

static inline uint32_t mix(uint32_t x) { /* a bijection that looks random */
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

#endif
