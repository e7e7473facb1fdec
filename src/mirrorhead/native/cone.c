/* The cone method of _conic.py for Schatten(1) and Schatten(inf), one small problem at a time.
 *
 * It takes the steps of _conic.py with the scaling of _spectral_cone.py, under the same names, from
 * a given start. The caller judges what comes out by its certificate. Matrices are stored by rows.
 */
#include <stdlib.h>
#include <string.h>

#include "lapack.h"

#define LAPACK EXPORT(lapack)

struct move {
    double *x, *z, *u, *lam, *scaled_x, *scaled_z;
};

struct program {
    int summed;              /* p = 1 */
    long n, R, a, c, k;      /* blocks, rows of a block, W is a x c, the order a + c */
    long m, small, large;    /* rows at present, min(a, c), max(a, c) */
    const double *right;     /* (n, c) */
    double *left, *b;        /* (m, a), (m): the rows that are not padding */
    long *block, *place;     /* the block of each row, and its number */
    double *x, *z, *u, *lam; /* the point */
    /* The scaling; the second line only for p = inf. */
    double *G, *V, *values, *system, *factor, *scale, *column, *against, corner, pivot;
    double *B, *C, *B_inverse, *C_inverse, *frame, *k_of, *E, *F, *own, *swap, *gain;
    double *plus_t, *minus_t, *plus, *minus;
    struct move moves[2];
    double *r, *push, *rhs, *rest, *fixed, *dS, *image; /* a step */
    double *p1, *p2, *p3, *q1, *q2, *q3, *vector, *work; /* products */
    int *iwork, lwork;
};

/* out = op(x) op(y), (rows, columns), with sums of `inner` terms; the lengths of stored rows follow x, y, out. */
static void mul(const char *op_x, const char *op_y, long rows, long columns, long inner,
                const double *x, long ld_x, const double *y, long ld_y, double *out, long ld_out) {
    const int i = (int)rows, j = (int)columns, s = (int)inner;
    const int lx = (int)ld_x, ly = (int)ld_y, lo = (int)ld_out;
    const double one = 1, zero = 0;
    LAPACK.gemm(op_y, op_x, &j, &i, &s, &one, y, &ly, x, &lx, &zero, out, &lo);
}

/* The lower Cholesky factor of the square matrix x, in place, with zeros above; 1 if there is none. */
static int cholesky(double *x, long n) {
    const int size = (int)n;
    int failed;
    LAPACK.potrf("U", &size, x, &size, &failed);
    for (long i = 0; i < n; i++) EACH(j, n - i - 1) x[i * n + i + 1 + j] = 0;
    return failed;
}

/* x, (rows, n), times L^-T (transposed) or L^-1, of a lower factor L. */
static void divide(const double *L, long n, const char *transposed, double *x, long rows) {
    const int size = (int)n, count = (int)rows;
    const double one = 1;
    LAPACK.trsm("L", "U", transposed, "N", &size, &count, &one, L, &size, x, &size);
}

static void transpose(const double *x, long rows, long columns, double *out) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j++) out[j * rows + i] = x[i * columns + j];
}

/* (A W)_t = left_t' W right_i for W, (a, c), whose rows are ld apart. */
static void apply(const struct program *S, const double *W, long ld, double *out) {
    mul("N", "T", S->n, S->a, S->c, S->right, S->c, W, ld, S->image, S->a);
    for (long t = 0; t < S->m; t++)
        out[t] = dot(S->left + t * S->a, S->image + S->block[t] * S->a, S->a);
}

static void adjoint(const struct program *S, const double *lam, double *out) {
    memset(S->image, 0, S->n * S->a * sizeof *S->image);
    for (long t = 0; t < S->m; t++) {
        double *pulled = S->image + S->block[t] * S->a;
        EACH(i, S->a) pulled[i] += lam[t] * S->left[t * S->a + i];
    }
    mul("T", "N", S->a, S->c, S->n, S->image, S->a, S->right, S->c, out, S->c);
}

/* The blocks (1, 2) and (2, 1) of x become sign W and its transpose. */
static void set_off(const struct program *S, double *x, const double *W, double sign) {
    for (long i = 0; i < S->a; i++)
        for (long j = 0; j < S->c; j++)
            x[i * S->k + S->a + j] = x[(S->a + j) * S->k + i] = sign * W[i * S->c + j];
}

