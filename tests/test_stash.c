/* test_stash.c - what goes into a stash comes out of it, whatever its size and the number of ranks, and each rank keeps
 * its part and no more: the ranks are threads here. */
#include "stash_cases.h"

int main(void)
{
    static const int32_t counts[] = {1, 2, 3, 4, 7, 8};
    bool dear = getenv("TSAN_OPTIONS") != NULL; /* threads are, there */
    for (int i = 0; i < nstash_cases; i++) {
        CASE("%s", stash_cases[i].name);
        for (uintptr_t seed = 1; seed <= stash_cases[i].nseeds && (!dear || seed < 3); seed++)
            for (size_t k = 0; k < sizeof counts / sizeof *counts && (!dear || counts[k] < 5); k++)
                on_ranks(counts[k], stash_cases[i].work, (void *)seed);
    }
    return tap_end();
}
