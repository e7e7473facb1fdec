/* One step of MirrorDescent or MirrorAdam, in one pass over memory: optim/_formula.py in C.
 *
 * The tensors are cut into blocks of 4 KB of weights. All of the step is done for one vector of
 * weights after the other (step_vectors.h), in float for float32, bfloat16 and float16, in double
 * for float64. The choices that a rule makes are the same for all vectors, so that the processor
 * predicts the branches. Blocks are independent: the result does not depend on the number of
 * threads.
 *
 * Edits of weights from outside are noticed by a checksum of the bits that each block had when it
 * was last written. Only where it differs (or is missing) the weights are compared one by one.
 *
 * A centred step (optim/_centered.py) writes w with the scale S of the last step and finds the
 * largest |u|. Where that changes S, which is rare, rescale writes all weights of the tensor again.
 */
#include <float.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "native.h"
#include "vectors.h"

enum dtype { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum storage { PRIMAL, DUAL, WIDE, CENTERED };
enum method { DESCENT, MOMENTUM, NESTEROV, ADAM };

enum power { GENERAL, PRODUCTS, SQUARE, TENTH_POWER, ROOT };

struct exponent {
    double value, high, low; /* value = high + low, high in 12 bits: times 2^8 it is exact */
    double lower; /* 2^-64 to the power of `value` */
    int64_t kind, whole, quarters; /* value = whole + quarters/4, unless it is GENERAL */
};

struct rule { /* UpdateRule of _formula.py */
    int32_t dtype, storage, method, knee, stochastic, linear;
    struct exponent mirror, inverse; /* p - 1 and 1/(p-1) */
    double dual_floor;
};

struct tensor { /* ParamState and Hyper of _formula.py */
    char *weight;
    const char *grad;
    char *stored, *m, *v;
    const char *center;
    uint64_t *checksums;
    int64_t count;
    uint64_t seed;
    double lr, decay, dither, grad_scale, momentum, gain1, beta2, gain2, eps, root_bias;
    double knee, dual_knee, slope;
    double scale, largest; /* S; and max |u|, a result */
    int32_t grad_dtype, checked, finite, unused; /* whether checksums hold; finite is a result */
};

/* Vectors that go through a stage of a general power together: each waits for its own results, so
 * that the processor has to work on several. Other powers are short enough as they are. */
#define TOGETHER 8
#define EACH(k) _Pragma("GCC unroll 8") for (int k = 0; k < count; k++)
#define MOST_WEIGHTS (BLOCK_BYTES / 2)
#define OF_CENTER 0x9e3779b97f4a7c15u /* odd: an exchange of weight and center is noticed */

static int size_of(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2; }

/* --- checksums ------------------------------------------------------------------------------ */

/* The NH hash: two blocks that differ have equal sums with probability 2^-32 at most. */
INLINE long_words hash_vector(words x, const uint32_t *keys) {
    words key;
    memcpy(&key, keys, WIDTH);
    const long_words y = (long_words)(x + key);
    return lower_products(y, y >> 32);
}

INLINE uint64_t add_up(long_words x) {
    uint64_t sum = 0;
    for (int k = 0; k < WIDTH / 8; k++) sum += x[k];
    return sum;
}

static uint64_t checksum(const char *bytes, long size) {
    long_words sums[4] = {0};
    words x;
    long i = 0;
    for (; i + 4 * WIDTH <= size; i += 4 * WIDTH)
        for (int k = 0; k < 4; k++) {
            memcpy(&x, bytes + i + k * WIDTH, WIDTH);
            sums[k] += hash_vector(x, checksum_keys + i / 4 + k * WIDTH / 4);
        }
    for (; i < size; i += WIDTH) {
        x = (words){0};
        memcpy(&x, bytes + i, size - i < WIDTH ? size - i : WIDTH);
        sums[0] += hash_vector(x, checksum_keys + i / 4);
    }
    return add_up(sums[0] + sums[1] + sums[2] + sums[3]);
}

/* --- half precision ------------------------------------------------------------------------- */

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline uint16_t to_bfloat16(float x) { /* to the nearest, ties to even */
    const uint32_t bits = as_bits(x), up = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((x != x ? 0x7fc00000 : up) >> 16);
}

static inline float from_float16(uint16_t h) {
    const uint32_t size = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    /* Subnormals as whole numbers: products of subnormal floats are 0 where those are flushed. */
    const uint32_t small = as_bits((float)(int32_t)size * 0x1p-24f);
    const uint32_t normal = (size << 13) + 0x38000000, large = size << 13 | 0x7f800000;
    return as_float((size < 0x400 ? small : size < 0x7c00 ? normal : large) | sign);
}

static inline uint16_t to_float16(float x) { /* to the nearest, ties to even */
    const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    const uint32_t small = as_bits(as_float(size) + 0.5f) - 0x3f000000; /* below 2^-14 */
    const uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    const uint32_t large = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size < 0x38800000 ? small : size < 0x477ff000 ? normal : large));
}