/* out = G' x G */
static void in_scale(const struct program *S, const double *x, double *out) {
    mul("N", "N", S->k, S->k, S->k, x, S->k, S->G, S->k, S->p1, S->k);
    mul("T", "N", S->k, S->k, S->k, S->G, S->k, S->p1, S->k, out, S->k);
}

/* Half the sum and half the difference of y and t, where y + k t k and t + k y k are given by
 * their sum and difference in plus and minus. */
static void halve(const struct program *S, double *plus, double *minus) {
    for (long i = 0; i < S->large; i++)
        EACH(j, S->large) {
            const double both = S->k_of[i] * S->k_of[j];
            plus[i * S->large + j] *= 0.5 / (1 + both);
            minus[i * S->large + j] *= 0.5 / (1 - both);
        }
}

/* y k + k t, (a, c) */
static double coupled(const struct program *S, const double *plus, const double *minus, long i,
                      long j) {
    const double *k = S->k_of;
    return plus[i * S->large + j] * (k[i] + k[j]) + minus[i * S->large + j] * (k[j] - k[i]);
}

static double half_trace(const struct program *S, const double *plus, const double *minus) {
    return 0.5 * SUM(i, S->large * S->large,
                     plus[i] * (S->E[i] + S->F[i]) + minus[i] * (S->E[i] - S->F[i]));
}

/* The sum and the difference of x (a, a) and y (c, c), both filled up with zeros. */
static void widen(const struct program *S, const double *x, long ld_x, const double *y, long ld_y,
                  double *plus, double *minus) {
    for (long i = 0; i < S->large; i++)
        for (long j = 0; j < S->large; j++) {
            const double one = i < S->a && j < S->a ? x[i * ld_x + j] : 0;
            const double two = i < S->c && j < S->c ? y[i * ld_y + j] : 0;
            plus[i * S->large + j] = one + two;
            minus[i * S->large + j] = one - two;
        }
}

/* A H A' for p = 1: Hadamard products of Gram matrices. */
static void fill_summed(struct program *S) {
    const long a = S->a, c = S->c, m = S->m, n = S->n, k = S->k;
    mul("N", "N", m, a, a, S->left, a, S->V, k, S->q1, a);
    mul("N", "T", m, m, a, S->q1, a, S->left, a, S->system, m);
    mul("N", "N", n, c, c, S->right, c, S->V + a * k + a, k, S->q1, c);
    mul("N", "T", n, n, c, S->q1, c, S->right, c, S->q2, n);
    mul("N", "N", m, c, a, S->left, a, S->V + a, k, S->q1, c);
    mul("N", "T", m, n, c, S->q1, c, S->right, c, S->q3, n);
    for (long t = 0; t < m; t++) {
        const double *side = S->q3 + t * n, *pair = S->q2 + S->block[t] * n;
        const long i = S->block[t];
        for (long s = 0; s < m; s++) {
            const long j = S->block[s];
            S->system[t * m + s] = S->system[t * m + s] * pair[j] + side[j] * S->q3[s * n + i];
        }
    }
}

