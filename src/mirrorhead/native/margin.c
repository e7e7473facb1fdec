/* The interior point method of _interior_point.py and _newton_step.py, one small problem at a time.
 *
 *     min ||w||_p  subject to  A w >= b,      row t of block i of A being vec(left_t right_i')
 *
 * It takes the steps that _newton_step.py explains, under the same names, in float64. The
 * caller judges what comes out by its certificate. Matrices are stored by rows; the few products
 * and factorisations are BLAS and LAPACK, which see them transposed.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lapack.h"

/* Entries below count as zero: the logarithm stays finite, and every power met here is 0. */
#define TINY 1e-290

struct lapack EXPORT(lapack);

/* The routines in the order of the struct. */
void EXPORT(use_lapack)(void *const *routines) {
    memcpy(&EXPORT(lapack), routines, sizeof EXPORT(lapack));
}

struct rule { /* Schedule of _newton_step.py and the constants of _interior_point.py */
    double factor, threshold, floor, infeasible, narrow_below, loose, worth;
    int64_t iterations;
};

enum verdict { INCONCLUSIVE, SOLVED, INFEASIBLE, LOST };

struct state {
    long n, a, c, m, N;      /* blocks; W is a x c; rows at present; weights, N = a c */
    double goal;             /* the exponent asked for */
    long R;                  /* rows of a block at first, padding included */
    const double *right, *all_left, *all_b; /* (n, c), (n, R, a), (n, R): the data */
    double *left, *b;        /* (m, a), (m): the rows at present */
    long *first, *place;     /* block i has the rows first[i] <= t < first[i+1]; their numbers */
    /* The point, normalised to ||w||_p = 1 and <w, s> = 1, with aw = A w, s = A' lam. */
    double p, log_dual_norm; /* the exponent of the moment, log ||s||_q */
    double *w, *s, *log_w, *log_s;           /* N */
    double *aw, *u, *lam;                    /* m */
    double *h, *rho, *f, *ds, *dw;           /* N: the link dw = h ds + rho, and a step */
    double *residual, *push, *dlam, *r, *du; /* m */
    double *image, *tilted, *weights, *scaled; /* (n, a), N, (n, a), (m, a) */
    double *gram, *K;        /* (m, m), lower triangles: A diag(h) A', and factors of K */
    int filled;              /* gram is up to date at p = 2, where h never changes */
    int narrowed;            /* some rows are left out */
};

