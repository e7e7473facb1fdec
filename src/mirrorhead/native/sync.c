/* Weight sync: fingerprints of tensors, and which entries differ from a snapshot; see
 * patches/fingerprint.py and patches/weight_sync.py, which have the same in numpy and torch. */
#include <stdint.h>
#include <string.h>

#include "native.h"

/* The sums over k of a mixed (position, bits), one for each of two mixers, mod 2^64. */
#define SUMS(type, position)                                                                \
    do {                                                                                    \
        const type *bits = data;                                                            \
        _Pragma("omp simd reduction(+ : one, two)") for (int64_t k = 0; k < count; k++) {   \
            const uint64_t place = (uint64_t)(position) + 1;                                \
            uint64_t x = place * 0x9e3779b97f4a7c15u ^ bits[k] * 0xd6e8feb86659fd93u;       \
            uint64_t y = place * 0xa0761d6478bd642fu ^ bits[k] * 0xe7037ed1a0b428dbu;       \
            x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;                                        \
            x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;                                        \
            y = (y ^ y >> 30) * 0xbf58476d1ce4e5b9u;                                        \
            y = (y ^ y >> 27) * 0x94d049bb133111ebu;                                        \
            one += x ^ x >> 33;                                                             \
            two += y ^ y >> 31;                                                             \
        }                                                                                   \
    } while (0)
#define SUMS_OF(type)                                       \
    do {                                                    \
        if (positions) SUMS(type, positions[k]);            \
        else SUMS(type, first + k);                         \
    } while (0)

/* `positions` of the entries, or NULL where they follow each other from `first`. */
void EXPORT(fingerprint)(const void *data, int64_t count, int32_t size, int64_t first,
                         const int64_t *positions, uint64_t *sums) {
    uint64_t one = 0, two = 0;
    if (size == 1) SUMS_OF(uint8_t);
    else if (size == 2) SUMS_OF(uint16_t);
    else if (size == 4) SUMS_OF(uint32_t);
    else SUMS_OF(uint64_t);
    sums[0] += one;
    sums[1] += two;
}

#define GROUP 64

/* Find where `now` differs, and append the position, the old bits and the new ones. Eight flags of a
 * byte each become eight bits by one product; then each bit that is set costs the same. */
#define COMPARE(type, differs, becomes)                                                         \
    do {                                                                                        \
        const type *old = snapshot;                                                             \
        type *to_before = before, *to_after = after;                                            \
        for (int64_t start = 0; start < count; start += GROUP) {                                \
            uint8_t flags[GROUP] = {0};                                                         \
            const int64_t end = count - start < GROUP ? count - start : GROUP;                  \
            if (end == GROUP)                                                                   \
                for (int j = 0; j < GROUP; j++) flags[j] = differs(new[start + j], old[start + j]); \
            else                                                                                \
                for (int j = 0; j < end; j++) flags[j] = differs(new[start + j], old[start + j]); \
            uint64_t set = 0;                                                                   \
            for (int g = 0; g < GROUP; g += 8) {                                                \
                uint64_t word;                                                                  \
                memcpy(&word, flags + g, 8);                                                    \
                set |= (word * 0x0102040810204080u >> 56) << g;                                 \
            }                                                                                   \
            for (; set; set &= set - 1) {                                                       \
                const int64_t k = start + __builtin_ctzll(set);                                 \
                places[found] = k;                                                              \
                to_before[found] = old[k];                                                      \
                to_after[found++] = becomes(new[k]);                                            \
            }                                                                                   \
        }                                                                                       \
    } while (0)

/* The bfloat16 that a float32 rounds to; NaN is one NaN, whatever its bits. */
static inline uint16_t rounded(uint32_t x) {
    const uint32_t nearest = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (uint16_t)((x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest);
}

/* Whether a float32 rounds to another bfloat16 than this one; from NaN to NaN is no change. */
static inline uint8_t rounds_elsewhere(uint32_t x, uint16_t old) {
    const int nan = (x & 0x7fffffff) > 0x7f800000, was_nan = (old & 0x7fff) > 0x7f80;
    return (rounded(x) != old) & !(nan & was_nan);
}

#define UNEQUAL(one, other) ((one) != (other))
#define SAME(x) (x)

/* Find the entries of `now` whose bits differ from the snapshot's, and return how many there are.
 * With `rounding`, `now` is float32 and the snapshot bfloat16; else both have `size` bytes each. */
int64_t EXPORT(changed)(const void *now, const void *snapshot, int64_t count, int32_t size,
                        int32_t rounding, int64_t *places, void *before, void *after) {
    int64_t found = 0;
    if (rounding) {
        const uint32_t *new = now;
        COMPARE(uint16_t, rounds_elsewhere, rounded);
    } else if (size == 1) {
        const uint8_t *new = now;
        COMPARE(uint8_t, UNEQUAL, SAME);
    } else if (size == 2) {
        const uint16_t *new = now;
        COMPARE(uint16_t, UNEQUAL, SAME);
    } else if (size == 4) {
        const uint32_t *new = now;
        COMPARE(uint32_t, UNEQUAL, SAME);
    } else {
        const uint64_t *new = now;
        COMPARE(uint64_t, UNEQUAL, SAME);
    }
    return found;
}
