/* The step in one floating-point type, vector by vector. step.c includes this for float and for
 * double: REAL, VEC, INTS, NAME and the others are set there.
 */

#define LANES ((long)(WIDTH / sizeof(REAL)))

INLINE VEC NAME(all)(double x) { return (REAL)x - (VEC){0}; }

INLINE struct NAME(exponent) NAME(exponent_of)(const struct exponent *e) {
    return (struct NAME(exponent)){NAME(all)(e->value), NAME(all)(e->high), NAME(all)(e->low),
                                   NAME(all)(e->lower), e->kind, e->whole, e->quarters,
                                   e->value < 1};
}

/* A rule and the numbers of one tensor. */
INLINE struct NAME(update) NAME(update_of)(const struct rule *rule, const struct tensor *t) {
    return (struct NAME(update)){
        .lr = NAME(all)(t->lr),
        .decay = NAME(all)(t->decay),
        .keep = NAME(all)(1 - t->decay),
        .dither = NAME(all)(t->dither),
        .grad_scale = NAME(all)(t->grad_scale),
        .momentum = NAME(all)(t->momentum),
        .gain1 = NAME(all)(t->gain1),
        .beta2 = NAME(all)(t->beta2),
        .gain2 = NAME(all)(t->gain2),
        .eps = NAME(all)(t->eps),
        .root_bias = NAME(all)(t->root_bias),
        .knee = NAME(all)(t->knee),
        .dual_knee = NAME(all)(t->dual_knee),
        .slope = NAME(all)(t->slope),
        .scale = NAME(all)(t->scale),
        .inverse_scale = NAME(all)(1 / t->scale),
        .floor = NAME(all)(rule->dual_floor),
        .mirror = NAME(exponent_of)(&rule->mirror),
        .inverse = NAME(exponent_of)(&rule->inverse),
        .storage = rule->storage,
        .method = rule->method,
        .bent = rule->knee,
        .linear = rule->linear,
    };
}

INLINE VEC NAME(load)(const REAL *x) {
    VEC value;
    memcpy(&value, x, WIDTH);
    return value;
}

INLINE void NAME(store)(REAL *x, VEC value) { memcpy(x, &value, WIDTH); }

INLINE VEC NAME(size)(VEC x) { return (VEC)((INTS)x & ~SIGN_BIT); }
INLINE VEC NAME(with_sign)(VEC size, VEC x) { return (VEC)((INTS)size | ((INTS)x & SIGN_BIT)); }

/* x^e for x >= 0, and 0 for x < least, of each of `count` vectors. */
INLINE void NAME(power)(VEC *x, int count, const struct NAME(exponent) *e, VEC least) {
    const VEC smallest = NAME(all)(SMALLEST);
    if (e->kind == GENERAL) {
        /* The root of a subnormal number is far from 0: computed of 2^64 x. */
        NAME(mask) small[TOGETHER];
        if (e->root)
            EACH(k) {
                small[k] = NAME(less)(x[k], smallest);
                x[k] = NAME(pick)(small[k], x[k] * NAME(all)(0x1p64), x[k]);
            }
        NAME(general)(x, count, e, NAME(at_least)(least, smallest));
        if (e->root) EACH(k) x[k] = NAME(pick)(small[k], x[k] * e->lower, x[k]);
        return;
    }
    EACH(k) {
        /* First, since subnormal products are slow. */
        x[k] = NAME(only)(NAME(not_less)(x[k], least), x[k]);
        const VEC x2 = x[k] * x[k];
        if (e->kind == SQUARE)
            x[k] = x2;
        else if (e->kind == TENTH_POWER) {
            const VEC x4 = x2 * x2;
            x[k] = x4 * x4 * x2;
        } else if (e->kind == ROOT)
            x[k] = ROOT_OF(x[k]);
        else {
            VEC result = NAME(all)(1), square = x[k];
            for (long bits = e->whole; bits; bits >>= 1, square *= square)
                if (bits & 1) result *= square;
            if (e->quarters) {
                const VEC root = ROOT_OF(x[k]), fourth = ROOT_OF(root);
                result *= e->quarters == 1 ? fourth : root;
                if (e->quarters == 3) result *= fourth;
            }
            x[k] = result;
        }
    }
}