/* A block of any dtype as floats. */
static void widen(const char *from, int dtype, float *restrict out, long n) {
    const uint16_t *h = (const uint16_t *)from;
    if (dtype == BFLOAT16)
        for (long i = 0; i < n; i++) out[i] = as_float((uint32_t)h[i] << 16);
    else if (dtype == FLOAT16)
        for (long i = 0; i < n; i++) out[i] = from_float16(h[i]);
    else if (dtype == FLOAT32)
        memcpy(out, from, n * sizeof *out);
    else
        for (long i = 0; i < n; i++) out[i] = (float)((const double *)from)[i];
}

/* A block of floats rounded to half precision; `random` rounds bfloat16 up or down, unbiased. */
static void narrow(const float *restrict from, int dtype, char *to, long n, int random,
                   uint64_t seed, uint64_t first) {
    uint16_t *restrict h = (uint16_t *)to;
    if (dtype == FLOAT16)
        for (long i = 0; i < n; i++) h[i] = to_float16(from[i]);
    else if (!random)
        for (long i = 0; i < n; i++) h[i] = to_bfloat16(from[i]);
    else {
        const uint32_t start = mix((uint32_t)seed ^ mix((uint32_t)(seed >> 32)));
        const uint32_t key = mix(start + (uint32_t)(first >> 32)), at = (uint32_t)first;
        for (long i = 0; i < n; i++) {
            const uint32_t bits = as_bits(from[i]), noise = mix((at + (uint32_t)i) ^ key) & 0xffff;
            const int finite = (bits & 0x7fffffff) < 0x7f800000;
            h[i] = (uint16_t)(finite ? (bits + noise) >> 16 : to_bfloat16(from[i]));
        }
    }
}

/* struct rule and struct tensor in one type, each number in all lanes of a vector. */
#define UPDATE(TYPE, VEC)                                                                  \
    struct exponent_##TYPE {                                                               \
        VEC value, high, low, lower;                                                       \
        int64_t kind, whole, quarters;                                                     \
        int root; /* value < 1 */                                                          \
    };                                                                                     \
    struct update_##TYPE {                                                                 \
        VEC lr, decay, keep, dither, grad_scale, momentum, gain1, beta2, gain2, eps;       \
        VEC root_bias, knee, dual_knee, slope, scale, inverse_scale, floor;                \
        struct exponent_##TYPE mirror, inverse;                                            \
        int storage, method, bent, linear;                                                 \
    }
UPDATE(float, floats);
UPDATE(double, doubles);

#include "powers.h"

/* --- the step ------------------------------------------------------------------------------- */

#define NAME(name) name##_float
#define REAL float
#define VEC floats
#define INTS ints
#define SIGN_BIT ((INTS)((words){0} + 0x80000000u))
#define EPSILON FLT_EPSILON
#define SMALLEST FLT_MIN
#define LARGEST FLT_MAX
#define ROOT_OF root_of_floats
#include "step_vectors.h"
#undef NAME
#undef REAL
#undef VEC
#undef INTS
#undef SIGN_BIT
#undef EPSILON
#undef SMALLEST
#undef LARGEST
#undef ROOT_OF

#define NAME(name) name##_double
#define REAL double
#define VEC doubles
#define INTS longs
#define SIGN_BIT ((INTS)((long_words){0} + 0x8000000000000000u))
#define EPSILON DBL_EPSILON
#define SMALLEST DBL_MIN
#define LARGEST DBL_MAX
#define ROOT_OF root_of_doubles
#include "step_vectors.h"

/* Where a change rounds away, a weight has the bits of its center; only those of 0 can differ. */
static void keep_center(uint16_t *restrict w, const uint16_t *restrict center, long n) {
    for (long i = 0; i < n; i++)
        if (!((w[i] | center[i]) & 0x7fff)) w[i] = center[i];
}