static double clamp(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

/* out (ny, nx) with the entries <x_i, y_j>, of x (nx, k) and y (ny, k); rows of out ld apart. */
static void products(const double *x, long nx, const double *y, long ny, long k, double *out,
                     long ld) {
    const int rows = (int)nx, columns = (int)ny, inner = (int)k, step = (int)ld;
    const double one = 1, zero = 0;
    EXPORT(lapack).gemm("T", "N", &rows, &columns, &inner, &one, x, &inner, y, &inner, &zero, out, &step);
}

/* (A w)_t = left_t' W right_i */
static void apply(const struct state *S, const double *w, double *out) {
    const long a = S->a;
    products(w, a, S->right, S->n, S->c, S->image, a); /* W right_i */
    for (long i = 0; i < S->n; i++)
        for (long t = S->first[i]; t < S->first[i + 1]; t++)
            out[t] = dot(S->left + t * a, S->image + i * a, a);
}

/* A' lam = sum_i (sum_t lam_t left_t) right_i' */
static void adjoint(const struct state *S, const double *lam, double *out) {
    const int n = (int)S->n, a = (int)S->a, c = (int)S->c;
    const double one = 1, zero = 0;
    for (long i = 0; i < n; i++) {
        double *pulled = S->image + i * a;
        memset(pulled, 0, a * sizeof *pulled);
        for (long t = S->first[i]; t < S->first[i + 1]; t++)
            EACH(x, a) pulled[x] += lam[t] * S->left[t * a + x];
    }
    EXPORT(lapack).gemm("N", "T", &c, &a, &n, &one, S->right, &c, S->image, &a, &zero, out, &c);
}

/* gram = A diag(h) A', by its blocks left_i diag(H (right_i o right_j)) left_j' with j <= i. */
static void fill(struct state *S) {
    const long a = S->a, c = S->c;
    for (long i = 0; i < S->n; i++) {
        const long start = S->first[i], end = S->first[i + 1];
        if (start == end) continue;
        for (long x = 0; x < a; x++)
            EACH(y, c) S->tilted[x * c + y] = S->h[x * c + y] * S->right[i * c + y];
        products(S->tilted, a, S->right, i + 1, c, S->weights, a); /* H (right_i o right_j) */
        for (long j = 0; j <= i; j++)
            for (long t = S->first[j]; t < S->first[j + 1]; t++)
                EACH(x, a) S->scaled[t * a + x] = S->left[t * a + x] * S->weights[j * a + x];
        products(S->scaled, end, S->left + start * a, end - start, a, S->gram + start * S->m, S->m);
    }
}

/* Cholesky factors of K = A diag(h) A' + diag(u / lam); with a jitter if need be. */
static void factor(struct state *S) {
    const long m = S->m;
    const int size = (int)m;
    int failed = 1;
    if (S->goal != 2 || !S->filled) fill(S);
    S->filled = 1;
    for (double jitter = 0; failed && jitter < 1e-2; jitter = jitter ? 100 * jitter : 1e-14) {
        for (long t = 0; t < m; t++) {
            memcpy(S->K + t * m, S->gram + t * m, (t + 1) * sizeof *S->K);
            S->K[t * m + t] = (S->K[t * m + t] + S->u[t] / S->lam[t]) * (1 + jitter);
        }
        EXPORT(lapack).potrf("U", &size, S->K, &size, &failed);
    }
}

/* x = K^-1 x */
static void solve(const struct state *S, double *x) {
    const int size = (int)S->m, one = 1;
    int failed;
    EXPORT(lapack).potrs("U", &size, &one, S->K, &size, x, &size, &failed);
}

static double log_norm(const double *log_x, long n, double p) {
    const double top = MOST(k, n, log_x[k]);
    return log(SUM(k, n, exp(p * (log_x[k] - top)))) / p + top;
}

/* log |x|, and log ||x|| as the value; nobody asks for the former where the goal is p = 2. */
static double sizes(const struct state *S, const double *x, double *log_x, double p) {
    if (S->goal == 2) return 0.5 * log(fmax(dot(x, x, S->N), 1e-300));
    EACH(k, S->N) log_x[k] = log(fabs(x[k]) > TINY ? fabs(x[k]) : TINY);
    return log_norm(log_x, S->N, p);
}

/* Scale w and lam, which changes neither's direction, and take the logarithms. */
static void normalise(struct state *S) {
    const double size = sizes(S, S->w, S->log_w, S->p), shrink = exp(-size);
    const double dual_size = sizes(S, S->s, S->log_s, S->p / (S->p - 1));
    EACH(k, S->N) S->w[k] *= shrink;
    double pairing = dot(S->w, S->s, S->N);
    if (!(pairing > 0)) pairing = 1; /* s = 0: lam is a certificate as it stands */
    const double grow = 1 / pairing, log_pairing = log(pairing);
    EACH(k, S->N) {
        S->s[k] *= grow;
        S->log_w[k] -= size;
        S->log_s[k] -= log_pairing;
    }
    EACH(t, S->m) {
        S->aw[t] *= shrink;
        S->u[t] *= shrink;
        S->lam[t] *= grow;
    }
    S->log_dual_norm = dual_size - log_pairing;
}

/* The same point normalised for another exponent, which needs no new logarithms. */
static void move_exponent(struct state *S, double p) {
    const double size = log_norm(S->log_w, S->N, p), grow = exp(size);
    EACH(k, S->N) {
        S->w[k] /= grow;
        S->s[k] *= grow;
        S->log_w[k] -= size;
        S->log_s[k] += size;
    }
    EACH(t, S->m) {
        S->aw[t] /= grow;
        S->u[t] /= grow;
        S->lam[t] *= grow;
    }
    S->p = p;
    S->log_dual_norm = log_norm(S->log_s, S->N, p / (p - 1));
}

/* The exponent one move nearer to the goal. */
static double towards(const struct state *S, double p, double factor) {
    return S->goal < 2 ? fmax((p - 1) / factor + 1, S->goal) : fmin((p - 1) * factor + 1, S->goal);
}

/* w = sign(s)|s|^(q-1), scaled to maximum 1. */
static void from_link(struct state *S) {
    EACH(k, S->N) S->log_s[k] = log(fabs(S->s[k]) > TINY ? fabs(S->s[k]) : TINY);
    const double top = MOST(k, S->N, S->log_s[k]), r = 1 / (S->p - 1);
    EACH(k, S->N) S->w[k] = copysign(exp((S->log_s[k] - top) * r), S->s[k]);
}

/* The linearised mirror map at the point: h, rho and f of _newton_step.py. */
static void linearise(struct state *S, double gap) {
    const double r = 1 / (S->p - 1); /* q - 1 */
    if (S->goal == 2)
        EACH(k, S->N) {
            S->h[k] = 1;
            S->f[k] = S->s[k];
            S->rho[k] = S->s[k] - S->w[k];
        }
    else if (S->goal < 2)
        EACH(k, S->N) {
            const double slope = exp((r - 1) * S->log_s[k]);
            S->h[k] = r * slope;
            S->f[k] = slope * S->s[k];
            S->rho[k] = S->f[k] - S->w[k];
        }
    else {
        const double top = MOST(k, S->N, S->log_w[k]);
        const double lowest = (S->p - 1) * top + log(1e-2 * clamp(gap, 1e-16, 1));
        EACH(k, S->N) {
            const double log_f = (S->p - 1) * S->log_w[k];
            S->f[k] = copysign(exp(log_f), S->w[k]);
            S->h[k] = r * exp((r - 1) * (log_f > lowest ? log_f : lowest));
            S->rho[k] = S->h[k] * (S->s[k] - S->f[k]);
        }
    }
}

/* <sign(x)|x|^e, d> at x + step d */
static double power_along(const double *x, const double *d, long n, double step, double e) {
    return SUM(k, n, ({
        const double y = x[k] + step * d[k], size = fabs(y) > TINY ? fabs(y) : TINY;
        copysign(exp(e * log(size)), y) * d[k];
    }));
}

/* The slope of the barrier function so far along the step: the dual one for p < 2; for p > 2
 * the Lagrangian of the primal one with the new multipliers. */
static double slope(const struct state *S, double step, double mu, double linear) {
    const double *u = S->u, *du = S->du, *r = S->r, *lam = S->lam, *dlam = S->dlam;
    if (S->goal < 2)
        return power_along(S->s, S->ds, S->N, step, 1 / (S->p - 1)) - linear -
               mu * SUM(t, S->m, r[t] / (1 + step * r[t]));
    return power_along(S->w, S->dw, S->N, step, S->p - 1) - linear +
           SUM(t, S->m, (lam[t] + dlam[t] - mu / (u[t] + step * du[t])) * du[t]);
}

/* By which factor to shorten the step, so that the barrier function does not rise steeply. */
static double backtrack(const struct state *S, double step, double mu, double linear, double at_0) {
    double shrink = 1;
    for (int k = 0; k < 8 && slope(S, step * shrink, mu, linear) > 0.9 * fabs(at_0); k++)
        shrink *= 0.5;
    return shrink;
}

/* The longest step up to 1 that keeps x + step dx >= 0, from the lowest dx/x. */
static double reach(double lowest) { return 1 / fmax(-lowest, 1); }

/* One predictor-corrector step, after moving the exponent if it may move. */
static void advance(struct state *S, const struct rule *rule, double gap) {
    const long m = S->m, N = S->N;
    double *w = S->w, *u = S->u, *lam = S->lam, *r = S->r, *push = S->push, *du = S->du;
    double *dlam = S->dlam, *ds = S->ds, *dw = S->dw, *residual = S->residual;
    const int moving = S->p != S->goal;
    if (moving && gap < rule->threshold) move_exponent(S, towards(S, S->p, rule->factor));
    const double q = S->p / (S->p - 1), complementarity = dot(lam, u, m);
    const double beta = fmax(1 - complementarity, 0.1) / dot(S->b, lam, m);
    const double fenchel = expm1(q * S->log_dual_norm) / q;
    linearise(S, gap);
    factor(S);
    apply(S, S->rho, residual);
    EACH(t, m) dlam[t] = residual[t] = beta * S->b[t] - S->aw[t] - residual[t];

    /* Predictor: straight at the solution. How far one gets says how much to centre. */
    solve(S, dlam);
    EACH(t, m) r[t] = dlam[t] / lam[t];
    double dual = reach(LEAST(t, m, r[t])), primal = reach(-1 - MOST(t, m, r[t]));
    const double after =
        SUM(t, m, lam[t] * u[t] * (1 + dual * r[t]) * (1 - primal - primal * r[t]));
    double sigma = pow(fmin(after / complementarity, 1), 4);
    if (moving) sigma = fmax(sigma, rule->floor);
    const double mu = sigma * (complementarity + fenchel) / m;

    /* Corrector. */
    EACH(t, m) {
        push[t] = mu / lam[t] + dual * u[t] * r[t] * (1 + r[t]);
        dlam[t] = residual[t] + push[t];
    }
    solve(S, dlam);
    EACH(t, m) {
        r[t] = dlam[t] / lam[t];
        du[t] = push[t] - u[t] * (1 + r[t]);
    }
    adjoint(S, dlam, ds);
    EACH(k, N) dw[k] = S->rho[k] + S->h[k] * ds[k];

    /* Nearly to the boundary, primal and dual apart; ever nearer as the gap closes. */
    const double fraction = clamp(1 - gap, 0.99, 1 - 1e-8);
    dual = fraction * reach(LEAST(t, m, r[t]));
    primal = fraction * reach(LEAST(t, m, du[t] / u[t]));
    if (S->goal < 2 && gap > 1e-4) {
        const double linear = beta * dot(S->b, dlam, m);
        const double at_0 = dot(S->f, ds, N) - linear - mu * SUM(t, m, r[t]);
        const double shrink = backtrack(S, dual, mu, linear, at_0);
        dual *= shrink;
        primal *= shrink;
    } else if (S->goal > 2 && gap > 0) {
        const double linear = SUM(k, N, (S->s[k] + ds[k]) * dw[k]);
        const double at_0 = dot(S->f, dw, N) - linear +
                            SUM(t, m, (lam[t] + dlam[t] - mu / u[t]) * du[t]);
        primal *= backtrack(S, primal, mu, linear, at_0);
    }
    EACH(k, N) w[k] += primal * dw[k];
    EACH(t, m) {
        lam[t] += dual * dlam[t];
        u[t] += primal * du[t];
    }
    adjoint(S, lam, S->s); /* anew: lam can swing by ten decades and would leave its rounding */
    if (dot(w, S->s, N) <= 0) from_link(S); /* as happens when there is no solution */
    apply(S, w, S->aw);
    normalise(S);
}

/* The smallest (A w)_t / b_t; ||s||_q / <b, lam> bounds it for every w of norm 1. */
static double margin(const struct state *S) { return LEAST(t, S->m, S->aw[t] / S->b[t]); }

/* All rows that are not padding, which has b < 0. */
static void load(struct state *S) {
    S->m = S->first[0] = 0;
    for (long i = 0; i < S->n; i++) {
        for (long t = i * S->R; t < (i + 1) * S->R; t++)
            if (S->all_b[t] > 0) {
                memcpy(S->left + S->m * S->a, S->all_left + t * S->a, S->a * sizeof *S->left);
                S->b[S->m] = S->all_b[t];
                S->place[S->m++] = t;
            }
        S->first[i + 1] = S->m;
    }
    S->filled = S->narrowed = 0;
}

/* Leave out the rows that no longer matter (`_rows_that_matter` of _interior_point.py), if they are many. */
static void narrow(struct state *S, const struct rule *rule) {
    const long a = S->a, m = S->m;
    const double ahead = S->goal < 2 ? fmax(1, (S->p - 1) / (S->goal - 1)) : 1;
    const double bound = rule->loose * ahead;
#define TIGHT(t) (S->u[t] < bound * S->lam[t] * S->gram[(t) * (m + 1)])
    long kept = 0;
    for (long t = 0; t < m; t++) kept += TIGHT(t);
    if (kept == 0 || kept > rule->worth * m) return;
    long to = 0;
    for (long i = 0, t = 0; i < S->n; i++) {
        const long end = S->first[i + 1];
        for (; t < end; t++)
            if (TIGHT(t)) {
                memmove(S->left + to * a, S->left + t * a, a * sizeof *S->left);
                S->b[to] = S->b[t];
                S->place[to] = S->place[t];
                S->lam[to] = S->lam[t];
                S->aw[to] = S->aw[t];
                S->u[to] = S->u[t];
                to++;
            }
        S->first[i + 1] = to;
    }
#undef TIGHT
    S->m = kept;
    S->filled = 0;
    S->narrowed = 1;
    adjoint(S, S->lam, S->s);
    normalise(S);
}

/* Whether the gap is above tol once the rows left out are counted. */
static int violates(const struct state *S, double tol) {
    const double needed = exp(S->log_dual_norm) / (dot(S->b, S->lam, S->m) * (1 + tol));
    products(S->w, S->a, S->right, S->n, S->c, S->image, S->a); /* W right_i */
    for (long t = 0; t < S->n * S->R; t++) {
        const double *image = S->image + t / S->R * S->a;
        if (dot(S->all_left + t * S->a, image, S->a) < needed * S->all_b[t]) return 1;
    }
    return 0;
}

/* A centred point: from the data alone at an exponent near 2, or from a given solution. */
static void begin(struct state *S, const struct rule *rule, const double *w, const double *lam) {
    const double scale = 1 / dot(S->b, S->b, S->m), slack = w ? 0.05 : 0.5;
    EACH(t, S->m) S->lam[t] = scale * S->b[t];
    if (w) {
        const double share = (1 - slack) / SUM(t, S->m, S->b[t] * lam[S->place[t]]);
        for (long t = 0; t < S->m; t++)
            S->lam[t] = share * lam[S->place[t]] + slack * S->lam[t];
    }
    S->p = w ? S->goal : towards(S, 2, rule->factor);
    if (!w && S->goal < 2) S->p = towards(S, S->p, rule->factor);
    adjoint(S, S->lam, S->s);
    if (w)
        memcpy(S->w, w, S->N * sizeof *w);
    else
        from_link(S);
    apply(S, S->w, S->aw);
    memcpy(S->u, S->aw, S->m * sizeof *S->u);
    normalise(S);
    const double beta = (1 - slack) / dot(S->b, S->lam, S->m);
    EACH(t, S->m) {
        const double least = 0.1 * slack / (S->m * S->lam[t]), room = S->aw[t] - beta * S->b[t];
        S->u[t] = room > least ? room : least;
    }
}

/* Hand out the point: w (N), and lam (n R), 0 at the rows left out. */
static void keep(const struct state *S, double *w, double *lam) {
    memcpy(w, S->w, S->N * sizeof *w);
    memset(lam, 0, S->n * S->R * sizeof *lam);
    for (long t = 0; t < S->m; t++) lam[S->place[t]] = S->lam[t];
}

/* Iterate until the problem has ended; hand out where it did, or the best point before that. */
static enum verdict run(struct state *S, const struct rule *rule, double tol, double *w,
                        double *lam, double *best, int64_t *iteration) {
    *best = INFINITY;
    for (*iteration = 0;; ++*iteration) {
        const double bound = dot(S->b, S->lam, S->m) * fmax(margin(S), 0);
        const double gap = expm1(S->log_dual_norm - log(bound));
        const int lost = !(gap > -1e-3); /* overflow or worse: the point says nothing */
        if (S->p == S->goal && gap < *best && !lost) {
            keep(S, w, lam);
            *best = gap;
        }
        if (*best <= tol) return S->narrowed && violates(S, tol) ? INCONCLUSIVE : SOLVED;
        if (gap == INFINITY &&
            sqrt(dot(S->s, S->s, S->N)) < rule->infeasible * SUM(t, S->m, S->lam[t])) {
            keep(S, w, lam);
            return INFEASIBLE;
        }
        if (lost || *iteration == rule->iterations) {
            if (*best == INFINITY && lost) return LOST;
            if (*best == INFINITY) keep(S, w, lam);
            return INCONCLUSIVE;
        }
        if (gap < rule->narrow_below && *iteration > 0) narrow(S, rule);
        advance(S, rule, gap);
    }
}

/* Solve `count` problems with left (count, n, R, a), right (count, n, c) and b (count, n R). On
 * entry, w (count, N) and lam (count, n R) hold where to start if `warm`; on return, where each
 * ended unless its verdict is LOST. Returns 1 where there is no memory, else 0. */
int EXPORT(solve_margins)(const double *left, const double *right, const double *b, double *w,
                  double *lam, double *gap, int64_t *verdict, int64_t *iterations, int64_t count, int64_t n,
                  int64_t R, int64_t a, int64_t c, double p, double tol, int warm,
                  const struct rule *rule) {
    const long m = n * R, N = a * c;
    struct state S = {.n = n, .a = a, .c = c, .N = N, .R = R, .goal = p};
    struct {
        double **at;
        long size;
    } parts[] = {
        {&S.w, N},     {&S.s, N},      {&S.log_w, N},   {&S.log_s, N},     {&S.h, N},
        {&S.rho, N},   {&S.f, N},      {&S.ds, N},      {&S.dw, N},        {&S.tilted, N},
        {&S.b, m},     {&S.aw, m},     {&S.u, m},       {&S.lam, m},       {&S.residual, m},
        {&S.push, m},  {&S.dlam, m},   {&S.r, m},       {&S.du, m},        {&S.image, n * a},
        {&S.weights, n * a}, {&S.left, m * a}, {&S.scaled, m * a}, {&S.gram, m * m}, {&S.K, m * m},
    };
    const int number = sizeof parts / sizeof *parts;
    long size = 0;
    for (int k = 0; k < number; k++) size += (parts[k].size + 7) & ~7L; /* whole cache lines */
    double *memory = calloc(size, sizeof *memory), *next = memory;
    S.first = calloc(n + 1 + m, sizeof *S.first);
    if (!memory || !S.first) {
        free(memory);
        free(S.first);
        return 1;
    }
    S.place = S.first + n + 1;
    for (int k = 0; k < number; next += (parts[k].size + 7) & ~7L, k++) *parts[k].at = next;
    for (long k = 0; k < count; k++, left += m * a, right += n * c, b += m, w += N, lam += m) {
        S.all_left = left;
        S.all_b = b;
        S.right = right;
        load(&S);
        begin(&S, rule, warm ? w : NULL, lam);
        verdict[k] = run(&S, rule, tol, w, lam, gap + k, iterations + k);
    }
    free(memory);
    free(S.first);
    return 0;
}
