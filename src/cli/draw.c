/* draw.c - pictures in the terminal: the traffic between ranks, and the file of each box of a tensor.
 *
 *              to 0 1 2 3
 *     from  0     @ : .            a row sends, a column receives; if there are too many ranks, a
 *           1     . @ :            square stands for a group of them
 */
#include "cli.h"

#include <langinfo.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANK_ROWS = 32, NSHADES = 5, MOST_PIECES = 20000000 };

void draw_open_traffic(struct traffic *traffic, int64_t nsenders, int64_t nreceivers,
                       int64_t most_rows)
{
    *traffic = (struct traffic){.nsenders = nsenders, .nreceivers = nreceivers};
    traffic->row_group = nsenders > most_rows ? (nsenders + most_rows - 1) / most_rows : 1;
    traffic->column_group = nreceivers > most_rows ? (nreceivers + most_rows - 1) / most_rows : 1;
    traffic->nrows = (nsenders + traffic->row_group - 1) / traffic->row_group;
    traffic->ncolumns = (nreceivers + traffic->column_group - 1) / traffic->column_group;
    size_t n = (size_t)(traffic->nrows * traffic->ncolumns) + 1;
    traffic->moved = cli_need_memory(calloc(n, sizeof *traffic->moved));
    traffic->kept = cli_need_memory(calloc(n, sizeof *traffic->kept));
}

void draw_add_traffic(struct traffic *traffic, int64_t from, int64_t to, double nbytes, bool kept)
{
    int64_t square = from / traffic->row_group * traffic->ncolumns + to / traffic->column_group;
    if (kept) {
        traffic->kept[square] += nbytes;
        return;
    }
    traffic->moved[square] += nbytes;
    traffic->most = traffic->moved[square] > traffic->most ? traffic->moved[square] : traffic->most;
}

rsd_status draw_count_traffic(const rsd_plan *plan, int64_t most_rows, struct traffic *traffic)
{
    int64_t src = rsd_layout_world(rsd_plan_src(plan)), dst = rsd_layout_world(rsd_plan_dst(plan));
    int64_t nranks = src > dst ? src : dst;
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status = rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor);
    if (status)
        return status;
    draw_open_traffic(traffic, nranks, nranks, most_rows);
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece)
        draw_add_traffic(traffic, piece->from, piece->to, (double)piece->nbytes,
                         piece->from == piece->to);
    rsd_cursor_free(cursor);
    return status;
}

void draw_free_traffic(struct traffic *traffic)
{
    free(traffic->moved);
    free(traffic->kept);
}

