/* page.c - the pictures as files: SVG, or an HTML page that shows numbers under the pointer.
 *
 * A page is complete in itself: its styles are inline, and the numbers are SVG titles. Text from a checkpoint
 * is escaped. A file is written under another name and renamed.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PAGE_ROWS = 64, SIDE = 640, MARGIN = 60 };

static void print_xml(FILE *out, const char *text)
{
    for (; *text; text++)
        switch (*text) {
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        case '&':
            fputs("&amp;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        default:
            if ((unsigned char)*text >= 0x20)
                fputc(*text, out);
        }
}

/* ---- files ---- */

typedef rsd_status page_print_svg(FILE *out, void *context);

static void print_page_frame(FILE *out, const char *title, bool html, bool end)
{
    if (!html)
        return;
    if (end) {
        fputs("</body></html>\n", out);
        return;
    }
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>", out);
    print_xml(out, title);
    fputs("</title><style>body{font:14px sans-serif;margin:2em;color:#222;background:#fff}"
          "svg{max-width:100%;height:auto}rect:hover{stroke:#000;stroke-width:2}"
          "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
          "text{fill:#ddd}rect:hover{stroke:#fff}}</style></head><body><h1>",
          out);
    print_xml(out, title);
    fputs("</h1><p>Point at a square to show its numbers.</p>\n", out);
}

static rsd_status write_page(const char *path, bool html, const char *title, page_print_svg *print,
                             void *context)
{
    struct out_file file;
    rsd_status status = RSD_OK;
    if (out_file_open(&file, path, true)) {
        print_page_frame(file.stream, title, html, false);
        status = print(file.stream, context);
        print_page_frame(file.stream, title, html, true);
    }
    if (!out_file_close(&file, !status) && !status)
        exit(cli_fail(NULL, EXIT_IO, "%s: %s", path, strerror(errno)));
    return status;
}

static void print_svg_start(FILE *out, int width, int height)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n",
            width, height, width, height);
}

/* ---- traffic ---- */

static void print_traffic_square(FILE *out, const struct traffic *traffic, int64_t from, int64_t to)
{
    int64_t square = from * traffic->nrows + to;
    double side = (double)SIDE / (double)traffic->nrows;
    double moved = traffic->moved[square], kept = traffic->kept[square];
    if (moved <= 0 && kept <= 0)
        return;
    int light = moved > 0 ? 85 - (int)(55 * moved / traffic->most) : 92;
    fprintf(out,
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"hsl(%d,%d%%,%d%%)\">"
            "<title>",
            MARGIN + (double)to * side, MARGIN + (double)from * side, side, side,
            moved > 0 ? 210 : 120, moved > 0 ? 70 : 40, light);
    if (traffic->group == 1)
        fprintf(out, "rank %lld to rank %lld: ", (long long)from, (long long)to);
    else
        fprintf(out, "ranks %lld-%lld to ranks %lld-%lld: ", (long long)(from * traffic->group),
                (long long)((from + 1) * traffic->group - 1), (long long)(to * traffic->group),
                (long long)((to + 1) * traffic->group - 1));
    if (moved > 0)
        fprintf(out, "%s sent", cli_size_text((int64_t)moved));
    if (kept > 0)
        fprintf(out, "%s%s kept", moved > 0 ? ", " : "", cli_size_text((int64_t)kept));
    fputs("</title></rect>\n", out);
}

static rsd_status print_traffic_svg(FILE *out, void *context)
{
    const struct traffic *traffic = context;
    double side = (double)SIDE / (double)traffic->nrows;
    print_svg_start(out, SIDE + 2 * MARGIN, SIDE + 2 * MARGIN);
    fprintf(out, "<text x=\"%d\" y=\"18\">rows send, columns receive</text>\n", MARGIN);
    int64_t step = (traffic->nrows + 15) / 16;
    for (int64_t i = 0; i < traffic->nrows; i += step) {
        fprintf(out, "<text x=\"%.1f\" y=\"%d\">%lld</text>\n", MARGIN + (double)i * side,
                MARGIN - 6, (long long)(i * traffic->group));
        fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%lld</text>\n", MARGIN - 6,
                MARGIN + (double)i * side + 12, (long long)(i * traffic->group));
    }
    fprintf(out,
            "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#888\"/>\n",
            MARGIN, MARGIN, SIDE, SIDE);
    for (int64_t from = 0; from < traffic->nrows; from++)
        for (int64_t to = 0; to < traffic->nrows; to++)
            print_traffic_square(out, traffic, from, to);
    fputs("</svg>\n", out);
    return RSD_OK;
}

