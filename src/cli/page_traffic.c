/* page_traffic.c - a picture of bytes from ranks or files to ranks: rows send, columns receive. */
#include "page.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_PAGE_ROWS = 64,
    MOST_SIDE = 640, /* of the square of all squares */
    MOST_SQUARE = 64,
    LEAST_NUMBER_SQUARE = 52, /* squares of this side contain their numbers */
    MOST_NAME = 36,           /* characters of the name of a row */
    SUM_WIDTH = 76,
    TOP = 104
};

struct traffic_page {
    const struct traffic *traffic;
    const char *title, *lines[2]; /* below the title */
    const char *row_title, *sent, *received;
    double square, left; /* the side of a square, and where the first column begins */
};

/* Returns what a row or column stands for. */
static char *name_group(const struct file_list *files, int64_t group, int64_t index, int64_t n)
{
    int64_t first = index * group, last = first + group - 1 < n ? first + group - 1 : n - 1;
    if (files)
        return first == last ? page_shorten(files->list[first].name, MOST_NAME)
                             : cli_text("files %lld-%lld", (long long)first, (long long)last);
    return first == last ? cli_text("%lld", (long long)first)
                         : cli_text("%lld-%lld", (long long)first, (long long)last);
}

static char *name_row(const struct traffic *traffic, int64_t row)
{
    return name_group(traffic->row_files, traffic->row_group, row, traffic->nsenders);
}

static char *name_column(const struct traffic *traffic, int64_t column)
{
    return name_group(NULL, traffic->column_group, column, traffic->nreceivers);
}

/* Finds the size of a square and the width of the labels. */
static void measure_traffic(struct traffic_page *page)
{
    const struct traffic *traffic = page->traffic;
    int64_t most = traffic->nrows > traffic->ncolumns ? traffic->nrows : traffic->ncolumns;
    int widest = 0;
    page->square = (double)MOST_SIDE / (double)most;
    page->square = page->square > MOST_SQUARE ? MOST_SQUARE : page->square;
    for (int64_t row = 0; row < traffic->nrows; row++) {
        int width = page_text_width(name_row(traffic, row));
        widest = width > widest ? width : widest;
    }
    int least = page_text_width(page->received) + 16;
    page->left = 48 + widest < least ? least : 48 + widest;
}

/* Prints one square: blue for bytes that move, green for bytes that stay. */
static void print_traffic_square(FILE *out, const struct traffic_page *page, int64_t row,
                                 int64_t column)
{
    const struct traffic *traffic = page->traffic;
    int64_t index = row * traffic->ncolumns + column;
    double moved = traffic->moved[index], kept = traffic->kept[index];
    if (moved <= 0 && kept <= 0)
        return;
    int light = moved > 0 ? 88 - (int)(56 * moved / traffic->most) : 84;
    double box[4] = {page->left + (double)column * page->square, TOP + (double)row * page->square,
                     page->square, page->square};
    char *from = name_row(traffic, row), *to = name_column(traffic, column);
    char *fill = cli_text("fill=\"hsl(%d,%d%%,%d%%)\" stroke=\"#fff\" stroke-width=\"0.5\"",
                          moved > 0 ? 210 : 130, moved > 0 ? 65 : 40, light);
    char *text = cli_text("%s %s to rank %s: %s %s%s%s%s", page->row_title, from, to,
                          moved > 0 ? cli_size_text((int64_t)moved) : "nothing", page->sent,
                          kept > 0 ? ", " : "", kept > 0 ? cli_size_text((int64_t)kept) : "",
                          kept > 0 ? " stays" : "");
    page_print_rect(out, box, fill, text);
    if (page->square >= LEAST_NUMBER_SQUARE)
        page_print_text(out, box[0] + page->square / 2, box[1] + page->square / 2 + 4,
                        light < 60 ? "class=\"light\" fill=\"#fff\" text-anchor=\"middle\" "
                                     "font-size=\"11\" pointer-events=\"none\""
                                   : "class=\"dark\" fill=\"#222\" text-anchor=\"middle\" "
                                     "font-size=\"11\" pointer-events=\"none\"",
                        "%s", cli_size_text((int64_t)(moved > 0 ? moved : kept)));
}

