/* page_boxes.c - pictures of a checkpoint: the file of each box of a tensor, and what each file contains. */
#include "page.h"

#include <stdlib.h>
#include <string.h>

enum {
    LEFT = 76,
    TOP = 88,
    WIDTH = 640,
    LEAST_HEIGHT = 120,
    MOST_HEIGHT = 640,
    MOST_NAME = 44,   /* characters of a file in a legend */
    MOST_LEGEND = 32, /* files */
    MOST_GROUPS = 8,  /* colours of names */
    BAR = 22,         /* the height of the bar of a file */
    MOST_BARS = 64,
    MOST_PARTS = 20000 /* boxes that are shown one by one */
};

/* ---- one tensor ---- */

struct tensor_page {
    const char *path;
    rsd_tensor_info info;
    int64_t tensor;
    struct file_list files;
    int32_t down, across; /* dims; -1: none */
    double height;
};

/* Draws a box of a tensor in the color of its file, with a label if it fits. */
static void print_tensor_box(FILE *out, const struct tensor_page *page, const rsd_extent *stored)
{
    double box[4] = {LEFT, TOP, WIDTH, page->height};
    const int64_t *shape = page->info.shape;
    if (page->across >= 0) {
        box[0] += WIDTH * (double)stored->box.lo[page->across] / (double)shape[page->across];
        box[2] = WIDTH * (double)stored->box.len[page->across] / (double)shape[page->across];
    }
    if (page->down >= 0) {
        box[1] += page->height * (double)stored->box.lo[page->down] / (double)shape[page->down];
        box[3] = page->height * (double)stored->box.len[page->down] / (double)shape[page->down];
    }
    const char *file = rsd_checkpoint_file(page->files.checkpoint, stored->file);
    char *text = cli_text("%s in %s, %s", cli_box_text(&stored->box), file ? file : "no file",
                          cli_size_text((int64_t)stored->nbytes));
    char *fill = cli_text(
        "fill=\"hsl(%d,60%%,72%%)\" fill-opacity=\"0.85\" stroke=\"#444\" stroke-width=\"0.5\"",
        file ? page_hue(page->files.position[stored->file]) : 0);
    page_print_rect(out, box, fill, text);
    const char *label = file ? page_shorten(file, 24) : "no file";
    if (page_text_width(label) + 8 < box[2] && box[3] > 16)
        page_print_text(
            out, box[0] + box[2] / 2, box[1] + box[3] / 2 + 4,
            "class=\"dark\" fill=\"#222\" text-anchor=\"middle\" pointer-events=\"none\"", "%s",
            label);
}

static void print_tensor_axes(FILE *out, const struct tensor_page *page)
{
    double bottom = TOP + page->height;
    if (page->across >= 0) {
        page_print_axis(out, (struct page_axis){LEFT, bottom, WIDTH, false,
                                                page->info.shape[page->across], false});
        page_print_text(out, LEFT + WIDTH / 2.0, bottom + 36,
                        "text-anchor=\"middle\" font-weight=\"bold\"", "dim %d", (int)page->across);
    }
    if (page->down >= 0) {
        page_print_axis(out, (struct page_axis){LEFT, TOP, page->height, true,
                                                page->info.shape[page->down], false});
        fprintf(out,
                "<text transform=\"translate(20 %.1f) rotate(-90)\" text-anchor=\"middle\" "
                "font-weight=\"bold\">dim %d</text>\n",
                TOP + page->height / 2, (int)page->down);
    }
}

static void print_file_legend(FILE *out, const struct tensor_page *page, double x)
{
    const struct file_list *files = &page->files;
    size_t shown = files->n < MOST_LEGEND ? files->n : MOST_LEGEND;
    for (size_t i = 0; i < shown; i++) {
        double y = TOP + PAGE_LINE * (double)i;
        double box[4] = {x, y, 14, 12};
        char *fill = cli_text("fill=\"hsl(%d,60%%,72%%)\" stroke=\"#444\" stroke-width=\"0.5\"",
                              page_hue((int64_t)i));
        char *name = page_shorten(files->list[i].name, MOST_NAME);
        page_print_rect(out, box, fill, files->list[i].name);
        page_print_text(out, x + 22, y + 11, "", "%s", name);
        page_print_text(out, x + 30 + page_text_width(name), y + 11, "opacity=\"0.7\"", "%s",
                        cli_size_text(files->list[i].nbytes));
    }
    if (shown < files->n)
        page_print_text(out, x + 22, TOP + PAGE_LINE * (double)shown + 11, "", "... and %zu more",
                        files->n - shown);
}