/* sign(w)|w|^(p-1) up to the knee, and the line with slope 1/T beyond (and for NaN). */
INLINE void NAME(mirror)(const struct NAME(update) *h, const VEC *w, VEC *out, int count) {
    EACH(k) out[k] = h->bent ? NAME(at_most)(NAME(size)(w[k]), h->knee) : NAME(size)(w[k]);
    NAME(power)(out, count, &h->mirror, (VEC){0});
    EACH(k) {
        if (h->bent) {
            const VEC size = NAME(size)(w[k]), line = h->dual_knee + (size - h->knee) / h->slope;
            out[k] = NAME(pick)(NAME(up_to)(size, h->knee), out[k], line);
        }
        out[k] = NAME(with_sign)(out[k], w[k]);
    }
}

/* sign(u)|u|^(1/(p-1)) up to the knee, and the line with slope T beyond; 0 where that is subnormal. */
INLINE void NAME(inverse)(const struct NAME(update) *h, const VEC *u, VEC *out, int count) {
    EACH(k) out[k] = h->bent ? NAME(at_most)(NAME(size)(u[k]), h->dual_knee) : NAME(size)(u[k]);
    NAME(power)(out, count, &h->inverse, h->floor);
    EACH(k) {
        if (h->bent) {
            const VEC size = NAME(size)(u[k]);
            const VEC line = NAME(fused)(size - h->dual_knee, h->slope, h->knee);
            out[k] = NAME(pick)(NAME(up_to)(size, h->dual_knee), out[k], line);
        }
        out[k] = NAME(with_sign)(out[k], u[k]);
    }
}

/* w0 + S sign(u)|u/S|^(1/(p-1)), with the bits of w0 where the change rounds away. */
INLINE void NAME(around)(const struct NAME(update) *h, const VEC *u, const REAL *center, VEC *out,
                         int count) {
    EACH(k) out[k] = NAME(size)(u[k]) * h->inverse_scale;
    NAME(power)(out, count, &h->inverse, h->floor);
    EACH(k) {
        const VEC w0 = NAME(load)(center + k * LANES);
        const VEC w = w0 + NAME(with_sign)(out[k] * h->scale, u[k]);
        out[k] = NAME(pick)(NAME(equal)(w, w0), w0, w);
    }
}

/* The direction d of the step, from the gradient and the moments, which are updated. */
INLINE VEC NAME(direction)(const struct NAME(update) *h, VEC g, REAL *m, REAL *v,
                           NAME(mask) *finite) {
    const NAME(mask) good = NAME(up_to)(NAME(size)(g), NAME(all)(LARGEST));
    *finite &= good;
    g = NAME(only)(good, g * h->grad_scale);
    if (h->method == DESCENT) return g;
    VEC first = NAME(load)(m);
    if (h->method == ADAM) {
        const VEC second = NAME(fused)(h->beta2, NAME(load)(v), h->gain2 * (g * g));
        first = NAME(fused)(h->gain1, g - first, first);
        NAME(store)(m, first);
        NAME(store)(v, second);
        return first / NAME(fused)(ROOT_OF(second), h->root_bias, h->eps);
    }
    first = NAME(fused)(h->momentum, first, g);
    NAME(store)(m, first);
    return h->method == NESTEROV ? NAME(fused)(h->momentum, first, g) : first;
}

/* u - (lr d + decay u), with dither: see dithered of _formula.py. */
INLINE VEC NAME(move_dual)(const struct NAME(update) *h, VEC u, VEC d) {
    const VEC gap = u - NAME(fused)(NAME(all)(-0.7 * EPSILON), u, u);
    const VEC step = NAME(fused)(h->lr, d, h->decay * u);
    return u - NAME(fused)(-h->dither, gap, step);
}

/* inverse((1 - decay) mirror(w) - lr d), measured by the larger of the two: see relative of
 * _formula.py. The result is in d. */
