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

/* x^e for x >= 0. */
INLINE VEC NAME(power)(VEC x, const struct NAME(exponent) *e) {
    if (e->kind == GENERAL) return NAME(general)(x, e);
    if (e->kind == SQUARE) return x * x;
    if (e->kind == TENTH_POWER) {
        const VEC x2 = x * x, x4 = x2 * x2;
        return x4 * x4 * x2;
    }
    if (e->kind == ROOT) return ROOT_OF(x);
    VEC result = (VEC){0} + 1, square = x;
    for (long bits = e->whole; bits; bits >>= 1, square *= square)
        if (bits & 1) result *= square;
    if (e->quarters == 0) return result;
    const VEC root = ROOT_OF(x);
    if (e->quarters == 2) return result * root;
    return e->quarters == 1 ? result * ROOT_OF(root) : result * root * ROOT_OF(root);
}

/* sign(c)|c|^(p-1) + (w - c)/T with c = w up to the knee. */
INLINE VEC NAME(mirror)(const struct NAME(update) *h, VEC w) {
    const VEC size = NAME(size)(w), c = h->bent ? NAME(at_most)(size, h->knee) : size;
    const VEC value = NAME(power)(c, &h->mirror);
    return NAME(with_sign)(h->bent ? value + (size - c) / h->slope : value, w);
}

/* sign(c)|c|^(1/(p-1)) + (u - c) T with c = u up to the knee; 0 where that is subnormal. */
INLINE VEC NAME(inverse)(const struct NAME(update) *h, VEC u) {
    const VEC size = NAME(size)(u), c = h->bent ? NAME(at_most)(size, h->dual_knee) : size;
    const VEC value = NAME(power)((VEC)((INTS)c & ~(size < h->floor)), &h->inverse);
    return NAME(with_sign)(h->bent ? value + (size - c) * h->slope : value, u);
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
 * _formula.py. */
INLINE VEC NAME(move_primal)(const struct NAME(update) *h, VEC w, VEC d) {
    const VEC step = h->lr * d;
    if (h->linear) return h->keep * w - step; /* p = 2 */
    if (h->bent) {                           /* p < 2, where u does not underflow */
        const VEC u = NAME(mirror)(h, w), moved = u - (step + h->decay * u);
        return NAME(pick)(moved == u, w, NAME(inverse)(h, moved));
    }
    const VEC size = NAME(power)(NAME(size)(w), &h->mirror);
    const INTS small = NAME(size)(step) <= size;
    const VEC divisor = NAME(pick)(size < SMALLEST, SMALLEST + (VEC){0}, size);
    const VEC ratio = (VEC)((INTS)step ^ ((INTS)w & SIGN_BIT)) / divisor;
    const VEC argument =
        NAME(pick)(small, h->keep - ratio, h->keep * NAME(with_sign)(size, w) - step);
    const VEC grown = NAME(with_sign)(NAME(power)(NAME(size)(argument), &h->inverse), argument);
    return NAME(pick)(small, w * grown, grown);
}

/* Take the step of LANES weights; `sum` is the checksum so far, of what is written. */
INLINE void NAME(step_vector)(const struct NAME(update) *h, REAL *w,
                              const REAL *g, REAL *stored, REAL *m, REAL *v, INTS *bad,
                              const uint32_t *keys, long_words *sum) {
    const VEC d = NAME(direction)(h, NAME(load)(g), m, v, bad), old = NAME(load)(w);
    VEC new;
    if (h->storage == DUAL) {
        const VEC u = NAME(load)(stored), moved = NAME(move_dual)(h, u, d);
        new = NAME(pick)(moved == u, old, NAME(inverse)(h, moved));
        NAME(store)(stored, moved);
    } else if (h->storage == WIDE) {
        const VEC base = NAME(load)(stored), moved = NAME(move_primal)(h, base, d);
        new = NAME(pick)(moved == base, old, moved);
        NAME(store)(stored, moved);
    } else
        new = NAME(move_primal)(h, old, d);
    NAME(store)(w, new);
    if (h->storage != PRIMAL) *sum += hash_vector((words)new, keys);
}

/* Take the step of a block: w and g hold its weights and gradient, w is written. Adds to the
 * checksum; returns whether the gradient was finite. */
INLINE int NAME(step_all)(const struct NAME(update) *h, REAL *w,
                          const REAL *g, REAL *stored, REAL *m, REAL *v, long n,
                          long_words *sum) {
    INTS bad = {0};
    const uint32_t *keys = checksum_keys;
    long i = 0;
    for (; i + LANES <= n; i += LANES, keys += WIDTH / 4) {
        NAME(step_vector)(h, w + i, g + i, stored + i, m + i, v + i, &bad, keys, sum);
    }
    if (i < n) { /* the rest, in a vector of its own */
        REAL rest[5][LANES], *parts[5] = {w, (REAL *)g, stored, m, v};
        memset(rest, 0, sizeof rest);
        for (int k = 0; k < 5; k++)
            memcpy(rest[k], parts[k] + i, (n - i) * sizeof(REAL));
        NAME(step_vector)(h, rest[0], rest[1], rest[2], rest[3], rest[4], &bad, keys, sum);
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
            NAME(store)(held, NAME(inverse)(&h, NAME(load)(held)));
            NAME(store)(fresh, NAME(mirror)(&h, NAME(load)(weight)));
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
#define CASE(STORAGE, METHOD, BENT, INVERSE)                                               \
    if (h.storage == STORAGE && h.method == METHOD && h.bent == BENT &&                    \
        h.inverse.kind == INVERSE) {                                                       \
        h.storage = STORAGE, h.method = METHOD, h.bent = BENT, h.inverse.kind = INVERSE;   \
        finite = NAME(step_all)(&h, w, g, stored, m, v, n, &sums);                         \
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
    finite = NAME(step_all)(&h, w, g, stored, m, v, n, &sums);
#undef CASE
    *sum = add_up(sums);
    return finite;
}

#undef LANES
