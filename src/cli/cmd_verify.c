/* cmd_verify.c - `reshard verify`, `diff` and `digest`: reads checkpoints, and compares or checks them. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define COMMON_HELP                                                                                \
    INPUT_HELP("       ")                                                                          \
    "  --json               Print one JSON object\n"                                               \
    "  --max-memory SIZE    Limit buffers to SIZE. Default: 256MiB\n"                              \
    "  --threads N          Use N threads. Default: one per core, at most 16\n"                    \
    "  -q, --quiet          Print no progress and no summary\n"                                    \
    "  -h, --help           Print this help\n"

#define ONLY_HELP "  --only REGEX         Select tensors whose name contains a match\n"

static const char verify_help[] =
    "usage: reshard verify [options] CHECKPOINT\n"
    "\n"
    "Read all of a checkpoint and check sizes, offsets, coverage and CRCs. Findings are printed "
    "to\n"
    "standard output, one per line. Exit status: 0 no findings, 1 findings.\n"
    "\n" COMMON_HELP;

static const char diff_help[] =
    "usage: reshard diff [options] A B\n"
    "\n"
    "Compare the tensors of two checkpoints bit by bit, in any layouts and formats. For each "
    "tensor\n"
    "that differs, print the first element that differs, with both values. Exit status: 0 all are\n"
    "equal, 1 some differ.\n"
    "\n" ONLY_HELP COMMON_HELP;

static const char digest_help[] =
    "usage: reshard digest [options] CHECKPOINT\n"
    "\n"
    "Print 32 hexadecimal digits and the name of each tensor, sorted by name. A digest depends on\n"
    "values, dtype and shape only. Digests detect accidental changes, not attacks.\n"
    "\n" ONLY_HELP COMMON_HELP;

struct verification {
    const struct verify_verb *verb;
    const char *paths[2];
    rsd_checkpoint *checkpoints[2];
    bool json, quiet;
    rsd_rules *only;       /* NULL: all tensors */
    const char *only_text; /* of --only */
    rsd_io io;
    struct progress_line progress;
    long long threads;
    int64_t nlisted; /* findings or differences */
    FILE *list;      /* of them as JSON, which is printed when the list is complete */
    char *list_text;
    size_t list_nbytes;
};

struct verify_verb {
    const char *name;
    int npaths;
    const char *help;
    int (*run)(struct verification *request);
};

enum { JSON = 256, MAX_MEMORY, THREADS, ONLY };

static const struct option verify_options[] = {
    {"json", no_argument, NULL, JSON},
    {"max-memory", required_argument, NULL, MAX_MEMORY},
    {"threads", required_argument, NULL, THREADS},
    {"only", required_argument, NULL, ONLY},
    INPUT_OPTIONS,
    {"quiet", no_argument, NULL, 'q'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int take_only(struct verification *request, const char *text)
{
    rsd_rules_free(request->only);
    request->only = NULL;
    request->only_text = text;
    if (rsd_rules_new(NULL, &request->only) || rsd_rules_add(request->only, RSD_RULE_ONLY, text))
        return cli_fail(request->verb->name, EXIT_USAGE, "%s", rsd_error());
    return GO_ON;
}

/* Returns GO_ON or an exit code. */
static int take_verify_option(struct verification *request, int option, char **argv)
{
    const char *verb = request->verb->name;
    switch (option) {
    case 'h':
        return cli_show_help(request->verb->help);
    case 'q':
        request->quiet = true;
        return GO_ON;
    case JSON:
        request->json = true;
        return GO_ON;
    case ONLY:
        return request->verb->help == verify_help
                   ? cli_fail(verb, EXIT_USAGE,
                              "option --only is not valid for 'verify'; see reshard verify --help")
                   : take_only(request, optarg);
    case MAX_MEMORY:
        return cli_parse_size(optarg, &request->io.max_nbytes)
                   ? GO_ON
                   : cli_fail(verb, EXIT_USAGE, "--max-memory %s must be a size such as 256MiB",
                              optarg);
    case THREADS:
        return cli_parse_number(optarg, 1, 4096, &request->threads)
                   ? GO_ON
                   : cli_fail(verb, EXIT_USAGE, "--threads %s must be from 1 to 4096", optarg);
    default:
        return input_take_option(option) ? GO_ON : cli_fail_option(verb, option, argv);
    }
}

static int read_verify_options(int argc, char **argv, struct verification *request)
{
    const char *verb = request->verb->name;
    int npaths = request->verb->npaths;
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":hq", verify_options, NULL)) != -1;) {
        int code = take_verify_option(request, option, argv);
        if (code != GO_ON)
            return code;
    }
    if (argc - optind != npaths)
        return cli_fail(verb, EXIT_USAGE, "%s; see reshard %s --help",
                        npaths == 1 ? "one checkpoint is needed" : "two checkpoints are needed",
                        verb);
    for (int i = 0; i < npaths; i++)
        request->paths[i] = argv[optind + i];
    return GO_ON;
}

