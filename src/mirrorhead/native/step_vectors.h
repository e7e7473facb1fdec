/* The step in one floating-point type, vector by vector. step.c includes this for float and for
 * double: REAL, VEC, INTS, NAME and the others are set there.
 */

#define LANES ((long)(WIDTH / sizeof(REAL)))

/* A rule and the numbers of one tensor, in REAL. */
INLINE struct NAME(update) NAME(update_of)(const struct rule *rule, const struct tensor *t) {
    const struct exponent *e = &rule->mirror, *f = &rule->inverse;
    return (struct NAME(update)){
        .lr = (REAL)t->lr,
        .decay = (REAL)t->decay,
        .keep = (REAL)(1 - t->decay),
        .dither = (REAL)t->dither,
        .grad_scale = (REAL)t->grad_scale,
        .momentum = (REAL)t->momentum,
        .gain1 = (REAL)t->gain1,
        .beta2 = (REAL)t->beta2,
        .gain2 = (REAL)t->gain2,
        .eps = (REAL)t->eps,
        .root_bias = (REAL)t->root_bias,
        .knee = (REAL)t->knee,
        .dual_knee = (REAL)t->dual_knee,
        .slope = (REAL)t->slope,
        .floor = (REAL)rule->dual_floor,
        .mirror = {(REAL)e->value, (REAL)e->high, (REAL)e->low, e->kind, e->whole, e->quarters},
        .inverse = {(REAL)f->value, (REAL)f->high, (REAL)f->low, f->kind, f->whole, f->quarters},
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

/* x^e for x >= 0, of each of `count` vectors. */
INLINE void NAME(power)(VEC *x, int count, const struct NAME(exponent) *e) {
    if (e->kind == GENERAL) {
        NAME(general)(x, count, e);
        return;
    }
    for (int k = 0; k < count; k++) {
        if (e->kind == SQUARE)
            x[k] *= x[k];
        else if (e->kind == TENTH_POWER) {
            const VEC x2 = x[k] * x[k], x4 = x2 * x2;
            x[k] = x4 * x4 * x2;
        } else if (e->kind == ROOT)
            x[k] = ROOT_OF(x[k]);
        else {
            VEC result = (VEC){0} + 1, square = x[k];
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

/* The line beyond the knee (and for NaN), the curve up to it. A sum of the two would round
 * differently where the compiler fuses the last product of the power with it, and where it does
 * not; then a weight read again after a checkpoint would look edited. */
INLINE VEC NAME(beyond)(VEC size, REAL knee, VEC line, VEC curve) {
    const INTS near = size <= knee;
    return (VEC)(((INTS)curve & near) | ((INTS)line & ~near));
}

/* sign(w)|w|^(p-1) up to the knee, and the line with slope 1/T beyond. */
INLINE void NAME(mirror)(const struct NAME(update) *h, const VEC *w, VEC *out, int count) {
    for (int k = 0; k < count; k++)
        out[k] = h->bent ? NAME(at_most)(NAME(size)(w[k]), h->knee) : NAME(size)(w[k]);
    NAME(power)(out, count, &h->mirror);
    for (int k = 0; k < count; k++) {
        const VEC size = NAME(size)(w[k]), line = h->dual_knee + (size - h->knee) / h->slope;
        out[k] = NAME(with_sign)(h->bent ? NAME(beyond)(size, h->knee, line, out[k]) : out[k], w[k]);
    }
}

/* sign(u)|u|^(1/(p-1)) up to the knee, and the line with slope T beyond; 0 where that is subnormal. */
INLINE void NAME(inverse)(const struct NAME(update) *h, const VEC *u, VEC *out, int count) {
    for (int k = 0; k < count; k++) {
        const VEC size = NAME(size)(u[k]), c = h->bent ? NAME(at_most)(size, h->dual_knee) : size;
        out[k] = (VEC)((INTS)c & ~(size < h->floor));
    }
    NAME(power)(out, count, &h->inverse);
    for (int k = 0; k < count; k++) {
        const VEC size = NAME(size)(u[k]), line = h->knee + (size - h->dual_knee) * h->slope;
        out[k] = NAME(with_sign)(h->bent ? NAME(beyond)(size, h->dual_knee, line, out[k]) : out[k], u[k]);
    }
}

/* The direction d of the step, from the gradient and the moments, which are updated. */
INLINE VEC NAME(direction)(const struct NAME(update) *h, VEC g, REAL *m,
                           REAL *v, INTS *bad) {
    const INTS wrong = ~(NAME(size)(g) <= LARGEST);
    *bad |= wrong;
    g = (VEC)((INTS)g & ~wrong) * h->grad_scale;
    if (h->method == DESCENT) return g;
    VEC first = NAME(load)(m);
    if (h->method == ADAM) {
        const VEC second = h->beta2 * NAME(load)(v) + h->gain2 * (g * g);
        first += h->gain1 * (g - first);
        NAME(store)(m, first);
        NAME(store)(v, second);
        return first / (ROOT_OF(second) * h->root_bias + h->eps);
    }
    first = h->momentum * first + g;
    NAME(store)(m, first);
    return h->method == NESTEROV ? g + h->momentum * first : first;
}

/* u - (lr d + decay u), with dither: see _dithered of _formula.py. */
INLINE VEC NAME(move_dual)(const struct NAME(update) *h, VEC u, VEC d) {
    const VEC gap = u - (u - u * (REAL)(0.7 * EPSILON));
    return u - ((h->lr * d + h->decay * u) - h->dither * gap);
}

/* inverse((1 - decay) mirror(w) - lr d), measured by the larger of the two: see relative of
 * _formula.py. The result is in d. */
INLINE void NAME(move_primal)(const struct NAME(update) *h, const VEC *w, VEC *d, int count) {
    VEC size[CHUNK], moved[CHUNK];
    if (h->linear) { /* p = 2 */
        for (int k = 0; k < count; k++) d[k] = h->keep * w[k] - h->lr * d[k];
        return;
    }
    if (h->bent) { /* p < 2, where u does not underflow */
        NAME(mirror)(h, w, size, count);
        for (int k = 0; k < count; k++) moved[k] = size[k] - (h->lr * d[k] + h->decay * size[k]);
        NAME(inverse)(h, moved, d, count);
        for (int k = 0; k < count; k++) d[k] = NAME(pick)(moved[k] == size[k], w[k], d[k]);
        return;
    }
    for (int k = 0; k < count; k++) size[k] = NAME(size)(w[k]);
    NAME(power)(size, count, &h->mirror);
    for (int k = 0; k < count; k++) {
        const VEC step = h->lr * d[k];
        const INTS small = NAME(size)(step) <= size[k];
        const VEC divisor = NAME(pick)(size[k] < SMALLEST, SMALLEST + (VEC){0}, size[k]);
        const VEC ratio = (VEC)((INTS)step ^ ((INTS)w[k] & SIGN_BIT)) / divisor;
        const VEC argument =
            NAME(pick)(small, h->keep - ratio, h->keep * NAME(with_sign)(size[k], w[k]) - step);
        d[k] = (VEC)((INTS)NAME(pick)(small, w[k], (VEC){0} + 1) ^ ((INTS)argument & SIGN_BIT));
        moved[k] = NAME(size)(argument);
    }
    NAME(power)(moved, count, &h->inverse);
    for (int k = 0; k < count; k++) d[k] *= moved[k];
}

/* Take the step of `count` vectors of weights. Adds to the checksum of what is written. */
INLINE void NAME(step_vectors)(const struct NAME(update) *h, REAL *w, const REAL *g, REAL *stored,
                               REAL *m, REAL *v, int count, INTS *bad, const uint32_t *keys,
                               long_words *sum) {
    VEC d[CHUNK], base[CHUNK], new[CHUNK];
    REAL *from = h->storage == PRIMAL ? w : stored; /* what is moved */
    for (int k = 0; k < count; k++) {
        d[k] = NAME(direction)(h, NAME(load)(g + k * LANES), m + k * LANES, v + k * LANES, bad);
        base[k] = NAME(load)(from + k * LANES);
        if (h->storage == DUAL) d[k] = NAME(move_dual)(h, base[k], d[k]);
    }
    if (h->storage == DUAL)
        NAME(inverse)(h, d, new, count);
    else
        NAME(move_primal)(h, base, d, count);
    for (int k = 0; k < count; k++) {
        VEC result = h->storage == DUAL ? new[k] : d[k];
        if (h->storage != PRIMAL) { /* a weight that has not moved keeps its bits */
            result = NAME(pick)(d[k] == base[k], NAME(load)(w + k * LANES), result);
            NAME(store)(stored + k * LANES, d[k]);
            *sum += hash_vector((words)result, keys + k * (WIDTH / 4));
        }
        NAME(store)(w + k * LANES, result);
    }
}

/* Take the step of a block, `together` vectors at a time. Returns whether the gradient is finite. */
INLINE int NAME(step_all)(const struct NAME(update) *h, REAL *w, const REAL *g, REAL *stored,
                          REAL *m, REAL *v, long n, int together, long_words *sum) {
    INTS bad = {0};
    const uint32_t *keys = checksum_keys;
    const long size = sizeof(REAL) / 4; /* words in a weight */
    long i = 0;
    for (const long step = together * LANES; i + step <= n; i += step)
        NAME(step_vectors)(h, w + i, g + i, stored + i, m + i, v + i, together, &bad,
                           keys + size * i, sum);
    if (together > 1)
        for (; i + LANES <= n; i += LANES)
            NAME(step_vectors)(h, w + i, g + i, stored + i, m + i, v + i, 1, &bad,
                               keys + size * i, sum);
    if (i < n) { /* the rest, in a vector of its own */
        REAL rest[5][LANES], *parts[5] = {w, (REAL *)g, stored, m, v};
        memset(rest, 0, sizeof rest);
        for (int k = 0; k < 5; k++) memcpy(rest[k], parts[k] + i, (n - i) * sizeof(REAL));
        NAME(step_vectors)(h, rest[0], rest[1], rest[2], rest[3], rest[4], 1, &bad,
                           keys + size * i, sum);
        for (int k = 4; k >= 0; k--) /* w last: it stands for parts that a rule does not have */
            if (k != 1) memcpy(parts[k] + i, rest[k], (n - i) * sizeof(REAL));
    }
    long any = 0;
    for (long k = 0; k < LANES; k++) any |= bad[k];
    return !any;
}

/* Whether w is what the last step wrote, given `held`, the weight before rounding. */
static inline int NAME(same)(const struct rule *rule, REAL held, REAL w) {
    if (rule->dtype == BFLOAT16 && rule->stochastic) { /* either neighbour may have been written */
        const REAL apart = held > w ? held - w : w - held;
        return apart <= (REAL)(1.01 * 0x1p-7) * (held < 0 ? -held : held) + (REAL)0x1p-132;
    }
    if (rule->dtype == BFLOAT16) return as_float((uint32_t)to_bfloat16((float)held) << 16) == w;
    if (rule->dtype == FLOAT16) return from_float16(to_float16((float)held)) == w;
    return held == w;
}

/* Where w was edited from outside, the stored value follows it. */
static __attribute__((noinline)) void NAME(follow_edits)(const struct rule *rule,
                                                         const struct tensor *t, const REAL *w,
                                                         REAL *stored, long n) {
    const struct NAME(update) h = NAME(update_of)(rule, t);
    for (long i = 0; i < n; i += LANES) {
        const long count = n - i < LANES ? n - i : LANES;
        REAL weight[LANES], held[LANES], fresh[LANES];
        memset(weight, 0, sizeof weight);
        memset(held, 0, sizeof held);
        memcpy(weight, w + i, count * sizeof(REAL));
        memcpy(held, stored + i, count * sizeof(REAL));
        memcpy(fresh, weight, sizeof fresh);
        if (rule->storage == DUAL) {
            VEC u = NAME(load)(held), x = NAME(load)(weight), out;
            NAME(inverse)(&h, &u, &out, 1);
            NAME(store)(held, out);
            NAME(mirror)(&h, &x, &out, 1);
            NAME(store)(fresh, out);
        }
        for (long k = 0; k < count; k++)
            if (!NAME(same)(rule, held[k], weight[k])) stored[i + k] = fresh[k];
    }
}

/* Take the step of one block: the most usual rules have loops of their own, without a branch. */
static int NAME(advance)(const struct rule *rule, const struct tensor *t, REAL *w, const REAL *g,
                         long first, long n, int unedited, uint64_t *sum) {
    /* What a rule does not have is never touched: w stands for it. */
    REAL *stored = t->stored ? (REAL *)t->stored + first : w;
    REAL *m = t->m ? (REAL *)t->m + first : w, *v = t->v ? (REAL *)t->v + first : w;
    if (rule->storage != PRIMAL && !unedited) NAME(follow_edits)(rule, t, w, stored, n);
    struct NAME(update) h = NAME(update_of)(rule, t);
    long_words sums = {0};
    int finite;
#define CASE(STORAGE, METHOD, BENT, INVERSE, TOGETHER)                                     \
    if (h.storage == STORAGE && h.method == METHOD && h.bent == BENT &&                    \
        h.inverse.kind == INVERSE) {                                                       \
        h.storage = STORAGE, h.method = METHOD, h.bent = BENT, h.inverse.kind = INVERSE;   \
        finite = NAME(step_all)(&h, w, g, stored, m, v, n, TOGETHER, &sums);               \
    } else
    CASE(DUAL, DESCENT, 0, TENTH_POWER, CHUNK)
    CASE(DUAL, DESCENT, 0, SQUARE, CHUNK)
    CASE(DUAL, DESCENT, 0, GENERAL, CHUNK)
    CASE(DUAL, MOMENTUM, 0, TENTH_POWER, CHUNK)
    CASE(PRIMAL, DESCENT, 0, ROOT, 1)
    CASE(PRIMAL, DESCENT, 0, GENERAL, CHUNK)
    CASE(DUAL, ADAM, 1, TENTH_POWER, CHUNK)
    CASE(DUAL, ADAM, 1, SQUARE, CHUNK)
    CASE(DUAL, ADAM, 1, GENERAL, CHUNK)
    finite = NAME(step_all)(&h, w, g, stored, m, v, n, CHUNK, &sums);
#undef CASE
    *sum = add_up(sums);
    return finite;
}

#undef LANES
