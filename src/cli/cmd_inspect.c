/* cmd_inspect.c - `reshard inspect`: lists what a checkpoint holds, without reading tensor data. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char inspect_help[] =
    "usage: reshard inspect [options] CHECKPOINT [TENSOR]\n"
    "\n"
    "List the tensors, dtypes, shapes and values of a checkpoint, or the boxes of one tensor.\n"
    "Nothing in the files is executed, and no tensor data is read.\n"
    "\n";

struct inspection {
    const char *path, *tensor;
    struct page_paths pages;
    bool json, tree;
    struct name_filter only;
};

static const struct cli_option inspect_options[] = {
    OPTION("json", NULL,
           "Print one JSON object: format, tensors with their boxes, and values; or\n"
           "TENSOR only",
           options_set_flag, offsetof(struct inspection, json), 0),
    OPTION("only", "REGEX",
           "Select tensors and values whose name contains a match. May be repeated",
           name_filter_add_only, offsetof(struct inspection, only), 0),
    OPTION("tree", NULL, "Print names as a tree", options_set_flag,
           offsetof(struct inspection, tree), 0),
    OPTION("svg", "FILE",
           "Write a picture to FILE as SVG: what each file contains, or the boxes of\n"
           "TENSOR",
           options_set_text, offsetof(struct inspection, pages.svg), 0),
    OPTION("html", "FILE", "Write that picture and a table to FILE as an HTML page",
           options_set_text, offsetof(struct inspection, pages.html), 0),
    OPTION_TABLE(input_option_rows),
    {0},
};

static const struct cli_verb inspect_verb = {
    .name = "inspect", .help = inspect_help, .help_column = 20, .options = inspect_options};

static int read_inspect_options(int argc, char **argv, struct inspection *request)
{
    int code = options_read(&inspect_verb, argc, argv, request);
    if (code != GO_ON)
        return code;
    if (argc - optind < 1 || argc - optind > 2)
        return cli_fail("inspect", EXIT_USAGE,
                        "one checkpoint is needed; see reshard inspect --help");
    request->path = argv[optind];
    request->tensor = argc - optind == 2 ? argv[optind + 1] : NULL;
    if (request->tree && (request->json || request->tensor))
        return cli_fail("inspect", EXIT_USAGE, "--tree excludes --json and TENSOR");
    if (request->only.rules && request->tensor)
        return cli_fail("inspect", EXIT_USAGE, "--only excludes TENSOR");
    if ((request->pages.svg || request->pages.html) && request->only.rules)
        return cli_fail("inspect", EXIT_USAGE, "--svg and --html exclude --only");
    return GO_ON;
}

/* The tensors that are listed, and the widths of columns. */
struct listing {
    const struct inspection *request;
    rsd_checkpoint *checkpoint;
    int64_t *tensors;
    size_t n;
    int name_width, tensor_width;
};

static bool lists_value(const struct listing *listing, int64_t index)
{
    return name_filter_selects(&listing->request->only,
                               rsd_checkpoint_value_name(listing->checkpoint, index));
}

/* ---- JSON ---- */

static void print_json_boxes(const rsd_checkpoint *checkpoint, int64_t index, int64_t nboxes)
{
    for (int64_t i = 0; i < nboxes; i++) {
        rsd_extent stored = input_extent(checkpoint, index, i);
        const char *file = rsd_checkpoint_file(checkpoint, stored.file);
        printf("%s{\"lo\": ", i ? ", " : "");
        cli_print_json_list(stdout, stored.box.ndim, stored.box.lo);
        printf(", \"len\": ");
        cli_print_json_list(stdout, stored.box.ndim, stored.box.len);
        printf(", \"file\": ");
        if (file)
            cli_print_json_string(stdout, file);
        else
            printf("null");
        printf("}");
    }
}

static void print_json_tensor(const rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = input_tensor(checkpoint, index);
    printf("{\"name\": ");
    cli_print_json_string(stdout, tensor.name);
    printf(", \"dtype\": \"%s\", \"shape\": ", rsd_dtype_name(tensor.dtype));
    cli_print_json_list(stdout, tensor.ndim, tensor.shape);
    printf(", \"nbytes\": %lld, \"boxes\": [", (long long)tensor.nbytes);
    print_json_boxes(checkpoint, index, tensor.nboxes);
    printf("]}");
}