static bool has_utf8(void)
{
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

static const char *choose_shade(const struct traffic *traffic, int64_t square)
{
    static const char *const utf8[NSHADES] = {"  ", "\u2591\u2591", "\u2592\u2592", "\u2593\u2593",
                                              "\u2588\u2588"};
    static const char *const ascii[NSHADES] = {"  ", "..", "::", "++", "##"};
    double moved = traffic->moved[square];
    if (moved <= 0)
        return traffic->kept[square] <= 0 ? "  " : has_utf8() ? "\u25c7 " : "o ";
    int level = 1 + (int)(moved / traffic->most * (NSHADES - 1) - 1e-9);
    return (has_utf8() ? utf8 : ascii)[level < NSHADES ? level : NSHADES - 1];
}

static void print_traffic(FILE *out, const struct traffic *traffic)
{
    fprintf(out, "\ntraffic: rows send, columns receive, %s stays on its rank\n",
            has_utf8() ? "\u25c7" : "o");
    if (traffic->row_group > 1)
        fprintf(out, "one square stands for %lld x %lld ranks\n", (long long)traffic->row_group,
                (long long)traffic->row_group);
    fprintf(out, "%11s", "");
    for (int64_t to = 0; to < traffic->nrows; to++)
        fprintf(out, "%-2lld", (long long)(to % 10));
    fputc('\n', out);
    for (int64_t from = 0; from < traffic->nrows; from++) {
        fprintf(out, "%10lld ", (long long)(from * traffic->row_group));
        for (int64_t to = 0; to < traffic->nrows; to++)
            fputs(choose_shade(traffic, from * traffic->nrows + to), out);
        fputc('\n', out);
    }
}

rsd_status draw_traffic(FILE *out, const rsd_plan *plan)
{
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    struct traffic traffic = {0};
    rsd_status status = rsd_plan_totals(plan, &totals);
    if (status || totals.npieces == 0)
        return status;
    if (totals.npieces > MOST_PIECES) {
        fprintf(out, "\nno picture: %lld pieces, the limit is %d\n", (long long)totals.npieces,
                (int)MOST_PIECES);
        return RSD_OK;
    }
    setlocale(LC_CTYPE, "");
    status = draw_count_traffic(plan, MOST_RANK_ROWS, &traffic);
    if (!status)
        print_traffic(out, &traffic);
    draw_free_traffic(&traffic);
    return status;
}

/* ---- boxes ---- */

static int by_file_name(const void *a, const void *b)
{
    return strverscmp(((const struct listed_file *)a)->name, ((const struct listed_file *)b)->name);
}

void draw_list_files(struct file_list *files, const rsd_checkpoint *checkpoint, int64_t tensor)
{
    int64_t nfiles = rsd_checkpoint_nfiles(checkpoint);
    files->checkpoint = checkpoint;
    files->list = cli_need_memory(calloc((size_t)nfiles + 1, sizeof *files->list));
    files->position = cli_need_memory(calloc((size_t)nfiles + 1, sizeof *files->position));
    for (int64_t i = 0; i < nfiles; i++)
        files->list[i] = (struct listed_file){rsd_checkpoint_file(checkpoint, i), i, 0, 0};
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        int64_t nboxes = tensor < 0 || i == tensor ? input_tensor(checkpoint, i).nboxes : 0;
        for (int64_t k = 0; k < nboxes; k++) {
            rsd_extent stored = input_extent(checkpoint, i, k);
            if (stored.file < 0)
                continue;
            files->list[stored.file].nboxes++;
            files->list[stored.file].nbytes += (int64_t)stored.nbytes;
            files->nbytes += (int64_t)stored.nbytes;
        }
    }
    for (int64_t i = 0; i < nfiles; i++)
        if (files->list[i].nboxes)
            files->list[files->n++] = files->list[i];
    qsort(files->list, files->n, sizeof *files->list, by_file_name);
    for (size_t i = 0; i < files->n; i++)
        files->position[files->list[i].file] = (int64_t)i;
}

void draw_drop_files(struct file_list *files)
{
    free(files->list);
    free(files->position);
}

enum { MOST_COLUMNS = 64, MOST_ROWS = 20, MOST_LEGEND = 16 };

