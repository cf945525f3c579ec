/* test_mpi.c - plans between processes equal the oracle: every case of every backend, many in one bind, by
 * messages, through shared memory and from arenas; random layouts; several execs at once. With the argument "gpu",
 * arrays lie in the memory of a GPU, or in memory of any kind; see gpu.h. With "device", messages do so too. */
#include "reshard_mpi.h"

#include "cases.h"
#include "device_transport.h"
#include "gpu.h"
#include "oracle.h"
#include "random.h"
#include "tap.h"

#include <stdlib.h>

static int rank, nranks;
static bool with_gpu, with_device;
static rsd_transport over_mpi;
static struct device_transport on_device;
static struct random dice;
static long failures;

/* Checks a condition. Each rank prints its failures; rank 0 reports the result of all ranks at the end of a group. */
#define HOLDS(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            if (!failures++) {                                                                     \
                printf("# rank %d: ", rank);                                                       \
                printf(__VA_ARGS__);                                                               \
                printf("\n");                                                                      \
                fflush(stdout);                                                                    \
            }                                                                                      \
        }                                                                                          \
    } while (0)

/* ---- problems, many in one bind ---- */

enum { MOST = 48 };
enum way { MESSAGES, STAGED, DIRECT };

struct one {
    char text[9000];
    rsd_layout *a, *b;
    rsd_plan *plan;
    int64_t *src_strides, *dst_strides;
    struct memory src, dst;
};

static struct {
    struct one *list;
    const rsd_plan *plans[MOST];
    rsd_bind_options bind[MOST];
    const void *from[MOST * 64];
    void *to[MOST * 64];
    enum gpu_kind from_kind[MOST * 64], to_kind[MOST * 64];
    int64_t n, nfrom, nto;
    enum way way; /* of the next batch */
    int round;
} batch;

static char group_name[256];

static void copy(void *to, const void *from, size_t nbytes)
{
    if (nbytes)
        memcpy(to, from, nbytes);
}

/* On a GPU, in every third batch in memory of any kind, which differs between arrays and ranks. */
static void *place_array(rsd_arena *arena, void *array, size_t nbytes, enum gpu_kind *kind)
{
    void *memory = array;
    *kind = PAGEABLE;
    if (with_gpu && array) {
        *kind = batch.round % 3 == 2 ? (enum gpu_kind)random_below(&dice, NGPU_KINDS)
                : batch.round % 2    ? ON_BLOCKS
                                     : ON_GPU;
        if (*kind != PAGEABLE) {
            memory = gpu_new(*kind, nbytes);
            gpu_put(*kind, memory, array, nbytes);
        }
    }
    if (*kind == PAGEABLE && arena && !rsd_arena_alloc(arena, (int64_t)nbytes, &memory))
        copy(memory, array, nbytes);
    return memory;
}

/* The arrays of this rank, in an arena if there is one. */
static void place(rsd_arena *arena, struct one *one)
{
    int64_t first, n;
    rsd_layout_arrays_of(one->a, rank, &first, &n);
    for (int64_t i = 0; i < n; i++, batch.nfrom++)
        batch.from[batch.nfrom] =
            place_array(arena, one->src.array[first + i], one->src.nbytes[first + i],
                        &batch.from_kind[batch.nfrom]);
    rsd_layout_arrays_of(one->b, rank, &first, &n);
    for (int64_t i = 0; i < n; i++, batch.nto++)
        batch.to[batch.nto] = place_array(arena, one->dst.array[first + i],
                                          one->dst.nbytes[first + i], &batch.to_kind[batch.nto]);
}

static void check(struct one *one, int64_t *next)
{
    int64_t first, n;
    rsd_layout_arrays_of(one->b, rank, &first, &n);
    for (int64_t i = 0; i < n; i++, ++*next)
        if (batch.to[*next] != one->dst.array[first + i])
            gpu_get(batch.to_kind[*next], one->dst.array[first + i], batch.to[*next],
                    one->dst.nbytes[first + i]);
    HOLDS(oracle_check_of(one->a, one->b, one->dst_strides, &one->dst, rank), "%s", one->text);
}

static void free_arrays(void)
{
    for (int64_t i = 0; i < batch.nfrom; i++)
        if (batch.from_kind[i] != PAGEABLE)
            gpu_free(batch.from_kind[i], (void *)(uintptr_t)batch.from[i]);
    for (int64_t i = 0; i < batch.nto; i++)
        if (batch.to_kind[i] != PAGEABLE)
            gpu_free(batch.to_kind[i], batch.to[i]);
}

static void forget(struct one *one)
{
    oracle_memory_free(&one->src);
    oracle_memory_free(&one->dst);
    free(one->src_strides);
    free(one->dst_strides);
    rsd_plan_free(one->plan);
    rsd_layout_free(one->a);
    rsd_layout_free(one->b);
}

