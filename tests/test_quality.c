/* test_quality.c - plans cost what bench/quality.csv records, so that a change of cost is visible. */
#include "reshard.h"
#include "tap.h"

#include <stdlib.h>

int main(void)
{
    FILE *file = fopen("bench/quality.csv", "r");
    char line[4096];
    CASE("plans cost what bench/quality.csv records");
    CHECK(file != NULL, "bench/quality.csv cannot be opened; run from the root of the project");
    if (file && !fgets(line, sizeof line, file))
        CHECK(false, "bench/quality.csv is empty");
    int rows = 0;
    while (file && fgets(line, sizeof line, file)) {
        char *problem = line + 1, *rest = strrchr(line, '"');
        rsd_layout *a, *b;
        rsd_plan *plan;
        rsd_totals t = {.struct_nbytes = sizeof t};
        long long want[7];
        *rest = '\0';
        CHECK(sscanf(rest + 1, ",%lld,%lld,%lld,%lld,%lld,%lld,%lld", &want[0], &want[1], &want[2],
                     &want[3], &want[4], &want[5], &want[6]) == 7,
              "%s: seven numbers are needed", problem);
        if (!CHECK(!rsd_problem_parse(problem, &a, &b), "%s: %s", problem, rsd_error()))
            continue;
        if (CHECK(!rsd_plan_new(a, b, NULL, &plan), "%s: %s", problem, rsd_error())) {
            OK(rsd_plan_totals(plan, &t));
            const int64_t got[7] = {t.npieces,     t.nmessages,    t.nstages,     t.nbytes_total,
                                    t.nbytes_kept, t.nbytes_moved, t.nbytes_least};
            for (int i = 0; i < 7; i++)
                CHECK(got[i] == want[i], "%s: number %d is %lld, was %lld", problem, i + 1,
                      (long long)got[i], want[i]);
            rsd_plan_free(plan);
        }
        rsd_layout_free(a);
        rsd_layout_free(b);
        rows++;
    }
    CHECK(rows >= 20, "only %d rows", rows);
    if (file)
        fclose(file);
    return tap_end();
}