INLINE void NAME(move_primal)(const struct NAME(update) *h, const VEC *w, VEC *d, int count) {
    VEC size[TOGETHER], moved[TOGETHER];
    if (h->linear) { /* p = 2 */
        EACH(k) d[k] = NAME(fused)(-h->lr, d[k], h->keep * w[k]);
        return;
    }
    if (h->bent) { /* p < 2, where u does not underflow */
        NAME(mirror)(h, w, size, count);
        EACH(k) moved[k] = size[k] - NAME(fused)(h->lr, d[k], h->decay * size[k]);
        NAME(inverse)(h, moved, d, count);
        EACH(k) d[k] = NAME(pick)(NAME(equal)(moved[k], size[k]), w[k], d[k]);
        return;
    }
    EACH(k) size[k] = NAME(size)(w[k]);
    NAME(power)(size, count, &h->mirror, (VEC){0});
    EACH(k) {
        const VEC step = h->lr * d[k];
        const NAME(mask) small = NAME(up_to)(NAME(size)(step), size[k]);
        const VEC divisor = NAME(at_least)(size[k], NAME(all)(SMALLEST));
        const VEC ratio = (VEC)((INTS)step ^ ((INTS)w[k] & SIGN_BIT)) / divisor;
        const VEC beyond = NAME(fused)(h->keep, NAME(with_sign)(size[k], w[k]), -step);
        const VEC argument = NAME(pick)(small, h->keep - ratio, beyond);
        const VEC start = NAME(pick)(small, w[k], NAME(all)(1));
        d[k] = (VEC)((INTS)start ^ ((INTS)argument & SIGN_BIT));
        moved[k] = NAME(size)(argument);
    }
    NAME(power)(moved, count, &h->inverse, (VEC){0});
    EACH(k) d[k] *= moved[k];
}

/* What the vectors of a block add up: which entries of the gradient are all finite, the checksum of
 * what is written, max |u|. */
struct NAME(totals) {
    NAME(mask) finite;
    long_words sum;
    VEC largest;
};

/* Take the step of `count` vectors of weights. */
INLINE void NAME(step_vectors)(const struct NAME(update) *h, REAL *w, const REAL *g, REAL *stored,
                               REAL *m, REAL *v, const REAL *center, int count,
                               const uint32_t *keys, struct NAME(totals) *totals) {
    VEC d[TOGETHER], base[TOGETHER], new[TOGETHER];
    REAL *from = h->storage == PRIMAL ? w : stored; /* what is moved */
    const int dual = h->storage == DUAL || h->storage == CENTERED;
    EACH(k) {
        const long at = k * LANES;
        d[k] = NAME(direction)(h, NAME(load)(g + at), m + at, v + at, &totals->finite);
        base[k] = NAME(load)(from + at);
        if (dual) d[k] = NAME(move_dual)(h, base[k], d[k]);
    }
    if (h->storage == DUAL)
        NAME(inverse)(h, d, new, count);
    else if (h->storage == CENTERED)
        NAME(around)(h, d, center, new, count);
    else
        NAME(move_primal)(h, base, d, count);
    EACH(k) {
        const long at = k * LANES;
        VEC result = dual ? new[k] : d[k];
        if (h->storage != PRIMAL) { /* a weight that has not moved keeps its bits */
            result = NAME(pick)(NAME(equal)(d[k], base[k]), NAME(load)(w + at), result);
            NAME(store)(stored + at, d[k]);
            totals->sum += hash_vector((words)result, keys + k * (WIDTH / 4));
        }
        if (h->storage == CENTERED)
            totals->largest = NAME(at_least)(totals->largest, NAME(size)(d[k]));
        NAME(store)(w + at, result);
    }
}

