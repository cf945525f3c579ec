/* cmd_prove.c - `reshard verify`, `diff` and `digest`: is it whole, is it the same, what is it. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define COMMON_HELP                                                                                \
    "  --json               one JSON object\n"                                                     \
    "  --max-memory SIZE    for buffers (256MiB)\n"                                                \
    "  --threads N          as many as there are cores, at most 16\n"                              \
    "  -q, --quiet          no progress\n"                                                         \
    "  -h, --help\n"

static const char verify_help[] = "usage: reshard verify [options] CHECKPOINT\n"
                                  "\n"
                                  "Reads everything: sizes, places, coverage, CRCs. Findings go to "
                                  "stdout, one a line; exit code 0\n"
                                  "if there is none, 1 if there is.\n"
                                  "\n" COMMON_HELP;

static const char diff_help[] =
    "usage: reshard diff [options] A B\n"
    "\n"
    "Compares the tensors of two checkpoints bit by bit, whatever their layouts and formats. Says "
    "the\n"
    "first element that differs, with both values. Exit code 0 if all are the same, 1 if not.\n"
    "\n"
    "  --only REGEX         only tensors in whose names this is found\n" COMMON_HELP;

static const char digest_help[] =
    "usage: reshard digest [options] CHECKPOINT\n"
    "\n"
    "Prints 32 hex digits and the name of each tensor, sorted by name. A digest depends on the "
    "values,\n"
    "the dtype and the shape, and on nothing else. It finds accidents, not malice.\n"
    "\n"
    "  --only REGEX         only tensors in whose names this is found\n" COMMON_HELP;

struct request {
    const char *verb;
    const char *paths[2];
    int npaths;
    bool json, quiet;
    rsd_rules *only;
    const char *only_text; /* NULL: all tensors */
    rsd_prove_options how;
    struct progress progress;
    long long threads;
    int64_t ntold; /* findings or differences */
    FILE *list;    /* JSON of them, which is printed when it is known to be all */
    char *text;
    size_t text_nbytes;
};

enum { JSON = 256, MAX_MEMORY, THREADS, ONLY };

static const struct option options[] = {
    {"json", no_argument, NULL, JSON},
    {"max-memory", required_argument, NULL, MAX_MEMORY},
    {"threads", required_argument, NULL, THREADS},
    {"only", required_argument, NULL, ONLY},
    {"quiet", no_argument, NULL, 'q'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int read_options(int argc, char **argv, const char *help, struct request *request)
{
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":hq", options, NULL)) != -1;)
        switch (option) {
        case 'h':
            return show_help(help);
        case 'q':
            request->quiet = true;
            break;
        case JSON:
            request->json = true;
            break;
        case ONLY:
            if (strcmp(request->verb, "verify") == 0)
                return complain("verify", EXIT_USAGE, "--only is not of this verb");
            request->only_text = optarg;
            rsd_rules_free(request->only);
            request->only = NULL;
            if (rsd_rules_new(NULL, &request->only) ||
                rsd_rules_add(request->only, RSD_RULE_ONLY, optarg))
                return complain(request->verb, EXIT_USAGE, "%s", rsd_error());
            break;
        case MAX_MEMORY:
            if (!parse_size(optarg, &request->how.max_nbytes))
                return complain(request->verb, EXIT_USAGE,
                                "--max-memory %s: a size such as 256MiB is needed", optarg);
            break;
        case THREADS:
            if (!parse_number(optarg, 1, 4096, &request->threads))
                return complain(request->verb, EXIT_USAGE, "--threads %s: a number from 1 to 4096",
                                optarg);
            break;
        default:
            return complain_option(request->verb, option, argv);
        }
    if (argc - optind != request->npaths)
        return complain(request->verb, EXIT_USAGE, "%s; see reshard %s --help",
                        request->npaths == 1 ? "one checkpoint is needed"
                                             : "two checkpoints are needed",
                        request->verb);
    for (int i = 0; i < request->npaths; i++)
        request->paths[i] = argv[optind + i];
    return GO_ON;
}