/* The coordinates B, C and k of p = inf, what t does there, and A H A'. */
static void fill_largest(struct program *S) {
    const long a = S->a, c = S->c, m = S->m, n = S->n, k = S->k, large = S->large, small = S->small;
    const int wide = (int)c, high = (int)a;
    int failed;
    double *one = S->p1, *two = S->p2, *half = S->p3, *U = S->B_inverse, *Q = S->C_inverse;
    for (long i = 0; i < a; i++) memcpy(one + i * a, S->V + i * k, a * sizeof *one);
    for (long i = 0; i < a; i++) memcpy(half + i * c, S->V + i * k + a, c * sizeof *half);
    for (long i = 0; i < c; i++) memcpy(two + i * c, S->V + (a + i) * k + a, c * sizeof *two);
    cholesky(one, a);
    cholesky(two, c);
    divide(two, c, "T", half, a); /* V12 L2^-T */
    transpose(half, a, c, S->q1);
    divide(one, a, "T", S->q1, c);
    transpose(S->q1, c, a, half);
    for (long i = 0; i < a * c; i++) half[i] = isfinite(half[i]) ? half[i] : 0;
    memset(S->k_of, 0, large * sizeof *S->k_of);
    /* Stored by columns this is the transpose: U and V change places. */
    LAPACK.gesdd("A", &wide, &high, half, &wide, S->k_of, S->q1, &wide, U, &high, S->work,
                 &S->lwork, S->iwork, &failed);
    transpose(S->q1, c, c, Q);
    EACH(i, small) S->k_of[i] = fmin(S->k_of[i], 1 - 1e-16);
    mul("N", "N", a, a, a, one, a, U, a, S->B, a);
    mul("N", "N", c, c, c, two, c, Q, c, S->C, c);
    transpose(U, a, a, S->q1); /* L^-T U from U' L^-1 */
    divide(one, a, "N", S->q1, a);
    transpose(S->q1, a, a, U);
    transpose(Q, c, c, S->q1);
    divide(two, c, "N", S->q1, c);
    transpose(S->q1, c, c, Q);
    mul("T", "N", a, k, a, U, a, S->G, k, S->frame, k);
    mul("T", "N", c, k, c, Q, c, S->G + a * k, k, S->frame + a * k, k);
    mul("T", "N", a, a, a, U, a, U, a, S->q1, a);
    mul("T", "N", c, c, c, Q, c, Q, c, S->q2, c);
    widen(S, S->q1, a, S->q2, c, S->plus_t, S->minus_t);
    EACH(i, large * large) {
        S->E[i] = 0.5 * (S->plus_t[i] + S->minus_t[i]);
        S->F[i] = 0.5 * (S->plus_t[i] - S->minus_t[i]);
    }
    halve(S, S->plus_t, S->minus_t);
    for (long i = 0; i < a; i++)
        for (long j = 0; j < c; j++) {
            const double x = S->k_of[i], y = S->k_of[j];
            S->own[i * c + j] = (1 - x * x) * (1 - y * y) / ((1 - x * y) * (1 + x * y));
            if (i < small && j < small) S->swap[i * small + j] = -x * y * S->own[i * c + j];
            S->gain[i * c + j] = coupled(S, S->plus_t, S->minus_t, i, j);
        }
    /* The rows in these coordinates. */
    double *left = S->q1, *right = S->q2, *both = S->q3, *weights = S->p1, *scaled = S->vector;
    double *turned = scaled + m * a, *after = turned + m * small;
    mul("N", "N", m, a, a, S->left, a, S->B, a, left, a);
    mul("N", "N", n, c, c, S->right, c, S->C, c, right, c);
    for (long i = 0, t = 0; i < n; i++) {
        const double *mine = right + i * c;
        const long start = t;
        while (t < m && S->block[t] == i) t++;
        if (t == start) continue;
        for (long j = 0; j < n; j++) EACH(y, c) both[j * c + y] = mine[y] * right[j * c + y];
        mul("N", "T", n, a, c, both, c, S->own, c, weights, a);
        for (long s = 0; s < m; s++)
            EACH(x, small) turned[s * small + x] = left[s * a + x] * mine[x];
        mul("N", "N", m, small, small, turned, small, S->swap, small, after, small);
        for (long s = 0; s < m; s++) {
            const double *w = weights + S->block[s] * a, *other = right + S->block[s] * c;
            EACH(x, a) scaled[s * a + x] = left[s * a + x] * w[x];
            EACH(x, small) scaled[s * a + x] += after[s * small + x] * other[x];
        }
        mul("N", "T", t - start, m, a, left + start * a, a, scaled, a, S->system + start * m, m);
    }
    mul("N", "T", n, a, c, right, c, S->gain, c, weights, a);
    for (long t = 0; t < m; t++) S->column[t] = dot(left + t * a, weights + S->block[t] * a, a);
    S->corner = half_trace(S, S->plus_t, S->minus_t);
}

/* y = factor^-1 y */
static void solve_factor(const struct program *S, double *y) {
    const int size = (int)S->m, one = 1;
    int failed;
    LAPACK.potrs("U", &size, &one, S->factor, &size, y, &size, &failed);
}