static void print_json_listing(const struct listing *listing)
{
    rsd_checkpoint *checkpoint = listing->checkpoint;
    printf("{\"format\": \"%s\", \"tensors\": [",
           rsd_format_name(rsd_checkpoint_format(checkpoint)));
    for (size_t i = 0; i < listing->n; i++) {
        printf("%s\n  ", i ? "," : "");
        print_json_tensor(checkpoint, listing->tensors[i]);
    }
    printf("],\n \"values\": [");
    for (int64_t i = 0, n = 0; i < rsd_checkpoint_nvalues(checkpoint); i++) {
        char *json = NULL;
        if (!lists_value(listing, i))
            continue;
        if (rsd_checkpoint_value(checkpoint, i, &json))
            json = NULL; /* Listed without its value: `verify` reports what is wrong with it. */
        printf("%s\n  {\"name\": ", n++ ? "," : "");
        cli_print_json_string(stdout, rsd_checkpoint_value_name(checkpoint, i));
        if (json) {
            printf(", \"value\": ");
            cli_print_json(stdout, json);
        }
        printf("}");
        rsd_free(json);
    }
    printf("]}\n");
}

/* ---- text ---- */

/* Names that are wider than the most have a line of their own. The least are for files and pipes. */
enum { LEAST_NAME_WIDTH = 44, MOST_NAME_WIDTH = 100, LEAST_TENSOR_WIDTH = 24, MAX_TREE_DEPTH = 64 };

static void widen_column(int *width, int needed, int most)
{
    if (needed > *width && needed <= most)
        *width = needed;
}

/* Counts the parts of a name that are printed above it in a tree, and finds its last part. */
static int find_tree_leaf(const char **name)
{
    int depth = 0;
    for (const char *dot; depth < MAX_TREE_DEPTH && (dot = strchr(*name, '.')); depth++)
        *name = dot + 1;
    return depth;
}

/* Finds the widths of the columns that fit the names and the shapes; no more than that on a terminal. */
static void measure_columns(struct listing *listing)
{
    bool terminal = isatty(STDOUT_FILENO);
    listing->name_width = terminal ? 0 : LEAST_NAME_WIDTH;
    listing->tensor_width = terminal ? 0 : LEAST_TENSOR_WIDTH;
    for (size_t i = 0; i < listing->n; i++) {
        rsd_tensor_info tensor = input_tensor(listing->checkpoint, listing->tensors[i]);
        const char *name = tensor.name;
        int indent = listing->request->tree ? 2 * find_tree_leaf(&name) : 0;
        widen_column(&listing->name_width, indent + cli_text_width(cli_plain_text(name)),
                     MOST_NAME_WIDTH);
        widen_column(&listing->tensor_width,
                     (int)strlen(cli_tensor_text(tensor.dtype, tensor.ndim, tensor.shape)),
                     MOST_NAME_WIDTH);
    }
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(listing->checkpoint); i++)
        if (!listing->request->tensor && lists_value(listing, i))
            widen_column(
                &listing->name_width,
                cli_text_width(cli_plain_text(rsd_checkpoint_value_name(listing->checkpoint, i))),
                MOST_NAME_WIDTH);
}

/* Prints the first line of a listing: format, number of tensors and values, bytes and files. */
static void print_totals(const struct listing *listing)
{
    const rsd_checkpoint *checkpoint = listing->checkpoint;
    int64_t total = 0; /* a file may claim more than any disk has */
    for (size_t i = 0; i < listing->n; i++)
        if (__builtin_add_overflow(total, input_tensor(checkpoint, listing->tensors[i]).nbytes,
                                   &total))
            total = INT64_MAX;
    int64_t nvalues = 0;
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint); i++)
        nvalues += lists_value(listing, i);
    printf("%s: %s, ", cli_plain_text(listing->request->path),
           rsd_format_name(rsd_checkpoint_format(checkpoint)));
    if (listing->request->only.rules)
        printf("%zu of ", listing->n);
    printf("%lld tensor%s of %s in %lld file%s", (long long)rsd_checkpoint_ntensors(checkpoint),
           rsd_checkpoint_ntensors(checkpoint) == 1 ? "" : "s", cli_size_text(total),
           (long long)rsd_checkpoint_nfiles(checkpoint),
           rsd_checkpoint_nfiles(checkpoint) == 1 ? "" : "s");
    if (nvalues)
        printf(", %lld value%s", (long long)nvalues, nvalues == 1 ? "" : "s");
    printf("\n\n");
}

