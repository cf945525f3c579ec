/* draw.c - pictures in the terminal: half-tones for bytes, from the plan's own pieces.
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