/* Prints names and sums of the rows. Those that would touch each other are left out. */
static void print_traffic_rows(FILE *out, const struct traffic_page *page)
{
    const struct traffic *traffic = page->traffic;
    double right = page->left + page->square * (double)traffic->ncolumns;
    int64_t step = 1 + (int64_t)(13 / page->square);
    for (int64_t row = 0; row < traffic->nrows; row += step) {
        double y = TOP + ((double)row + 0.5) * page->square + 4, sum = 0;
        char *name = name_row(traffic, row);
        for (int64_t column = 0; column < traffic->ncolumns; column++)
            sum += traffic->moved[row * traffic->ncolumns + column];
        page_print_text(out, page->left - 8, y, "text-anchor=\"end\"", "%s", name);
        page_print_text(out, right + 8, y, "opacity=\"0.7\"", "%s", cli_size_text((int64_t)sum));
    }
    page_print_text(out, right + 8, TOP - 8, "opacity=\"0.7\"", "%s", page->sent);
    fprintf(out,
            "<text transform=\"translate(20 %.1f) rotate(-90)\" text-anchor=\"middle\" "
            "font-weight=\"bold\">from %s</text>\n",
            TOP + page->square * (double)traffic->nrows / 2, page->row_title);
}

static void print_traffic_columns(FILE *out, const struct traffic_page *page)
{
    const struct traffic *traffic = page->traffic;
    double bottom = TOP + page->square * (double)traffic->nrows;
    const char *last = name_column(traffic, traffic->ncolumns - 1);
    int64_t step = 1 + (int64_t)((page_text_width(last) + 4) / page->square);
    for (int64_t column = 0; column < traffic->ncolumns; column++) {
        double x = page->left + ((double)column + 0.5) * page->square, sum = 0;
        char *name = name_column(traffic, column);
        for (int64_t row = 0; row < traffic->nrows; row++)
            sum += traffic->moved[row * traffic->ncolumns + column];
        if (column % step == 0)
            page_print_text(out, x, TOP - 8, "text-anchor=\"middle\"", "%s", name);
        if (page->square >= LEAST_NUMBER_SQUARE)
            page_print_text(out, x, bottom + 16, "text-anchor=\"middle\" opacity=\"0.7\"", "%s",
                            cli_size_text((int64_t)sum));
        else if (column % (1 + (int64_t)(13 / page->square)) == 0)
            fprintf(out,
                    "<text transform=\"translate(%.1f %.1f) rotate(60)\" opacity=\"0.7\">%s"
                    "</text>\n",
                    x - 4, bottom + 14, cli_size_text((int64_t)sum));
    }
    page_print_text(out, page->left - 8, bottom + 16, "text-anchor=\"end\" opacity=\"0.7\"", "%s",
                    page->received);
    page_print_text(out, page->left + page->square * (double)traffic->ncolumns / 2, TOP - 24,
                    "text-anchor=\"middle\" font-weight=\"bold\"", "to rank");
}

/* Prints what the colours mean. */
static void print_traffic_legend(FILE *out, const struct traffic_page *page, double y)
{
    enum { NSTEPS = 8, STEP_WIDTH = 20 };
    const struct traffic *traffic = page->traffic;
    double x = page->left;
    for (int i = 0; i < NSTEPS; i++) {
        double box[4] = {x + i * STEP_WIDTH, y, STEP_WIDTH, 12};
        char *fill = cli_text("fill=\"hsl(210,65%%,%d%%)\"", 88 - (int)(56.0 * (i + 1) / NSTEPS));
        page_print_rect(out, box, fill, NULL);
    }
    page_print_text(out, x + NSTEPS * STEP_WIDTH + 8, y + 11, "", "up to %s per square",
                    cli_size_text((int64_t)traffic->most));
    if (traffic->row_files)
        return;
    double box[4] = {x, y + PAGE_LINE, STEP_WIDTH, 12};
    page_print_rect(out, box, "fill=\"hsl(130,40%,84%)\"", NULL);
    page_print_text(out, x + STEP_WIDTH + 8, y + PAGE_LINE + 11, "", "stays on its rank");
}