/* Prints a name with blanks up to the next column. */
static void print_name_column(const struct listing *listing, int indent, const char *name)
{
    printf("%*s", indent, "");
    cli_print_padded(stdout, name, listing->name_width - indent);
    if (indent + cli_text_width(name) > listing->name_width)
        printf("\n%*s", listing->name_width, "");
    printf("  ");
}

static void print_tensor_line(const struct listing *listing, const rsd_tensor_info *tensor,
                              int indent, const char *name)
{
    print_name_column(listing, indent, cli_plain_text(name));
    printf("%-*s %10s", listing->tensor_width,
           cli_tensor_text(tensor->dtype, tensor->ndim, tensor->shape),
           cli_size_text(tensor->nbytes));
    if (tensor->nboxes != 1)
        printf("  in %lld boxes", (long long)tensor->nboxes);
    printf("\n");
}

/* Prints at most 60 bytes, and no part of a UTF-8 character. */
static void print_start_of_text(const char *text)
{
    int n = (int)strnlen(text, 60);
    while (text[n] && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    printf("%.*s%s\n", n, text, text[n] ? "..." : "");
}

static void print_value_line(const struct listing *listing, int64_t index)
{
    char *json = NULL;
    rsd_status status = rsd_checkpoint_value(listing->checkpoint, index, &json);
    print_name_column(listing, 0,
                      cli_plain_text(rsd_checkpoint_value_name(listing->checkpoint, index)));
    if (status)
        printf("unreadable: %s\n", cli_plain_text(rsd_error()));
    else if (!json)
        printf("an opaque object, copied as it is\n");
    else
        print_start_of_text(cli_plain_text(json));
    rsd_free(json);
}

static void print_tree_node(int indent, const char *text, int n)
{
    printf("%*s%s\n", indent, "", cli_plain_text(cli_text("%.*s", n, text)));
}

/* Returns the length of the parts that two names begin with, up to the last dot. */
static size_t count_same_parts(const char *x, const char *y)
{
    size_t same = 0;
    while (x[same] && x[same] == y[same])
        same++;
    while (same > 0 && x[same - 1] != '.')
        same--;
    return same;
}

/* A tensor in a tree, and its name with a character in place of each dot that sorts before all others. */
struct tree_tensor {
    rsd_tensor_info info;
    const char *key;
};

static const char *make_tree_key(const char *name)
{
    char *key = cli_text("%s", name);
    for (char *c = key; *c; c++)
        *c = *c == '.' ? '\1' : *c;
    return key;
}

/* So one branch stays together, and layers.2 comes before layers.10. */
static int by_tree_key(const void *a, const void *b)
{
    return strverscmp(((const struct tree_tensor *)a)->key, ((const struct tree_tensor *)b)->key);
}

/* Leading parts that a name has in common with the one before it are not printed again. */
static void print_name_tree(const struct listing *listing)
{
    const char *before = "";
    size_t n = listing->n;
    struct tree_tensor *tensors = cli_need_memory(calloc(n + 1, sizeof *tensors));
    for (size_t i = 0; i < n; i++) {
        tensors[i].info = input_tensor(listing->checkpoint, listing->tensors[i]);
        tensors[i].key = make_tree_key(tensors[i].info.name);
    }
    if (n > 1)
        qsort(tensors, n, sizeof *tensors, by_tree_key);
    for (size_t i = 0; i < n; i++) {
        const char *name = tensors[i].info.name, *at = name;
        const char *end = at + count_same_parts(at, before), *dot;
        int depth = 0;
        for (; at < end && depth < MAX_TREE_DEPTH; at = strchr(at, '.') + 1)
            depth++;
        for (; depth < MAX_TREE_DEPTH && (dot = strchr(at, '.')); at = dot + 1, depth++)
            print_tree_node(2 * depth, at, (int)(dot - at));
        print_tensor_line(listing, &tensors[i].info, 2 * depth, at);
        before = name;
    }
    free(tensors);
}

static void print_text_listing(struct listing *listing)
{
    measure_columns(listing);
    print_totals(listing);
    if (listing->request->tree)
        print_name_tree(listing);
    for (size_t i = 0; i < listing->n && !listing->request->tree; i++) {
        rsd_tensor_info tensor = input_tensor(listing->checkpoint, listing->tensors[i]);
        print_tensor_line(listing, &tensor, 0, tensor.name);
    }
    for (int64_t i = 0, n = 0; i < rsd_checkpoint_nvalues(listing->checkpoint); i++)
        if (lists_value(listing, i)) {
            printf("%s", n++ || !listing->n ? "" : "\n");
            print_value_line(listing, i);
        }
}

static int list_checkpoint(const struct inspection *request, rsd_checkpoint *checkpoint)
{
    struct listing listing = {.request = request, .checkpoint = checkpoint};
    listing.tensors = cli_need_memory(
        calloc((size_t)rsd_checkpoint_ntensors(checkpoint) + 1, sizeof *listing.tensors));
    listing.n = (size_t)name_filter_list(&request->only, checkpoint, listing.tensors);
    int64_t nvalues = 0;
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint); i++)
        nvalues += lists_value(&listing, i);
    int code = EXIT_YES;
    if (request->only.rules && !listing.n && !nvalues)
        code = cli_fail("inspect", EXIT_CANNOT, "--only '%s' matches no tensor and no value",
                        request->only.text);
    else {
        page_write_checkpoint(&request->pages, request->path, checkpoint);
        if (request->json)
            print_json_listing(&listing);
        else
            print_text_listing(&listing);
    }
    free(listing.tensors);
    return code;
}

