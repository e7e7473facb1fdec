/* BLAS and LAPACK, at the addresses that the caller gives; matrices are stored by columns there. */
#ifndef MIRRORHEAD_LAPACK_H
#define MIRRORHEAD_LAPACK_H

#include "native.h"

struct lapack {
    void (*gemm)(const char *, const char *, const int *, const int *, const int *, const double *,
                 const double *, const int *, const double *, const int *, const double *,
                 double *, const int *);
    void (*trsm)(const char *, const char *, const char *, const char *, const int *, const int *,
                 const double *, const double *, const int *, double *, const int *);
    void (*potrf)(const char *, const int *, double *, const int *, int *);
    void (*potrs)(const char *, const int *, const int *, const double *, const int *, double *,
                  const int *, int *);
    void (*syev)(const char *, const char *, const int *, double *, const int *, double *,
                 double *, const int *, int *);
    void (*gesdd)(const char *, const int *, const int *, double *, const int *, double *,
                  double *, const int *, double *, const int *, double *, const int *, int *,
                  int *);
};
extern struct lapack EXPORT(lapack);

#define EACH(k, n) _Pragma("omp simd") for (long k = 0; k < (n); k++)
#define SUM(k, n, term) ({ double y_ = 0; \
    _Pragma("omp simd reduction(+ : y_)") for (long k = 0; k < (n); k++) y_ += (term); y_; })
#define LEAST(k, n, term) ({ double y_ = INFINITY; \
    _Pragma("omp simd reduction(min : y_)") \
    for (long k = 0; k < (n); k++) { double t_ = (term); y_ = t_ < y_ ? t_ : y_; } y_; })
#define MOST(k, n, term) (-LEAST(k, n, -(term)))

static inline double dot(const double *x, const double *y, long n) {
    return SUM(k, n, x[k] * y[k]);
}

#endif
