/* test_exchange_wrong.c - an invalid argument of one rank fails on all ranks with the same status before data moves,
 * and the exec can be used again. Errors name ranks that are late. */
#include "ranks.h"

#include <sys/resource.h>

enum { NRANKS = 3, ODD = 1, NUMEL = 12, PART = NUMEL / NRANKS };

static rsd_plan *plan_of(const char *problem)
{
    rsd_layout *a = NULL, *b = NULL;
    rsd_plan *plan = NULL;
    OK(rsd_problem_parse(problem, &a, &b));
    OK(rsd_plan_new(a, b, NULL, &plan));
    rsd_layout_free(a);
    rsd_layout_free(b);
    return plan;
}

static rsd_status bind_one(struct rank *rank, const rsd_plan *plan, const rsd_bind_options *bind,
                           int64_t node, double timeout, rsd_exec **exec)
{
    rsd_exchange_options options = {
        .struct_nbytes = sizeof options, .timeout = timeout, .node = node};
    return rsd_bind_transport(1, &plan, bind, &rank->transport, &options, exec);
}

/* A good run of "f32[12] : 3:S0 -> 3:R". */
static void gather_all(struct rank *rank, rsd_exec *exec)
{
    float from[PART], to[NUMEL] = {0};
    const void *src = from;
    void *dst = to;
    for (int i = 0; i < PART; i++)
        from[i] = (float)(rank->rank * PART + i);
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    for (int i = 0; i < NUMEL; i++)
        NEED(rank, to[i] == (float)i, "element %d is %g", i, (double)to[i]);
}

static rsd_plan *gathering; /* made once: the ranks share it */

/* ---- arrays ---- */

static void null_arrays(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    float from[PART] = {0}, to[NUMEL];
    const void *src = from, *no_src = NULL;
    void *dst = to, *no_dst = NULL;
    bool odd = rank->rank == ODD;
    NEED_OK(rank, bind_one(rank, gathering, NULL, (int64_t)(uintptr_t)context - 1, 60, &exec));
    for (int i = 0; i < 2; i++) {
        NEED_FAILS(rank, RSD_EINVAL, "rank 1: destination array 0 is NULL",
                   rsd_exec_run(exec, &src, odd ? &no_dst : &dst));
        NEED_FAILS(rank, RSD_EINVAL, "rank 1: source array 0 is NULL",
                   rsd_exec_run(exec, odd ? &no_src : &src, &dst));
        NEED_FAILS(rank, RSD_EINVAL, "rank 1: source array 0 is NULL",
                   rsd_exec_run(exec, odd ? NULL : &src, &dst));
        gather_all(rank, exec);
    }
    /* With start and wait, the error is that of the run, also if other calls failed in between. */
    NEED_OK(rank, rsd_exec_start(exec, odd ? &no_src : &src, &dst));
    NEED_FAILS(rank, RSD_EINVAL, "call rsd_exec_wait", rsd_exec_start(exec, &src, &dst));
    NEED_OK(rank, rsd_exec_progress(exec));
    NEED_FAILS(rank, RSD_EINVAL, "rank 1: source array 0 is NULL", rsd_exec_wait(exec));
    NEED_FAILS(rank, RSD_EINVAL, "rsd_exec_wait: no run in progress", rsd_exec_wait(exec));
    NEED_FAILS(rank, RSD_EINVAL, "rsd_exec_progress: no run in progress", rsd_exec_progress(exec));
    gather_all(rank, exec);
    rsd_exec_free(exec);
}

static void overlapping_arrays(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    float memory[2 * NUMEL] = {0}, from[PART] = {0};
    bool odd = rank->rank == ODD;
    NEED_OK(rank, bind_one(rank, gathering, NULL, (int64_t)(uintptr_t)context - 1, 60, &exec));
    /* The source begins at the destination, in it, at its last element, or ends in it. */
    static const int starts[] = {PART, PART + 3, PART + NUMEL - 1, 1};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        const void *src = odd ? memory + starts[i] : from;
        void *dst = memory + PART;
        NEED(rank, rsd_exec_run(exec, &src, &dst) == RSD_EINVAL, "start %d: %s", starts[i],
             rsd_error());
        NEED(rank,
             strncmp(rsd_error(), "rank 1: ", 8) == 0 && strstr(rsd_error(), "array 0 overlaps a"),
             "%s", rsd_error());
    }
    const void *src = memory + PART + NUMEL; /* adjacent arrays do not overlap */
    void *dst = memory + PART;
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    src = memory;
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    gather_all(rank, exec);
    rsd_exec_free(exec);
}

