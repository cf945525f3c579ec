/* cmd_verify.c - `reshard verify`, `diff` and `digest`: reads checkpoints, and compares or checks them. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char verify_help[] =
    "usage: reshard verify [options] CHECKPOINT\n"
    "\n"
    "Read all of a checkpoint and check sizes, offsets, coverage and CRCs. Findings are printed "
    "to\n"
    "standard output, one per line. Exit status: 0 no findings, 1 findings.\n"
    "\n";

static const char diff_help[] =
    "usage: reshard diff [options] A B\n"
    "\n"
    "Compare the tensors of two checkpoints bit by bit, in any layouts and formats. For each "
    "tensor\n"
    "that differs, print the first element that differs, with both values. Tensors that differ in "
    "the\n"
    "same way, such as those of one checkpoint only, are one line; --json lists all of them. Exit\n"
    "status: 0 all are equal, 1 some differ.\n"
    "\n";

static const char digest_help[] =
    "usage: reshard digest [options] CHECKPOINT\n"
    "\n"
    "Print 32 hexadecimal digits and the name of each tensor, sorted by name. A digest depends on\n"
    "values, dtype and shape only. Digests detect accidental changes, not attacks.\n"
    "\n";

struct verification {
    const struct verify_verb *verb;
    const char *paths[2];
    rsd_checkpoint *checkpoints[2];
    bool json, quiet;
    struct name_filter only; /* and what --rename does to names */
    double rtol, atol;
    rsd_io io;
    struct progress_line progress;
    long long threads;
    int64_t nlisted; /* findings or differences */
    struct folded_difference *folded;
    size_t nfolded;
    FILE *list; /* of them as JSON, which is printed when the list is complete */
    char *list_text;
    size_t list_nbytes;
};

struct verify_verb {
    struct cli_verb verb;
    int npaths;
    int (*run)(struct verification *request);
};

/* ---- options ---- */

enum { VERIFY = 1, DIFF = 2, DIGEST = 4 }; /* bits of verbs */

static int take_tolerance(const struct given_option *given)
{
    char *end;
    double *value = options_field(given);
    *value = strtod(given->value, &end);
    return end != given->value && !*end && *value >= 0 && *value < HUGE_VAL
               ? GO_ON
               : cli_fail(given->verb, EXIT_USAGE, "--%s %s must be a number that is not negative",
                          given->name, given->value);
}

static const struct cli_option verify_options[] = {
    OPTION("rtol", "X",
           "Take floating-point elements as equal if |a - b| <= atol + rtol * |b|,\n"
           "also between dtypes. Default: 0",
           take_tolerance, offsetof(struct verification, rtol), DIFF),
    OPTION("atol", "X", "See --rtol. Default: 0", take_tolerance,
           offsetof(struct verification, atol), DIFF),
    OPTION("rename", "'s/A/B/'", "Replace A by B in names of the first checkpoint. May be repeated",
           name_filter_add_rename, offsetof(struct verification, only), DIFF),
    OPTION("only", "REGEX", "Select tensors whose name contains a match. May be repeated",
           name_filter_add_only, offsetof(struct verification, only), DIFF | DIGEST),
    OPTION_TABLE(input_option_rows),
    OPTION("json", NULL, "Print one JSON object", options_set_flag,
           offsetof(struct verification, json), 0),
    OPTION("max-memory", "SIZE", "Limit buffers to SIZE. Default: 256MB", options_set_size,
           offsetof(struct verification, io.max_nbytes), 0),
    OPTION("max-nbytes", "SIZE", NULL, options_set_size, /* Python's word */
           offsetof(struct verification, io.max_nbytes), 0),
    OPTION("threads", "N", "Use N threads. Default: one per core, at most 16", options_set_threads,
           offsetof(struct verification, threads), 0),
    {"quiet", NULL, "Print no progress and no summary", options_set_flag,
     offsetof(struct verification, quiet), 0, 'q', NULL},
    {0},
};

static int read_verify_options(int argc, char **argv, struct verification *request)
{
    const char *verb = request->verb->verb.name;
    int npaths = request->verb->npaths;
    int code = options_read(&request->verb->verb, argc, argv, request);
    if (code != GO_ON)
        return code;
    if (argc - optind != npaths)
        return cli_fail(verb, EXIT_USAGE, "%s; see reshard %s --help",
                        npaths == 1 ? "one checkpoint is needed" : "two checkpoints are needed",
                        verb);
    for (int i = 0; i < npaths; i++)
        request->paths[i] = argv[optind + i];
    return GO_ON;
}

/* ---- selection ---- */

/* Fails if --only selects nothing: success would be taken for an answer about the tensors that were meant. */
static int check_selection(const struct verification *request)
{
    if (!request->only.text)
        return EXIT_YES;
    for (int i = 0; i < request->verb->npaths; i++)
        if (name_filter_list(&request->only, request->checkpoints[i], NULL))
            return EXIT_YES;
    return name_filter_fail(&request->only, request->verb->verb.name);
}

