/* Which of the compiled instruction sets this processor has, and what the library was built from. */

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