/* Take the step of a block, `together` vectors at a time. */
INLINE void NAME(step_all)(const struct NAME(update) *h, REAL *w, const REAL *g, REAL *stored,
                           REAL *m, REAL *v, const REAL *center, long n, int together,
                           struct NAME(totals) *totals) {
    const long line = 64 / sizeof(REAL), key = sizeof(REAL) / 4; /* weights; words in a weight */
    long i = 0;
    for (const long step = together * LANES; i + step <= n; i += step) {
        /* The next block's checksum reads these first; the processor foresees the rest by itself.
         * Into the second cache: in the first all streams of this block are in the same lines. */
        for (long k = i + BLOCK_BYTES / sizeof(REAL), end = k + step; k < end; k += line) {
            if (h->storage != PRIMAL) __builtin_prefetch(w + k, 0, 2);
            if (h->storage == CENTERED) __builtin_prefetch(center + k, 0, 2);
        }
        /* Adam has more streams than the processor foresees well. */
        const long near = i + 512 / sizeof(REAL);
        for (long k = near; h->method == ADAM && k < near + step; k += line) {
            __builtin_prefetch(g + k);
            __builtin_prefetch(m + k);
            __builtin_prefetch(v + k);
            if (h->storage != PRIMAL) __builtin_prefetch(stored + k);
        }
        NAME(step_vectors)(h, w + i, g + i, stored + i, m + i, v + i, center + i, together,
                           checksum_keys + key * i, totals);
    }
    for (; i < n; i += LANES) { /* the rest, in vectors of their own */
        const long size = (n - i < LANES ? n - i : LANES) * sizeof(REAL);
        REAL rest[6][LANES], *parts[6] = {w, stored, m, v, (REAL *)g, (REAL *)center};
        memset(rest, 0, sizeof rest);
        for (int k = 0; k < 6; k++) memcpy(rest[k], parts[k] + i, size);
        NAME(step_vectors)(h, rest[0], rest[4], rest[1], rest[2], rest[3], rest[5], 1,
                           checksum_keys + key * i, totals);
        for (int k = 3; k >= 0; k--) /* w last: it stands for parts that a rule does not have */
            memcpy(parts[k] + i, rest[k], size);
    }
}

/* Whether w, of half precision, is what the last step wrote, given the weight before rounding. */
static inline int NAME(same)(const struct rule *rule, REAL held, REAL w) {
    if (rule->dtype == BFLOAT16 && rule->stochastic) { /* either neighbour may have been written */
        const REAL apart = held > w ? held - w : w - held;
        return apart <= (REAL)(1.01 * 0x1p-7) * (held < 0 ? -held : held) + (REAL)0x1p-132;
    }
    if (rule->dtype == BFLOAT16) return as_float((uint32_t)to_bfloat16((float)held) << 16) == w;
    return from_float16(to_float16((float)held)) == w;
}

/* Of `count` vectors: the weight that belongs to the stored value, and the stored value that belongs
 * to the weight. */
INLINE void NAME(both_ways)(const struct NAME(update) *h, const REAL *w, const REAL *center,
                            const REAL *stored, REAL *held, REAL *fresh, int count) {
    VEC x[TOGETHER], u[TOGETHER], out[TOGETHER];
    EACH(k) {
        x[k] = NAME(load)(w + k * LANES), u[k] = NAME(load)(stored + k * LANES);
        if (h->storage == CENTERED) x[k] = (x[k] - NAME(load)(center + k * LANES)) / h->scale;
    }
    if (h->storage == CENTERED)
        NAME(around)(h, u, center, out, count);
    else
        NAME(inverse)(h, u, out, count);
    EACH(k) NAME(store)(held + k * LANES, out[k]);
    NAME(mirror)(h, x, out, count);
    EACH(k) NAME(store)(fresh + k * LANES, h->storage == CENTERED ? out[k] * h->scale : out[k]);
}

/* Where w was edited from outside, the stored value follows it. */
static __attribute__((noinline)) void NAME(follow_edits)(const struct rule *rule,
                                                         const struct tensor *t, const REAL *w,
                                                         const REAL *center, REAL *stored,
                                                         long n) {
    const struct NAME(update) h = NAME(update_of)(rule, t);
    const long most = TOGETHER * LANES;
    for (long i = 0; i < n; i += most) {
        const long count = n - i < most ? n - i : most, size = count * sizeof(REAL);
        REAL held[TOGETHER * LANES], fresh[TOGETHER * LANES];
        if (rule->storage == WIDE)
            memcpy(held, stored + i, size), memcpy(fresh, w + i, size);
        else if (count == most)
            NAME(both_ways)(&h, w + i, center + i, stored + i, held, fresh, TOGETHER);
        else {
            REAL rest[3][TOGETHER * LANES] = {0};
            memcpy(rest[0], w + i, size);
            memcpy(rest[1], center + i, size);
            memcpy(rest[2], stored + i, size);
            NAME(both_ways)(&h, rest[0], rest[1], rest[2], held, fresh, TOGETHER);
        }
        if (rule->dtype == FLOAT32 || rule->dtype == FLOAT64)
            for (long k = 0; k < count; k++) /* without a branch: this becomes vectors */
                stored[i + k] = held[k] == w[i + k] ? stored[i + k] : fresh[k];
        else
            for (long k = 0; k < count; k++)
                if (!NAME(same)(rule, held[k], w[i + k])) stored[i + k] = fresh[k];
    }
}