static void print_tensor_svg(FILE *out, const void *context)
{
    const struct tensor_page *page = context;
    const rsd_tensor_info *info = &page->info;
    size_t nlines = page->files.n < MOST_LEGEND ? page->files.n : MOST_LEGEND + 1;
    double legend = TOP + PAGE_LINE * (double)nlines, bottom = TOP + page->height + 48;
    int width = LEFT + WIDTH + 32;
    for (size_t i = 0; i < page->files.n && i < MOST_LEGEND; i++) {
        const char *file = page_shorten(page->files.list[i].name, MOST_NAME);
        int needed = LEFT + WIDTH + 130 + page_text_width(file);
        width = needed > width ? needed : width;
    }
    page_start_svg(out, width, (int)((legend > bottom ? legend : bottom) + 16),
                   page_shorten(info->name, 110));
    page_print_text(out, 16, 44, "", "%s, %s in %lld box%s of %zu file%s of %s",
                    cli_tensor_text(info->dtype, info->ndim, info->shape),
                    cli_size_text(info->nbytes), (long long)info->nboxes,
                    info->nboxes == 1 ? "" : "es", page->files.n, page->files.n == 1 ? "" : "s",
                    page_shorten(page->path, 80));
    if (info->ndim > 2)
        page_print_text(out, 16, 44 + PAGE_LINE, "opacity=\"0.7\"",
                        "dims %d and %d of %d are shown; boxes that differ in others lie on each "
                        "other",
                        (int)page->down, (int)page->across, (int)info->ndim);
    double frame[4] = {LEFT, TOP, WIDTH, page->height};
    page_print_rect(out, frame, "fill=\"#8881\" stroke=\"#888\"", NULL);
    for (int64_t i = 0; i < info->nboxes && i < MOST_PARTS && info->nbytes; i++) {
        rsd_extent stored = input_extent(page->files.checkpoint, page->tensor, i);
        print_tensor_box(out, page, &stored);
    }
    print_tensor_axes(out, page);
    print_file_legend(out, page, LEFT + WIDTH + 24);
    page_end_svg(out);
}

static void print_box_table(FILE *out, const void *context)
{
    const struct tensor_page *page = context;
    fputs("<table><tr><th>box</th><th class=\"text\">file</th><th>byte</th><th>size</th></tr>\n",
          out);
    for (int64_t i = 0; i < page->info.nboxes && i < MOST_PARTS; i++) {
        rsd_extent stored = input_extent(page->files.checkpoint, page->tensor, i);
        const char *file = rsd_checkpoint_file(page->files.checkpoint, stored.file);
        fprintf(out, "<tr><td>%s</td><td class=\"text\">", cli_box_text(&stored.box));
        page_print_xml(out, file ? cli_plain_text(file) : "no file");
        fprintf(out, "</td><td>%llu</td><td>%s</td></tr>\n", (unsigned long long)stored.offset,
                cli_size_text((int64_t)stored.nbytes));
    }
    fputs("</table>\n", out);
}

void page_write_boxes(const struct page_paths *paths, const char *checkpoint_path,
                      const rsd_checkpoint *checkpoint, int64_t tensor)
{
    struct tensor_page page = {.path = checkpoint_path,
                               .info = input_tensor(checkpoint, tensor),
                               .tensor = tensor,
                               .height = LEAST_HEIGHT};
    draw_choose_dims(checkpoint, tensor, &page.down, &page.across);
    if (page.down >= 0 && page.info.nbytes > 0)
        page.height =
            WIDTH * (double)page.info.shape[page.down] / (double)page.info.shape[page.across];
    page.height = page.height < LEAST_HEIGHT  ? LEAST_HEIGHT
                  : page.height > MOST_HEIGHT ? MOST_HEIGHT
                                              : page.height;
    draw_list_files(&page.files, checkpoint, tensor);
    page_write(paths, &(struct page_content){.title = page.info.name,
                                             .svg = print_tensor_svg,
                                             .table = print_box_table,
                                             .context = &page});
    draw_drop_files(&page.files);
}

/* ---- a checkpoint ---- */

/* The tensors whose names begin with the same part. */
struct name_group {
    char *name;
    int64_t nbytes, ntensors;
};

struct checkpoint_page {
    const char *path;
    const rsd_checkpoint *checkpoint;
    struct file_list files;
    size_t common; /* bytes that all names begin with */
    struct name_group groups[MOST_GROUPS + 1];
    size_t ngroups;
    int64_t nbytes, nboxes;
};

