/* draw.c - pictures in the terminal: who sends to whom, in half-tones, and which file has what.
 *
 *              to 0 1 2 3
 *     from  0     @ : .            a row gives, a column gets; more ranks than fit are taken
 *           1     . @ :            together in groups of equal size
 */
#include "cli.h"

#include <langinfo.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_CELLS = 32, NSHADES = 5, MOST_PIECES = 20000000 };

struct picture {
    int64_t world, group; /* ranks in all, and per cell */
    int64_t ncells;
    double moved[MOST_CELLS][MOST_CELLS]; /* bytes */
    bool kept[MOST_CELLS][MOST_CELLS];
};

static rsd_status count_pieces(const rsd_plan *plan, struct picture *picture)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status = rsd_plan_walk(plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor);
    if (status)
        return status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        int64_t from = piece->from / picture->group, to = piece->to / picture->group;
        if (piece->from == piece->to)
            picture->kept[from][to] = true;
        else
            picture->moved[from][to] += (double)piece->nbytes;
    }
    rsd_cursor_free(cursor);
    return status;
}

static bool speaks_utf8(void)
{
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

static const char *shade(const struct picture *picture, int64_t from, int64_t to, double most)
{
    static const char *const utf8[NSHADES] = {"  ", "\u2591\u2591", "\u2592\u2592", "\u2593\u2593",
                                              "\u2588\u2588"};
    static const char *const ascii[NSHADES] = {"  ", "..", "::", "++", "##"};
    bool pretty = speaks_utf8();
    double moved = picture->moved[from][to];
    if (moved <= 0)
        return !picture->kept[from][to] ? "  " : pretty ? "\u25c7 " : "o ";
    int level = 1 + (int)(moved / most * (NSHADES - 1) - 1e-9);
    return (pretty ? utf8 : ascii)[level < NSHADES ? level : NSHADES - 1];
}

static void print_picture(FILE *out, const struct picture *picture)
{
    double most = 0;
    for (int64_t i = 0; i < picture->ncells * picture->ncells; i++) {
        double moved = picture->moved[i / picture->ncells][i % picture->ncells];
        most = moved > most ? moved : most;
    }
    fprintf(out, "\nwho sends to whom: a row gives, a column gets, %s keeps\n",
            speaks_utf8() ? "\u25c7" : "o");
    if (picture->group > 1)
        fprintf(out, "one cell stands for %lld x %lld ranks\n", (long long)picture->group,
                (long long)picture->group);
    fprintf(out, "%11s", "");
    for (int64_t to = 0; to < picture->ncells; to++)
        fprintf(out, "%-2lld", (long long)(to % 10));
    fputc('\n', out);
    for (int64_t from = 0; from < picture->ncells; from++) {
        fprintf(out, "%10lld ", (long long)(from * picture->group));
        for (int64_t to = 0; to < picture->ncells; to++)
            fputs(shade(picture, from, to, most), out);
        fputc('\n', out);
    }
}

rsd_status draw_traffic(FILE *out, const rsd_plan *plan)
{
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    rsd_status counted = rsd_plan_totals(plan, &totals);
    if (counted || totals.npieces == 0)
        return counted;
    if (totals.npieces > MOST_PIECES) {
        fprintf(out, "\nno picture: %lld pieces are too many to look at\n",
                (long long)totals.npieces);
        return RSD_OK;
    }
    int64_t src = rsd_layout_world(rsd_plan_src(plan)), dst = rsd_layout_world(rsd_plan_dst(plan));
    setlocale(LC_CTYPE, "");
    struct picture picture = {.world = src > dst ? src : dst};
    picture.group = (picture.world + MOST_CELLS - 1) / MOST_CELLS;
    picture.ncells = (picture.world + picture.group - 1) / picture.group;
    rsd_status status = count_pieces(plan, &picture);
    if (!status)
        print_picture(out, &picture);
    return status;
}

/* ---- boxes ---- */

enum { MOST_COLUMNS = 64, MOST_ROWS = 20, MOST_LEGEND = 16 };

static char mark_of(int64_t file)
{
    static const char marks[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return file < 0 ? '?' : marks[file % (int64_t)(sizeof marks - 1)];
}

struct canvas {
    int32_t rows_dim, columns_dim; /* -1: there is none */
    int64_t rows, columns;
    char cells[MOST_ROWS][MOST_COLUMNS];
};

/* The cells whose middles lie in [lo, lo + len) of an extent. */
static void cells_of(int64_t lo, int64_t len, int64_t extent, int64_t ncells, int64_t *first,
                     int64_t *end)
{
    double scale = (double)ncells / (double)extent;
    *first = (int64_t)((double)lo * scale + 0.5);
    *end = (int64_t)((double)(lo + len) * scale + 0.5);
}

static void paint(struct canvas *canvas, const rsd_tensor_info *tensor, const rsd_extent *stored)
{
    int64_t r0 = 0, r1 = 1, c0 = 0, c1 = 1;
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (d != canvas->rows_dim && d != canvas->columns_dim && stored->box.lo[d] > 0)
            return; /* of the other dims, only the first index is drawn */
    if (canvas->rows_dim >= 0)
        cells_of(stored->box.lo[canvas->rows_dim], stored->box.len[canvas->rows_dim],
                 tensor->shape[canvas->rows_dim], canvas->rows, &r0, &r1);
    if (canvas->columns_dim >= 0)
        cells_of(stored->box.lo[canvas->columns_dim], stored->box.len[canvas->columns_dim],
                 tensor->shape[canvas->columns_dim], canvas->columns, &c0, &c1);
    for (int64_t r = r0; r < r1 && r < canvas->rows; r++)
        for (int64_t c = c0; c < c1 && c < canvas->columns; c++)
            canvas->cells[r][c] = mark_of(stored->file);
}

/* Two dims to draw: the first two that are cut, else the last ones. */
rsd_status picture_dims(const rsd_checkpoint *checkpoint, int64_t index, int32_t *down,
                        int32_t *across)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    bool cut[RSD_MAX_DIMS] = {false};
    int32_t chosen[2], n = 0;
    rsd_status status = rsd_checkpoint_tensor(checkpoint, index, &tensor);
    for (int64_t i = 0; i < tensor.nboxes && !status; i++) {
        status = rsd_checkpoint_box(checkpoint, index, i, &stored);
        for (int32_t d = 0; d < tensor.ndim && !status; d++)
            cut[d] = cut[d] || stored.box.len[d] < tensor.shape[d];
    }
    for (int32_t d = 0; d < tensor.ndim && n < 2; d++)
        if (cut[d])
            chosen[n++] = d;
    for (int32_t d = tensor.ndim - 1; d >= 0 && n < 2; d--)
        if (!cut[d])
            chosen[n++] = d;
    if (n == 2 && chosen[0] > chosen[1]) {
        int32_t other = chosen[0];
        chosen[0] = chosen[1];
        chosen[1] = other;
    }
    *across = n > 0 ? chosen[n - 1] : -1;
    *down = n > 1 ? chosen[0] : -1;
    return status;
}

static rsd_status choose_dims(struct canvas *canvas, const rsd_checkpoint *checkpoint,
                              int64_t index, const rsd_tensor_info *tensor)
{
    rsd_status status = picture_dims(checkpoint, index, &canvas->rows_dim, &canvas->columns_dim);
    canvas->rows = canvas->rows_dim < 0 ? 1 : tensor->shape[canvas->rows_dim];
    canvas->columns = canvas->columns_dim < 0 ? 1 : tensor->shape[canvas->columns_dim];
    canvas->rows = canvas->rows < MOST_ROWS ? canvas->rows : MOST_ROWS;
    canvas->columns = canvas->columns < MOST_COLUMNS ? canvas->columns : MOST_COLUMNS;
    return status;
}

rsd_status draw_boxes(FILE *out, const rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    struct canvas canvas;
    rsd_status status = rsd_checkpoint_tensor(checkpoint, index, &tensor);
    if (status || tensor.nbytes == 0)
        return status;
    status = choose_dims(&canvas, checkpoint, index, &tensor);
    if (status)
        return status;
    memset(canvas.cells, '.', sizeof canvas.cells);
    for (int64_t i = 0; i < tensor.nboxes; i++) {
        status = rsd_checkpoint_box(checkpoint, index, i, &stored);
        if (status)
            return status;
        paint(&canvas, &tensor, &stored);
    }
    fprintf(out, "\nwhich file has what");
    if (canvas.rows_dim >= 0)
        fprintf(out, ": dim %d down, dim %d across", (int)canvas.rows_dim, (int)canvas.columns_dim);
    else if (canvas.columns_dim >= 0)
        fprintf(out, ": dim %d across", (int)canvas.columns_dim);
    fputc('\n', out);
    for (int64_t r = 0; r < canvas.rows; r++)
        fprintf(out, "  %.*s\n", (int)canvas.columns, canvas.cells[r]);
    int64_t told[MOST_LEGEND];
    for (int64_t i = 0, n = 0; i < tensor.nboxes && n < MOST_LEGEND; i++) {
        rsd_checkpoint_box(checkpoint, index, i, &stored);
        bool known = stored.file < 0;
        for (int64_t k = 0; k < n; k++)
            known = known || told[k] == stored.file;
        if (known)
            continue;
        fprintf(out, "  %c = %s\n", mark_of(stored.file),
                plain_text(rsd_checkpoint_file(checkpoint, stored.file)));
        told[n++] = stored.file;
    }
    return RSD_OK;
}
