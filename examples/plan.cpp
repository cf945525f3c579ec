/* plan.cpp - the library from C++: what a plan moves, and the arrays of one rank before and after.
 *
 *     build/examples/plan 'f32[4096,4096] : 4:S0 -> 2x2:S0,S1' 1
 *
 * Objects are owned by std::unique_ptr, and errors become exceptions. Shows: rsd_problem_parse, rsd_layout_local,
 * rsd_plan_new, rsd_plan_totals, rsd_plan_walk, RSD_INIT.
 */
#include "reshard.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

static void check(rsd_status status)
{
    if (status != RSD_OK)
        throw std::runtime_error(std::string(rsd_status_name(status)) + ": " + rsd_error());
}

struct deleter {
    void operator()(rsd_layout *layout) const
    {
        rsd_layout_free(layout);
    }
    void operator()(rsd_plan *plan) const
    {
        rsd_plan_free(plan);
    }
    void operator()(rsd_cursor *cursor) const
    {
        rsd_cursor_free(cursor);
    }
};
template <typename object> using owned = std::unique_ptr<object, deleter>;

static void print_array(const char *when, const rsd_layout *layout, int32_t rank)
{
    rsd_array array;
    check(rsd_layout_local(layout, rank, &array));
    std::printf("rank %d %s: [", static_cast<int>(rank), when);
    for (int32_t d = 0; d < array.ndim; d++)
        std::printf("%s%lld", d ? "," : "", static_cast<long long>(array.shape[d]));
    std::printf("], %zu bytes\n", array.nbytes);
}

static void print_plan(const char *problem, int32_t rank)
{
    rsd_layout *from, *to;
    check(rsd_problem_parse(problem, &from, &to));
    owned<rsd_layout> src(from), dst(to);
    print_array("before", src.get(), rank);
    print_array("after", dst.get(), rank);

    rsd_plan *made;
    check(rsd_plan_new(src.get(), dst.get(), nullptr, &made));
    owned<rsd_plan> plan(made);
    rsd_totals totals = RSD_INIT(rsd_totals);
    check(rsd_plan_totals(plan.get(), &totals));
    std::printf("%lld bytes move in %lld messages\n", static_cast<long long>(totals.nbytes_moved),
                static_cast<long long>(totals.nmessages));

    rsd_cursor *walk;
    check(rsd_plan_walk(plan.get(), rank, RSD_RECEIVES, &walk));
    owned<rsd_cursor> cursor(walk);
    const rsd_piece *piece;
    for (check(rsd_cursor_next(walk, &piece)); piece; check(rsd_cursor_next(walk, &piece)))
        std::printf("%lld bytes from rank %d\n", static_cast<long long>(piece->nbytes),
                    static_cast<int>(piece->from));
}

int main(int argc, char **argv)
{
    try {
        print_plan(argc > 1 ? argv[1] : "f32[4096,4096] : 4:S0 -> 2x2:S0,S1",
                   argc > 2 ? std::atoi(argv[2]) : 0);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return std::fflush(stdout) != 0;
}
