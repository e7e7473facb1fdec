/* Vectors of the widest kind that the instruction set has, by the vector extensions of GNU C. */
#ifndef MIRRORHEAD_VECTORS_H
#define MIRRORHEAD_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 64 /* bytes */
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define INLINE static inline __attribute__((always_inline))
#define VECTOR __attribute__((vector_size(WIDTH)))

typedef float floats VECTOR;
typedef double doubles VECTOR;
typedef int32_t ints VECTOR;
typedef uint32_t words VECTOR;
typedef int64_t longs VECTOR;
typedef uint64_t long_words VECTOR;

/* The products of the lower halves of all 64-bit lanes. */
INLINE long_words lower_products(long_words x, long_words y) {
#if defined(__AVX512F__)
    return (long_words)_mm512_mul_epu32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (long_words)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#elif defined(__x86_64__)
    return (long_words)_mm_mul_epu32((__m128i)x, (__m128i)y);
#elif defined(__aarch64__)
    return (long_words)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)y));
#else
    return (x & 0xffffffff) * (y & 0xffffffff);
#endif
}

/* yes where all bits of mask are 1, no where they are 0. */
INLINE floats pick_float(ints mask, floats yes, floats no) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
#endif
}

INLINE doubles pick_double(longs mask, doubles yes, doubles no) {
    return (doubles)(((longs)yes & mask) | ((longs)no & ~mask));
}

/* The smaller of x and most; NaN stays. */
INLINE floats at_most_float(floats x, float most) {
    const floats limit = most + (floats){0};
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)limit, (__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)limit, (__m256)x);
#else
    return pick_float(x > limit, limit, x);
#endif
}

/* The larger of x and least. */
INLINE floats at_least_float(floats x, float least) {
    const floats limit = least + (floats){0};
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)limit, (__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)limit, (__m256)x);
#else
    return pick_float(x < limit, limit, x);
#endif
}

INLINE doubles at_most_double(doubles x, double most) {
    const doubles limit = most + (doubles){0};
    return pick_double(x > limit, limit, x);
}

INLINE floats root_of_floats(floats x) {
#if defined(__AVX512F__)
    return (floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
    return (floats)vsqrtq_f32((float32x4_t)x);
#else
    for (int k = 0; k < WIDTH / 4; k++) x[k] = __builtin_sqrtf(x[k]);
    return x;
#endif
}

INLINE doubles root_of_doubles(doubles x) {
#if defined(__AVX512F__)
    return (doubles)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
    return (doubles)_mm256_sqrt_pd((__m256d)x);
#elif defined(__x86_64__)
    return (doubles)_mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
    return (doubles)vsqrtq_f64((float64x2_t)x);
#else
    for (int k = 0; k < WIDTH / 8; k++) x[k] = __builtin_sqrt(x[k]);
    return x;
#endif
}

#endif
