/* mlp.h - trains a tensor-parallel MLP over any transport: mlp.c runs it on threads, mlp_mpi.c over MPI.
 *
 * Blocks of two layers, one after the other, on m ranks:
 *
 *     x [BATCH,WIDTH]       replicated: the same on all ranks
 *     W1 [WIDTH,HIDDEN]     sharded by columns: B(1)       h = relu(x W1), sharded by columns too
 *     W2 [HIDDEN,WIDTH]     sharded by rows: B(0)          h W2 is a term of the sum on each rank: P(sum)
 *     x + sum               the next x: the plan P -> R    backward: the gradient of x is such a sum too
 *
 * Backward needs the x of every block. Without a stash each rank keeps all of it, with a stash 1/m of it. Losses and
 * gradients have the same bits. Introduces: rsd_bind_transport, rsd_gather, rsd_stash_new, _put,
 * _prefetch, _get, _drop, _stats.
 */
#ifndef MLP_H
#define MLP_H

#include "reshard_experimental.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 32, WIDTH = 64, HIDDEN = 128, NBLOCKS = 6, NSTEPS = 8 };
enum { X_NUMEL = BATCH * WIDTH };

struct mlp {
    const rsd_transport *transport;
    rsd_exec *sum;        /* a term on each rank -> the sum on all */
    int64_t first, n;     /* columns of W1 and rows of W2 on this rank */
    float *w1[NBLOCKS];   /* [WIDTH,n] */
    float *w2[NBLOCKS];   /* [n,WIDTH] */
    float *grad1, *grad2; /* of all blocks and steps, so that they can be compared */
    float loss[NSTEPS];

    /* Data that forward keeps for backward. */
    rsd_stash *stash;    /* NULL: the whole of x is kept */
    float *x[NBLOCKS];   /* without a stash */
    int64_t id[NBLOCKS]; /* with one */
    float *h[NBLOCKS];   /* [BATCH,n]: a shard, so it is small already */
    int64_t nbytes_kept; /* of x, at most */
};

static void or_die(rsd_status status)
{
    if (status != RSD_OK) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

static float *floats(int64_t n)
{
    float *memory = calloc(n ? (size_t)n : 1, sizeof *memory);
    if (!memory) {
        fprintf(stderr, "no memory for %lld floats\n", (long long)n);
        exit(1);
    }
    return memory;
}

/* Returns a number between -0.5 and 0.5 that depends on an index. */
static float noise(uint64_t index)
{
    index = (index + 1) * 0x9e3779b97f4a7c15u;
    index = (index ^ index >> 29) * 0xbf58476d1ce4e5b9u;
    return (float)(index >> 40) / (float)(1 << 24) - 0.5f;
}

/* c += a b, where a is [rows,inner] and b is [inner,cols]; each may be stored transposed. */
static void multiply(float *c, const float *a, int a_transposed, const float *b, int b_transposed,
                     int64_t rows, int64_t inner, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t j = 0; j < cols; j++)
                c[i * cols + j] += (a_transposed ? a[k * rows + i] : a[i * inner + k]) *
                                   (b_transposed ? b[j * inner + k] : b[k * cols + j]);
}

/* ---- communication: plans ---- */

static rsd_plan *plan_of(const char *problem)
{
    rsd_layout *from, *to;
    rsd_plan *plan;
    or_die(rsd_problem_parse(problem, &from, &to));
    or_die(rsd_plan_new(from, to, NULL, &plan));
    rsd_layout_free(from);
    rsd_layout_free(to);
    return plan;
}

static void connect(struct mlp *mlp)
{
    int m = mlp->transport->nranks;
    char text[100];
    snprintf(text, sizeof text, "f32[%d,%d] : %d:P -> %d:R", BATCH, WIDTH, m, m);
    rsd_plan *plan = plan_of(text);
    const rsd_plan *plans[] = {plan};
    or_die(rsd_bind_transport(1, plans, NULL, mlp->transport, NULL, &mlp->sum));
    rsd_plan_free(plan);

    rsd_layout *columns; /* the layout of W1 */
    rsd_shard *shards;
    int64_t nshards;
    snprintf(text, sizeof text, "f32[%d,%d] @ %d:B1", WIDTH, HIDDEN, m);
    or_die(rsd_layout_parse(text, &columns));
    or_die(rsd_layout_boxes(columns, mlp->transport->rank, &shards, &nshards));
    mlp->first = shards[0].box.lo[1];
    mlp->n = shards[0].box.len[1];
    rsd_free(shards);
    rsd_layout_free(columns);
}