/* The pool and the progress that all three use. */
static rsd_status start(struct request *request)
{
    progress_start(&request->progress, request->verb, request->quiet);
    request->how.struct_nbytes = sizeof request->how;
    request->how.on_progress = progress_tell;
    request->how.context = &request->progress;
    request->how.transport = together();
    return rsd_pool_new((int32_t)request->threads, &request->how.pool);
}

static bool is_wanted(const struct request *request, const char *name)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor, .name = name};
    rsd_tensor_target target = {.struct_nbytes = sizeof target};
    return !request->only ||
           (rsd_rules_map(request->only, &tensor, &target) == RSD_OK && target.keep);
}

/* How many tensors are wanted: all, or those that --only finds. */
static int64_t count_wanted(const struct request *request, const rsd_checkpoint *checkpoint)
{
    int64_t n = 0;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        n += rsd_checkpoint_tensor(checkpoint, i, &tensor) == RSD_OK &&
             is_wanted(request, tensor.name);
    }
    return n;
}

/* A yes about no tensor at all would be taken for a yes about those that were meant. */
static int check_only(const struct request *request, rsd_checkpoint *const *checkpoints)
{
    if (!request->only_text)
        return EXIT_YES;
    for (int i = 0; i < request->npaths; i++)
        if (count_wanted(request, checkpoints[i]))
            return EXIT_YES;
    return complain(request->verb, EXIT_CANNOT, "--only '%s' is found in no name",
                    request->only_text);
}

static const char *listed(struct request *request)
{
    fflush(request->list);
    return request->text;
}

/* ---- verify ---- */

static rsd_status print_finding(void *context, const char *text)
{
    struct request *request = context;
    progress_end(&request->progress);
    if (request->json) {
        fprintf(request->list, request->ntold ? ",\n  " : "\n  ");
        print_json_string(request->list, text);
    } else {
        printf("%s\n", plain_text(text));
    }
    request->ntold++;
    return RSD_OK;
}

static int verify(struct request *request, rsd_checkpoint *checkpoint)
{
    int64_t n = 0;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_status status = rsd_verify(checkpoint, &request->how, print_finding, request, &n, &report);
    progress_end(&request->progress);
    if (status)
        return complain_status("verify", status);
    if (request->json)
        printf("{\"findings\": [%s], \"tensors\": %lld, \"bytes\": {\"read\": %lld, "
               "\"unchecked\": %lld}}\n",
               listed(request), (long long)report.ntensors, (long long)report.nbytes_read,
               (long long)report.nbytes_unchecked);
    if (n == 0 && !request->json && !request->quiet) {
        fprintf(stderr, "%s: %lld tensors, %s, nothing is wrong", plain_text(request->paths[0]),
                (long long)report.ntensors, size_text(report.nbytes_read));
        if (report.nbytes_unchecked)
            fprintf(stderr, "; %s have no CRC", size_text(report.nbytes_unchecked));
        fprintf(stderr, "\n");
    }
    return n ? EXIT_NO : EXIT_YES;
}

/* ---- diff ---- */

static const char *difference_name(rsd_difference difference)
{
    static const char *const names[] = {"same",  "only_in_a", "only_in_b",
                                        "dtype", "shape",     "element"};
    return names[difference];
}

static rsd_status print_difference(void *context, const char *name, rsd_difference difference,
                                   const char *text)
{
    struct request *request = context;
    progress_end(&request->progress);
    if (!is_wanted(request, name))
        return RSD_OK;
    if (request->json) {
        fprintf(request->list, "%s{\"name\": ", request->ntold ? ",\n  " : "\n  ");
        print_json_string(request->list, name);
        fprintf(request->list, ", \"difference\": \"%s\", \"text\": ", difference_name(difference));
        print_json_string(request->list, text);
        fprintf(request->list, "}");
    } else {
        printf("%s: %s\n", plain_text(name), plain_text(text));
    }
    request->ntold++;
    return RSD_OK;
}