/* Fails if a selected tensor cannot be read: an answer about the others would be taken for one about all. */
static int check_readable(const struct verification *request)
{
    for (int i = 0; i < request->verb->npaths; i++) {
        const rsd_checkpoint *checkpoint = request->checkpoints[i];
        for (int64_t k = 0, index; k < rsd_checkpoint_nvalues(checkpoint); k++) {
            const char *name = rsd_checkpoint_value_name(checkpoint, k);
            if (name_filter_selects(&request->only, name) &&
                rsd_checkpoint_find(checkpoint, name, &index) == RSD_EUNSUPPORTED)
                return cli_fail(request->verb->verb.name, EXIT_CANNOT, "%s: %s", request->paths[i],
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

/* Tensors that differ in the same way, such as those of one checkpoint only. */
struct folded_difference {
    char *text;
    struct name_sample names;
};

static void fold_difference(struct verification *request, const char *name, const char *text)
{
    size_t i = 0;
    while (i < request->nfolded && strcmp(request->folded[i].text, text) != 0)
        i++;
    if (i == request->nfolded) {
        request->folded =
            cli_need_memory(realloc(request->folded, (i + 1) * sizeof *request->folded));
        request->folded[request->nfolded++] =
            (struct folded_difference){.text = cli_text("%s", text)};
    }
    name_sample_add(&request->folded[i].names, name);
}

/* Prints one line for the tensors that differ in the same way, with their number. */
static void print_folded_differences(struct verification *request)
{
    for (size_t i = 0; i < request->nfolded; i++) {
        struct folded_difference *folded = &request->folded[i];
        const char *names = cli_plain_text(folded->names.names);
        if (folded->names.n == 1)
            printf("%s: %s\n", names, cli_plain_text(folded->text));
        else
            printf("%lld tensors: %s: %s\n", (long long)folded->names.n,
                   cli_plain_text(folded->text), names);
    }
    free(request->folded);
    request->folded = NULL;
    request->nfolded = 0;
}

static rsd_status print_difference(void *context, const char *name, rsd_difference difference,
                                   const char *text)
{
    static const char *const kinds[] = {"same",  "only_in_a", "only_in_b",
                                        "dtype", "shape",     "element"};
    struct verification *request = context;
    progress_end(&request->progress);
    if (!name_filter_selects(&request->only, name))
        return RSD_OK;
    if (request->json) {
        fprintf(request->list, "%s{\"name\": ", request->nlisted ? ",\n  " : "\n  ");
        cli_print_json_string(request->list, name);
        fprintf(request->list, ", \"difference\": \"%s\", \"text\": ", kinds[difference]);
        cli_print_json_string(request->list, text);
        fprintf(request->list, "}");
    } else if (difference == RSD_OTHER_ELEMENT) {
        printf("%s: %s\n", cli_plain_text(name), cli_plain_text(text));
    } else {
        fold_difference(request, name, text);
    }
    request->nlisted++;
    return RSD_OK;
}

static int run_diff(struct verification *request)
{
    rsd_checkpoint *a = request->checkpoints[0], *b = request->checkpoints[1];
    int64_t ndiffer = 0;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_diff_options options = {.struct_nbytes = sizeof options,
                                .rtol = request->rtol,
                                .atol = request->atol,
                                .map = request->only.rules ? rsd_rules_map : NULL,
                                .map_context = request->only.rules,
                                .io = &request->io};
    rsd_status status = rsd_diff(a, b, &options, print_difference, request, &ndiffer, &report);
    progress_end(&request->progress);
    print_folded_differences(request);
    if (status)
        return cli_fail_status("diff", status);
    long long ntensors =
        request->only.text ? name_filter_list(&request->only, a, NULL) : report.ntensors;
    if (request->json)
        printf("{\"differences\": [%s], \"tensors\": %lld}\n", finish_list(request), ntensors);
    if (request->nlisted == 0 && !request->json && !request->quiet)
        fprintf(stderr, "%lld tensor%s equal in both%s\n", ntensors,
                ntensors == 1 ? " is" : "s are",
                request->rtol > 0 || request->atol > 0 ? ", within the tolerance" : "");
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
    size_t all = (size_t)rsd_checkpoint_ntensors(checkpoint);
    int64_t *tensors = cli_need_memory(calloc(all + 1, sizeof *tensors));
    struct digest_line *lines = cli_need_memory(calloc(all + 1, sizeof *lines));
    char(*digests)[RSD_DIGEST_NCHARS] = cli_need_memory(calloc(all + 1, sizeof *digests));
    size_t n = (size_t)name_filter_list(&request->only, checkpoint, tensors);
    for (size_t i = 0; i < n; i++)
        lines[i].name = input_tensor(checkpoint, tensors[i]).name;
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
    const char *verb = request->verb->verb.name;
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
        code = ranks_agree(verb->verb.name, open_inputs(&request));
        if (!code)
            code = verb->run(&request);
    }
    rsd_checkpoint_close(request.checkpoints[0]);
    rsd_checkpoint_close(request.checkpoints[1]);
    rsd_pool_free(request.io.pool);
    name_filter_drop(&request.only);
    fclose(request.list);
    free(request.list_text);
    return code;
}

int command_verify(int argc, char **argv)
{
    static const struct verify_verb verb = {{.name = "verify",
                                             .help = verify_help,
                                             .help_column = 23,
                                             .bit = VERIFY,
                                             .options = verify_options},
                                            1,
                                            run_verify};
    return run_verify_verb(&verb, argc, argv);
}

int command_diff(int argc, char **argv)
{
    static const struct verify_verb verb = {{.name = "diff",
                                             .help = diff_help,
                                             .help_column = 23,
                                             .bit = DIFF,
                                             .options = verify_options},
                                            2,
                                            run_diff};
    return run_verify_verb(&verb, argc, argv);
}

int command_digest(int argc, char **argv)
{
    static const struct verify_verb verb = {{.name = "digest",
                                             .help = digest_help,
                                             .help_column = 23,
                                             .bit = DIGEST,
                                             .options = verify_options},
                                            1,
                                            run_digest};
    return run_verify_verb(&verb, argc, argv);
}