/* Returns the strides of the arrays of this rank. */
static const int64_t *own(const int64_t *strides, const rsd_layout *layout)
{
    int64_t first, n;
    rsd_layout_arrays_of(layout, rank, &first, &n);
    return strides ? strides + first * rsd_layout_ndim(layout) : NULL;
}

/* Binds a batch to MPI, or to a transport that takes device memory: of this device only, or of any. */
static rsd_status bind_batch(const rsd_exchange_options *options, rsd_exec **exec)
{
    rsd_transport transport =
        device_transport_of(&on_device, &over_mpi, batch.round % 4 == 3 ? -1 : 0);
    return with_device
               ? rsd_bind_transport(batch.n, batch.plans, batch.bind, &transport, options, exec)
               : rsd_bind_mpi_many(batch.n, batch.plans, batch.bind, MPI_COMM_WORLD, options, exec);
}

static void run_batch(void)
{
    rsd_arena *arena = NULL;
    rsd_exec *exec = NULL;
    rsd_exchange_options options = {.struct_nbytes = sizeof options,
                                    .max_nbytes = batch.n % 2 ? 1 : 0,
                                    .timeout = 60,
                                    .node = batch.way == MESSAGES ? -1 : 0};
    if (batch.n == 0)
        return;
    if (batch.way == DIRECT && rsd_arena_new((int64_t)2 << 20, &arena))
        HOLDS(false, "an arena: %s", rsd_error());
    options.arena = arena;
    for (int64_t i = 0; i < batch.n; i++) {
        struct one *one = &batch.list[i];
        batch.plans[i] = one->plan;
        batch.bind[i] = (rsd_bind_options){.struct_nbytes = sizeof(rsd_bind_options),
                                           .src_strides = own(one->src_strides, one->a),
                                           .dst_strides = own(one->dst_strides, one->b)};
        place(arena, one);
    }
    rsd_status status = bind_batch(&options, &exec);
    HOLDS(!status, "%s ...: %s", batch.list[0].text, rsd_error());
    if (!status) {
        HOLDS(nranks == 1 || batch.way == MESSAGES || strstr(rsd_exec_describe(exec), "shared"),
              "%s", rsd_exec_describe(exec));
        HOLDS(!rsd_exec_run(exec, batch.from, batch.to), "%s", rsd_error());
        HOLDS(!rsd_exec_start(exec, batch.from, batch.to) && !rsd_exec_progress(exec) &&
                  !rsd_exec_wait(exec),
              "%s", rsd_error());
        HOLDS(!with_device || !strstr(rsd_exec_describe(exec), "memory of the host only"), "%s",
              rsd_exec_describe(exec));
    }
    rsd_exec_free(exec);
    int64_t next = 0;
    for (int64_t i = 0; i < batch.n; i++) {
        if (!status)
            check(&batch.list[i], &next);
        forget(&batch.list[i]);
    }
    free_arrays();
    rsd_arena_free(arena);
    batch.n = batch.nfrom = batch.nto = 0;
    batch.way = (enum way)((batch.way + 1) % 3);
    batch.round++;
}

static void add(void *context, const char *problem, enum arrangement from, enum arrangement to)
{
    struct one *one = &batch.list[batch.n];
    (void)context;
    if (rsd_problem_parse(problem, &one->a, &one->b)) {
        HOLDS(false, "%s: %s", problem, rsd_error());
        return;
    }
    int64_t world = rsd_layout_world(one->a);
    world = rsd_layout_world(one->b) > world ? rsd_layout_world(one->b) : world;
    if (world > nranks || rsd_plan_new(one->a, one->b, &case_options, &one->plan)) {
        HOLDS(world > nranks, "%s: %s", problem, rsd_error());
        rsd_layout_free(one->a);
        rsd_layout_free(one->b);
        return;
    }
    snprintf(one->text, sizeof one->text, "%s", problem);
    one->src_strides = oracle_strides(one->a, from);
    one->dst_strides = oracle_strides(one->b, to);
    one->src = oracle_memory(one->a, one->src_strides);
    one->dst = oracle_memory(one->b, one->dst_strides);
    oracle_fill(one->a, one->src_strides, &one->src);
    if (++batch.n == MOST)
        run_batch();
}

/* Ends a group on all ranks. Rank 0 prints its result. */
static void begin(void *context, const char *name)
{
    long all = 0;
    (void)context;
    run_batch();
    MPI_Allreduce(&failures, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && group_name[0]) {
        CASE("%s", group_name);
        CHECK(all == 0, "%ld failures", all);
    }
    failures = 0;
    snprintf(group_name, sizeof group_name, "%s", name);
}