/* The scaling at the point, and the factors of its system. */
static void scale_point(struct program *S) {
    const long k = S->k, m = S->m;
    const int order = (int)k;
    int failed = 1;
    double *L = S->p3;
    memcpy(L, S->x, k * k * sizeof *L);
    cholesky(L, k);
    mul("N", "N", k, k, k, S->z, k, L, k, S->p1, k);
    mul("T", "N", k, k, k, L, k, S->p1, k, S->p2, k);
    LAPACK.syev("V", "U", &order, S->p2, &order, S->values, S->work, &S->lwork, &failed);
    EACH(i, k) S->values[i] = sqrt(fmax(S->values[i], 1e-300));
    mul("N", "T", k, k, k, L, k, S->p2, k, S->G, k);
    for (long i = 0; i < k; i++) EACH(j, k) S->G[i * k + j] /= sqrt(S->values[j]);
    mul("N", "T", k, k, k, S->G, k, S->G, k, S->V, k);
    if (S->summed)
        fill_summed(S);
    else
        fill_largest(S);
    for (long t = 0; t < m; t++) {
        S->system[t * m + t] += S->u[t] / S->lam[t];
        S->scale[t] = 1 / sqrt(S->system[t * m + t]);
    }
    for (long t = 0; t < m; t++)
        EACH(s, m) S->system[t * m + s] *= S->scale[t] * S->scale[s];
    const int size = (int)m;
    failed = 1;
    for (double jitter = 0; failed && jitter < 1e-2; jitter = jitter ? 100 * jitter : 1e-14) {
        memcpy(S->factor, S->system, m * m * sizeof *S->factor);
        for (long t = 0; t < m; t++) S->factor[t * m + t] *= 1 + jitter;
        LAPACK.potrf("U", &size, S->factor, &size, &failed);
    }
    if (S->summed) return;
    EACH(t, m) S->against[t] = S->column[t] *= S->scale[t];
    solve_factor(S, S->against);
    S->pivot = S->corner + dot(S->column, S->against, m);
}

/* y and t with (A H A' + diag) y + column t = rhs and column' y - corner t = s; returns t. */
static double solve(struct program *S, double s, double *y) {
    const long m = S->m;
    double t = 0;
    EACH(i, m) S->rhs[i] *= S->scale[i];
    memset(y, 0, m * sizeof *y);
    for (int round = 0; round < 3; round++) {
        for (long i = 0; i < m; i++)
            S->rest[i] = S->rhs[i] - (round ? dot(S->system + i * m, y, m) : 0) -
                         (S->summed ? 0 : S->column[i] * t);
        solve_factor(S, S->rest);
        EACH(i, m) y[i] += S->rest[i];
        if (S->summed) continue;
        const double more = (dot(S->column, y, m) - S->corner * t - s) / S->pivot;
        EACH(i, m) y[i] -= S->against[i] * more;
        t += more;
    }
    EACH(i, m) y[i] *= S->scale[i];
    return t;
}

