/* page.c - pictures as files: SVG, or an HTML page that shows numbers under the pointer.
 *
 * A page is complete in itself: its styles are inline, and the numbers are SVG titles. Text from a checkpoint
 * is escaped. A file is written under another name and renamed.
 */
#include "page.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void page_print_xml(FILE *out, const char *text)
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

void page_print_text(FILE *out, double x, double y, const char *attributes, const char *format, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    cli_need_memory(n < 0 ? NULL : text);
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    page_print_xml(out, cli_plain_text(text));
    fputs("</text>\n", out);
    free(text);
}

void page_print_rect(FILE *out, const double box[4], const char *attributes, const char *text)
{
    fprintf(out, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" %s>", box[0], box[1],
            box[2], box[3], attributes);
    if (text) {
        fputs("<title>", out);
        page_print_xml(out, cli_plain_text(text));
        fputs("</title>", out);
    }
    fputs("</rect>\n", out);
}

char *page_shorten(const char *name, int most)
{
    const char *plain = cli_plain_text(name), *end = plain;
    int width = cli_text_width(plain), skip = width - most + 3;
    if (width <= most)
        return cli_text("%s", plain);
    for (int n = 0; n < most / 2; n++) /* to the start of the character after */
        for (end++; ((unsigned char)*end & 0xc0) == 0x80;)
            end++;
    const char *rest = end;
    for (int n = 0; n < skip; n++)
        for (rest++; ((unsigned char)*rest & 0xc0) == 0x80;)
            rest++;
    return cli_text("%.*s...%s", (int)(end - plain), plain, rest);
}

int page_text_width(const char *text)
{
    return 7 * cli_text_width(text);
}

int page_hue(int64_t index)
{
    return (int)((210 + index * 137) % 360);
}

/* ---- axes ---- */

/* Returns a step of 1, 2 or 5 times a power of ten that has at most so many marks. */
static int64_t choose_axis_step(int64_t extent, int64_t most)
{
    static const int64_t steps[] = {1, 2, 5};
    for (int64_t power = 1;; power *= 10)
        for (int i = 0; i < 3; i++)
            if (extent / (steps[i] * power) <= most || power > INT64_MAX / 100)
                return steps[i] * power;
}

void page_print_axis(FILE *out, struct page_axis axis)
{
    int64_t step = choose_axis_step(axis.extent, axis.down ? 10 : 8);
    for (int64_t at = 0; at <= axis.extent && axis.extent > 0; at += step) {
        double along = axis.length * (double)at / (double)axis.extent;
        double x = axis.x + (axis.down ? 0 : along), y = axis.y + (axis.down ? along : 0);
        char *text =
            axis.is_size ? cli_text("%s", cli_size_text(at)) : cli_text("%lld", (long long)at);
        fprintf(out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#888\"/>\n",
                axis.down ? x - 5 : x, y, x, axis.down ? y : y + 5);
        if (axis.down)
            page_print_text(out, x - 8, y + 4, "text-anchor=\"end\"", "%s", text);
        else
            page_print_text(out, x, y + 18, "text-anchor=\"middle\"", "%s", text);
        if (at > INT64_MAX - step)
            break;
    }
}

/* ---- files ---- */

void page_start_svg(FILE *out, int width, int height, const char *title)
{
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect class=\"paper\" width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            width, height, width, height);
    page_print_text(out, 16, 24, "font-size=\"16\" font-weight=\"bold\"", "%s", title);
}

void page_end_svg(FILE *out)
{
    fputs("</svg>\n", out);
}

static void print_page_head(FILE *out, const char *title)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>"
          "<meta name=\"viewport\" content=\"width=device-width\"/><title>",
          out);
    page_print_xml(out, cli_plain_text(title));
    fputs("</title><style>body{font:14px sans-serif;margin:1em;color:#222;background:#fff}"
          "svg{max-width:100%;height:auto}.paper{fill:none}rect[stroke-width]:hover{stroke:#000;"
          "stroke-width:2}"
          "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 8px;text-align:right;"
          "border-bottom:1px solid "
          "#8884}td:first-child,th:first-child,td.text,th.text{text-align:left}"
          "td:first-child{overflow-wrap:anywhere;min-width:8em}td:not(:first-child){white-space:"
          "nowrap}"
          "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}"
          "text:not([class]){fill:#ddd}rect[stroke-width]:hover{stroke:#fff}}</style></head>"
          "<body>\n",
          out);
}

static void write_page_file(const char *path, bool html, const struct page_content *content)
{
    struct out_file file;
    if (!path)
        return;
    bool opened = out_file_open(&file, path, true);
    if (opened && html)
        print_page_head(file.stream, content->title);
    if (opened)
        content->svg(file.stream, content->context);
    if (opened && html) {
        fputs("<p>Point at a rectangle to show its numbers.</p>\n", file.stream);
        if (content->table)
            content->table(file.stream, content->context);
        fputs("</body></html>\n", file.stream);
    }
    if (!out_file_close(&file, opened))
        exit(cli_fail(NULL, EXIT_IO, "%s: %s", path, out_file_error()));
}

void page_write(const struct page_paths *paths, const struct page_content *content)
{
    write_page_file(paths->svg, false, content);
    write_page_file(paths->html, true, content);
}
