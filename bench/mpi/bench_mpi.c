/* bench_mpi.c - plans over MPI beside hand-written code for the same boxes: MPI_Alltoallw and MPI_Isend with subarray
 * types, and packing into messages. */
#include "bench_mpi.h"

enum { MOST = 64 };

/* One two-dimensional tensor in which every pair of ranks exchanges at most one box. */
struct tensor {
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_array from, to;
    size_t each;
    char *src, *dst; /* ordinary memory */
    MPI_Datatype send[MOST], recv[MOST];
    int nsend[MOST], nrecv[MOST];
    rsd_piece give[MOST], get[MOST];
};

struct job {
    struct tensor *tensors;
    int n;
    rsd_exec *plain, *direct, *messages;
    const void **src, **arena_src;
    void **dst, **arena_dst;
    char *packed[2][MOST];
};

/* ---- by hand ---- */

static MPI_Datatype subarray(const rsd_array *array, const rsd_piece *piece, const int64_t *at,
                             size_t each)
{
    MPI_Datatype type;
    int sizes[2] = {(int)array->shape[0], (int)(array->shape[1] * (int64_t)each)};
    int lens[2] = {(int)piece->box.len[0], (int)(piece->box.len[1] * (int64_t)each)};
    int starts[2] = {(int)at[0], (int)(at[1] * (int64_t)each)};
    MPI_Type_create_subarray(2, sizes, lens, starts, MPI_ORDER_C, MPI_BYTE, &type);
    MPI_Type_commit(&type);
    return type;
}

static void walk(struct tensor *t, rsd_side side)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    must(rsd_plan_walk(t->plan, rank, side, &cursor));
    while (!rsd_cursor_next(cursor, &piece) && piece) {
        if (side == RSD_SENDS) {
            t->give[piece->to] = *piece;
            t->send[piece->to] = subarray(&t->from, piece, piece->from_at, t->each);
            t->nsend[piece->to] = 1;
        } else {
            t->get[piece->from] = *piece;
            t->recv[piece->from] = subarray(&t->to, piece, piece->to_at, t->each);
            t->nrecv[piece->from] = 1;
        }
    }
    rsd_cursor_free(cursor);
}

static void by_alltoallw(void *context)
{
    static const int zeros[MOST];
    struct job *job = context;
    for (int i = 0; i < job->n; i++) {
        struct tensor *t = &job->tensors[i];
        MPI_Alltoallw(t->src, t->nsend, zeros, t->send, t->dst, t->nrecv, zeros, t->recv,
                      MPI_COMM_WORLD);
    }
}

static void by_isend(void *context)
{
    struct job *job = context;
    MPI_Request requests[2 * MOST];
    for (int i = 0; i < job->n; i++) {
        struct tensor *t = &job->tensors[i];
        int n = 0;
        for (int p = 0; p < nranks; p++)
            if (t->nrecv[p])
                MPI_Irecv(t->dst, 1, t->recv[p], p, 0, MPI_COMM_WORLD, &requests[n++]);
        for (int p = 0; p < nranks; p++)
            if (t->nsend[p])
                MPI_Isend(t->src, 1, t->send[p], p, 0, MPI_COMM_WORLD, &requests[n++]);
        MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
    }
}

static void rows(const rsd_array *array, const rsd_piece *piece, const int64_t *at, size_t each,
                 char *base, char *packed, int out)
{
    size_t pitch = (size_t)array->shape[1] * each, run = (size_t)piece->box.len[1] * each;
    char *row = base + (size_t)at[0] * pitch + (size_t)at[1] * each;
    for (int64_t i = 0; i < piece->box.len[0]; i++, row += pitch, packed += run)
        memcpy(out ? packed : row, out ? row : packed, run);
}

static void by_packing(void *context)
{
    struct job *job = context;
    MPI_Request requests[2 * MOST];
    for (int i = 0; i < job->n; i++) {
        struct tensor *t = &job->tensors[i];
        int n = 0;
        for (int p = 0; p < nranks; p++)
            if (t->nrecv[p])
                MPI_Irecv(job->packed[1][p], (int)t->get[p].nbytes, MPI_BYTE, p, 0, MPI_COMM_WORLD,
                          &requests[n++]);
        for (int p = 0; p < nranks; p++)
            if (t->nsend[p]) {
                rows(&t->from, &t->give[p], t->give[p].from_at, t->each, t->src, job->packed[0][p],
                     1);
                MPI_Isend(job->packed[0][p], (int)t->give[p].nbytes, MPI_BYTE, p, 0, MPI_COMM_WORLD,
                          &requests[n++]);
            }
        MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
        for (int p = 0; p < nranks; p++)
            if (t->nrecv[p])
                rows(&t->to, &t->get[p], t->get[p].to_at, t->each, t->dst, job->packed[1][p], 0);
    }
}