/* Returns the mark of a file: its number among those of the tensor, in the order of their names. */
static char mark_of_file(const struct file_list *files, int64_t file)
{
    static const char marks[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return file < 0 ? '?' : marks[files->position[file] % (int64_t)(sizeof marks - 1)];
}

struct box_picture {
    struct file_list files;        /* of the tensor */
    int32_t rows_dim, columns_dim; /* -1: the tensor has no such dim */
    int64_t nrows, ncolumns;
    char marks[MOST_ROWS][MOST_COLUMNS];
};

/* The rows or columns whose centres lie in [lo, lo + len) of an extent. */
static void scale_range(int64_t lo, int64_t len, int64_t extent, int64_t n, int64_t *first,
                        int64_t *end)
{
    double scale = (double)n / (double)extent;
    *first = (int64_t)((double)lo * scale + 0.5);
    *end = (int64_t)((double)(lo + len) * scale + 0.5);
}

/* Marks the squares of a picture that a box covers. */
static void paint_box(struct box_picture *picture, const rsd_tensor_info *tensor,
                      const rsd_extent *stored)
{
    int64_t r0 = 0, r1 = 1, c0 = 0, c1 = 1;
    int32_t down = picture->rows_dim, across = picture->columns_dim;
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (d != down && d != across && stored->box.lo[d] > 0)
            return; /* Only index 0 of the other dims is drawn. */
    if (down >= 0)
        scale_range(stored->box.lo[down], stored->box.len[down], tensor->shape[down],
                    picture->nrows, &r0, &r1);
    if (across >= 0)
        scale_range(stored->box.lo[across], stored->box.len[across], tensor->shape[across],
                    picture->ncolumns, &c0, &c1);
    for (int64_t r = r0; r < r1 && r < picture->nrows; r++)
        for (int64_t c = c0; c < c1 && c < picture->ncolumns; c++)
            picture->marks[r][c] = mark_of_file(&picture->files, stored->file);
}

/* Chooses the first two dims that are sharded, else the last ones. */
void draw_choose_dims(const rsd_checkpoint *checkpoint, int64_t index, int32_t *down,
                      int32_t *across)
{
    rsd_tensor_info tensor = input_tensor(checkpoint, index);
    bool sharded[RSD_MAX_DIMS] = {false};
    int32_t chosen[2], n = 0;
    for (int64_t i = 0; i < tensor.nboxes; i++) {
        rsd_extent stored = input_extent(checkpoint, index, i);
        for (int32_t d = 0; d < tensor.ndim; d++)
            sharded[d] = sharded[d] || stored.box.len[d] < tensor.shape[d];
    }
    for (int32_t d = 0; d < tensor.ndim && n < 2; d++)
        if (sharded[d])
            chosen[n++] = d;
    for (int32_t d = tensor.ndim - 1; d >= 0 && n < 2; d--)
        if (!sharded[d])
            chosen[n++] = d;
    if (n == 2 && chosen[0] > chosen[1]) {
        int32_t other = chosen[0];
        chosen[0] = chosen[1];
        chosen[1] = other;
    }
    *across = n > 0 ? chosen[n - 1] : -1;
    *down = n > 1 ? chosen[0] : -1;
}

static void open_box_picture(struct box_picture *picture, const rsd_checkpoint *checkpoint,
                             int64_t index, const rsd_tensor_info *tensor)
{
    draw_choose_dims(checkpoint, index, &picture->rows_dim, &picture->columns_dim);
    picture->nrows = picture->rows_dim < 0 ? 1 : tensor->shape[picture->rows_dim];
    picture->ncolumns = picture->columns_dim < 0 ? 1 : tensor->shape[picture->columns_dim];
    picture->nrows = picture->nrows < MOST_ROWS ? picture->nrows : MOST_ROWS;
    picture->ncolumns = picture->ncolumns < MOST_COLUMNS ? picture->ncolumns : MOST_COLUMNS;
    memset(picture->marks, '.', sizeof picture->marks);
}

/* Prints which mark stands for which file. */
static void print_legend(FILE *out, const struct file_list *files)
{
    for (size_t i = 0; i < files->n && i < MOST_LEGEND; i++)
        fprintf(out, "  %c = %s\n", mark_of_file(files, files->list[i].file),
                cli_plain_text(files->list[i].name));
    if (files->n > MOST_LEGEND)
        fprintf(out, "  ... and %zu more files\n", files->n - MOST_LEGEND);
}

void draw_boxes(FILE *out, const rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = input_tensor(checkpoint, index);
    struct box_picture picture = {.files = {0}};
    if (tensor.nbytes == 0)
        return;
    open_box_picture(&picture, checkpoint, index, &tensor);
    draw_list_files(&picture.files, checkpoint, index);
    for (int64_t i = 0; i < tensor.nboxes; i++) {
        rsd_extent stored = input_extent(checkpoint, index, i);
        paint_box(&picture, &tensor, &stored);
    }
    fprintf(out, "\nfile of each element");
    if (picture.rows_dim >= 0)
        fprintf(out, ": dim %d down, dim %d across", (int)picture.rows_dim,
                (int)picture.columns_dim);
    else if (picture.columns_dim >= 0)
        fprintf(out, ": dim %d across", (int)picture.columns_dim);
    fputc('\n', out);
    for (int64_t r = 0; r < picture.nrows; r++)
        fprintf(out, "  %.*s\n", (int)picture.ncolumns, picture.marks[r]);
    print_legend(out, &picture.files);
    draw_drop_files(&picture.files);
}