/* Columns of one matrix: strided arrays may interleave. */
static void interleaved_arrays(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    static const int64_t from_strides[] = {3}, to_strides[] = {3};
    rsd_bind_options bind = {
        .struct_nbytes = sizeof bind, .src_strides = from_strides, .dst_strides = to_strides};
    float memory[3 * NUMEL] = {0};
    const void *src = memory + 1;
    void *dst = memory;
    NEED_OK(rank, bind_one(rank, gathering, &bind, (int64_t)(uintptr_t)context - 1, 60, &exec));
    for (int i = 0; i < PART; i++)
        memory[1 + 3 * i] = (float)(rank->rank * PART + i);
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    for (int i = 0; i < NUMEL; i++)
        NEED(rank, memory[3 * i] == (float)i, "element %d is %g", i, (double)memory[3 * i]);
    src = memory;
    NEED_FAILS(rank, RSD_EINVAL, "overlaps", rsd_exec_run(exec, &src, &dst));
    rsd_exec_free(exec);
}

/* ---- plans ---- */

static rsd_plan *other_plan, *too_large;

static void different_plans(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    int64_t node = (int64_t)(uintptr_t)context - 1;
    bool odd = rank->rank == ODD;
    const rsd_plan *plans[] = {gathering, gathering, odd ? other_plan : gathering};
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = 60, .node = node};
    NEED_FAILS(rank, RSD_EMISMATCH, "plan 2 differs: rank 0 has f32[12] : ",
               rsd_bind_transport(3, plans, NULL, &rank->transport, &options, &exec));
    NEED(rank, strstr(rsd_error(), "rank 1 has f64[12]"), "%s", rsd_error());
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 1 has 1 plans, rank 0 has 2",
               rsd_bind_transport(odd ? 1 : 2, plans, NULL, &rank->transport, &options, &exec));
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 0: a layout names rank 7, but the transport has 3 ranks",
               bind_one(rank, too_large, NULL, node, 60, &exec));
    options.struct_nbytes = odd ? 1 : sizeof options;
    NEED_FAILS(rank, RSD_EINVAL, "rank 1: rsd_exchange_options.struct_nbytes is 1",
               rsd_bind_transport(1, plans, NULL, &rank->transport, &options, &exec));
    rsd_bind_options both = {.struct_nbytes = sizeof both, .src_column_major = 1};
    both.src_strides = (const int64_t[]){1};
    NEED_FAILS(rank, RSD_EINVAL, "rank 1: strides and column_major exclude each other",
               bind_one(rank, gathering, odd ? &both : NULL, node, 60, &exec));
    NEED(rank, exec == NULL, "written by a bind that failed");
    NEED_OK(rank, bind_one(rank, gathering, NULL, node, 60, &exec));
    gather_all(rank, exec);
    rsd_exec_free(exec);
}

/* Ranks that run different plans, or bind while others run, on one transport. */
static void different_calls(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL, *other = NULL, *none = NULL;
    double from[NUMEL] = {0}, to[NUMEL];
    const void *src = from;
    void *dst = to;
    bool odd = rank->rank == ODD;
    (void)context;
    NEED_OK(rank, bind_one(rank, gathering, NULL, -1, 60, &exec));
    NEED_OK(rank, bind_one(rank, other_plan, NULL, -1, 60, &other));
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 1 passed different arguments than rank 0 to rsd_exec_run",
               rsd_exec_run(odd ? other : exec, &src, &dst));
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 1 called rsd_bind_transport, rank 0 called rsd_exec_run",
               odd ? bind_one(rank, gathering, NULL, -1, 60, &none)
                   : rsd_exec_run(exec, &src, &dst));
    gather_all(rank, exec);
    rsd_exec_free(exec);
    rsd_exec_free(other);
}

