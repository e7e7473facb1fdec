/* The k largest entries of each row, by a histogram of their bits: geometry/k_support.py.
 *
 * Without its sign bit a float is ordered as its bits are, NaN last. Three passes find the bits of the
 * k-th largest, 11, 10 and 10 at a time, and a fourth one writes. Nothing is sorted. */
#include <stdint.h>
#include <string.h>

#include "native.h"

#define MOST_BINS 2048
#define FEW 32
#define COPIES 4 /* of the histogram: neighbours that are alike do not wait for each other */

static uint32_t magnitude(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}

/* The bits of the k-th largest of `count` entries; `ties` becomes how many that equal it are kept. */
static uint32_t kth_largest(const float *u, int64_t count, int64_t k, int64_t *ties) {
    static const int shifts[] = {20, 10, 0};
    uint32_t found = 0;
    for (int pass = 0; pass < 3; pass++) {
        const int shift = shifts[pass], bins = pass ? 1024 : MOST_BINS;
        uint32_t histogram[COPIES][MOST_BINS] = {{0}}; /* a row has fewer than 2^32 entries */
        if (pass == 0)
            for (int64_t i = 0; i < count; i++) histogram[i % COPIES][magnitude(u[i]) >> shift]++;
        else
            for (int64_t i = 0; i < count; i++) {
                const uint32_t bits = magnitude(u[i]);
                if (bits >> (shift + 10) == found) histogram[i % COPIES][bits >> shift & 1023]++;
            }
        int bin = bins - 1;
        for (;; bin--) {
            int64_t here = 0;
            for (int copy = 0; copy < COPIES; copy++) here += histogram[copy][bin];
            if (k <= here) break;
            k -= here;
        }
        found = pass ? found << 10 | (uint32_t)bin : (uint32_t)bin;
    }
    *ties = k;
    return found;
}

/* out = u with all but the k largest entries of each row set to 0; of equals the first are kept. */
void EXPORT(keep_largest)(const float *u, float *out, int64_t rows, int64_t count, int64_t k) {
    if (count <= FEW) { /* an entry stays if fewer than k are larger, or equal and before it */
        for (int64_t row = 0; row < rows; row++, u += count, out += count)
            for (int64_t i = 0; i < count; i++) {
                const uint32_t own = magnitude(u[i]);
                int64_t ahead = 0;
                for (int64_t j = 0; j < count; j++)
                    ahead += magnitude(u[j]) > own || (magnitude(u[j]) == own && j < i);
                out[i] = ahead < k ? u[i] : 0;
            }
        return;
    }
    for (int64_t row = 0; row < rows; row++, u += count, out += count) {
        int64_t ties, i = 0;
        const uint32_t least = kth_largest(u, count, k, &ties);
        for (; i < count && ties; i++) {
            const uint32_t bits = magnitude(u[i]);
            const int equal = bits == least;
            out[i] = bits > least || equal ? u[i] : 0;
            ties -= equal;
        }
        for (; i < count; i++) out[i] = magnitude(u[i]) > least ? u[i] : 0;
    }
}