/* Finds the parts that all names begin with. */
static size_t find_common_start(const rsd_checkpoint *checkpoint)
{
    if (rsd_checkpoint_ntensors(checkpoint) < 2)
        return 0;
    const char *first = input_tensor(checkpoint, 0).name;
    size_t common = strlen(first);
    for (int64_t i = 1; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        const char *other = input_tensor(checkpoint, i).name;
        size_t n = 0;
        while (n < common && first[n] == other[n])
            n++;
        common = n;
    }
    while (common > 0 && first[common - 1] != '.')
        common--;
    return common;
}

/* Returns the group of a name. What has no group of its own is in the last one. */
static size_t find_name_group(struct checkpoint_page *page, const char *name)
{
    size_t n = strlen(name) > page->common ? page->common : 0;
    n += strcspn(name + n, ".");
    for (size_t i = 0; i < page->ngroups && i < MOST_GROUPS; i++)
        if (strlen(page->groups[i].name) == n && strncmp(page->groups[i].name, name, n) == 0)
            return i;
    if (page->ngroups < MOST_GROUPS) {
        page->groups[page->ngroups].name = cli_text("%.*s", (int)n, name);
        return page->ngroups++;
    }
    if (page->ngroups == MOST_GROUPS)
        page->groups[page->ngroups++].name = cli_text("other names");
    return MOST_GROUPS;
}

/* Groups the tensors by the start of their names, and adds up their bytes. */
static void group_names(struct checkpoint_page *page)
{
    page->common = find_common_start(page->checkpoint);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(page->checkpoint); i++) {
        rsd_tensor_info info = input_tensor(page->checkpoint, i);
        struct name_group *group = &page->groups[find_name_group(page, info.name)];
        group->ntensors++;
        if (__builtin_add_overflow(group->nbytes, info.nbytes, &group->nbytes) ||
            __builtin_add_overflow(page->nbytes, info.nbytes, &page->nbytes))
            group->nbytes = page->nbytes = INT64_MAX;
        page->nboxes += info.nboxes;
    }
}

/* Prints the parts of the bars, tensor by tensor. */
static void print_bar_parts(FILE *out, struct checkpoint_page *page, double x, double scale)
{
    double *at = cli_need_memory(calloc(page->files.n + 1, sizeof *at));
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(page->checkpoint); i++) {
        rsd_tensor_info info = input_tensor(page->checkpoint, i);
        size_t group = find_name_group(page, info.name);
        for (int64_t k = 0; k < info.nboxes; k++) {
            rsd_extent stored = input_extent(page->checkpoint, i, k);
            if (stored.file < 0)
                continue;
            size_t bar = (size_t)page->files.position[stored.file];
            double box[4] = {x + at[bar], TOP + 24 + BAR * (double)bar,
                             scale * (double)stored.nbytes, BAR - 4};
            at[bar] += box[2];
            if (bar >= MOST_BARS)
                continue;
            char *text = cli_text("%s %s of %s, %s", info.name, cli_box_text(&stored.box),
                                  cli_tensor_text(info.dtype, info.ndim, info.shape),
                                  cli_size_text((int64_t)stored.nbytes));
            char *fill = cli_text("fill=\"hsl(%d,60%%,68%%)\" stroke=\"#fff\" "
                                  "stroke-width=\"%.1f\"",
                                  page_hue((int64_t)group), box[2] > 3 ? 0.5 : 0.0);
            page_print_rect(out, box, fill, text);
        }
    }
    free(at);
}

/* Prints one bar per file, where the parts are too many to be shown. */
static void print_whole_bars(FILE *out, const struct checkpoint_page *page, double x, double scale)
{
    for (size_t i = 0; i < page->files.n && i < MOST_BARS; i++) {
        double box[4] = {x, TOP + 24 + BAR * (double)i, scale * (double)page->files.list[i].nbytes,
                         BAR - 4};
        char *text = cli_text("%s: %lld boxes, %s", page->files.list[i].name,
                              (long long)page->files.list[i].nboxes,
                              cli_size_text(page->files.list[i].nbytes));
        page_print_rect(out, box, "fill=\"hsl(210,60%,68%)\" stroke=\"#fff\" stroke-width=\"0.5\"",
                        text);
    }
}

