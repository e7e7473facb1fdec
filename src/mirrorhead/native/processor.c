/* Which of the compiled instruction sets this processor has, and what the library was built from. */
#include "native.h"

uint32_t checksum_keys[BLOCK_BYTES / 2];
struct power_tables power_tables;

__attribute__((constructor)) static void fill_tables(void) {
    for (int j = 0; j < 32; j++) {
        /* Of the middle; but 1 for the first, so that 1^e is 1. */
        const float reciprocal = (float)(j ? 1 / (1 + (j + 0.5) / 32) : 1);
        power_tables.reciprocal[j] = reciprocal;
        power_tables.log2[j] = (float)(j ? -log2(reciprocal) : 0);
        power_tables.exp2[j] = (float)exp2(j / 32.0);
    }
    for (uint32_t k = 0; k < BLOCK_BYTES / 2; k++) checksum_keys[k] = mix(k * 0x9e3779b9u + 1);
}

/* The names of the usable sets, best first, separated by blanks. */
const char *usable_sets(void) {
#if defined(__x86_64__) && defined(HAS_avx2)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(HAS_avx512)
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return "avx512 avx2 baseline";
#endif
    if (avx2) return "avx2 baseline";
#endif
    return "baseline";
}

/* A hash of the C sources, to notice a library that is older than they are. */
const char *source_digest(void) { return DIGEST; }