/* ---- ours ---- */

static void by_plan(void *context)
{
    struct job *job = context;
    must(rsd_exec_run(job->plain, job->src, job->dst));
}

static void by_plan_from_arena(void *context)
{
    struct job *job = context;
    must(rsd_exec_run(job->direct, job->arena_src, job->arena_dst));
}

/* ---- a job ---- */

static void make_tensor(struct tensor *t, const char *problem)
{
    must(rsd_problem_parse(problem, &t->a, &t->b));
    must(rsd_plan_new(t->a, t->b, NULL, &t->plan));
    t->each = rsd_dtype_nbytes(rsd_layout_dtype(t->a));
    t->from = own_array(t->a);
    t->to = own_array(t->b);
    for (int p = 0; p < MOST; p++)
        t->send[p] = t->recv[p] = MPI_BYTE;
    t->src = touched(array_nbytes(t->a));
    t->dst = touched(array_nbytes(t->b));
    walk(t, RSD_SENDS);
    walk(t, RSD_RECEIVES);
}

static void make_job(struct job *job, int n, const char *const *problems, rsd_arena **arena)
{
    int64_t nbytes = 0;
    size_t most = 0;
    const rsd_plan **plans = calloc((size_t)n, sizeof *plans);
    *job = (struct job){.tensors = calloc((size_t)n, sizeof *job->tensors), .n = n};
    job->src = calloc((size_t)n, sizeof *job->src);
    job->dst = calloc((size_t)n, sizeof *job->dst);
    job->arena_src = calloc((size_t)n, sizeof *job->src);
    job->arena_dst = calloc((size_t)n, sizeof *job->dst);
    for (int i = 0; i < n; i++) {
        struct tensor *t = &job->tensors[i];
        make_tensor(t, problems[i]);
        plans[i] = t->plan;
        job->src[i] = t->src;
        job->dst[i] = t->dst;
        nbytes += (int64_t)(array_nbytes(t->a) + array_nbytes(t->b)) + 128;
        most = array_nbytes(t->a) > most ? array_nbytes(t->a) : most;
    }
    for (int p = 0; p < nranks; p++) {
        job->packed[0][p] = touched(most);
        job->packed[1][p] = touched(most);
    }
    must(rsd_arena_new(nbytes, arena));
    for (int i = 0; i < n; i++) {
        void *memory;
        must(rsd_arena_alloc(*arena, (int64_t)array_nbytes(job->tensors[i].a), &memory));
        memset(memory, 1, array_nbytes(job->tensors[i].a));
        job->arena_src[i] = memory;
        must(rsd_arena_alloc(*arena, (int64_t)array_nbytes(job->tensors[i].b), &job->arena_dst[i]));
        memset(job->arena_dst[i], 1, array_nbytes(job->tensors[i].b));
    }
    rsd_exchange_options options = {.struct_nbytes = sizeof options};
    must(rsd_bind_mpi_many(n, plans, NULL, MPI_COMM_WORLD, &options, &job->plain));
    options.arena = *arena;
    must(rsd_bind_mpi_many(n, plans, NULL, MPI_COMM_WORLD, &options, &job->direct));
    free(plans);
}

static void drop_job(struct job *job, rsd_arena *arena)
{
    rsd_exec_free(job->plain);
    rsd_exec_free(job->direct);
    for (int i = 0; i < job->n; i++) {
        struct tensor *t = &job->tensors[i];
        for (int p = 0; p < nranks; p++) {
            if (t->nsend[p])
                MPI_Type_free(&t->send[p]);
            if (t->nrecv[p])
                MPI_Type_free(&t->recv[p]);
        }
        free(t->src);
        free(t->dst);
        rsd_plan_free(t->plan);
        rsd_layout_free(t->a);
        rsd_layout_free(t->b);
    }
    for (int p = 0; p < nranks; p++) {
        free(job->packed[0][p]);
        free(job->packed[1][p]);
    }
    rsd_arena_free(arena);
    free(job->tensors);
    free(job->src);
    free(job->dst);
    free(job->arena_src);
    free(job->arena_dst);
}