/* Prints the box, file, offset and size of each stored box. */
static void print_box_lines(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t nboxes)
{
    enum { MOST_LINES = 64 };
    int64_t n = nboxes < MOST_LINES ? nboxes : MOST_LINES;
    char *boxes[MOST_LINES];
    int width = 0;
    for (int64_t i = 0; i < n; i++) {
        rsd_extent stored = input_extent(checkpoint, tensor, i);
        boxes[i] = cli_box_text(&stored.box);
        widen_column(&width, cli_text_width(boxes[i]), MOST_NAME_WIDTH);
    }
    for (int64_t i = 0; i < n; i++) {
        rsd_extent stored = input_extent(checkpoint, tensor, i);
        const char *file = rsd_checkpoint_file(checkpoint, stored.file);
        printf("  ");
        cli_print_padded(stdout, boxes[i], width);
        printf("  %s, byte %llu, %s\n", file ? cli_plain_text(file) : "no file",
               (unsigned long long)stored.offset, cli_size_text((int64_t)stored.nbytes));
    }
    if (nboxes > n)
        printf("  ... and %lld more\n", (long long)(nboxes - n));
}

/* ---- one tensor ---- */

static int inspect_tensor(const struct inspection *request, rsd_checkpoint *checkpoint)
{
    int64_t index;
    struct listing listing = {.request = request, .checkpoint = checkpoint, .n = 1};
    if (rsd_checkpoint_find(checkpoint, request->tensor, &index))
        return cli_fail("inspect", EXIT_CANNOT, "%s: %s", request->path, rsd_error());
    rsd_tensor_info tensor = input_tensor(checkpoint, index);
    page_write_boxes(&request->pages, request->path, checkpoint, index);
    if (request->json) {
        print_json_tensor(checkpoint, index);
        putchar('\n');
        return EXIT_YES;
    }
    listing.tensors = &index;
    measure_columns(&listing);
    print_tensor_line(&listing, &tensor, 0, tensor.name);
    print_box_lines(checkpoint, index, tensor.nboxes);
    draw_boxes(stdout, checkpoint, index);
    return EXIT_YES;
}

int command_inspect(int argc, char **argv)
{
    struct inspection request = {0};
    rsd_checkpoint *checkpoint = NULL;
    int code = read_inspect_options(argc, argv, &request);
    if (code == GO_ON) {
        code = input_open("inspect", request.path, false, &checkpoint);
        if (!code)
            code = request.tensor ? inspect_tensor(&request, checkpoint)
                                  : list_checkpoint(&request, checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    name_filter_drop(&request.only);
    return code;
}