/* Store the larger of the two, for a result that threads share. */
static void raise_to(double *largest, double x) {
    uint64_t seen = __atomic_load_n((uint64_t *)largest, __ATOMIC_RELAXED), bits;
    memcpy(&bits, &x, 8); /* numbers >= 0 are ordered as their bits are */
    while (bits > seen && !__atomic_compare_exchange_n((uint64_t *)largest, &seen, bits, 0,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Whether the step of a block changes nothing: plain descent, whose u is known, without a gradient.
 * (Dither is less than half a gap of u, and rounds away.) So the rows of an embedding that a batch
 * has not used cost no more than to read their gradient. */
static int stands_still(const struct rule *rule, const struct tensor *t, const char *grad,
                        long bytes) {
    const int kept = rule->storage != CENTERED && t->checksums && t->checked;
    const int known = rule->storage == PRIMAL || kept;
    return rule->method == DESCENT && known && !rule->stochastic && t->decay == 0 && !grad[0] &&
           !memcmp(grad, grad + 1, bytes - 1);
}

/* Take the step of the weights first <= i < first + n of a tensor, one block. */
static void step_block(const struct rule *rule, struct tensor *t, long first, long n, long block) {
    const int size = size_of(rule->dtype), g_size = size_of(t->grad_dtype);
    char *weight = t->weight + first * size;
    const char *grad = t->grad + first * g_size;
    if (stands_still(rule, t, grad, n * g_size)) return;
    const char *center = t->center ? t->center + first * size : NULL;
    uint64_t *seen = t->checksums ? t->checksums + block : NULL, sum;
    const uint64_t of_center = seen && center ? OF_CENTER * checksum(center, n * size) : 0;
    const int unedited = seen && t->checked && *seen == checksum(weight, n * size) + of_center;
    double largest = 0;
    int finite;
    if (rule->dtype == FLOAT64) {
        double g[BLOCK_BYTES / 8];
        const double *gradient = (const double *)grad;
        if (t->grad_dtype != FLOAT64) {
            float narrow_g[BLOCK_BYTES / 8];
            widen(grad, t->grad_dtype, narrow_g, n);
            for (long i = 0; i < n; i++) g[i] = narrow_g[i];
            gradient = g;
        }
        finite = advance_double(rule, t, (double *)weight, gradient, (const double *)center, first,
                                n, unedited, &sum, &largest);
    } else {
        float w[MOST_WEIGHTS], g[MOST_WEIGHTS], c[MOST_WEIGHTS];
        float *weights = (float *)weight;
        const float *gradient = (const float *)grad, *centers = (const float *)center;
        if (rule->dtype != FLOAT32) widen(weight, rule->dtype, weights = w, n);
        if (rule->dtype != FLOAT32 && center) widen(center, rule->dtype, c, n), centers = c;
        if (t->grad_dtype != FLOAT32) widen(grad, t->grad_dtype, g, n), gradient = g;
        finite = advance_float(rule, t, weights, gradient, centers, first, n, unedited, &sum,
                               &largest);
        if (rule->dtype != FLOAT32) {
            narrow(w, rule->dtype, weight, n, rule->stochastic, t->seed, (uint64_t)first);
            if (center) keep_center((uint16_t *)weight, (const uint16_t *)center, n);
            if (seen) sum = checksum(weight, n * size);
        }
    }
    if (seen) *seen = sum + of_center;
    if (largest > 0) raise_to(&t->largest, largest);
    if (!finite) __atomic_store_n(&t->finite, 0, __ATOMIC_RELAXED);
}

/* Write one block of centred weights from u, with the present scale. */
static void rescale_block(const struct rule *rule, struct tensor *t, long first, long n,
                          long block) {
    const int size = size_of(rule->dtype);
    char *weight = t->weight + first * size;
    const char *center = t->center + first * size;
    if (rule->dtype == FLOAT64)
        rewrite_double(rule, t, (double *)weight, (const double *)center, first, n);
    else if (rule->dtype == FLOAT32)
        rewrite_float(rule, t, (float *)weight, (const float *)center, first, n);
    else {
        float w[MOST_WEIGHTS], c[MOST_WEIGHTS];
        widen(center, rule->dtype, c, n);
        rewrite_float(rule, t, w, c, first, n);
        narrow(w, rule->dtype, weight, n, 0, 0, 0);
        keep_center((uint16_t *)weight, (const uint16_t *)center, n);
    }
    if (t->checksums)
        t->checksums[block] =
            checksum(weight, n * size) + OF_CENTER * checksum(center, n * size);
}

struct share { /* the blocks begin <= k < end, counted through all tensors */
    void (*each)(const struct rule *, struct tensor *, long first, long n, long block);
    const struct rule *rule;
    struct tensor *tensors;
    long count, begin, end;
};

static void *work(void *argument) {
    const struct share *share = argument;
    const long length = BLOCK_BYTES / size_of(share->rule->dtype);
    long before = 0; /* blocks of the tensors passed */
    for (long i = 0; i < share->count && before < share->end; i++) {
        struct tensor *t = share->tensors + i;
        const long blocks = (t->count + length - 1) / length;
        const long start = share->begin > before ? share->begin - before : 0;
        const long end = share->end - before < blocks ? share->end - before : blocks;
        for (long block = start; block < end; block++) {
            const long first = block * length, left = t->count - first;
            share->each(share->rule, t, first, left < length ? left : length, block);
        }
        before += blocks;
    }
    return NULL;
}

#define MOST_THREADS 256
#define LEAST_BLOCKS 32 /* for a thread: starting one costs as much as a few */

/* Do `each` block of all tensors. */
static void for_all_blocks(void (*each)(const struct rule *, struct tensor *, long, long, long),
                           const struct rule *rule, struct tensor *tensors, long count,
                           long threads) {
    const long length = BLOCK_BYTES / size_of(rule->dtype);
    long blocks = 0;
    for (long i = 0; i < count; i++) blocks += (tensors[i].count + length - 1) / length;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > blocks / LEAST_BLOCKS) threads = blocks / LEAST_BLOCKS;
    if (threads < 1) threads = 1;
    struct share shares[MOST_THREADS];
    pthread_t others[MOST_THREADS];
    int started[MOST_THREADS];
    for (long k = 0; k < threads; k++) {
        shares[k] = (struct share){each, rule, tensors, count, k * blocks / threads,
                                   (k + 1) * blocks / threads};
        started[k] = k > 0 && pthread_create(&others[k], NULL, work, &shares[k]) == 0;
    }
    for (long k = 0; k < threads; k++)
        if (!started[k]) work(&shares[k]); /* the first share, and those without a thread */
    for (long k = 1; k < threads; k++)
        if (started[k]) pthread_join(others[k], NULL);
}

/* Move all tensors, which share a rule. `finite` of each says whether its gradient was, `largest`
 * is max |u| of a centred one. */
void EXPORT(step)(const struct rule *rule, struct tensor *tensors, int64_t count, int64_t threads) {
    for (long i = 0; i < count; i++) tensors[i].finite = 1, tensors[i].largest = 0;
    for_all_blocks(step_block, rule, tensors, count, threads);
}

/* Write all weights of centred tensors, whose scale has changed. */
void EXPORT(rescale)(const struct rule *rule, struct tensor *tensors, int64_t count,
                     int64_t threads) {
    for_all_blocks(rescale_block, rule, tensors, count, threads);
}

/* The sum of the squares of n weights. The terms are added in one order, whatever the instruction
 * set, the number of threads or the alignment of memory. */
void EXPORT(sum_of_squares)(const char *x, double *sum, int64_t dtype, int64_t n) {
    enum { LENGTH = 512, SUMS = 32, VECTORS = SUMS * 8 / WIDTH };
    double block[LENGTH], parts[SUMS];
    float narrow_x[LENGTH];
    *sum = 0;
    for (long i = 0; i < n; i += LENGTH) {
        const long count = n - i < LENGTH ? n - i : LENGTH;
        const char *from = x + i * size_of(dtype);
        for (long k = 0; k < LENGTH * size_of(dtype); k += 64)
            __builtin_prefetch(from + 2 * BLOCK_BYTES + k, 0, 2); /* while this block is added up */
        if (dtype == FLOAT64)
            memcpy(block, from, count * sizeof *block);
        else {
            widen(from, dtype, narrow_x, count);
            for (long k = 0; k < count; k++) block[k] = narrow_x[k];
        }
        for (long k = count; k % SUMS; k++) block[k] = 0;
        doubles sums[VECTORS] = {0};
        for (long k = 0; k < count; k += SUMS)
            _Pragma("GCC unroll 16") for (int l = 0; l < VECTORS; l++) {
                const doubles y = load_double(block + k + l * (WIDTH / 8));
                sums[l] += y * y;
            }
        memcpy(parts, sums, sizeof parts);
        for (int half = SUMS / 2; half; half /= 2)
            for (int l = 0; l < half; l++) parts[l] += parts[l + half];
        *sum += parts[0];
    }
}

/* out = x^e, x >= 0, for the tests of the powers. */
void EXPORT(power_float)(const float *x, float *out, int64_t n, const struct exponent *e) {
    const struct rule rule = {.inverse = *e};
    const struct tensor none = {0};
    const struct update_float h = update_of_float(&rule, &none);
    for (long i = 0; i < n; i += WIDTH / 4) {
        floats vector = {0};
        const long size = 4 * (n - i) < WIDTH ? 4 * (n - i) : WIDTH;
        memcpy(&vector, x + i, size);
        power_float(&vector, 1, &h.inverse, FLT_MIN - (floats){0});
        memcpy(out + i, &vector, size);
    }
}

/* Only read and write as many bytes as a step does: the floor in benchmarks/step.py. */
void EXPORT(move_bytes)(float **streams, int64_t reads, int64_t writes, int64_t n) {
    for (long i = 0; i + WIDTH / 4 <= n; i += WIDTH / 4) {
        words x = {0}, y;
        for (long k = 0; k < reads; k++) {
            memcpy(&y, streams[k] + i, WIDTH);
            x ^= y;
        }
        for (long k = 0; k < writes; k++) memcpy(streams[k] + i, &x, WIDTH);
    }
}
