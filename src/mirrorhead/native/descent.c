/* The hot loops of descent.py, trial by trial in the cache: normalised lp-AttGD,
 *
 *     u+ = u - lr grad L(W) / ||grad L(W)||_q,     W+ = sign(u+) |u+|^(1/(p-1)),
 *
 * and the accelerated rule, which _update_rules.py describes. The gradient is the one that
 * problem.py derives: relative to the selected token, with the scale of each sample carried as a
 * logarithm.
 *
 * Memory is laid out for inner loops over whole vectors: W, u and the gradient are transposed
 * (column of W contiguous), and rows over d and over T are padded to a multiple of four, dp and
 * Tp. What stands in the padding is zero.
 */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

enum loss { LOGISTIC = 0, EXPONENTIAL = 1, LINEAR = 2 }; /* `native` in losses.py */

struct problem {
    const double *X;  /* (n, T, dp) */
    const double *Xt; /* (n, d, Tp) */
    const double *z;  /* (n, d) */
    const double *a;  /* (n, Tp) scores */
    long n, T, d, Tp, dp; /* samples, tokens, width; padded */
    enum loss loss;
};

/* out = |x|^e, by multiplications and one root where e is a multiple of 1/2 up to 32. */
static void powers(const double *restrict x, double *restrict out, double *restrict square,
                   long count, double e) {
    if (e != 0.5 * round(2 * e) || e > 32) {
#pragma omp simd
        for (long j = 0; j < count; j++) out[j] = pow(fabs(x[j]), e);
        return;
    }
    for (long j = 0; j < count; j++) square[j] = fabs(x[j]);
    if (e != floor(e))
        for (long j = 0; j < count; j++) out[j] = sqrt(square[j]);
    else
        for (long j = 0; j < count; j++) out[j] = 1;
    for (long k = (long)e;;) { /* binary powers: |x|^10 = |x|^8 |x|^2 */
        if (k & 1)
            for (long j = 0; j < count; j++) out[j] *= square[j];
        if (!(k >>= 1)) return;
        for (long j = 0; j < count; j++) square[j] *= square[j];
    }
}

/* log(-l') at the margins x, in place. A logarithm needs no more than absolute accuracy. */
static void log_slopes(enum loss loss, double *restrict x, long n) {
    if (loss == LOGISTIC) /* log sigmoid(-x) = min(-x, 0) - log(1 + exp(-|x|)) */
#pragma omp simd
        for (long i = 0; i < n; i++) x[i] = (x[i] > 0 ? -x[i] : 0) - log(1 + exp(-fabs(x[i])));
    else if (loss == EXPONENTIAL)
        for (long i = 0; i < n; i++) x[i] = -x[i];
    else /* a code of no loss must not run as one of them: NaN stops the path */
        for (long i = 0; i < n; i++) x[i] = loss == LINEAR ? 0 : NAN;
}

typedef double four __attribute__((vector_size(32), aligned(8)));

/* out = sum_r weight[r] M[r] over rows of M that are whole vectors wide; sums stay in registers. */
static inline void combine(double *restrict out, const double *restrict M,
                           const double *restrict weight, long rows, long width) {
    long c = 0;
    for (; c + 8 <= width; c += 8) {
        four left = {0}, right = {0};
        for (long r = 0; r < rows; r++) {
            left += weight[r] * *(const four *)(M + r * width + c);
            right += weight[r] * *(const four *)(M + r * width + c + 4);
        }
        *(four *)(out + c) = left;
        *(four *)(out + c + 4) = right;
    }
    for (; c < width; c += 4) {
        four sum = {0};
        for (long r = 0; r < rows; r++) sum += weight[r] * *(const four *)(M + r * width + c);
        *(four *)(out + c) = sum;
    }
}

static double largest(const double *restrict x, long count) {
    double most = x[0];
    for (long j = 1; j < count; j++) most = x[j] > most ? x[j] : most;
    return most;
}