rsd_status page_write_traffic(const char *path, bool html, const rsd_plan *plan)
{
    struct traffic traffic = {0};
    rsd_status status = draw_count_traffic(plan, MOST_PAGE_ROWS, &traffic);
    if (!status)
        status = write_page(path, html, "Traffic between ranks", print_traffic_svg, &traffic);
    draw_free_traffic(&traffic);
    return status;
}

/* ---- boxes ---- */

struct page_boxes {
    const rsd_checkpoint *checkpoint;
    int64_t tensor;
};

static void print_box_rect(FILE *out, const rsd_checkpoint *checkpoint,
                           const rsd_tensor_info *tensor, const rsd_extent *stored, int32_t down,
                           int32_t across)
{
    double x = 0, y = 0, width = SIDE, height = SIDE;
    if (across >= 0) {
        x = SIDE * (double)stored->box.lo[across] / (double)tensor->shape[across];
        width = SIDE * (double)stored->box.len[across] / (double)tensor->shape[across];
    }
    if (down >= 0) {
        y = SIDE * (double)stored->box.lo[down] / (double)tensor->shape[down];
        height = SIDE * (double)stored->box.len[down] / (double)tensor->shape[down];
    }
    const char *file = rsd_checkpoint_file(checkpoint, stored->file);
    fprintf(out,
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" "
            "fill=\"hsl(%d,60%%,70%%)\" fill-opacity=\"0.8\" stroke=\"#444\" stroke-width=\"0.5\">"
            "<title>",
            MARGIN + x, MARGIN + y, width, height, (int)(stored->file * 137 % 360));
    fputs("[", out);
    for (int32_t d = 0; d < stored->box.ndim; d++)
        fprintf(out, "%s%lld:%lld", d ? ", " : "", (long long)stored->box.lo[d],
                (long long)(stored->box.lo[d] + stored->box.len[d]));
    fputs("] in ", out);
    print_xml(out, file ? file : "no file");
    fprintf(out, ", %s</title></rect>\n", cli_size_text((int64_t)stored->nbytes));
}

static rsd_status print_boxes_svg(FILE *out, void *context)
{
    const struct page_boxes *boxes = context;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    int32_t down, across;
    rsd_status status = rsd_checkpoint_tensor(boxes->checkpoint, boxes->tensor, &tensor);
    if (!status)
        status = draw_choose_dims(boxes->checkpoint, boxes->tensor, &down, &across);
    print_svg_start(out, SIDE + 2 * MARGIN, SIDE + 2 * MARGIN);
    fprintf(out, "<text x=\"%d\" y=\"18\">", MARGIN);
    print_xml(out, tensor.name);
    fprintf(out, "  %s</text>\n", cli_tensor_text(tensor.dtype, tensor.ndim, tensor.shape));
    for (int64_t i = 0; i < tensor.nboxes && !status && tensor.nbytes; i++) {
        status = rsd_checkpoint_box(boxes->checkpoint, boxes->tensor, i, &stored);
        if (!status)
            print_box_rect(out, boxes->checkpoint, &tensor, &stored, down, across);
    }
    fputs("</svg>\n", out);
    return status;
}

rsd_status page_write_boxes(const char *path, bool html, const rsd_checkpoint *checkpoint,
                            int64_t tensor)
{
    struct page_boxes boxes = {checkpoint, tensor};
    return write_page(path, html, "File of each element", print_boxes_svg, &boxes);
}