static void print_group_legend(FILE *out, const struct checkpoint_page *page)
{
    double x = 16;
    for (size_t i = 0; i < page->ngroups; i++) {
        char *name = page_shorten(page->groups[i].name, 28);
        char *text = cli_text("%s: %lld tensor%s, %s", name, (long long)page->groups[i].ntensors,
                              page->groups[i].ntensors == 1 ? "" : "s",
                              cli_size_text(page->groups[i].nbytes));
        size_t line = i / 3, column = i % 3;
        double box[4] = {16 + 300 * (double)column, 56 + PAGE_LINE * (double)line, 14, 12};
        char *fill = cli_text("fill=\"hsl(%d,60%%,68%%)\"", page_hue((int64_t)i));
        x = box[0];
        page_print_rect(out, box, fill, NULL);
        page_print_text(out, x + 20, box[1] + 11, "", "%s", text);
    }
}

static void print_checkpoint_svg(FILE *out, const void *context)
{
    struct checkpoint_page page = *(const struct checkpoint_page *)context;
    size_t shown = page.files.n < MOST_BARS ? page.files.n : MOST_BARS;
    int64_t most = 1;
    int widest = 40;
    for (size_t i = 0; i < shown; i++) {
        int width = page_text_width(page_shorten(page.files.list[i].name, MOST_NAME));
        widest = width > widest ? width : widest;
        most = page.files.list[i].nbytes > most ? page.files.list[i].nbytes : most;
    }
    double x = 24 + widest, bottom = TOP + 24 + BAR * (double)shown;
    bool parts = page.nboxes <= MOST_PARTS;
    page_start_svg(out, (int)x + WIDTH + 100, (int)bottom + 64, page_shorten(page.path, 110));
    page_print_text(out, 16, 44, "", "%s, %lld tensor%s of %s in %zu file%s with %s",
                    rsd_format_name(rsd_checkpoint_format(page.checkpoint)),
                    (long long)rsd_checkpoint_ntensors(page.checkpoint),
                    rsd_checkpoint_ntensors(page.checkpoint) == 1 ? "" : "s",
                    cli_size_text(page.nbytes), page.files.n, page.files.n == 1 ? "" : "s",
                    cli_size_text(page.files.nbytes));
    if (parts)
        print_group_legend(out, &page);
    double scale = WIDTH / (double)most;
    for (size_t i = 0; i < shown; i++) {
        double y = TOP + 24 + BAR * (double)i + 14;
        page_print_text(out, x - 8, y, "text-anchor=\"end\"", "%s",
                        page_shorten(page.files.list[i].name, MOST_NAME));
        page_print_text(out, x + scale * (double)page.files.list[i].nbytes + 8, y,
                        "opacity=\"0.7\"", "%s", cli_size_text(page.files.list[i].nbytes));
    }
    if (parts)
        print_bar_parts(out, &page, x, scale);
    else
        print_whole_bars(out, &page, x, scale);
    page_print_axis(out, (struct page_axis){x, bottom, WIDTH, false, most, true});
    page_print_text(out, x + WIDTH / 2.0, bottom + 36,
                    "text-anchor=\"middle\" font-weight=\"bold\"", "bytes of the file");
    if (shown < page.files.n)
        page_print_text(out, 16, bottom + 36, "", "... and %zu more files", page.files.n - shown);
    page_end_svg(out);
}

static void print_tensor_table(FILE *out, const void *context)
{
    const struct checkpoint_page *page = context;
    fputs("<table><tr><th>tensor</th><th class=\"text\">dtype and shape</th><th>size</th>"
          "<th>boxes</th></tr>\n",
          out);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(page->checkpoint); i++) {
        rsd_tensor_info info = input_tensor(page->checkpoint, i);
        fputs("<tr><td>", out);
        page_print_xml(out, cli_plain_text(info.name));
        fprintf(out, "</td><td class=\"text\">%s</td><td>%s</td><td>%lld</td></tr>\n",
                cli_tensor_text(info.dtype, info.ndim, info.shape), cli_size_text(info.nbytes),
                (long long)info.nboxes);
    }
    fputs("</table>\n", out);
}

void page_write_checkpoint(const struct page_paths *paths, const char *checkpoint_path,
                           const rsd_checkpoint *checkpoint)
{
    if (!paths->svg && !paths->html)
        return;
    struct checkpoint_page page = {.path = checkpoint_path, .checkpoint = checkpoint};
    draw_list_files(&page.files, checkpoint, -1);
    group_names(&page);
    page_write(paths, &(struct page_content){.title = page.path,
                                             .svg = print_checkpoint_svg,
                                             .table = print_tensor_table,
                                             .context = &page});
    draw_drop_files(&page.files);
}
