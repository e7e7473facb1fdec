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

/* Append the positions of the flags that are set; a word of zeros costs one comparison. */
static inline int64_t append(const uint8_t *flags, int64_t start, int64_t *places, int64_t found) {
    for (int g = 0; g < GROUP; g += 8) {
        uint64_t word;
        memcpy(&word, flags + g, 8);
        if (word)
            for (int k = g; k < g + 8; k++) {
                places[found] = start + k;
                found += flags[k];
            }
    }
    return found;
}

#define COMPARE(differs)                                                        \
    do {                                                                        \
        int64_t start = 0;                                                      \
        uint8_t flags[GROUP];                                                   \
        for (; start + GROUP <= count; start += GROUP) {                        \
            for (int j = 0; j < GROUP; j++) {                                   \
                const int64_t k = start + j;                                    \
                flags[j] = differs;                                             \
            }                                                                   \
            found = append(flags, start, places, found);                        \
        }                                                                       \
        for (int64_t k = start; k < count; k++) {                               \
            places[found] = k;                                                  \
            found += differs;                                                   \
        }                                                                       \
    } while (0)

/* Whether a float32 rounds to another bfloat16 than this one. NaN is NaN, whatever its bits. */
static inline uint8_t rounds_elsewhere(uint32_t now, uint16_t old) {
    const uint32_t rounded = (now + 0x7fff + (now >> 16 & 1)) >> 16;
    const int nan = (now & 0x7fffffff) > 0x7f800000;
    const int was_nan = (old & 0x7fff) > 0x7f80;
    return nan ? !was_nan : rounded != old;
}

/* Find the entries of `now` whose bits differ from the snapshot's. `places` has room for `count`
 * positions and one more. With `rounding`, `now` is float32 and the snapshot bfloat16; else both have
 * `size` bytes each. */
int64_t EXPORT(changed)(const void *now, const void *snapshot, int64_t count, int32_t size,
                        int32_t rounding, int64_t *places) {
    int64_t found = 0;
    if (rounding) {
        const uint32_t *new = now;
        const uint16_t *old = snapshot;
        COMPARE(rounds_elsewhere(new[k], old[k]));
    } else if (size == 1) {
        const uint8_t *new = now, *old = snapshot;
        COMPARE(new[k] != old[k]);
    } else if (size == 2) {
        const uint16_t *new = now, *old = snapshot;
        COMPARE(new[k] != old[k]);
    } else if (size == 4) {
        const uint32_t *new = now, *old = snapshot;
        COMPARE(new[k] != old[k]);
    } else {
        const uint64_t *new = now, *old = snapshot;
        COMPARE(new[k] != old[k]);
    }
    return found;
}