/* All ranks pack in one order, also if only some of them have their arrays by columns. */
static void columns_on_one_rank(struct rank *rank, void *context)
{
    enum { ROWS = 6, COLUMNS = 9 };
    rsd_plan *plan = context;
    rsd_exec *exec = NULL;
    bool odd = rank->rank == ODD;
    rsd_bind_options bind = {
        .struct_nbytes = sizeof bind, .src_column_major = odd, .dst_column_major = odd};
    float from[2 * COLUMNS], to[ROWS * 3];
    const void *src = from;
    void *dst = to;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < COLUMNS; k++)
            from[odd ? k * 2 + i : i * COLUMNS + k] = (float)((2 * rank->rank + i) * COLUMNS + k);
    NEED_OK(rank, bind_one(rank, plan, &bind, -1, 60, &exec));
    NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < 3; k++)
            NEED(rank,
                 to[odd ? k * ROWS + i : i * 3 + k] == (float)(i * COLUMNS + 3 * rank->rank + k),
                 "element %d,%d is wrong", i, k);
    rsd_exec_free(exec);
}

/* ---- no shared memory ---- */

/* Without a free descriptor no rank can share memory. */
static void without_shared_memory(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    (void)context;
    NEED_OK(rank, bind_one(rank, gathering, NULL, 0, 60, &exec));
    const char *note = exec ? rsd_exec_describe(exec) : "";
    NEED(rank, strcmp(note, "messages only: rank 0: memfd_create: Too many open files") == 0, "%s",
         note);
    gather_all(rank, exec);
    rsd_exec_free(exec);
}

static void no_descriptors(void)
{
    CASE("without shared memory the transport is used, and the description has the reason");
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = (struct rlimit){0, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    on_ranks(NRANKS, without_shared_memory, NULL);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

/* ---- late ranks ---- */

static void late_to_run(struct rank *rank, void *context)
{
    static const char *const names[] = {"layers.0.weight"};
    rsd_exec *exec = NULL;
    float from[PART] = {0}, to[NUMEL];
    const void *src = from;
    void *dst = to;
    rsd_exchange_options options = {.struct_nbytes = sizeof options,
                                    .timeout = 2,
                                    .node = (int64_t)(uintptr_t)context - 1,
                                    .names = names};
    const rsd_plan *plans[] = {gathering};
    NEED_OK(rank, rsd_bind_transport(1, plans, NULL, &rank->transport, &options, &exec));
    if (rank->rank != ODD) {
        NEED_FAILS(rank, RSD_ETIMEOUT,
                   "timed out after 2 s: rank 1 has not entered the call "
                   "(layers.0.weight, rank ",
                   rsd_exec_run(exec, &src, &dst));
        NEED_FAILS(rank, RSD_EINVAL, "can only be freed", rsd_exec_run(exec, &src, &dst));
    }
    rsd_exec_free(exec);
}

static void late_to_bind(struct rank *rank, void *context)
{
    rsd_exec *exec = NULL;
    if (rank->rank != ODD)
        NEED_FAILS(rank, RSD_ETIMEOUT, "timed out after 2 s: rank 1 has not entered the call",
                   bind_one(rank, gathering, NULL, (int64_t)(uintptr_t)context - 1, 2, &exec));
}

int main(void)
{
    static const struct {
        const char *name;
        uintptr_t node; /* one more than the node */
    } ways[] = {{"by messages", 0}, {"through shared memory", 1}};
    gathering = plan_of("f32[12] : 3:S0 -> 3:R");
    other_plan = plan_of("f64[12] : 3:S0 -> 3:R");
    too_large = plan_of("f32[16] : 8:S0 -> 8:R");
    rsd_plan *transposing = plan_of("f32[6,9] : 3:S0 -> 3:S1");
    for (int i = 0; i < 2; i++) {
        void *node = (void *)ways[i].node;
        CASE("an array that is NULL on one rank, %s", ways[i].name);
        on_ranks(NRANKS, null_arrays, node);
        CASE("a destination that overlaps a source on one rank, %s", ways[i].name);
        on_ranks(NRANKS, overlapping_arrays, node);
        CASE("strided arrays that interleave, %s", ways[i].name);
        on_ranks(NRANKS, interleaved_arrays, node);
        CASE("different plans, %s", ways[i].name);
        on_ranks(NRANKS, different_plans, node);
        CASE("the error names a rank that is late, %s", ways[i].name);
        on_ranks(NRANKS, late_to_run, node);
        on_ranks(NRANKS, late_to_bind, node);
    }
    no_descriptors();
    CASE("different calls");
    on_ranks(NRANKS, different_calls, NULL);
    CASE("columns on one rank, rows on the others");
    on_ranks(NRANKS, columns_on_one_rank, transposing);
    rsd_plan_free(gathering);
    rsd_plan_free(other_plan);
    rsd_plan_free(too_large);
    rsd_plan_free(transposing);
    return tap_end();
}