/* Prints the best of the three hand-written ways, and its name. */
static void report(const char *problem, const double *seconds)
{
    static const char *const names[] = {"MPI_Alltoallw", "MPI_Isend of subarrays",
                                        "pack + MPI_Isend"};
    char label[200], peer[80];
    int best = 0;
    for (int i = 1; i < 3; i++)
        best = seconds[i] < seconds[best] ? i : best;
    snprintf(peer, sizeof peer, "%s, the best of three by hand", names[best]);
    if (rank)
        return;
    snprintf(label, sizeof label, "%s, %d ranks, arenas", problem, nranks);
    bench_row(label, 1e3 * seconds[4], 1e3 * seconds[best], "ms", peer);
    snprintf(label, sizeof label, "%s, %d ranks, any memory", problem, nranks);
    bench_row(label, 1e3 * seconds[3], 1e3 * seconds[best], "ms", peer);
}

static void compare(const char *problem, int rounds)
{
    static ranks_work *const works[] = {by_alltoallw, by_isend, by_packing, by_plan,
                                        by_plan_from_arena};
    struct job job;
    rsd_arena *arena;
    double seconds[5];
    make_job(&job, 1, &problem, &arena);
    best_of_ranks(rounds, 5, works, &job, seconds);
    report(problem, seconds);
    drop_job(&job, arena);
}

/* ---- problems ---- */

static void fine_runs(int64_t total)
{
    if (rank == 0)
        bench_title("MPI: short rows, all tensors of the same number of bytes");
    for (int64_t run = 64; run <= 4096; run *= 4)
        for (int way = 0; way < 2; way++) {
            char problem[100];
            int64_t columns = run / 8 * nranks, nrows = total / 8 / columns / nranks * nranks;
            snprintf(problem, sizeof problem, "f64[%lld,%lld] : %d:S%d -> %d:S%d", (long long)nrows,
                     (long long)columns, nranks, way, nranks, !way);
            compare(problem, 4);
        }
}

/* Layers of a model: some large matrices, many small vectors; from rows to columns or rows. */
static void model(int64_t total)
{
    enum { N = 300 };
    static char texts[N][100];
    static const char *problems[N];
    static ranks_work *const works[] = {by_alltoallw, by_plan, by_plan_from_arena};
    int64_t hidden = 256;
    while (24 * 12 * hidden * hidden * 2 < total)
        hidden += 64;
    for (int i = 0; i < N; i++) {
        static const int64_t shapes[][2] = {{4, 1}, {1, 1}, {1, 4}, {1, 1}};
        int64_t rows_ = hidden * shapes[i % 4][0], columns = hidden * shapes[i % 4][1];
        if (i % 5 == 4) { /* a norm or a bias */
            rows_ = 1;
            columns = hidden;
        }
        snprintf(texts[i], sizeof texts[i], "bf16[%lld,%lld] : %d:S0 -> %d:S%d", (long long)rows_,
                 (long long)columns, nranks, nranks, i % 2);
        problems[i] = texts[i];
    }
    struct job job;
    rsd_arena *arena;
    double seconds[3];
    make_job(&job, N, problems, &arena);
    best_of_ranks(5, 3, works, &job, seconds);
    int64_t nbytes = 0, all;
    for (int i = 0; i < N; i++)
        nbytes += (int64_t)array_nbytes(job.tensors[i].b);
    MPI_Allreduce(&nbytes, &all, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        char label[120];
        bench_title("MPI: a model, FSDP to tensor parallel, in one run");
        snprintf(label, sizeof label, "300 tensors, %.2f GB, %d ranks, any memory",
                 1e-9 * (double)all, nranks);
        bench_row(label, 1e3 * seconds[1], 1e3 * seconds[0], "ms", "300 calls of MPI_Alltoallw");
        snprintf(label, sizeof label, "300 tensors, %.2f GB, %d ranks, arenas", 1e-9 * (double)all,
                 nranks);
        bench_row(label, 1e3 * seconds[2], 1e3 * seconds[0], "ms", "300 calls of MPI_Alltoallw");
    }
    drop_job(&job, arena);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    char problem[100];
    int only_one = argc > 2 && strcmp(argv[2], "hosts") == 0;
    if (rank == 0) {
        bench_open(argc, argv);
        bench_title(only_one ? "MPI: between hosts" : "MPI: ranks of one host");
    }
    snprintf(problem, sizeof problem, "f64[8192,8192] : %d:S0 -> %d:S1", nranks, nranks);
    compare(problem, 7);
    if (!only_one) {
        fine_runs((int64_t)256 << 20);
        model((int64_t)1 << 30);
    }
    MPI_Finalize();
    return 0;
}