/* Adds the sum of the terms of all ranks to out. */
static void add_sum(struct mlp *mlp, const float *term, float *out)
{
    static _Thread_local float sum[X_NUMEL];
    const void *src = term;
    void *dst = sum;
    or_die(rsd_exec_run(mlp->sum, &src, &dst));
    for (int i = 0; i < X_NUMEL; i++)
        out[i] += sum[i];
}

/* ---- activations ---- */

static void keep(struct mlp *mlp, int block, const float *x)
{
    if (mlp->stash) {
        or_die(rsd_stash_put(mlp->stash, x, X_NUMEL * sizeof *x, &mlp->id[block]));
    } else {
        mlp->x[block] = floats(X_NUMEL);
        memcpy(mlp->x[block], x, X_NUMEL * sizeof *x);
        if ((block + 1) * (int64_t)(X_NUMEL * sizeof *x) > mlp->nbytes_kept)
            mlp->nbytes_kept = (block + 1) * (int64_t)(X_NUMEL * sizeof *x);
    }
}

/* Returns the x of a block. Starts to gather that of the previous block, into the other of two buffers. */
static const float *again(struct mlp *mlp, int block, float buffers[2][X_NUMEL])
{
    if (!mlp->stash)
        return mlp->x[block];
    or_die(rsd_stash_get(mlp->stash, mlp->id[block], buffers[block % 2]));
    if (block > 0)
        or_die(rsd_stash_prefetch(mlp->stash, mlp->id[block - 1], buffers[(block - 1) % 2]));
    return buffers[block % 2];
}

static void forget(struct mlp *mlp, int block)
{
    if (mlp->stash)
        or_die(rsd_stash_drop(mlp->stash, mlp->id[block]));
    free(mlp->x[block]);
    mlp->x[block] = NULL;
    free(mlp->h[block]);
    mlp->h[block] = NULL;
}

/* ---- training ---- */

static void forward(struct mlp *mlp, float *x)
{
    for (int block = 0; block < NBLOCKS; block++) {
        float *h = mlp->h[block] = floats(BATCH * mlp->n), *term = floats(X_NUMEL);
        keep(mlp, block, x);
        multiply(h, x, 0, mlp->w1[block], 0, BATCH, WIDTH, mlp->n);
        for (int64_t i = 0; i < BATCH * mlp->n; i++)
            h[i] = h[i] > 0 ? h[i] : 0;
        multiply(term, h, 0, mlp->w2[block], 0, BATCH, mlp->n, WIDTH);
        add_sum(mlp, term, x);
        free(term);
    }
}

/* dx is the gradient of the last x, and on return that of the first. */
static void backward(struct mlp *mlp, int step, float *dx)
{
    static _Thread_local float buffers[2][X_NUMEL];
    int64_t weights = WIDTH * mlp->n;
    for (int block = NBLOCKS; block-- > 0;) {
        const float *x = again(mlp, block, buffers), *h = mlp->h[block];
        float *grad1 = mlp->grad1 + (step * NBLOCKS + block) * weights;
        float *grad2 = mlp->grad2 + (step * NBLOCKS + block) * weights;
        float *dh = floats(BATCH * mlp->n), *term = floats(X_NUMEL);
        multiply(dh, dx, 0, mlp->w2[block], 1, BATCH, WIDTH, mlp->n);
        for (int64_t i = 0; i < BATCH * mlp->n; i++)
            dh[i] = h[i] > 0 ? dh[i] : 0;
        multiply(grad2, h, 1, dx, 0, mlp->n, BATCH, WIDTH);
        multiply(grad1, x, 1, dh, 0, WIDTH, BATCH, mlp->n);
        multiply(term, dh, 0, mlp->w1[block], 1, BATCH, mlp->n, WIDTH);
        add_sum(mlp, term, dx);
        for (int64_t i = 0; i < weights; i++) {
            mlp->w1[block][i] -= 0.05f * grad1[i];
            mlp->w2[block][i] -= 0.05f * grad2[i];
        }
        forget(mlp, block);
        free(dh);
        free(term);
    }
}