/* A maximum passes over NaN; logits that overflow must not look like a gradient of zero. */
static int has_nan(const double *restrict x, long count) {
    int found = 0;
    for (long j = 0; j < count; j++) found |= x[j] != x[j];
    return found;
}

/* The gradient of one trial up to a positive factor, into G (d, dp). Returns the sum of |dL/dh|
 * over all tokens that are not selected, up to the same factor. */
static double gradient(const struct problem *P, const double *restrict W, double *restrict G,
                     double *restrict work) {
    const long n = P->n, T = P->T, d = P->d, Tp = P->Tp, dp = P->dp;
    const long np = (n + 3) & ~3L; /* samples in whole vectors; what is beyond n is not read */
    double *h = work, *rows = h + n * Tp, *wz = rows + n * dp;
    double *tail = wz + dp, *excess = tail + np, *margin = excess + np, *scale = margin + np;
    double *selected = scale + np, *pull = selected + np;

    for (long i = 0; i < n; i++) { /* logits, relative to the second largest */
        const double *z = P->z + i * d, *Xt = P->Xt + i * d * Tp;
        double *hi = h + i * Tp;
        combine(wz, W, z, d, dp);
        combine(hi, Xt, wz, d, Tp);
        long top = 0;
        double peak = hi[0], next = -DBL_MAX;
        for (long t = 1; t < T; t++) {
            if (hi[t] > peak) {
                next = peak;
                peak = hi[t];
                top = t;
            } else if (hi[t] > next)
                next = hi[t];
        }
        for (long t = 0; t < Tp; t++) hi[t] -= next;
        for (long t = T; t < Tp; t++) hi[t] = -DBL_MAX;
        hi[top] = -DBL_MAX;
        scale[i] = next - peak; /* m */
        selected[i] = (double)top;
    }
#pragma omp simd
    for (long j = 0; j < n * Tp; j++) h[j] = exp(h[j]); /* e_t, zero at the selected token */
#pragma omp simd
    for (long i = 0; i < np; i++) tail[i] = exp(scale[i]);

    for (long i = 0; i < n; i++) { /* the pull on each token, and on x */
        const double *a = P->a + i * Tp, *X = P->X + i * T * dp;
        double *e = h + i * Tp, *row = rows + i * dp;
        const long top = (long)selected[i];
        const double best = a[top];
        double sum = 0, gaps = 0, total = 0, size = 0;
#pragma omp simd reduction(+ : sum, gaps)
        for (long t = 0; t < Tp; t++) {
            sum += e[t];
            gaps += e[t] * (best - a[t]);
        }
        excess[i] = tail[i] * sum;
        const double short_of = tail[i] * gaps / (1 + excess[i]); /* exp(m) D' */
        margin[i] = best - short_of;
#pragma omp simd reduction(+ : total, size)
        for (long t = 0; t < Tp; t++) {
            e[t] *= short_of - (best - a[t]);
            total += e[t];
            size += fabs(e[t]);
        }
        e[top] = -total;
        pull[i] = size;
        combine(row, X, e, T, dp);
    }

    log_slopes(P->loss, margin, np);
#pragma omp simd
    for (long i = 0; i < np; i++) scale[i] += margin[i] - log(1 + excess[i]);
    const double most = largest(scale, n);
#pragma omp simd
    for (long i = 0; i < np; i++) scale[i] = -exp(scale[i] - most);
    for (long b = 0; b < d; b++) {
        for (long i = 0; i < n; i++) tail[i] = scale[i] * P->z[i * d + b];
        combine(G + b * dp, rows, tail, n, dp);
    }
    double mass = 0;
    for (long i = 0; i < n; i++) mass -= scale[i] * pull[i];
    return mass;
}

/* W (d, dp) of u (d, d). */
static void weights(const double *restrict u, double *restrict W, double *restrict power,
                    double *restrict square, long d, long dp, double inverse) {
    powers(u, power, square, d * d, inverse);
    for (long b = 0; b < d; b++)
        for (long c = 0; c < d; c++) W[b * dp + c] = copysign(power[b * d + c], u[b * d + c]);
}

