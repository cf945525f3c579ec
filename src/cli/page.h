/* page.h - pictures as files, private to cli: the frame of a page, and texts and scales in SVG. */
#ifndef PAGE_H
#define PAGE_H

#include "cli.h"

enum { PAGE_LINE = 18 }; /* the height of a line of text */

typedef void page_print(FILE *out, const void *context);

/* What a page shows. */
struct page_content {
    const char *title;
    page_print *svg;   /* prints the picture */
    page_print *table; /* prints what an HTML page has below the picture; NULL: nothing */
    const void *context;
};

/* Writes a page to each path that is set. Ends the process if it cannot. */
void page_write(const struct page_paths *paths, const struct page_content *content);

/* Start and end the picture. The first line is the title. */
void page_start_svg(FILE *out, int width, int height, const char *title);
void page_end_svg(FILE *out);

/* Prints text without markup, or a whole text element with these attributes. */
void page_print_xml(FILE *out, const char *text);
void page_print_text(FILE *out, double x, double y, const char *attributes, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Prints a rectangle that shows a text under the pointer. */
void page_print_rect(FILE *out, const double box[4], const char *attributes, const char *text);

/* Returns a name of at most so many characters, with dots in its middle if it was longer. */
char *page_shorten(const char *name, int most);

/* Returns the width of a text in pixels, about. */
int page_text_width(const char *text);

/* An axis from 0 to `extent`, which begins at (x, y). */
struct page_axis {
    double x, y, length; /* pixels */
    bool down;           /* else to the right */
    int64_t extent;
    bool is_size; /* its numbers are bytes */
};
void page_print_axis(FILE *out, struct page_axis axis); /* with marks and numbers */

/* The colour of the i-th of several kinds. */
int page_hue(int64_t index);

#endif