/* ---- more ---- */

static void random_layouts(void)
{
    struct random random = {(uint64_t)nranks};
    begin(NULL, "random layouts");
    for (int i = 0; i < 400; i++) {
        static const char *const dtypes[] = {"f32", "i64", "bf16", "u8"};
        struct random_tensor tensor = random_tensor(&random, dtypes[random_below(&random, 4)]);
        const char *other = i % 2 ? dtypes[random_below(&random, 4)] : "";
        char from[4096], to[4096], problem[9000];
        rsd_layout *a, *b;
        rsd_plan *plan = NULL;
        random_side(&random, &tensor, i % 3 == 0 ? "sum" : NULL, from, sizeof from);
        random_side(&random, &tensor, NULL, to, sizeof to);
        snprintf(problem, sizeof problem, "%s : %s -> %s %s", tensor.text, from, other, to);
        if (rsd_problem_parse(problem, &a, &b))
            continue;
        if (!rsd_plan_new(a, b, &case_options, &plan))
            add(NULL, problem, (enum arrangement)(i % 3), (enum arrangement)(i / 3 % 3));
        rsd_plan_free(plan);
        rsd_layout_free(a);
        rsd_layout_free(b);
    }
}

/* Two execs of one plan at once, waited for in the other order; and the inverse plan. */
static void several_execs(void)
{
    char problem[100];
    rsd_layout *a, *b;
    rsd_plan *there, *back;
    rsd_exec *exec[3];
    begin(NULL, "several execs at once, a communicator as Fortran has it, and the way back");
    snprintf(problem, sizeof problem, "i64[61,47] : %d:S0 -> %d:S1", nranks, nranks);
    HOLDS(!rsd_problem_parse(problem, &a, &b) && !rsd_plan_new(a, b, NULL, &there) &&
              !rsd_plan_inverse(there, &back),
          "%s", rsd_error());
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .node = -1, .timeout = 60};
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    HOLDS(!rsd_mpi_transport_f((int32_t)MPI_Comm_c2f(MPI_COMM_WORLD), &transport), "%s",
          rsd_error());
    HOLDS(!rsd_bind_mpi(there, MPI_COMM_WORLD, &options, &exec[0]) &&
              !rsd_bind_transport(1, (const rsd_plan *const *)&there, NULL, &transport, &options,
                                  &exec[1]) &&
              !rsd_bind_mpi(back, MPI_COMM_WORLD, NULL, &exec[2]),
          "%s", rsd_error());
    struct memory src = oracle_memory(a, NULL), dst[2], again = oracle_memory(a, NULL);
    oracle_fill(a, NULL, &src);
    for (int i = 0; i < 2; i++) {
        dst[i] = oracle_memory(b, NULL);
        HOLDS(!rsd_exec_start(exec[i], (const void *const *)&src.array[rank], &dst[i].array[rank]),
              "%s", rsd_error());
    }
    for (int i = 1; i >= 0; i--)
        HOLDS(!rsd_exec_wait(exec[i]) && oracle_check_of(a, b, NULL, &dst[i], rank), "%s",
              rsd_error());
    HOLDS(!rsd_exec_run(exec[2], (const void *const *)&dst[0].array[rank], &again.array[rank]),
          "%s", rsd_error());
    HOLDS(oracle_check_of(a, a, NULL, &again, rank), "the way back");
    for (int i = 0; i < 3; i++)
        rsd_exec_free(exec[i]);
    rsd_mpi_transport_free(&transport);
    oracle_memory_free(&src);
    oracle_memory_free(&again);
    oracle_memory_free(&dst[0]);
    oracle_memory_free(&dst[1]);
    rsd_plan_free(there);
    rsd_plan_free(back);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

int main(int argc, char **argv)
{
    with_device = argc > 1 && strcmp(argv[1], "device") == 0;
    with_gpu = with_device || (argc > 1 && strcmp(argv[1], "gpu") == 0);
    if (with_gpu && !gpu_open(argv))
        return 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (with_gpu) {
        gpu_start();
        gpu_use_device(rank % gpu_ndevices());
    }
    over_mpi.struct_nbytes = sizeof over_mpi;
    if (with_device && rsd_mpi_transport(MPI_COMM_WORLD, &over_mpi))
        return 1;
    dice.state = (uint64_t)rank + 1;
    batch.list = calloc(MOST, sizeof *batch.list);
    every_case(&(struct cases){begin, add, NULL});
    random_layouts();
    several_execs();
    begin(NULL, "");
    free(batch.list);
    rsd_mpi_transport_free(&over_mpi);
    int failed = rank == 0 ? tap_end() : 0;
    MPI_Finalize();
    return failed;
}
