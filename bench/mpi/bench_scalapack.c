/* bench_scalapack.c - moves between two block-cyclic distributions, beside pdgemr2d of ScaLAPACK. */
#include "bench_mpi.h"

/* Declarations of ScaLAPACK, which has no C header. */
void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, char *order, int nrows, int ncolumns);
void Cblacs_gridinfo(int context, int *nrows, int *ncolumns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *at, const int *first, const int *nprocs);
void descinit_(int *desc, const int *m, const int *n, const int *mb, const int *nb, const int *row,
               const int *column, const int *context, const int *leading, int *info);
void Cpdgemr2d(int m, int n, double *a, int ia, int ja, int *desc_a, double *b, int ib, int jb,
               int *desc_b, int context);

enum { N = 8192 };

struct side {
    int nrows, ncolumns, block, context, desc[9];
    size_t nbytes;
    double *memory;
};

struct job {
    struct side from, to;
    rsd_exec *plain, *direct;
    void *src, *dst; /* in the arena */
};

static void make_side(struct side *side)
{
    static const int zero, n = N;
    int row, column, info;
    Cblacs_get(-1, 0, &side->context);
    char order[] = "R";
    Cblacs_gridinit(&side->context, order, side->nrows, side->ncolumns);
    Cblacs_gridinfo(side->context, &info, &info, &row, &column);
    int rows = numroc_(&n, &side->block, &row, &zero, &side->nrows);
    int columns = numroc_(&n, &side->block, &column, &zero, &side->ncolumns);
    descinit_(side->desc, &n, &n, &side->block, &side->block, &zero, &zero, &side->context, &rows,
              &info);
    side->nbytes = (size_t)rows * (size_t)columns * sizeof(double);
    side->memory = touched(side->nbytes);
}

static void by_scalapack(void *context)
{
    struct job *job = context;
    Cpdgemr2d(N, N, job->from.memory, 1, 1, job->from.desc, job->to.memory, 1, 1, job->to.desc,
              job->from.context);
}

static void by_plan(void *context)
{
    struct job *job = context;
    const void *src[] = {job->from.memory};
    void *dst[] = {job->to.memory};
    must(rsd_exec_run(job->plain, src, dst));
}

static void by_plan_from_arena(void *context)
{
    struct job *job = context;
    must(rsd_exec_run(job->direct, (const void *const *)&job->src, &job->dst));
}

int main(int argc, char **argv)
{
    static ranks_work *const works[] = {by_scalapack, by_plan, by_plan_from_arena};
    struct job job = {.from = {2, 2, 64, 0, {0}, 0, NULL}, .to = {4, 1, 128, 0, {0}, 0, NULL}};
    static const char problem[] = "f64[8192,8192] : 2x2:C(0,64),C(1,64) -> 4x1:C(0,128),C(1,128)";
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_arena *arena;
    double seconds[3];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    make_side(&job.from);
    make_side(&job.to);
    must(rsd_problem_parse(problem, &a, &b));
    must(rsd_plan_new(a, b, NULL, &plan));
    rsd_bind_options columns = {
        .struct_nbytes = sizeof columns, .src_column_major = 1, .dst_column_major = 1};
    rsd_exchange_options options = {.struct_nbytes = sizeof options};
    const rsd_plan *plans[] = {plan};
    must(array_nbytes(a) == job.from.nbytes && array_nbytes(b) == job.to.nbytes ? RSD_OK
                                                                                : RSD_EINVAL);
    must(rsd_bind_mpi_many(1, plans, &columns, MPI_COMM_WORLD, &options, &job.plain));
    must(rsd_arena_new((int64_t)(job.from.nbytes + job.to.nbytes + 128), &arena));
    must(rsd_arena_alloc(arena, (int64_t)job.from.nbytes, &job.src));
    must(rsd_arena_alloc(arena, (int64_t)job.to.nbytes, &job.dst));
    options.arena = arena;
    must(rsd_bind_mpi_many(1, plans, &columns, MPI_COMM_WORLD, &options, &job.direct));
    for (size_t i = 0; i < job.from.nbytes / sizeof(double); i++)
        job.from.memory[i] = (double)rank + (double)i * 4;
    memcpy(job.src, job.from.memory, job.from.nbytes);
    by_scalapack(&job);
    by_plan_from_arena(&job);
    int same = memcmp(job.to.memory, job.dst, job.to.nbytes) == 0, all;
    memset(job.to.memory, 0, job.to.nbytes);
    by_plan(&job);
    same = same && memcmp(job.to.memory, job.dst, job.to.nbytes) == 0;
    MPI_Allreduce(&same, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    best_of_ranks(5, 3, works, &job, seconds);
    if (rank == 0) {
        bench_open(argc, argv);
        bench_title(all ? "MPI: block-cyclic, the same elements as ScaLAPACK's"
                        : "MPI: block-cyclic, and the elements DIFFER from ScaLAPACK's");
        bench_row("C 2x2 nb 64 -> C 4x1 nb 128, f64 8192^2, arenas", 1e3 * seconds[2],
                  1e3 * seconds[0], "ms", "pdgemr2d");
        bench_row("C 2x2 nb 64 -> C 4x1 nb 128, f64 8192^2, any memory", 1e3 * seconds[1],
                  1e3 * seconds[0], "ms", "pdgemr2d");
    }
    rsd_exec_free(job.plain);
    rsd_exec_free(job.direct);
    rsd_arena_free(arena);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
    free(job.from.memory);
    free(job.to.memory);
    MPI_Finalize();
    return !all;
}