static int diff(struct request *request, rsd_checkpoint *a, rsd_checkpoint *b)
{
    int64_t n = 0, nwanted = count_wanted(request, a);
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_status status = rsd_diff(a, b, &request->how, print_difference, request, &n, &report);
    progress_end(&request->progress);
    if (status)
        return complain_status("diff", status);
    if (request->json)
        printf("{\"differences\": [%s], \"tensors\": %lld}\n", listed(request),
               (long long)(request->only_text ? nwanted : report.ntensors));
    if (request->ntold == 0 && !request->json && !request->quiet)
        fprintf(stderr, "%lld tensors are the same in both\n",
                (long long)(request->only_text ? nwanted : report.ntensors));
    return request->ntold ? EXIT_NO : EXIT_YES;
}

/* ---- digest ---- */

struct line {
    char digest[RSD_DIGEST_NCHARS];
    const char *name;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct line *)a)->name, ((const struct line *)b)->name);
}

static int digest(struct request *request, rsd_checkpoint *checkpoint)
{
    size_t all = (size_t)rsd_checkpoint_ntensors(checkpoint), n = 0;
    int64_t *tensors = need_memory(calloc(all + 1, sizeof *tensors));
    struct line *lines = need_memory(calloc(all + 1, sizeof *lines));
    char(*digests)[RSD_DIGEST_NCHARS] = need_memory(calloc(all + 1, sizeof *digests));
    for (size_t i = 0; i < all; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (rsd_checkpoint_tensor(checkpoint, (int64_t)i, &tensor) == RSD_OK &&
            is_wanted(request, tensor.name)) {
            lines[n].name = tensor.name;
            tensors[n++] = (int64_t)i;
        }
    }
    rsd_status status = rsd_digest(checkpoint, (int64_t)n, tensors, &request->how, digests, NULL);
    progress_end(&request->progress);
    for (size_t i = 0; i < n && !status; i++)
        memcpy(lines[i].digest, digests[i], sizeof lines[i].digest);
    if (n > 1)
        qsort(lines, n, sizeof *lines, by_name);
    if (!status && request->json)
        printf("{");
    for (size_t i = 0; i < n && !status; i++)
        if (request->json) {
            printf("%s", i ? ",\n " : "");
            print_json_string(stdout, lines[i].name);
            printf(": \"%s\"", lines[i].digest);
        } else {
            printf("%s  %s\n", lines[i].digest, plain_text(lines[i].name));
        }
    if (!status && request->json)
        printf("}\n");
    free(tensors);
    free(lines);
    free(digests);
    return complain_status("digest", status);
}

/* ---- the three ---- */

static int open_and_prove(struct request *request)
{
    rsd_checkpoint *checkpoints[2] = {NULL, NULL};
    rsd_status status = start(request);
    int code = complain_status(request->verb, status);
    for (int i = 0; i < request->npaths && !code; i++)
        code = open_checkpoint(request->verb, request->paths[i], &checkpoints[i]);
    for (int i = 0; i < request->npaths && !code && strcmp(request->verb, "verify") != 0; i++)
        code = need_files(request->verb, request->paths[i], checkpoints[i], every_tensor, NULL);
    if (!code)
        code = check_only(request, checkpoints);
    code = together_code(request->verb, code);
    if (!code && strcmp(request->verb, "verify") == 0)
        code = verify(request, checkpoints[0]);
    else if (!code && strcmp(request->verb, "diff") == 0)
        code = diff(request, checkpoints[0], checkpoints[1]);
    else if (!code)
        code = digest(request, checkpoints[0]);
    rsd_checkpoint_close(checkpoints[0]);
    rsd_checkpoint_close(checkpoints[1]);
    rsd_pool_free(request->how.pool);
    return code;
}

static int command(const char *verb, int npaths, const char *help, int argc, char **argv)
{
    struct request request = {.verb = verb, .npaths = npaths, .threads = default_threads()};
    int code = read_options(argc, argv, help, &request);
    request.list = need_memory(open_memstream(&request.text, &request.text_nbytes));
    if (code == GO_ON)
        code = open_and_prove(&request);
    fclose(request.list);
    free(request.text);
    rsd_rules_free(request.only);
    return code;
}

int command_verify(int argc, char **argv)
{
    return command("verify", 1, verify_help, argc, argv);
}

int command_diff(int argc, char **argv)
{
    return command("diff", 2, diff_help, argc, argv);
}

int command_digest(int argc, char **argv)
{
    return command("digest", 1, digest_help, argc, argv);
}
