/* rank_loads.c - what each rank of a target layout holds, and what it reads of the files of a checkpoint. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_LOAD_ROWS = 64, MOST_MARKS = 1 << 30 };

/* Maps a tensor. *layout is where it goes, or NULL if it is left out. */
static rsd_status map_load(const struct conversion *request, const rsd_tensor_info *tensor,
                           rsd_dtype *dtype, rsd_layout **layout)
{
    rsd_tensor_target target = {
        .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor->dtype, .name = tensor->name};
    static const int64_t origin[RSD_MAX_DIMS];
    const int32_t rank = 0;
    rsd_status status = rsd_rules_map(request->rules, tensor, &target);
    *layout = NULL;
    if (status || !target.keep) {
        rsd_layout_free(target.layout);
        return status;
    }
    *dtype = target.dtype;
    if (!target.layout)
        return rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor->shape, 1, &rank, origin,
                                    tensor->shape, layout);
    *layout = target.layout;
    return RSD_OK;
}

static void add_file_reads(struct rank_loads *loads, int64_t index, int64_t rank, int64_t nbytes)
{
    int64_t file = loads->files.position[index];
    size_t bit = (size_t)(rank * (int64_t)loads->files.n + file);
    struct rank_load *load = &loads->list[rank];
    load->nread += nbytes;
    if (!(loads->marks[bit / 8] >> bit % 8 & 1))
        load->nfiles++;
    loads->marks[bit / 8] |= (unsigned char)(1u << bit % 8);
    draw_add_traffic(&loads->traffic, file, rank, (double)nbytes, false);
}

/* Adds the arrays of a tensor, and the bytes of files that fill them. */
static rsd_status add_tensor_loads(struct rank_loads *loads, const rsd_checkpoint *in,
                                   int64_t index, const rsd_layout *target, rsd_dtype dtype)
{
    rsd_layout *stored = NULL;
    rsd_plan *plan = NULL;
    rsd_cursor *cursor = NULL;
    const rsd_piece *piece;
    rsd_status status = rsd_checkpoint_layout(in, index, &stored);
    int64_t width = (int64_t)rsd_dtype_nbytes(rsd_layout_dtype(target));
    for (int64_t i = 0; i < rsd_layout_narrays(target) && !status; i++) {
        rsd_array array;
        status = rsd_layout_array(target, i, &array);
        if (status || !array.nbytes)
            continue;
        loads->list[array.rank].nmemory +=
            (int64_t)array.nbytes / width * (int64_t)rsd_dtype_nbytes(dtype);
        loads->list[array.rank].ntensors++;
    }
    if (!status)
        status = rsd_plan_new(stored, target, NULL, &plan);
    if (!status)
        status = rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor);
    while (!status && !(status = rsd_cursor_next(cursor, &piece)) && piece)
        if (piece->nbytes > 0)
            add_file_reads(loads, piece->from, piece->to, piece->nbytes);
    rsd_cursor_free(cursor);
    rsd_plan_free(plan);
    rsd_layout_free(stored);
    return status;
}

/* Calls for each tensor that is kept: counts ranks first, and then adds the loads. */
static rsd_status visit_tensors(struct rank_loads *loads, const struct conversion *request,
                                const rsd_checkpoint *in, bool count_ranks)
{
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(in) && !status; i++) {
        rsd_tensor_info tensor = input_tensor(in, i);
        rsd_layout *layout = NULL;
        rsd_dtype dtype = 0;
        status = map_load(request, &tensor, &dtype, &layout);
        if (!status && layout && count_ranks)
            loads->nranks =
                rsd_layout_world(layout) > loads->nranks ? rsd_layout_world(layout) : loads->nranks;
        else if (!status && layout && tensor.nbytes > 0)
            status = add_tensor_loads(loads, in, i, layout, dtype);
        rsd_layout_free(layout);
    }
    return status;
}

int rank_loads_count(struct rank_loads *loads, const struct conversion *request,
                     const rsd_checkpoint *in)
{
    rsd_status status = visit_tensors(loads, request, in, true);
    if (status)
        return cli_fail_status(request->verb, status);
    draw_list_files(&loads->files, in, -1);
    int64_t nfiles = (int64_t)loads->files.n;
    if (loads->nranks > MOST_MARKS / (nfiles + 1))
        return cli_fail(request->verb, EXIT_CANNOT,
                        "--ranks: %lld ranks and %lld files are too many", (long long)loads->nranks,
                        (long long)nfiles);
    loads->list = cli_need_memory(calloc((size_t)loads->nranks + 1, sizeof *loads->list));
    loads->marks = cli_need_memory(calloc((size_t)(loads->nranks * nfiles) / 8 + 1, 1));
    draw_open_traffic(&loads->traffic, nfiles, loads->nranks, MOST_LOAD_ROWS);
    loads->traffic.row_files = &loads->files;
    return cli_fail_status(request->verb, visit_tensors(loads, request, in, false));
}

void rank_loads_print(const struct rank_loads *loads, bool json)
{
    if (json)
        printf(", \"ranks\": [");
    else
        printf("\n%8s %8s %12s %12s %8s\n", "rank", "tensors", "memory", "read", "files");
    for (int64_t i = 0; i < loads->nranks; i++) {
        const struct rank_load *load = &loads->list[i];
        if (json)
            printf("%s\n  {\"rank\": %lld, \"tensors\": %lld, \"memory\": %lld, \"read\": %lld, "
                   "\"files\": %lld}",
                   i ? "," : "", (long long)i, (long long)load->ntensors, (long long)load->nmemory,
                   (long long)load->nread, (long long)load->nfiles);
        else
            printf("%8lld %8lld %12s %12s %8lld\n", (long long)i, (long long)load->ntensors,
                   cli_size_text(load->nmemory), cli_size_text(load->nread),
                   (long long)load->nfiles);
    }
    printf("%s", json ? "]" : "");
}

void rank_loads_draw(const struct rank_loads *loads, const struct conversion *request)
{
    int64_t nread = 0, most = 0;
    for (int64_t i = 0; i < loads->nranks; i++) {
        nread += loads->list[i].nread;
        most = loads->list[i].nmemory > most ? loads->list[i].nmemory : most;
    }
    char *totals =
        cli_text("%lld rank%s read %s of %zu file%s; a rank holds at most %s",
                 (long long)loads->nranks, loads->nranks == 1 ? "" : "s", cli_size_text(nread),
                 loads->files.n, loads->files.n == 1 ? "" : "s", cli_size_text(most));
    page_write_reads(&request->pages, &loads->traffic, request->in, totals);
}

void rank_loads_drop(struct rank_loads *loads)
{
    free(loads->list);
    free(loads->marks);
    draw_drop_files(&loads->files);
    draw_free_traffic(&loads->traffic);
}