static void descend(const struct problem *P, double *restrict u, long steps, double lr, double q,
                    double inverse, double *restrict work) {
    const long d = P->d, dp = P->dp, size = d * d;
    double *W = work, *G = W + d * dp, *g = G + d * dp, *power = g + size, *square = power + size;
    double *rest = square + size;
    memset(W, 0, d * dp * sizeof *W);
    weights(u, W, power, square, d, dp, inverse); /* W follows from u alone: any cut resumes alike */
    for (long step = 0; step < steps; step++) {
        gradient(P, W, G, rest);
        double most = 0;
#pragma omp simd reduction(max : most)
        for (long j = 0; j < d * dp; j++) most = fabs(G[j]) > most ? fabs(G[j]) : most;
        if (most == 0 && !has_nan(G, d * dp)) return; /* nothing pulls, now or ever */
        for (long b = 0; b < d; b++)
            for (long c = 0; c < d; c++) g[b * d + c] = G[b * dp + c] / most;
        powers(g, power, square, size, q);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < size; j++) sum += power[j];
        const double rate = lr / pow(sum, 1 / q);
        for (long j = 0; j < size; j++) u[j] -= rate * g[j];
        weights(u, W, power, square, d, dp, inverse);
    }
}

/* The constants of _update_rules.py. */
#define GROWTH 1.05
#define SHRINK 0.5
#define RESTART 64
#define LONGEST 1e3
#define TOLERANCE 1e-13

/* The gradient of phi(u) = 1/2 ||u||_q^2 into out, and the norm. With m the largest |u|, r = |u|/m
 * and S = sum r^q, the norm is m S^(1/q), and the gradient sign(u) m r^(q-1) S^((2-q)/q). */
static double grad_phi(const double *restrict u, double *restrict out, double *restrict ratio,
                       double *restrict square, long size, double q) {
    double most = 0, sum = 0;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < size; j++) most = fabs(u[j]) > most ? fabs(u[j]) : most;
    if (most == 0) { /* all are zero, or NaN */
        memcpy(out, u, size * sizeof *out);
        return 0;
    }
    for (long j = 0; j < size; j++) ratio[j] = fabs(u[j]) / most;
    powers(ratio, out, square, size, q - 1);
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < size; j++) sum += out[j] * ratio[j];
    const double factor = most * pow(sum, (2 - q) / q);
    for (long j = 0; j < size; j++) out[j] = copysign(factor * out[j], u[j]);
    return most * pow(sum, 1 / q);
}

/* What the accelerated rule keeps of one trial, (d, d) each and transposed. */
struct points {
    double *W, *x, *z, *move, *anchor, *next_anchor;
};