static void train(struct mlp *mlp)
{
    float *x = floats(X_NUMEL), *dx = floats(X_NUMEL);
    for (int block = 0; block < NBLOCKS; block++) {
        mlp->w1[block] = floats(WIDTH * mlp->n);
        mlp->w2[block] = floats(WIDTH * mlp->n);
        for (int64_t i = 0; i < WIDTH; i++)
            for (int64_t k = 0; k < mlp->n;
                 k++) { /* the whole matrix does not depend on the number of ranks */
                uint64_t at = (uint64_t)((block * WIDTH + i) * HIDDEN + mlp->first + k);
                mlp->w1[block][i * mlp->n + k] = 0.3f * noise(2 * at);
                mlp->w2[block][k * WIDTH + i] = 0.3f * noise(2 * at + 1);
            }
    }
    mlp->grad1 = floats(NSTEPS * NBLOCKS * WIDTH * mlp->n);
    mlp->grad2 = floats(NSTEPS * NBLOCKS * WIDTH * mlp->n);
    for (int step = 0; step < NSTEPS; step++) {
        for (int i = 0; i < X_NUMEL; i++)
            x[i] = noise((uint64_t)i + 1000000);
        forward(mlp, x);
        for (int i = 0; i < X_NUMEL; i++) {
            float error = x[i] - noise((uint64_t)i + 2000000);
            mlp->loss[step] += error * error / X_NUMEL;
            dx[i] = 2 * error / BATCH;
        }
        backward(mlp, step, dx);
    }
    free(x);
    free(dx);
}

static void free_mlp(struct mlp *mlp)
{
    for (int block = 0; block < NBLOCKS; block++) {
        free(mlp->w1[block]);
        free(mlp->w2[block]);
    }
    free(mlp->grad1);
    free(mlp->grad2);
    rsd_exec_free(mlp->sum);
}

/* ---- with and without a stash ---- */

static int differ(const struct mlp *a, const struct mlp *b)
{
    size_t all = (size_t)(NSTEPS * NBLOCKS * WIDTH * a->n) * sizeof(float);
    return memcmp(a->loss, b->loss, sizeof a->loss) != 0 || memcmp(a->grad1, b->grad1, all) != 0 ||
           memcmp(a->grad2, b->grad2, all) != 0;
}

/* Runs the training on one rank. Returns 0 if all ranks have the same results with and without a stash. */
static int run_mlp(const rsd_transport *transport)
{
    struct mlp plain = {.transport = transport}, stashed = {.transport = transport};
    rsd_stash_usage usage = {.struct_nbytes = sizeof usage};
    connect(&plain);
    train(&plain);
    connect(&stashed);
    or_die(rsd_stash_new(transport, NULL, &stashed.stash));
    train(&stashed);
    or_die(rsd_stash_stats(stashed.stash, &usage));
    rsd_stash_free(stashed.stash);

    int32_t own = differ(&plain, &stashed), ndiffer = 0;
    int32_t *all = calloc((size_t)transport->nranks, sizeof *all);
    or_die(rsd_gather(transport, &own, sizeof own, all, 0));
    for (int32_t i = 0; i < transport->nranks; i++)
        ndiffer += all[i];
    free(all);
    if (transport->rank == 0) {
        printf("%d ranks, %d blocks, %d steps: loss %.6f -> %.6f\n", (int)transport->nranks,
               NBLOCKS, NSTEPS, (double)plain.loss[0], (double)plain.loss[NSTEPS - 1]);
        printf(
            "activations that all ranks have: %lld bytes on each without the stash, %lld with it\n",
            (long long)plain.nbytes_kept, (long long)usage.nbytes_kept_most);
        printf("losses and gradients with and without it: %s\n",
               ndiffer ? "they differ" : "the same, to the last bit");
    }
    free_mlp(&plain);
    free_mlp(&stashed);
    return ndiffer != 0;
}

#endif
