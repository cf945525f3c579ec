/* test_stash.c - a stash returns the bytes that were put, for any size and number of ranks, and each rank keeps only
 * its slice. The ranks are threads. */
#include "stash_cases.h"

int main(void)
{
    static const int32_t counts[] = {1, 2, 3, 4, 7, 8};
    bool slow = getenv("TSAN_OPTIONS") != NULL;
    for (int i = 0; i < nstash_cases; i++) {
        CASE("%s", stash_cases[i].name);
        for (uintptr_t seed = 1; seed <= stash_cases[i].nseeds && (!slow || seed < 3); seed++)
            for (size_t k = 0; k < sizeof counts / sizeof *counts && (!slow || counts[k] < 5); k++)
                on_ranks(counts[k], stash_cases[i].work, (void *)seed);
    }
    return tap_end();
}