/* numbers: B, a, theta and s. count: the steps that were taken before. */
static void accelerate(const struct problem *P, const struct points *at, double *numbers,
                       double floor, long count, long steps, double q, double *restrict work) {
    const long d = P->d, dp = P->dp, size = d * d;
    double total = numbers[0], a = numbers[1], theta = numbers[2], step = numbers[3];
    double *V = work, *G = V + d * dp, *z = G + d * dp, *x = z + size, *slope = x + size;
    double *ratio = slope + size, *square = ratio + size, *rest = square + size;
    memset(V, 0, d * dp * sizeof *V);
    for (const long end = count + steps; count < end;) {
        for (long b = 0; b < d; b++)
            for (long c = 0; c < d; c++)
                V[b * dp + c] = at->W[b * d + c] + a * at->move[b * d + c];
        const double mass = gradient(P, V, G, rest), unit = mass > 0 ? mass : 1;
        for (long b = 0; b < d; b++)
            for (long c = 0; c < d; c++) z[b * d + c] = -G[b * dp + c] / unit;
        for (long j = 0; j < size; j++) x[j] = at->x[j] + theta * (z[j] - at->x[j]);
        const double norm = grad_phi(x, slope, ratio, square, size, q);
        double overshoot = 0;
#pragma omp simd reduction(+ : overshoot)
        for (long j = 0; j < size; j++) overshoot += slope[j] * (z[j] - at->z[j]);
        const int fits = overshoot <= TOLERANCE * norm * norm; /* not where it is NaN */
        if (fits || step <= floor) {
            for (long b = 0; b < d; b++) memcpy(at->W + b * d, V + b * dp, d * sizeof *V);
            memcpy(at->x, x, size * sizeof *x);
            memcpy(at->z, z, size * sizeof *z);
            total += a;
        }
        step = fits ? fmin(step * GROWTH, floor * LONGEST) : fmax(step * SHRINK, floor);

        count++;
        const int power_of_two = !(count & (count - 1));
        if (power_of_two && count >= RESTART) {
            memcpy(at->x, at->z, size * sizeof *x);
            total = 0;
        }
        a = (step + sqrt(step * step + 4 * step * total)) / 2;
        theta = a / (total + a);
        for (long j = 0; j < size; j++) x[j] = at->x[j] + theta * (at->z[j] - at->x[j]); /* y */
        grad_phi(x, at->move, ratio, square, size, q);
        if (power_of_two) {
            memcpy(at->anchor, at->next_anchor, size * sizeof *x);
            for (long j = 0; j < size; j++) at->next_anchor[j] = at->W[j] + a * at->move[j];
        }
    }
    numbers[0] = total, numbers[1] = a, numbers[2] = theta, numbers[3] = step;
}

/* Where a trial of (trials, ...) arrays begins. */
static struct problem trial(long k, const double *X, const double *Xt, const double *z,
                            const double *a, long n, long T, long d, long Tp, long dp, int loss) {
    return (struct problem){X + k * n * T * dp, Xt + k * n * d * Tp, z + k * n * d, a + k * n * Tp,
                            n, T, d, Tp, dp, (enum loss)loss};
}

static double *workspace(long matrices, long n, long d, long Tp, long dp) {
    const long each = matrices * d * d + 2 * d * dp + n * (Tp + dp) + 6 * (n + 3) + dp;
    return calloc((size_t)each, sizeof(double));
}

/* Take `steps` steps from the dual variable u (trials, d, d; transposed) of every trial.
 * Returns 1 where there is no memory, else 0. */
int EXPORT(normalized_descent)(const double *X, const double *Xt, const double *z, const double *a,
                               long trials, long n, long T, long d, long Tp, long dp, int loss,
                               long steps, double q, double *u, double lr, double inverse) {
    double *work = workspace(3, n, d, Tp, dp);
    if (!work) return 1;
    for (long k = 0; k < trials; k++) {
        const struct problem P = trial(k, X, Xt, z, a, n, T, d, Tp, dp, loss);
        descend(&P, u + k * d * d, steps, lr, q, inverse, work);
    }
    free(work);
    return 0;
}

/* The same for the accelerated rule. points: (6, trials, d, d), in the order of struct points and
 * transposed; numbers: (trials, 4); floor: (trials,). */
int EXPORT(accelerated_descent)(const double *X, const double *Xt, const double *z, const double *a,
                                long trials, long n, long T, long d, long Tp, long dp, int loss,
                                long steps, double q, double *points, double *numbers,
                                const double *floor, long count) {
    double *work = workspace(5, n, d, Tp, dp);
    if (!work) return 1;
    const long size = d * d, all = trials * size;
    for (long k = 0; k < trials; k++) {
        const struct problem P = trial(k, X, Xt, z, a, n, T, d, Tp, dp, loss);
        double *p = points + k * size;
        const struct points at = {p, p + all, p + 2 * all, p + 3 * all, p + 4 * all, p + 5 * all};
        accelerate(&P, &at, numbers + 4 * k, floor[k], count, steps, q, work);
    }
    free(work);
    return 0;
}
