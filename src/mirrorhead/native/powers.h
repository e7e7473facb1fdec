/* General powers x^e for x >= 0, with a relative error below (2 + e) 2^-23 in float:
 *
 *     x = 2^k z:                        log2(x) = k + log2(z)
 *     e log2(x) = m + r, |r| small:     x^e     = 2^m 2^r
 *
 * k e is kept in two parts, the larger one exact, so that the size of x does not matter. AVX-512
 * looks log2(z) and 2^m up in tables of 32 numbers, which fit into two registers, and needs short
 * polynomials only; other instruction sets have longer polynomials. Those were fitted to the
 * smallest error in log2(z) and in 2^r, which is at most 2e-8 (log) and 1.1e-7 (exponential).
 */

/* a + b x for two numbers. */
INLINE floats line(float a, float b, floats x) {
    return fused_float(b - (floats){0}, x, a - (floats){0});
}

#if defined(__AVX512F__)

/* table[index mod 32] */
INLINE floats look_up(const float *table, words index) {
    return (floats)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)index,
                                          _mm512_loadu_ps(table + 16));
}

/* z in [1, 2), by the first five bits of its fraction: log2(z) = log2(1/c) + log2(1 + f) with
 * c about 1/z from a table, f = c z - 1. Return `rest`, e log2(x) without the larger part of k e. */
INLINE floats log_stage(floats x, const struct exponent_float *e, floats *k) {
    const words bits = (words)x;
    const floats z = (floats)((bits & 0x7fffff) | 0x3f800000);
    const floats c = look_up(power_tables.reciprocal, bits >> 18);
    const floats f = fused_float(c, z, -1 - (floats){0});
    const floats P = fused_float(line(-0.721406996f, 0.470026523f, f), f, 1.44269729f - (floats){0});
    const floats log_z = fused_float(f, P, look_up(power_tables.log2, bits >> 18));
    *k = (floats)_mm512_getexp_ps((__m512)x);
    return fused_float(e->value, log_z, *k * e->low);
}

/* m is a multiple of 1/32: 2^m is a table's 2^(j/32), scaled by a whole power of two. */
INLINE floats exp_stage(const struct exponent_float *e, floats k, floats rest) {
    const float whole = 0x1.8p18f; /* rounds to a multiple of 1/32, in the lowest bits */
    const floats shifted = fused_float(k, e->high, rest) + whole, m = shifted - whole;
    const floats r = fused_float(k, e->high, -m) + rest;
    const floats power = look_up(power_tables.exp2, (words)shifted);
    const floats result = fused_float(power, r * line(0.693157315f, 0.240228698f, r), power);
    return (floats)_mm512_scalef_ps((__m512)result, (__m512)m); /* by 2^floor(m) */
}

#else

/* z = 1 + f in [sqrt(1/2), sqrt(2)). Return `rest`, e log2(x) without the larger part of k e. */
INLINE floats log_stage(floats x, const struct exponent_float *e, floats *k) {
    const words bits = (words)x, scaling = (bits - 0x3f3504f3) & 0xff800000;
    const floats f = (floats)(bits - scaling) - 1, f2 = f * f;
    *k = __builtin_convertvector((ints)scaling >> 23, floats);
    /* By pairs and pairs of pairs: a chain of products and sums would wait for each. */
    const floats f4 = f2 * f2;
    const floats low = fused_float(line(0.48092252f, -0.360721201f, f), f2,
                                   line(1.4426949f, -0.721347153f, f));
    const floats high = fused_float(line(0.217379391f, -0.210303336f, f), f2,
                                    line(0.287656665f, -0.238519445f, f));
    const floats P = fused_float(fused_float(0.125412419f - (floats){0}, f4, high), f4, low);
    return fused_float(e->value, f * P, *k * e->low);
}

/* m is whole. 2^-127 and 2^128 are written as the bits of 0 and inf. */
INLINE floats exp_stage(const struct exponent_float *e, floats k, floats rest) {
    const floats y = at_least_float(fused_float(k, e->high, rest), -127 - (floats){0});
    const float whole = 0x1.8p23f + 127; /* rounds to a whole number, in the lowest bits */
    const floats shifted = at_most_float(y, 128 - (floats){0}) + whole, m = shifted - whole;
    /* Where y was cut off at -127, r is large: the sign of the result must stay. */
    const floats r = at_least_float(fused_float(k, e->high, -m) + rest, -1 - (floats){0});
    const floats r2 = r * r;
    const floats Q = fused_float(fused_float(0.00132647273f - (floats){0}, r2,
                                             line(0.0555073358f, 0.00967151299f, r)),
                                 r2, line(0.693147004f, 0.240222424f, r));
    return (floats)((words)shifted << 23) * fused_float(r, Q, 1 - (floats){0});
}

#endif

/* x^e, and 0 for x < least, of each of `count` vectors; least >= FLT_MIN. Results far below the
 * smallest normal number are 0. In two loops: the processor then works on several at once. */
INLINE void general_float(floats *x, int count, const struct exponent_float *e, floats least) {
    floats k[TOGETHER], rest[TOGETHER];
    EACH(i) rest[i] = log_stage(x[i], e, &k[i]);
    EACH(i) {
        const floats power = only_float(not_less_float(x[i], least), exp_stage(e, k[i], rest[i]));
        x[i] = pick_float(up_to_float(x[i], FLT_MAX - (floats){0}), power, x[i]); /* or inf, NaN */
    }
}

INLINE void general_double(doubles *x, int count, const struct exponent_double *e, doubles least) {
    const double exponent = e->value[0];
    for (int k = 0; k < count; k++) {
        double lanes[WIDTH / 8];
        x[k] = only_double(not_less_double(x[k], least), x[k]);
        memcpy(lanes, &x[k], WIDTH);
#pragma omp simd
        for (int l = 0; l < WIDTH / 8; l++) lanes[l] = pow(lanes[l], exponent);
        memcpy(&x[k], lanes, WIDTH);
    }
}