/* ---- selection ---- */

static bool is_selected(const struct verification *request, const char *name)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor, .name = name};
    rsd_tensor_target target = {.struct_nbytes = sizeof target};
    return !request->only ||
           (rsd_rules_map(request->only, &tensor, &target) == RSD_OK && target.keep);
}

static int64_t count_selected(const struct verification *request, const rsd_checkpoint *checkpoint)
{
    int64_t n = 0;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        n += rsd_checkpoint_tensor(checkpoint, i, &tensor) == RSD_OK &&
             is_selected(request, tensor.name);
    }
    return n;
}

/* Fails if --only selects nothing: success would be taken for an answer about the tensors that were meant. */
static int check_selection(const struct verification *request)
{
    if (!request->only)
        return EXIT_YES;
    for (int i = 0; i < request->verb->npaths; i++)
        if (count_selected(request, request->checkpoints[i]))
            return EXIT_YES;
    return cli_fail(request->verb->name, EXIT_CANNOT, "--only '%s' matches no tensor",
                    request->only_text);
}

/* Fails if a selected tensor cannot be read: an answer about the others would be taken for one about all. */
static int check_readable(const struct verification *request)
{
    for (int i = 0; i < request->verb->npaths; i++) {
        const rsd_checkpoint *checkpoint = request->checkpoints[i];
        for (int64_t k = 0, index; k < rsd_checkpoint_nvalues(checkpoint); k++) {
            const char *name = rsd_checkpoint_value_name(checkpoint, k);
            if (is_selected(request, name) &&
                rsd_checkpoint_find(checkpoint, name, &index) == RSD_EUNSUPPORTED)
                return cli_fail(request->verb->name, EXIT_CANNOT, "%s: %s", request->paths[i],
                                rsd_error());
        }
    }
    return EXIT_YES;
}

static const char *finish_list(struct verification *request)
{
    fflush(request->list);
    return request->list_text;
}

/* ---- verify ---- */

static rsd_status print_finding(void *context, const char *text)
{
    struct verification *request = context;
    progress_end(&request->progress);
    if (request->json) {
        fprintf(request->list, request->nlisted ? ",\n  " : "\n  ");
        cli_print_json_string(request->list, text);
    } else {
        printf("%s\n", cli_plain_text(text));
    }
    request->nlisted++;
    return RSD_OK;
}

static int run_verify(struct verification *request)
{
    int64_t n = 0;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_status status =
        rsd_verify(request->checkpoints[0], &request->io, print_finding, request, &n, &report);
    progress_end(&request->progress);
    if (status)
        return cli_fail_status("verify", status);
    if (request->json)
        printf("{\"findings\": [%s], \"tensors\": %lld, \"bytes\": {\"read\": %lld, "
               "\"unchecked\": %lld}}\n",
               finish_list(request), (long long)report.ntensors, (long long)report.nbytes_read,
               (long long)report.nbytes_unchecked);
    if (n == 0 && !request->json && !request->quiet) {
        fprintf(stderr, "%s: no damage found: %lld tensor%s, %s read",
                cli_plain_text(request->paths[0]), (long long)report.ntensors,
                report.ntensors == 1 ? "" : "s", cli_size_text(report.nbytes_read));
        if (report.nbytes_unchecked)
            fprintf(stderr, ", %s without CRCs", cli_size_text(report.nbytes_unchecked));
        fprintf(stderr, "\n");
    }
    return n ? EXIT_NO : EXIT_YES;
}

/* ---- diff ---- */

static rsd_status print_difference(void *context, const char *name, rsd_difference difference,
                                   const char *text)
{
    static const char *const kinds[] = {"same",  "only_in_a", "only_in_b",
                                        "dtype", "shape",     "element"};
    struct verification *request = context;
    progress_end(&request->progress);
    if (!is_selected(request, name))
        return RSD_OK;
    if (request->json) {
        fprintf(request->list, "%s{\"name\": ", request->nlisted ? ",\n  " : "\n  ");
        cli_print_json_string(request->list, name);
        fprintf(request->list, ", \"difference\": \"%s\", \"text\": ", kinds[difference]);
        cli_print_json_string(request->list, text);
        fprintf(request->list, "}");
    } else {
        printf("%s: %s\n", cli_plain_text(name), cli_plain_text(text));
    }
    request->nlisted++;
    return RSD_OK;
}

static int run_diff(struct verification *request)
{
    rsd_checkpoint *a = request->checkpoints[0], *b = request->checkpoints[1];
    int64_t ndiffer = 0;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_status status = rsd_diff(a, b, &request->io, print_difference, request, &ndiffer, &report);
    progress_end(&request->progress);
    if (status)
        return cli_fail_status("diff", status);
    long long ntensors = request->only ? count_selected(request, a) : report.ntensors;
    if (request->json)
        printf("{\"differences\": [%s], \"tensors\": %lld}\n", finish_list(request), ntensors);
    if (request->nlisted == 0 && !request->json && !request->quiet)
        fprintf(stderr, "%lld tensor%s equal in both\n", ntensors, ntensors == 1 ? " is" : "s are");
    return request->nlisted ? EXIT_NO : EXIT_YES;
}

