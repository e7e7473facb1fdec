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

/* What a comparison gives: a bit for each lane with AVX-512, else a lane of ones or zeros. Masks are
 * made and used by the functions below only: a mask that the compiler turns into a vector and back
 * costs more than the comparison. */
#if defined(__AVX512F__)
typedef __mmask16 mask_float;
typedef __mmask8 mask_double;
#else
typedef ints mask_float;
typedef longs mask_double;
#endif

#if defined(__AVX512F__)
#define COMPARISON(name, result, predicate)                                                \
    INLINE mask_float name##_float(floats x, floats y) {                                   \
        return _mm512_cmp_ps_mask((__m512)x, (__m512)y, predicate);                        \
    }                                                                                      \
    INLINE mask_double name##_double(doubles x, doubles y) {                               \
        return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, predicate);                      \
    }
#else
#define COMPARISON(name, result, predicate)                                                \
    INLINE mask_float name##_float(floats x, floats y) { return result; }                  \
    INLINE mask_double name##_double(doubles x, doubles y) { return result; }
#endif
COMPARISON(less, x < y, _CMP_LT_OQ)
COMPARISON(not_less, ~(x < y), _CMP_NLT_UQ)
COMPARISON(up_to, x <= y, _CMP_LE_OQ)
COMPARISON(equal, x == y, _CMP_EQ_OQ)

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

/* a b + c, rounded once where the processor can. Nothing else is fused (-ffp-contract=off), so that
 * every copy of a formula rounds alike: else a weight read again would look edited. */
INLINE floats fused_float(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE doubles fused_double(doubles a, doubles b, doubles c) {
#if defined(__AVX512F__)
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    return (doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

/* yes where the mask is set, no elsewhere. */
INLINE floats pick_float(mask_float mask, floats yes, floats no) {
#if defined(__AVX512F__)
    return (floats)_mm512_mask_blend_ps(mask, (__m512)no, (__m512)yes);
#elif defined(__AVX2__)
    return (floats)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
#endif
}

INLINE doubles pick_double(mask_double mask, doubles yes, doubles no) {
#if defined(__AVX512F__)
    return (doubles)_mm512_mask_blend_pd(mask, (__m512d)no, (__m512d)yes);
#elif defined(__AVX2__)
    return (doubles)_mm256_blendv_pd((__m256d)no, (__m256d)yes, (__m256d)mask);
#else
    return (doubles)(((longs)yes & mask) | ((longs)no & ~mask));
#endif
}

/* Whether the mask is set in all lanes. */
#if defined(__AVX512F__)
INLINE int whole_float(mask_float mask) { return mask == 0xffff; }
INLINE int whole_double(mask_double mask) { return mask == 0xff; }
#else
INLINE int whole_double(mask_double mask) {
    int64_t all = -1;
    for (int k = 0; k < WIDTH / 8; k++) all &= mask[k];
    return all == -1;
}
INLINE int whole_float(mask_float mask) { return whole_double((mask_double)mask); }
#endif

/* x where the mask is set, 0 elsewhere. */
INLINE floats only_float(mask_float mask, floats x) {
#if defined(__AVX512F__)
    return (floats)_mm512_maskz_mov_ps(mask, (__m512)x);
#else
    return (floats)((ints)x & mask);
#endif
}

INLINE doubles only_double(mask_double mask, doubles x) {
#if defined(__AVX512F__)
    return (doubles)_mm512_maskz_mov_pd(mask, (__m512d)x);
#else
    return (doubles)((longs)x & mask);
#endif
}

/* The smaller of x and limit; NaN stays. */
INLINE floats at_most_float(floats x, floats limit) {
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)limit, (__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_min_ps((__m256)limit, (__m256)x);
#else
    return pick_float(x > limit, limit, x);
#endif
}

INLINE doubles at_most_double(doubles x, doubles limit) {
    return pick_double(less_double(limit, x), limit, x);
}

/* The larger of x and limit; NaN stays. */
INLINE floats at_least_float(floats x, floats limit) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)limit, (__m512)x);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)limit, (__m256)x);
#else
    return pick_float(x < limit, limit, x);
#endif
}

INLINE doubles at_least_double(doubles x, doubles limit) {
    return pick_double(less_double(x, limit), limit, x);
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