/* The step with dx + dz = r in scaled coordinates and u + du = push - (u/lam) dlam. */
static void direction(struct program *S, struct move *d) {
    const long a = S->a, c = S->c, k = S->k, m = S->m, large = S->large;
    double *fixed = S->fixed, *side = S->q1, surplus = 0;
    mul("N", "N", k, k, k, S->summed ? S->G : S->frame, k, S->r, k, S->p1, k);
    if (S->summed)
        mul("N", "T", a, c, k, S->p1, k, S->G + a * k, k, fixed, c);
    else {
        mul("N", "T", k, k, k, S->p1, k, S->frame, k, S->p2, k);
        widen(S, S->p2, k, S->p2 + a * k + a, k, S->plus, S->minus);
        halve(S, S->plus, S->minus);
        surplus = half_trace(S, S->plus, S->minus) + 0.5 * SUM(i, k, S->z[i * k + i]) - 1;
        for (long i = 0; i < a; i++)
            for (long j = 0; j < c; j++)
                side[i * c + j] = S->p2[i * k + a + j] - coupled(S, S->plus, S->minus, i, j);
        mul("N", "N", a, c, a, S->B, a, side, c, S->q2, c);
        mul("N", "T", a, c, c, S->q2, c, S->C, c, fixed, c);
    }
    for (long i = 0; i < a; i++) EACH(j, c) S->q3[i * c + j] = S->x[i * k + a + j] + fixed[i * c + j];
    apply(S, S->q3, c, S->rhs);
    EACH(t, m) S->rhs[t] = S->b[t] + S->push[t] - S->rhs[t];
    const double dt = solve(S, -surplus, d->lam);
    adjoint(S, d->lam, S->dS);
    memset(d->z, 0, k * k * sizeof *d->z);
    set_off(S, d->z, S->dS, -1);
    if (!S->summed) {
        double *y = S->q2, *t = S->q3;
        mul("T", "N", a, c, a, S->B, a, S->dS, c, S->p1, c);
        mul("N", "N", a, c, c, S->p1, c, S->C, c, y, c);
#define SIDE(i, j) ((i) < a && (j) < c ? y[(i) * c + (j)] : 0)
        for (long i = 0; i < a; i++)
            for (long j = 0; j < c; j++) {
                const int inside = i < S->small && j < S->small;
                side[i * c + j] += S->own[i * c + j] * y[i * c + j] + dt * S->gain[i * c + j] +
                                   (inside ? S->swap[i * S->small + j] * y[j * c + i] : 0);
            }
        for (long i = 0; i < large; i++)
            for (long j = 0; j < large; j++) {
                const double ki = S->k_of[i], kj = S->k_of[j], one = SIDE(i, j), two = SIDE(j, i);
                const long at = i * large + j;
                S->plus[at] += 0.5 * (one + two) * (ki + kj) / (1 + ki * kj) - dt * S->plus_t[at];
                S->minus[at] += 0.5 * (one - two) * (kj - ki) / (1 - ki * kj) - dt * S->minus_t[at];
            }
#undef SIDE
        /* dW, and the blocks of dz. */
        mul("N", "N", a, c, a, S->B, a, side, c, S->p1, c);
        mul("N", "T", a, c, c, S->p1, c, S->C, c, side, c);
        memset(d->x, 0, k * k * sizeof *d->x);
        set_off(S, d->x, side, 1);
        for (long i = 0; i < k; i++) d->x[i * k + i] = dt;
        for (long block = 0; block < 2; block++) {
            const long size = block ? c : a, at = block ? a * k + a : 0;
            const double *inverse = block ? S->C_inverse : S->B_inverse, sign = block ? -1 : 1;
            for (long i = 0; i < size; i++)
                EACH(j, size) t[i * size + j] =
                    S->plus[i * large + j] + sign * S->minus[i * large + j];
            mul("N", "N", size, size, size, inverse, size, t, size, S->p1, size);
            mul("N", "T", size, size, size, S->p1, size, inverse, size, d->z + at, k);
        }
    }
    in_scale(S, d->z, d->scaled_z);
    EACH(i, k * k) d->scaled_x[i] = S->r[i] - d->scaled_z[i];
    if (S->summed) {
        mul("N", "N", k, k, k, S->G, k, d->scaled_x, k, S->p1, k);
        mul("N", "T", k, k, k, S->p1, k, S->G, k, d->x, k);
    }
    EACH(t, m) d->u[t] = S->push[t] - S->u[t] - S->u[t] / S->lam[t] * d->lam[t];
}

/* The smallest and the largest eigenvalue of a scaled move relative to the point. */
static void extremes(struct program *S, const double *move, double *least, double *most) {
    const long k = S->k;
    const int order = (int)k;
    int failed;
    for (long i = 0; i < k; i++)
        EACH(j, k) S->p1[i * k + j] = move[i * k + j] / sqrt(S->values[i] * S->values[j]);
    for (long i = 0; i < k * k; i++) S->p1[i] = isfinite(S->p1[i]) ? S->p1[i] : 0;
    LAPACK.syev("N", "U", &order, S->p1, &order, S->vector, S->work, &S->lwork, &failed);
    *least = S->vector[0];
    *most = S->vector[k - 1];
}

static double limited(double least, const double *d, const double *x, long n) {
    return 1 / fmax(-fmin(least, LEAST(t, n, d[t] / x[t])), 1e-9);
}

