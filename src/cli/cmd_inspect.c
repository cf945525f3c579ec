/* cmd_inspect.c - `reshard inspect`: lists what a checkpoint holds, without reading tensor data. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const char inspect_help[] =
    "usage: reshard inspect [options] CHECKPOINT [TENSOR]\n"
    "\n"
    "List the tensors, dtypes, shapes and values of a checkpoint, or the boxes of one tensor.\n"
    "Nothing in the files is executed, and no tensor data is read.\n"
    "\n"
    "  --json            Print one JSON object: format, tensors with their boxes, and values; or\n"
    "                    TENSOR only\n"
    "  --tree            Print names as a tree\n"
    "  --svg FILE        With TENSOR: write a picture of its boxes to FILE as SVG\n"
    "  --html FILE       With TENSOR: write that picture to FILE as an HTML page\n" INPUT_HELP(
        "    ") "  -h, --help        Print this help\n";

struct inspection {
    const char *path, *tensor, *svg, *html;
    bool json, tree;
};

enum { JSON = 256, TREE, SVG, HTML };

static const struct option inspect_options[] = {
    {"json", no_argument, NULL, JSON},
    {"tree", no_argument, NULL, TREE},
    {"svg", required_argument, NULL, SVG},
    {"html", required_argument, NULL, HTML},
    INPUT_OPTIONS,
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int read_inspect_options(int argc, char **argv, struct inspection *request)
{
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":h", inspect_options, NULL)) != -1;)
        switch (option) {
        case 'h':
            return cli_show_help(inspect_help);
        case JSON:
            request->json = true;
            break;
        case TREE:
            request->tree = true;
            break;
        case SVG:
            request->svg = optarg;
            break;
        case HTML:
            request->html = optarg;
            break;
        default:
            if (input_take_option(option))
                break;
            return cli_fail_option("inspect", option, argv);
        }
    if (argc - optind < 1 || argc - optind > 2)
        return cli_fail("inspect", EXIT_USAGE,
                        "one checkpoint is needed; see reshard inspect --help");
    request->path = argv[optind];
    request->tensor = argc - optind == 2 ? argv[optind + 1] : NULL;
    if (request->tree && (request->json || request->tensor))
        return cli_fail("inspect", EXIT_USAGE, "--tree excludes --json and TENSOR");
    if ((request->svg || request->html) && !request->tensor)
        return cli_fail("inspect", EXIT_USAGE, "--svg and --html need TENSOR");
    return GO_ON;
}

static rsd_tensor_info need_tensor(const rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    if (rsd_checkpoint_tensor(checkpoint, index, &tensor))
        exit(cli_fail_status("inspect", RSD_EINVAL));
    return tensor;
}

static rsd_extent need_extent(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t index)
{
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    if (rsd_checkpoint_box(checkpoint, tensor, index, &stored))
        exit(cli_fail_status("inspect", RSD_EINVAL));
    return stored;
}

/* ---- JSON ---- */

static void print_json_boxes(const rsd_checkpoint *checkpoint, int64_t index, int64_t nboxes)
{
    for (int64_t i = 0; i < nboxes; i++) {
        rsd_extent stored = need_extent(checkpoint, index, i);
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
    rsd_tensor_info tensor = need_tensor(checkpoint, index);
    printf("{\"name\": ");
    cli_print_json_string(stdout, tensor.name);
    printf(", \"dtype\": \"%s\", \"shape\": ", rsd_dtype_name(tensor.dtype));
    cli_print_json_list(stdout, tensor.ndim, tensor.shape);
    printf(", \"nbytes\": %lld, \"boxes\": [", (long long)tensor.nbytes);
    print_json_boxes(checkpoint, index, tensor.nboxes);
    printf("]}");
}

static int print_json_listing(rsd_checkpoint *checkpoint)
{
    printf("{\"format\": \"%s\", \"tensors\": [",
           rsd_format_name(rsd_checkpoint_format(checkpoint)));
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        printf("%s\n  ", i ? "," : "");
        print_json_tensor(checkpoint, i);
    }
    printf("],\n \"values\": [");
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint); i++) {
        char *json = NULL;
        if (rsd_checkpoint_value(checkpoint, i, &json))
            json = NULL; /* Listed without its value: `verify` reports what is wrong with it. */
        printf("%s\n  {\"name\": ", i ? "," : "");
        cli_print_json_string(stdout, rsd_checkpoint_value_name(checkpoint, i));
        if (json)
            printf(", \"value\": %s", json);
        printf("}");
        rsd_free(json);
    }
    printf("]}\n");
    return EXIT_YES;
}

/* ---- text ---- */

static int64_t sum_nbytes(const rsd_checkpoint *checkpoint)
{
    int64_t total = 0; /* a file may claim more than any disk has */
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++)
        if (__builtin_add_overflow(total, need_tensor(checkpoint, i).nbytes, &total))
            return INT64_MAX;
    return total;
}

static void print_totals(const struct inspection *request, const rsd_checkpoint *checkpoint)
{
    printf("%s: %s, %lld tensors of %s in %lld file%s", cli_plain_text(request->path),
           rsd_format_name(rsd_checkpoint_format(checkpoint)),
           (long long)rsd_checkpoint_ntensors(checkpoint), cli_size_text(sum_nbytes(checkpoint)),
           (long long)rsd_checkpoint_nfiles(checkpoint),
           rsd_checkpoint_nfiles(checkpoint) == 1 ? "" : "s");
    if (rsd_checkpoint_nvalues(checkpoint))
        printf(", %lld values", (long long)rsd_checkpoint_nvalues(checkpoint));
    printf("\n\n");
}