static void print_traffic_svg(FILE *out, const void *context)
{
    const struct traffic_page *page = context;
    const struct traffic *traffic = page->traffic;
    double width = page->square * (double)traffic->ncolumns,
           height = page->square * (double)traffic->nrows;
    double below = page->square >= LEAST_NUMBER_SQUARE ? 36 : 76;
    int text = 32;
    for (int i = 0; i < 2; i++)
        text = page->lines[i] && page_text_width(page->lines[i]) + 32 > text
                   ? page_text_width(page->lines[i]) + 32
                   : text;
    int whole = (int)(page->left + width) + SUM_WIDTH + 16;
    int least = (int)page->left + 340;
    whole = whole < least ? least : whole;
    page_start_svg(out, whole < text ? text : whole, (int)(TOP + height + below) + 3 * PAGE_LINE,
                   page->title);
    for (int i = 0; i < 2; i++)
        if (page->lines[i])
            page_print_text(out, 16, 44 + PAGE_LINE * i, "", "%s", page->lines[i]);
    double frame[4] = {page->left, TOP, width, height};
    page_print_rect(out, frame, "fill=\"#8881\" stroke=\"#888\"", NULL);
    print_traffic_rows(out, page);
    print_traffic_columns(out, page);
    for (int64_t row = 0; row < traffic->nrows; row++)
        for (int64_t column = 0; column < traffic->ncolumns; column++)
            print_traffic_square(out, page, row, column);
    print_traffic_legend(out, page, TOP + height + below);
    page_end_svg(out);
}

rsd_status page_write_traffic(const struct page_paths *paths, const rsd_plan *plan)
{
    if (!paths->svg && !paths->html)
        return RSD_OK;
    struct traffic traffic = {0};
    char *problem = NULL;
    rsd_totals totals = {.struct_nbytes = sizeof totals};
    rsd_status status = draw_count_traffic(plan, MOST_PAGE_ROWS, &traffic);
    if (!status)
        status = rsd_plan_totals(plan, &totals);
    if (!status)
        status = rsd_problem_print(rsd_plan_src(plan), rsd_plan_dst(plan), &problem);
    if (!status) {
        char *short_problem = page_shorten(problem, 140);
        char *line = cli_text(
            "%s moved in %lld message%s, %s stays on its rank; the least that any plan moves is %s",
            cli_size_text(totals.nbytes_moved), (long long)totals.nmessages,
            totals.nmessages == 1 ? "" : "s", cli_size_text(totals.nbytes_kept),
            cli_size_text(totals.nbytes_least));
        struct traffic_page page = {.traffic = &traffic,
                                    .title = "Traffic between ranks",
                                    .lines = {short_problem, line},
                                    .row_title = "rank",
                                    .sent = "sent",
                                    .received = "received"};
        measure_traffic(&page);
        page_write(paths, &(struct page_content){
                              .title = page.title, .svg = print_traffic_svg, .context = &page});
    }
    rsd_free(problem);
    draw_free_traffic(&traffic);
    return status;
}

void page_write_reads(const struct page_paths *paths, const struct traffic *traffic,
                      const char *checkpoint, const char *totals)
{
    char *title = cli_text("Bytes that each rank reads of %s", page_shorten(checkpoint, 120));
    struct traffic_page page = {.traffic = traffic,
                                .title = title,
                                .lines = {totals},
                                .row_title = "file",
                                .sent = "read",
                                .received = "read"};
    measure_traffic(&page);
    page_write(paths, &(struct page_content){
                          .title = page.title, .svg = print_traffic_svg, .context = &page});
}