/* One predictor-corrector step. */
static void advance(struct program *S) {
    const long k = S->k, a = S->a, m = S->m;
    struct move *first = S->moves, *d = S->moves + 1;
    double least, most, other;
    scale_point(S);
    const double now = 0.5 * dot(S->values, S->values, k) + dot(S->u, S->lam, m);
    memset(S->r, 0, k * k * sizeof *S->r);
    memset(S->push, 0, m * sizeof *S->push);
    for (long i = 0; i < k; i++) S->r[i * k + i] = -S->values[i];
    direction(S, first);
    extremes(S, first->scaled_z, &least, &most); /* here dx = -x - dz */
    double primal = fmin(1, limited(-1 - most, first->u, S->u, m));
    double dual = fmin(1, limited(least, first->lam, S->lam, m));
    double after = SUM(t, m, (S->u[t] + primal * first->u[t]) * (S->lam[t] + dual * first->lam[t]));
    for (long i = 0; i < k; i++)
        after += 0.5 * SUM(j, k, ((i == j) * S->values[i] + primal * first->scaled_x[i * k + j]) *
                                     ((i == j) * S->values[i] + dual * first->scaled_z[i * k + j]));
    const double share = fmin(fmax(after / now, 0), 1);
    const double mu = share * share * now / (0.5 * k + m), near = 0.9 + 0.09 * fmin(primal, dual);
    mul("N", "N", k, k, k, first->scaled_x, k, first->scaled_z, k, S->p1, k);
    for (long i = 0; i < k; i++) {
        EACH(j, k) S->r[i * k + j] =
            -(S->p1[i * k + j] + S->p1[j * k + i]) / (S->values[i] + S->values[j]);
        S->r[i * k + i] += mu / S->values[i] - S->values[i];
    }
    EACH(t, m) S->push[t] = (mu - first->u[t] * first->lam[t]) / S->lam[t];
    direction(S, d);
    extremes(S, d->scaled_x, &least, &other);
    primal = fmin(1, near * limited(least, d->u, S->u, m));
    extremes(S, d->scaled_z, &least, &other);
    dual = fmin(1, near * limited(least, d->lam, S->lam, m));
    for (long i = 0; i < k; i++)
        for (long j = 0; j <= i; j++) {
            const long at = i * k + j, mirror = j * k + i;
            S->x[at] = S->x[mirror] += 0.5 * primal * (d->x[at] + d->x[mirror]);
            S->z[at] = S->z[mirror] += 0.5 * dual * (d->z[at] + d->z[mirror]);
        }
    EACH(t, m) S->lam[t] += dual * d->lam[t];
    if (!S->summed) {
        const double grow = 2 / SUM(i, k, S->z[i * k + i]);
        EACH(i, k * k) S->z[i] *= grow;
    }
    adjoint(S, S->lam, S->dS);
    set_off(S, S->z, S->dS, -1);
    apply(S, S->x + a, k, S->rest);
    EACH(t, m) S->u[t] = fmax(S->rest[t] - S->b[t], 1e-3 * (S->u[t] + primal * d->u[t]));
}

/* The gap of the point, infinite where it proves nothing. */
static double gap_of(struct program *S) {
    const double lower = dot(S->b, S->lam, S->m), trace = 0.5 * SUM(i, S->k, S->x[i * (S->k + 1)]);
    apply(S, S->x + S->a, S->k, S->rest);
    const double margin = LEAST(t, S->m, S->rest[t] / S->b[t]);
    const double gap = trace / (S->summed ? 1 : 0.5 * S->k) / (margin * lower) - 1;
    return margin > 0 && lower > 0 && gap > -1e-6 ? gap : INFINITY;
}

/* Iterate; hand out the best weights (a, c), multipliers (n R) and gap, and the number of steps. */
static void run(struct program *S, double tol, int64_t most, int64_t patience, double *w,
                double *lam, double *best, int64_t *steps) {
    int64_t since = 0;
    *best = INFINITY;
    for (*steps = 0; *steps < most; ++*steps) {
        const double gap = gap_of(S);
        if (gap < *best) {
            *best = gap;
            since = *steps;
            for (long i = 0; i < S->a; i++)
                memcpy(w + i * S->c, S->x + i * S->k + S->a, S->c * sizeof *w);
            memset(lam, 0, S->n * S->R * sizeof *lam);
            for (long t = 0; t < S->m; t++) lam[S->place[t]] = S->lam[t];
        }
        const double sum = SUM(i, S->k * S->k, S->x[i] + S->z[i]) + SUM(t, S->m, S->u[t] + S->lam[t]);
        if (gap <= tol || !isfinite(sum) || (*best < INFINITY && *steps - since >= patience)) return;
        advance(S);
    }
}

