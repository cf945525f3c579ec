/* Compiled by tools/lint.sh as C and as C++: RSD_INIT in every place where a struct is initialized. */
#include "reshard.h"

rsd_status describe(const rsd_plan *plan, int64_t *nbytes);

rsd_status describe(const rsd_plan *plan, int64_t *nbytes)
{
    rsd_totals totals = RSD_INIT(rsd_totals);
    rsd_plan_options options = RSD_INIT(rsd_plan_options), *pointer = &options;
    rsd_coverage coverage;
    coverage = RSD_INIT(rsd_coverage);
    *pointer = RSD_INIT(rsd_plan_options);
    *nbytes = (int64_t)(RSD_INIT(rsd_coverage).struct_nbytes + coverage.struct_nbytes +
                        options.struct_nbytes);
    return rsd_plan_totals(plan, &totals);
}