/* Take the step of one block: the most usual rules have loops of their own, without a branch.
 * Returns whether the gradient is finite. */
static int NAME(advance)(const struct rule *rule, const struct tensor *t, REAL *w, const REAL *g,
                         const REAL *center, long first, long n, int unedited, uint64_t *sum,
                         double *largest) {
    /* What a rule does not have is never touched: w stands for it. */
    REAL *stored = t->stored ? (REAL *)t->stored + first : w;
    REAL *m = t->m ? (REAL *)t->m + first : w, *v = t->v ? (REAL *)t->v + first : w;
    if (!center) center = w;
    if (rule->storage != PRIMAL && !unedited) NAME(follow_edits)(rule, t, w, center, stored, n);
    struct NAME(update) h = NAME(update_of)(rule, t);
    struct NAME(totals) totals = {.finite = NAME(up_to)((VEC){0}, (VEC){0})};
#define CASE(STORAGE, METHOD, BENT, INVERSE)                                               \
    if (h.storage == STORAGE && h.method == METHOD && h.bent == BENT &&                    \
        h.inverse.kind == INVERSE) {                                                       \
        h.storage = STORAGE, h.method = METHOD, h.bent = BENT, h.inverse.kind = INVERSE;   \
        NAME(step_all)(&h, w, g, stored, m, v, center, n,                                  \
                       INVERSE == GENERAL ? TOGETHER : 64 / WIDTH, &totals);               \
    } else
    CASE(DUAL, DESCENT, 0, TENTH_POWER)
    CASE(DUAL, DESCENT, 0, SQUARE)
    CASE(DUAL, DESCENT, 0, GENERAL)
    CASE(DUAL, MOMENTUM, 0, TENTH_POWER)
    CASE(PRIMAL, DESCENT, 0, ROOT)
    CASE(PRIMAL, DESCENT, 0, GENERAL)
    CASE(DUAL, ADAM, 1, TENTH_POWER)
    CASE(DUAL, ADAM, 1, SQUARE)
    CASE(DUAL, ADAM, 1, GENERAL)
    CASE(CENTERED, ADAM, 0, TENTH_POWER)
    CASE(CENTERED, ADAM, 0, SQUARE)
    CASE(CENTERED, ADAM, 0, GENERAL)
    NAME(step_all)(&h, w, g, stored, m, v, center, n, TOGETHER, &totals);
#undef CASE
    *sum = add_up(totals.sum);
    for (long k = 0; k < LANES; k++)
        if (totals.largest[k] > *largest) *largest = totals.largest[k];
    return NAME(whole)(totals.finite);
}

/* Write the centred weights of one block from u. */
static void NAME(rewrite)(const struct rule *rule, const struct tensor *t, REAL *w,
                          const REAL *center, long first, long n) {
    const struct NAME(update) h = NAME(update_of)(rule, t);
    const REAL *stored = (const REAL *)t->stored + first;
    for (long i = 0; i < n; i += LANES) {
        const long size = (n - i < LANES ? n - i : LANES) * sizeof(REAL);
        REAL held[LANES] = {0}, origin[LANES] = {0};
        memcpy(held, stored + i, size);
        memcpy(origin, center + i, size);
        VEC u = NAME(load)(held), out;
        NAME(around)(&h, &u, origin, &out, 1);
        memcpy(w + i, &out, size);
    }
}

#undef LANES
