/* bench.h - timing and reporting: each result beside the limit of the machine, measured in the same run.
 *
 * Memory is touched before the clock starts. Every figure is the best of several repetitions. The library and the
 * limit are measured in turns, since the machine may be shared. Each row is printed as text, and written as one JSON
 * object to the file named on the command line.
 */
#ifndef BENCH_H
#define BENCH_H

#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Ends the program if a call fails. */
static inline void must(rsd_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

static inline void *touched(size_t nbytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, nbytes ? nbytes : 1))
        exit(1);
    memset(memory, 7, nbytes);
    return memory;
}

typedef void work_fn(void *context);

/* Measures n functions in turn, `rounds` times, and returns the best seconds of each. */
static inline void best_of(int rounds, int n, work_fn *const *works, void *context, double *seconds)
{
    for (int i = 0; i < n; i++)
        seconds[i] = 1e99;
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < n; i++) {
            double start = now();
            works[i](context);
            double took = now() - start;
            if (took < seconds[i])
                seconds[i] = took;
        }
}

static FILE *bench_file;

static inline void bench_open(int argc, char **argv)
{
    bench_file = argc > 1 ? fopen(argv[1], "a") : NULL;
    setvbuf(stdout, NULL, _IOLBF, 0);
}

static inline void bench_title(const char *title)
{
    printf("\n%s\n%-64s %12s %12s %-8s %7s\n", title, "problem", "ours", "limit", "unit", "ratio");
}

/* Prints a row. A ratio above 1 is better than the limit, for seconds and for bytes per second. */
static inline void bench_row(const char *problem, double ours, double limit, const char *unit,
                             const char *limit_is)
{
    int is_time = strcmp(unit, "s") == 0 || strcmp(unit, "ms") == 0 || strcmp(unit, "us") == 0;
    double ratio = is_time ? limit / ours : ours / limit;
    printf("%-64s %12.4g %12.4g %-8s %7.2f   limit: %s\n", problem, ours, limit, unit, ratio,
           limit_is);
    if (bench_file) {
        fprintf(bench_file,
                "{\"problem\": \"%s\", \"ours\": %.6g, \"limit\": %.6g, \"peer\": null, \"unit\": "
                "\"%s\", \"ratio\": %.4g, \"what\": \"%s\"}\n",
                problem, ours, limit, unit, ratio, limit_is);
        fflush(bench_file);
    }
}

#endif