/* ---- digest ---- */

struct digest_line {
    char digest[RSD_DIGEST_NCHARS];
    const char *name;
};

static int by_tensor_name(const void *a, const void *b)
{
    return strcmp(((const struct digest_line *)a)->name, ((const struct digest_line *)b)->name);
}

static void print_digests(const struct digest_line *lines, size_t n, bool json)
{
    printf("%s", json ? "{" : "");
    for (size_t i = 0; i < n; i++)
        if (json) {
            printf("%s", i ? ",\n " : "");
            cli_print_json_string(stdout, lines[i].name);
            printf(": \"%s\"", lines[i].digest);
        } else {
            printf("%s  %s\n", lines[i].digest, cli_plain_text(lines[i].name));
        }
    printf("%s", json ? "}\n" : "");
}

static int run_digest(struct verification *request)
{
    rsd_checkpoint *checkpoint = request->checkpoints[0];
    size_t all = (size_t)rsd_checkpoint_ntensors(checkpoint), n = 0;
    int64_t *tensors = cli_need_memory(calloc(all + 1, sizeof *tensors));
    struct digest_line *lines = cli_need_memory(calloc(all + 1, sizeof *lines));
    char(*digests)[RSD_DIGEST_NCHARS] = cli_need_memory(calloc(all + 1, sizeof *digests));
    for (size_t i = 0; i < all; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (rsd_checkpoint_tensor(checkpoint, (int64_t)i, &tensor) == RSD_OK &&
            is_selected(request, tensor.name)) {
            lines[n].name = tensor.name;
            tensors[n++] = (int64_t)i;
        }
    }
    rsd_status status = rsd_digest(checkpoint, (int64_t)n, tensors, &request->io, digests, NULL);
    progress_end(&request->progress);
    for (size_t i = 0; i < n; i++)
        memcpy(lines[i].digest, digests[i], sizeof lines[i].digest);
    if (n > 1)
        qsort(lines, n, sizeof *lines, by_tensor_name);
    if (!status)
        print_digests(lines, n, request->json);
    free(tensors);
    free(lines);
    free(digests);
    return cli_fail_status("digest", status);
}

/* ---- the three verbs ---- */

static bool needs_every_extent(const void *context, const rsd_tensor_info *tensor,
                               const rsd_extent *extent)
{
    (void)context;
    (void)extent;
    return tensor->nbytes > 0;
}

/* Opens what the verb reads. Returns EXIT_YES or an exit code. */
static int open_inputs(struct verification *request)
{
    const char *verb = request->verb->name;
    progress_start(&request->progress, verb, request->quiet);
    request->io.struct_nbytes = sizeof request->io;
    request->io.on_progress = progress_report;
    request->io.context = &request->progress;
    request->io.transport = ranks_transport();
    request->io.max_nbytes =
        urls_limit_memory(request->paths[0], request->verb->npaths > 1 ? request->paths[1] : "",
                          request->io.max_nbytes);
    int code = cli_fail_status(verb, rsd_pool_new((int32_t)request->threads, &request->io.pool));
    for (int i = 0; i < request->verb->npaths && !code; i++)
        code = input_open(verb, request->paths[i], request->quiet, &request->checkpoints[i]);
    for (int i = 0; i < request->verb->npaths && !code && request->verb->run != run_verify; i++)
        code = input_check_files(verb, request->paths[i], request->checkpoints[i],
                                 needs_every_extent, NULL);
    if (!code && request->verb->run != run_verify)
        code = check_readable(request);
    return code ? code : check_selection(request);
}

static int run_verify_verb(const struct verify_verb *verb, int argc, char **argv)
{
    struct verification request = {.verb = verb, .threads = cli_default_threads()};
    request.list = cli_need_memory(open_memstream(&request.list_text, &request.list_nbytes));
    int code = read_verify_options(argc, argv, &request);
    if (code == GO_ON) {
        code = ranks_agree(verb->name, open_inputs(&request));
        if (!code)
            code = verb->run(&request);
    }
    rsd_checkpoint_close(request.checkpoints[0]);
    rsd_checkpoint_close(request.checkpoints[1]);
    rsd_pool_free(request.io.pool);
    rsd_rules_free(request.only);
    fclose(request.list);
    free(request.list_text);
    return code;
}

int command_verify(int argc, char **argv)
{
    static const struct verify_verb verb = {"verify", 1, verify_help, run_verify};
    return run_verify_verb(&verb, argc, argv);
}

int command_diff(int argc, char **argv)
{
    static const struct verify_verb verb = {"diff", 2, diff_help, run_diff};
    return run_verify_verb(&verb, argc, argv);
}

int command_digest(int argc, char **argv)
{
    static const struct verify_verb verb = {"digest", 1, digest_help, run_digest};
    return run_verify_verb(&verb, argc, argv);
}
