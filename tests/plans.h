/* plans.h - layouts and plans from text, for tests. */
#ifndef PLANS_H
#define PLANS_H

#include "reshard.h"
#include "tap.h"

static inline rsd_layout *parsed(const char *text)
{
    rsd_layout *layout = NULL;
    CHECK(rsd_layout_parse(text, &layout) == RSD_OK, "%s: %s", text, rsd_error());
    return layout;
}

static inline void prints_as(const rsd_layout *layout, const char *canonical)
{
    char *text;
    if (OK(rsd_layout_print(layout, &text))) {
        CHECK(strcmp(text, canonical) == 0, "'%s' should be '%s'", text, canonical);
        rsd_free(text);
    }
}

static inline bool make(const char *problem, const rsd_plan_options *options, rsd_plan **plan)
{
    rsd_layout *a, *b;
    if (!CHECK(rsd_problem_parse(problem, &a, &b) == RSD_OK, "%s: %s", problem, rsd_error()))
        return false;
    bool fine = CHECK(rsd_plan_new(a, b, options, plan) == RSD_OK, "%s: %s", problem, rsd_error());
    rsd_layout_free(a);
    rsd_layout_free(b);
    return fine;
}

static inline rsd_totals totals_of(const rsd_plan *plan)
{
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    OK(rsd_plan_totals(plan, &totals));
    return totals;
}

static inline rsd_rank_totals part_of(const rsd_plan *plan, int32_t rank)
{
    rsd_rank_totals totals = {.struct_nbytes = sizeof totals};
    OK(rsd_plan_rank_totals(plan, rank, &totals));
    return totals;
}

#endif