/* Solve `count` problems with left (count, n, R, a), right (count, n, c), b (count, n R) from the
 * points x, z (count, a + c, a + c), u, lam (count, n R); lam also receives the multipliers, and
 * w (count, a c) the weights. Returns 1 where there is no memory, else 0. */
int EXPORT(solve_cones)(const double *left, const double *right, const double *b, const double *x,
                        const double *z, const double *u, double *lam, double *w, double *gap,
                        int64_t *iterations, int64_t count, int64_t n, int64_t R, int64_t a,
                        int64_t c, int summed, double tol, int64_t most, int64_t patience) {
    const long m = n * R, k = a + c, large = a > c ? a : c, small = a + c - large;
    const long most_rows = m > n ? m : n, big = large * large;
    const long product = most_rows * (k > n ? k : n) > k * k ? most_rows * (k > n ? k : n) : k * k;
    struct program S = {.summed = summed, .n = n, .R = R, .a = a, .c = c, .k = k};
    S.small = small;
    S.large = large;
    S.lwork = (int)(8 * k * k + 200 * k);
    struct {
        double **at;
        long size;
    } parts[] = {
        {&S.left, m * a}, {&S.b, m}, {&S.x, k * k}, {&S.z, k * k}, {&S.u, m}, {&S.lam, m},
        {&S.G, k * k}, {&S.V, k * k}, {&S.values, k}, {&S.system, m * m}, {&S.factor, m * m},
        {&S.scale, m}, {&S.column, m}, {&S.against, m}, {&S.B, a * a}, {&S.C, c * c},
        {&S.B_inverse, a * a}, {&S.C_inverse, c * c}, {&S.frame, k * k}, {&S.k_of, large},
        {&S.E, big}, {&S.F, big}, {&S.own, a * c}, {&S.swap, small * small}, {&S.gain, a * c},
        {&S.plus_t, big}, {&S.minus_t, big}, {&S.plus, big}, {&S.minus, big}, {&S.r, k * k},
        {&S.push, m}, {&S.rhs, m}, {&S.rest, m}, {&S.fixed, a * c}, {&S.dS, a * c},
        {&S.image, n * a}, {&S.p1, product}, {&S.p2, product}, {&S.p3, product},
        {&S.q1, product}, {&S.q2, product}, {&S.q3, product}, {&S.vector, 3 * product},
        {&S.work, S.lwork},
        {&S.moves[0].x, k * k}, {&S.moves[0].z, k * k}, {&S.moves[0].u, m},
        {&S.moves[0].lam, m}, {&S.moves[0].scaled_x, k * k}, {&S.moves[0].scaled_z, k * k},
        {&S.moves[1].x, k * k}, {&S.moves[1].z, k * k}, {&S.moves[1].u, m},
        {&S.moves[1].lam, m}, {&S.moves[1].scaled_x, k * k}, {&S.moves[1].scaled_z, k * k},
    };
    const int number = sizeof parts / sizeof *parts;
    long size = 0;
    for (int i = 0; i < number; i++) size += (parts[i].size + 7) & ~7L;
    double *memory = calloc(size, sizeof *memory), *next = memory;
    S.block = calloc(2 * m, sizeof *S.block);
    S.iwork = calloc(8 * k, sizeof *S.iwork);
    const int missing = !memory || !S.block || !S.iwork;
    for (int i = 0; i < number && !missing; next += (parts[i].size + 7) & ~7L, i++)
        *parts[i].at = next;
    S.place = S.block + m;
    for (long i = 0; i < count && !missing; i++) {
        S.right = right + i * n * c;
        S.m = 0;
        for (long t = 0; t < m; t++) {
            if (!(b[i * m + t] > 0)) continue; /* padding */
            memcpy(S.left + S.m * a, left + (i * m + t) * a, a * sizeof *left);
            S.b[S.m] = b[i * m + t];
            S.u[S.m] = u[i * m + t];
            S.lam[S.m] = lam[i * m + t];
            S.block[S.m] = t / R;
            S.place[S.m++] = t;
        }
        memcpy(S.x, x + i * k * k, k * k * sizeof *x);
        memcpy(S.z, z + i * k * k, k * k * sizeof *z);
        run(&S, tol, most, patience, w + i * a * c, lam + i * m, gap + i, iterations + i);
    }
    free(memory);
    free(S.block);
    free(S.iwork);
    return missing;
}
