/* What the kernels share: the name of an exported function, and vector forms of libm. */
#ifndef MIRRORHEAD_NATIVE_H
#define MIRRORHEAD_NATIVE_H

#include <math.h>

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

#endif
