/* test_tile.c - one tile of a transfer: every sink receives its block once and whole, from any number of sources,
 * also where a tile has very many sinks. */
#include "tap.h"
#include "transfer.h"

#include <stdlib.h>

/* A tensor i32[nrows, ncols] whose element [r, c] is r * ncols + c; sources are groups of rows, sinks of columns. */
enum { MAX_SIDE = 1 << 16 };

struct grid {
    int64_t nrows, ncols, rows_per_source, cols_per_sink;
    int32_t *values;
    int32_t *nblocks; /* of each sink */
    bool right;
};

static rsd_status check_block(const struct sink *sink, struct scratch *scratch, const int64_t *lo,
                              const int64_t *len, const char *block)
{
    struct grid *grid = sink->context;
    (void)scratch;
    grid->nblocks[sink->index]++;
    grid->right = grid->right && lo[0] == 0 && len[0] == grid->nrows && lo[1] == sink->lo[1] &&
                  len[1] == sink->len[1];
    for (int64_t r = 0; r < len[0] && grid->right; r++)
        for (int64_t c = 0; c < len[1] && grid->right; c++) {
            int32_t value;
            memcpy(&value, block + 4 * (r * len[1] + c), 4);
            grid->right = value == r * grid->ncols + lo[1] + c;
        }
    return RSD_OK;
}

/* One piece for each pair of a source and a sink, in an order that is neither that of sources nor of sinks. */
static rsd_status add_pieces(struct transfer *transfer)
{
    size_t n = transfer->nsources * transfer->nsinks;
    transfer->pieces = mem_new(n, sizeof *transfer->pieces);
    transfer->piece_lo = mem_new(n * 2, sizeof *transfer->piece_lo);
    transfer->piece_len = mem_new(n * 2, sizeof *transfer->piece_len);
    for (size_t i = 0; i < n; i++) {
        size_t pair = (i * 7919) % n;
        const struct source *source = &transfer->sources[pair % transfer->nsources];
        const struct sink *sink = &transfer->sinks[pair / transfer->nsources];
        transfer->pieces[i] =
            (struct transfer_piece){.source = pair % transfer->nsources, .sink = sink->index};
        box_overlap(2, source->lo, source->len, sink->lo, sink->len, transfer->piece_lo + 2 * i,
                    transfer->piece_len + 2 * i);
    }
    transfer->npieces = n;
    return box_tree_build(&transfer->tree, 2, (int64_t)n, transfer->piece_lo, transfer->piece_len);
}

static void run_grid(struct grid *grid)
{
    struct transfer transfer = {.dtype = RSD_I32, .element_nbytes = 4, .ndim = 2};
    struct scratch scratch = {.copier = copier_best()};
    struct io_stats stats = {0};
    int64_t origin[2] = {0}, shape[2] = {grid->nrows, grid->ncols},
            strides[2] = {4 * grid->ncols, 4};
    grid->values = malloc((size_t)(grid->nrows * grid->ncols) * 4);
    for (int32_t i = 0; i < grid->nrows * grid->ncols; i++)
        grid->values[i] = i;
    transfer.nsources = (size_t)(grid->nrows / grid->rows_per_source);
    transfer.nsinks = (size_t)(grid->ncols / grid->cols_per_sink);
    transfer.sources = mem_new(transfer.nsources, sizeof *transfer.sources);
    transfer.sinks = mem_new(transfer.nsinks, sizeof *transfer.sinks);
    grid->nblocks = calloc(transfer.nsinks, sizeof *grid->nblocks);
    grid->right = true;
    for (size_t i = 0; i < transfer.nsources; i++) {
        int64_t lo[2] = {(int64_t)i * grid->rows_per_source, 0},
                len[2] = {grid->rows_per_source, grid->ncols};
        source_in_memory(&transfer.sources[i], RSD_I32, 2, lo, len,
                         (const char *)grid->values + lo[0] * strides[0], strides);
    }
    for (size_t i = 0; i < transfer.nsinks; i++)
        transfer.sinks[i] = (struct sink){.kind = SINK_BLOCKS,
                                          .dtype = RSD_I32,
                                          .ndim = 2,
                                          .lo = {0, (int64_t)i * grid->cols_per_sink},
                                          .len = {grid->nrows, grid->cols_per_sink},
                                          .take = check_block,
                                          .context = grid,
                                          .index = i};
    if (OK(add_pieces(&transfer)))
        OK(transfer_run_box(&transfer, origin, shape, &scratch, &stats));
    CHECK(grid->right, "a block is not what the sources hold");
    for (size_t i = 0; i < transfer.nsinks; i++)
        CHECK(grid->nblocks[i] == 1, "sink %zu received %d blocks", i, (int)grid->nblocks[i]);
    transfer_drop(&transfer);
    scratch_drop(&scratch);
    free(grid->values);
    free(grid->nblocks);
}

int main(void)
{
    CASE("blocks gathered from several sources");
    run_grid(&(struct grid){.nrows = 12, .ncols = 20, .rows_per_source = 3, .cols_per_sink = 4});
    run_grid(&(struct grid){.nrows = 12, .ncols = 20, .rows_per_source = 12, .cols_per_sink = 20});
    run_grid(&(struct grid){.nrows = 200, .ncols = 300, .rows_per_source = 1, .cols_per_sink = 1});
    CASE("as many sinks as a tile has elements");
    run_grid(
        &(struct grid){.nrows = 1, .ncols = MAX_SIDE, .rows_per_source = 1, .cols_per_sink = 1});
    return tap_end();
}