static void print_tensor_line(const rsd_tensor_info *tensor, int indent, const char *name)
{
    int width = 44 - indent;
    printf("%*s%-*s  %-24s %10s", indent, "", width > 0 ? width : 0, cli_plain_text(name),
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

static void print_value_line(rsd_checkpoint *checkpoint, int64_t index)
{
    char *json = NULL;
    rsd_status status = rsd_checkpoint_value(checkpoint, index, &json);
    printf("%-44s  ", cli_plain_text(rsd_checkpoint_value_name(checkpoint, index)));
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
    char *part = cli_new_text("%.*s", n, text);
    printf("%*s%s\n", indent, "", cli_plain_text(part));
    free(part);
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

/* Compares names part by part, so that one branch stays together, and layers.2 comes before layers.10. */
static int by_name_parts(const void *a, const void *b)
{
    const char *x = ((const rsd_tensor_info *)a)->name, *y = ((const rsd_tensor_info *)b)->name;
    size_t same = count_same_parts(x, y);
    for (x += same, y += same;; x++, y++) {
        size_t n = strcspn(x, "."), m = strcspn(y, ".");
        char *one = cli_new_text("%.*s", (int)n, x), *other = cli_new_text("%.*s", (int)m, y);
        int order = strverscmp(one, other);
        free(one);
        free(other);
        x += n;
        y += m;
        if (order || !*x || !*y)
            return order ? order : (*x != 0) - (*y != 0);
    }
}

enum { MAX_TREE_DEPTH = 64 }; /* what is deeper is printed in one line */

/* Leading parts that a name has in common with the one before it are not printed again. */
static void print_name_tree(const rsd_checkpoint *checkpoint)
{
    const char *before = "";
    size_t n = (size_t)rsd_checkpoint_ntensors(checkpoint);
    rsd_tensor_info *tensors = cli_need_memory(calloc(n + 1, sizeof *tensors));
    for (size_t i = 0; i < n; i++)
        tensors[i] = need_tensor(checkpoint, (int64_t)i);
    if (n > 1)
        qsort(tensors, n, sizeof *tensors, by_name_parts);
    for (size_t i = 0; i < n; i++) {
        rsd_tensor_info tensor = tensors[i];
        const char *at = tensor.name;
        const char *end = at + count_same_parts(at, before), *dot;
        int depth = 0;
        for (; at < end && depth < MAX_TREE_DEPTH; at = strchr(at, '.') + 1)
            depth++;
        for (; depth < MAX_TREE_DEPTH && (dot = strchr(at, '.')); at = dot + 1, depth++)
            print_tree_node(2 * depth, at, (int)(dot - at));
        print_tensor_line(&tensor, 2 * depth, at);
        before = tensor.name;
    }
    free(tensors);
}

static int print_text_listing(const struct inspection *request, rsd_checkpoint *checkpoint)
{
    print_totals(request, checkpoint);
    if (request->tree)
        print_name_tree(checkpoint);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint) && !request->tree; i++) {
        rsd_tensor_info tensor = need_tensor(checkpoint, i);
        print_tensor_line(&tensor, 0, tensor.name);
    }
    if (rsd_checkpoint_nvalues(checkpoint))
        printf("\n");
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint); i++)
        print_value_line(checkpoint, i);
    return EXIT_YES;
}

/* ---- one tensor ---- */

static int inspect_tensor(const struct inspection *request, const rsd_checkpoint *checkpoint)
{
    int64_t index;
    rsd_status status = rsd_checkpoint_find(checkpoint, request->tensor, &index);
    if (status)
        return cli_fail("inspect", EXIT_CANNOT, "%s: %s", request->path, rsd_error());
    rsd_tensor_info tensor = need_tensor(checkpoint, index);
    if (request->svg)
        status = page_write_boxes(request->svg, false, checkpoint, index);
    if (!status && request->html)
        status = page_write_boxes(request->html, true, checkpoint, index);
    if (status)
        return cli_fail_status("inspect", status);
    if (request->json) {
        print_json_tensor(checkpoint, index);
        putchar('\n');
        return EXIT_YES;
    }
    print_tensor_line(&tensor, 0, tensor.name);
    for (int64_t i = 0; i < tensor.nboxes && i < 64; i++) {
        rsd_extent stored = need_extent(checkpoint, index, i);
        const char *file = rsd_checkpoint_file(checkpoint, stored.file);
        printf("  [");
        for (int32_t d = 0; d < stored.box.ndim; d++)
            printf("%s%lld:%lld", d ? ", " : "", (long long)stored.box.lo[d],
                   (long long)(stored.box.lo[d] + stored.box.len[d]));
        printf("]  %s, byte %llu, %s\n", file ? cli_plain_text(file) : "no file",
               (unsigned long long)stored.offset, cli_size_text((int64_t)stored.nbytes));
    }
    if (tensor.nboxes > 64)
        printf("  ... and %lld more\n", (long long)tensor.nboxes - 64);
    return cli_fail_status("inspect", draw_boxes(stdout, checkpoint, index));
}

int command_inspect(int argc, char **argv)
{
    struct inspection request = {0};
    rsd_checkpoint *checkpoint;
    int code = read_inspect_options(argc, argv, &request);
    if (code != GO_ON)
        return code;
    code = input_open("inspect", request.path, false, &checkpoint);
    if (code)
        return code;
    if (request.tensor)
        code = inspect_tensor(&request, checkpoint);
    else
        code = request.json ? print_json_listing(checkpoint)
                            : print_text_listing(&request, checkpoint);
    rsd_checkpoint_close(checkpoint);
    return code;
}
