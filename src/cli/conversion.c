/* conversion.c - runs what convert, merge, split and plan of a checkpoint request, and prints the report. */
#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

enum { MERGE_SHARD_GB = 5, DEFAULT_MEMORY_MB = 256 };

/* ---- what each verb means ---- */

static bool ends_in(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n > m && strcmp(text + n - m, suffix) == 0;
}

/* Sets the output format and the options that the verb implies. Returns GO_ON or an exit code. */
static int set_format_and_limits(struct conversion *request, rsd_format in)
{
    rsd_convert_options *convert = &request->convert;
    bool torch_file = ends_in(request->out, ".pt") || ends_in(request->out, ".pth") ||
                      ends_in(request->out, ".bin");
    bool one_file = ends_in(request->out, ".safetensors") || torch_file;
    if (request->kind == PLAN)
        convert->dry = 1;
    if (request->kind == SPLIT)
        convert->every_replica = 1;
    if (torch_file && !convert->format && request->kind != SPLIT)
        convert->format = RSD_FORMAT_TORCH_SAVE;
    if (request->kind == SPLIT || (request->kind == MERGE && !convert->format))
        convert->format = RSD_FORMAT_SAFETENSORS;
    else if (!convert->format)
        convert->format =
            one_file || in != RSD_FORMAT_DCP ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP;
    if (request->kind == MERGE && !convert->max_shard_nbytes && !one_file)
        convert->max_shard_nbytes = MERGE_SHARD_GB * (int64_t)1000000000;
    if (convert->max_shard_nbytes && (convert->format == RSD_FORMAT_DCP || request->has_mesh))
        return cli_fail(request->verb, EXIT_USAGE,
                        "--max-shard-size applies to output of whole tensors only, not to DCP");
    return GO_ON;
}

/* Whether a file is copied along with the weights: config.json, tokenizer.json, tokenizer.model and others. */
static bool is_side_file(const char *name)
{
    static const char *const suffixes[] = {".json", ".model",    ".txt", ".jinja",
                                           ".py",   ".tiktoken", NULL};
    if (name[0] == '.' || name[0] == '_' || strcmp(name, "commit_success.txt") == 0 ||
        ends_in(name, ".index.json") || strstr(name, "reshard-"))
        return false;
    if (strcmp(name, "metadata.json") == 0 || strncmp(name, "latest_", 7) == 0 ||
        strcmp(name, "zero_to_fp32.py") == 0)
        return false; /* of Megatron and DeepSpeed: it says how IN is stored */
    for (const char *const *suffix = suffixes; *suffix; suffix++)
        if (ends_in(name, *suffix))
            return true;
    return false;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Returns the directory that configs are copied from: IN, or the one that verl puts into it. */
static char *find_config_directory(const struct conversion *request)
{
    struct stat about;
    char *beside = cli_new_text("%s/huggingface", request->in);
    bool found = !request->config_from && stat(beside, &about) == 0 && S_ISDIR(about.st_mode);
    if (found)
        return beside;
    free(beside);
    return cli_new_text("%s", request->config_from ? request->config_from : request->in);
}

/* Takes a path over. One that is not a file is left out. */
static void add_side_file(struct conversion *request, char *path)
{
    struct stat about;
    if (stat(path, &about) != 0 || !S_ISREG(about.st_mode)) {
        free(path);
        return;
    }
    request->side_files = cli_need_memory(
        realloc(request->side_files, (request->nside_files + 1) * sizeof *request->side_files));
    request->side_files[request->nside_files++] = path;
    request->convert.side_files = (const char *const *)request->side_files;
    request->convert.nside_files = (int64_t)request->nside_files;
}

/* Megatron reads a DCP only with its own two files beside .metadata. */
static void find_megatron_files(struct conversion *request, const rsd_checkpoint *in)
{
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(in); i++) {
        const char *file = rsd_checkpoint_file(in, i), *slash = strrchr(file, '/');
        int n = slash ? (int)(slash + 1 - file) : 0;
        if (strcmp(file + n, ".metadata") != 0)
            continue;
        add_side_file(request, cli_new_text("%s/%.*scommon.pt", request->in, n, file));
        if (request->nside_files > 0)
            add_side_file(request, cli_new_text("%s/%.*smetadata.json", request->in, n, file));
        return;
    }
}

static int list_side_files(struct conversion *request, const char *directory)
{
    if (ends_in(request->out, ".safetensors") || ends_in(request->out, ".pt") ||
        ends_in(request->out, ".pth") || ends_in(request->out, ".bin"))
        return !request->config_from ? GO_ON
                                     : cli_fail("merge", EXIT_USAGE,
                                                "--config-from needs an OUT that is a directory");
    DIR *entries = opendir(directory);
    if (!entries && request->config_from)
        return cli_fail("merge", EXIT_USAGE, "--config-from %s: %s", directory, strerror(errno));
    if (!entries)
        return GO_ON; /* IN is one file. */
    for (struct dirent *entry; (entry = readdir(entries));)
        if (is_side_file(entry->d_name))
            add_side_file(request, cli_new_text("%s/%s", directory, entry->d_name));
    closedir(entries);
    if (request->nside_files > 1)
        qsort(request->side_files, request->nside_files, sizeof *request->side_files, by_path);
    return GO_ON;
}

static int find_side_files(struct conversion *request)
{
    char *directory = find_config_directory(request);
    int code = list_side_files(request, directory);
    free(directory);
    return code;
}

/* ---- reports ---- */

/* Returns the free space of the nearest directory above a path that exists. */
static int64_t find_free_space(const char *path)
{
    struct statvfs about;
    char *above = cli_new_text("%s", path);
    while (statvfs(*above ? above : ".", &about) != 0) {
        char *slash = strrchr(above, '/');
        if (!*above || strcmp(above, "/") == 0) {
            free(above);
            return 0;
        }
        *(!slash ? above : slash == above ? slash + 1 : slash) = '\0';
    }
    free(above);
    return (int64_t)(about.f_bavail * about.f_frsize);
}

static int64_t memory_limit(const struct conversion *request)
{
    return request->io.max_nbytes ? request->io.max_nbytes : DEFAULT_MEMORY_MB * (int64_t)1000000;
}

static void print_json_report(const struct conversion *request, rsd_format in,
                              const rsd_report *report)
{
    rsd_traffic traffic;
    printf("{\"verb\": \"%s\", \"in\": ", request->verb);
    cli_print_json_string(stdout, request->in);
    printf(", \"out\": ");
    cli_print_json_string(stdout, request->out);
    printf(
        ", \"from\": \"%s\", \"to\": \"%s\", \"dry_run\": %s, \"tensors\": %lld, \"files\": %lld, "
        "\"bytes\": {\"needed\": %lld, \"read\": %lld, \"written\": %lld, \"unchecked\": %lld, "
        "\"decoded_again\": %lld}, \"left_out\": %lld, ",
        rsd_format_name(in), rsd_format_name(request->convert.format),
        request->convert.dry ? "true" : "false", (long long)report->ntensors,
        (long long)report->nfiles_written, (long long)report->nbytes_needed,
        (long long)report->nbytes_read, (long long)report->nbytes_written,
        (long long)report->nbytes_unchecked, (long long)report->nbytes_decoded_again,
        (long long)report->nleft_out);
    if (request->convert.dry)
        printf("\"memory_limit\": %lld, \"free\": %lld", (long long)memory_limit(request),
               (long long)find_free_space(request->out));
    else
        printf("\"memory\": %lld, \"seconds\": %.3f", (long long)report->nbytes_memory,
               report->seconds);
    if (!request->convert.dry && request->verify)
        printf(", \"verified\": %lld", (long long)request->nverified);
    if (report->nbytes_shared)
        printf(", \"shared\": %lld", (long long)report->nbytes_shared);
    if (urls_have_traffic(&traffic))
        printf(", \"network\": {\"received\": %lld, \"sent\": %lld, \"requests\": %lld, "
               "\"retries\": %lld}",
               (long long)traffic.nbytes_received, (long long)traffic.nbytes_sent,
               (long long)traffic.nrequests, (long long)traffic.nretries);
    printf("}\n");
}

static void print_read_line(const rsd_report *report, bool dry)
{
    printf("%-8s %s", "read", cli_size_text(report->nbytes_read));
    if (!dry && report->nbytes_unchecked >= report->nbytes_read)
        printf(", without CRCs");
    else if (!dry && report->nbytes_unchecked)
        printf(", CRCs checked but for %s without CRCs or read in part",
               cli_size_text(report->nbytes_unchecked));
    else if (!dry)
        printf(", CRCs checked");
    printf("\n");
}

static void print_network_line(void)
{
    rsd_traffic traffic;
    if (urls_have_traffic(&traffic))
        printf("%-8s %s received, %s sent in %lld requests, %lld of them repeated\n", "network",
               cli_size_text(traffic.nbytes_received), cli_size_text(traffic.nbytes_sent),
               (long long)traffic.nrequests, (long long)traffic.nretries);
}

static void print_text_report(const struct conversion *request, rsd_format in,
                              const rsd_report *report)
{
    bool dry = request->convert.dry;
    printf("%-8s %s, %s\n", "from", cli_plain_text(request->in), rsd_format_name(in));
    if (request->kind != PLAN)
        printf("%-8s %s, %s\n", "to", cli_plain_text(request->out),
               rsd_format_name(request->convert.format));
    else
        printf("%-8s %s\n", "to", rsd_format_name(request->convert.format));
    printf("%-8s %lld", "tensors", (long long)report->ntensors);
    if (report->nleft_out)
        printf(", %lld tensors and values left out", (long long)report->nleft_out);
    printf("\n");
    print_read_line(report, dry);
    printf("%-8s %s in %lld file%s%s\n", "written", cli_size_text(report->nbytes_written),
           (long long)report->nfiles_written, report->nfiles_written == 1 ? "" : "s",
           dry && request->convert.compress ? ", less when compressed" : "");
    if (dry) {
        printf("%-8s buffers of at most %s\n", "memory", cli_size_text(memory_limit(request)));
        printf("%-8s %s needed, %s free\n", "space", cli_size_text(report->nbytes_written),
               cli_size_text(find_free_space(request->out)));
        return;
    }
    if (report->nbytes_shared)
        printf("%-8s %s with %s\n", "shared", cli_size_text(report->nbytes_shared),
               cli_plain_text(request->in));
    print_network_line();
    printf("%-8s buffers of %s\n", "memory", cli_size_text(report->nbytes_memory));
    printf("%-8s %.2f s, %s/s\n", "time", report->seconds,
           cli_size_text((int64_t)((double)(report->nbytes_written + report->nbytes_shared) /
                                   (report->seconds > 0 ? report->seconds : 1))));
    if (request->verify)
        printf("%-8s %lld tensors: equal digests in both\n", "verified",
               (long long)request->nverified);
}

static void print_left_out(const struct conversion *request, const char *what,
                           struct name_sample *names)
{
    if (names->n)
        cli_note(request->verb, "%lld %s%s left out: %s", (long long)names->n, what,
                 names->n == 1 ? "" : "s", names->names);
    free(names->names);
}

/* Notes on standard error which tensors and values the output does not have. */
static void note_left_out(const struct conversion *request, const rsd_checkpoint *in)
{
    struct name_sample tensors = {0}, values = {0};
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(in); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        rsd_tensor_target target = {.struct_nbytes = sizeof target, .keep = 1};
        if (rsd_checkpoint_tensor(in, i, &tensor) == RSD_OK &&
            rsd_rules_map(request->rules, &tensor, &target) == RSD_OK && !target.keep)
            name_sample_add(&tensors, tensor.name);
        rsd_layout_free(target.layout);
    }
    if (request->convert.format != RSD_FORMAT_DCP)
        for (int64_t i = 0; i < rsd_checkpoint_nvalues(in); i++)
            name_sample_add(&values, rsd_checkpoint_value_name(in, i));
    print_left_out(request, "tensor", &tensors);
    print_left_out(request, "value", &values);
}

/* ---- verification ---- */

static rsd_status print_output_finding(void *context, const char *text)
{
    const struct conversion *request = context;
    cli_fail(request->verb, EXIT_NO, "%s", text);
    return RSD_OK;
}

/* Tensors whose dtype the conversion did not change: their indices in the input and in the output. */
struct tensor_pairs {
    int64_t *in, *out;
    size_t n;
};

/* Lists the tensors of the input that the output has with the same dtype, and their indices in both. */
static rsd_status pair_tensors(struct conversion *request, rsd_checkpoint *in, rsd_checkpoint *out,
                               struct tensor_pairs *pairs)
{
    int64_t ntensors = rsd_checkpoint_ntensors(in);
    pairs->in = cli_need_memory(calloc((size_t)ntensors + 1, sizeof *pairs->in));
    pairs->out = cli_need_memory(calloc((size_t)ntensors + 1, sizeof *pairs->out));
    rsd_status status = RSD_OK;
    for (int64_t i = 0, index; !status && i < ntensors; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor}, other = tensor;
        rsd_tensor_target target = {.struct_nbytes = sizeof target, .keep = 1};
        status = rsd_checkpoint_tensor(in, i, &tensor);
        if (!status)
            status = rsd_rules_map(request->rules, &tensor, &target);
        rsd_layout_free(target.layout);
        if (status || !target.keep)
            continue;
        status = rsd_checkpoint_find(out, target.name, &index);
        if (!status)
            status = rsd_checkpoint_tensor(out, index, &other);
        if (status || other.dtype != tensor.dtype)
            continue;
        pairs->in[pairs->n] = i;
        pairs->out[pairs->n++] = index;
    }
    return status;
}

/* Compares the digests of input and output. Returns EXIT_YES or an exit code. */
static rsd_status compare_digests(struct conversion *request, rsd_checkpoint *out)
{
    struct tensor_pairs pairs = {0};
    struct name_sample changed = {0};
    rsd_status status = pair_tensors(request, request->input, out, &pairs);
    char(*a)[RSD_DIGEST_NCHARS] = cli_need_memory(calloc(pairs.n + 1, sizeof *a));
    char(*b)[RSD_DIGEST_NCHARS] = cli_need_memory(calloc(pairs.n + 1, sizeof *b));
    if (!status)
        status = rsd_digest(request->input, (int64_t)pairs.n, pairs.in, &request->io, a, NULL);
    if (!status)
        status = rsd_digest(out, (int64_t)pairs.n, pairs.out, &request->io, b, NULL);
    for (size_t i = 0; i < pairs.n && !status; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        status = rsd_checkpoint_tensor(out, pairs.out[i], &tensor);
        request->nverified++;
        if (!status && strcmp(a[i], b[i]) != 0)
            name_sample_add(&changed, tensor.name);
    }
    if (!status && changed.n)
        request->verify_code =
            cli_fail(request->verb, EXIT_NO, "%s: %lld tensors differ from %s: %s", request->out,
                     (long long)changed.n, request->in, changed.names);
    free(changed.names);
    free(a);
    free(b);
    free(pairs.in);
    free(pairs.out);
    return status;
}

/* Verifies the output before it is put at its path, and compares it with the input. An rsd_check_output. */
static rsd_status verify_output(void *context, rsd_checkpoint *out)
{
    struct conversion *request = context;
    int64_t nfindings = 0;
    struct progress_line progress;
    void *before = request->io.context;
    progress_end(before);
    progress_start(&progress, "verify", request->quiet);
    request->io.context = &progress;
    rsd_status status =
        rsd_verify(out, &request->io, print_output_finding, request, &nfindings, NULL);
    if (!status)
        status = compare_digests(request, out);
    progress_end(&progress);
    request->io.context = before;
    if (!status && nfindings)
        request->verify_code = cli_fail(request->verb, EXIT_NO, "%s is damaged", request->out);
    return status ? status : request->verify_code ? RSD_EFORMAT : RSD_OK;
}

/* ---- running ---- */

/* Returns the staging directory that a stopped run has left; NULL: none. Owned by the caller. */
static char *find_staging_directory(const char *out)
{
    struct stat about;
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/')
        n--;
    char *staging = cli_new_text("%.*s.reshard-part", (int)n, out);
    if (stat(staging, &about) == 0)
        return staging;
    free(staging);
    return NULL;
}

/* Prints why a conversion stopped, and what to do. */
static int explain_stop(const struct conversion *request, rsd_status status)
{
    const char *verb = request->verb;
    char *staging = find_staging_directory(request->out);
    bool resumable = status == RSD_ECANCELLED || status == RSD_EIO || status == RSD_ENOENT ||
                     status == RSD_EPEER || status == RSD_ETIMEOUT;
    int code = status == RSD_ECANCELLED ? cli_fail(verb, EXIT_INTERRUPTED, "interrupted")
                                        : cli_fail_status(verb, status);
    if (staging && resumable)
        cli_note(verb, "complete data is kept in %s; continue with --resume", staging);
    if (!staging && status == RSD_EEXIST && !request->convert.overwrite)
        cli_note(verb, "use --force to replace an existing checkpoint");
    free(staging);
    return code;
}

/* Converts, verifies if requested, and prints the report. Returns the exit code. */
static int convert_and_report(struct conversion *request, rsd_checkpoint *in)
{
    struct progress_line progress;
    rsd_report report = {.struct_nbytes = sizeof report};
    progress_start(&progress, request->verb, request->quiet || request->convert.dry);
    request->convert.map = rsd_rules_map;
    request->convert.map_context = request->rules;
    request->convert.io = &request->io;
    request->io.struct_nbytes = sizeof request->io;
    request->io.on_progress = progress_report;
    request->io.context = &progress;
    request->io.transport = ranks_transport();
    request->input = in;
    if (request->verify) {
        request->convert.check = verify_output;
        request->convert.check_context = request;
    }
    rsd_status status = rsd_convert(in, request->out, &request->convert, &report);
    progress_end(&progress);
    if (request->verify_code) /* the message is printed */
        return request->verify_code;
    if (status)
        return explain_stop(request, status);
    if (request->kind != PLAN && !request->quiet)
        note_left_out(request, in);
    if (request->json)
        print_json_report(request, rsd_checkpoint_format(in), &report);
    else if (!request->quiet || request->convert.dry)
        print_text_report(request, rsd_checkpoint_format(in), &report);
    return EXIT_YES;
}

/* --verify compares with the input, which must still exist then. */
static int check_verify(const struct conversion *request)
{
    struct stat in, out;
    bool same = stat(request->in, &in) == 0 && stat(request->out, &out) == 0 &&
                in.st_dev == out.st_dev && in.st_ino == out.st_ino;
    if (request->verify && !request->convert.dry && same)
        return cli_fail(request->verb, EXIT_CANNOT,
                        "--verify needs %s, which this run would replace; choose another OUT",
                        request->in);
    return GO_ON;
}

/* Prints a problem or a note of the rules. */
static rsd_status print_rule_message(void *context, int32_t is_problem, const char *text)
{
    const struct conversion *request = context;
    if (is_problem)
        cli_fail(request->verb, EXIT_CANNOT, "%s", text);
    else if (!request->quiet)
        cli_note(request->verb, "%s", text);
    return RSD_OK;
}

/* Prints all problems of the rules for this input. Returns GO_ON, or EXIT_CANNOT if there are any. */
static int check_rules(struct conversion *request, rsd_checkpoint *in)
{
    int64_t nproblems = 0;
    rsd_status status =
        rsd_rules_check(request->rules, in, print_rule_message, request, &nproblems);
    return status ? cli_fail_status(request->verb, status) : nproblems ? EXIT_CANNOT : GO_ON;
}

/* Collective. Checks on each rank return GO_ON or an exit code; ranks_agree compares them before the work starts. */
int conversion_run(struct conversion *request)
{
    rsd_checkpoint *in;
    const char *out = request->out ? request->out : "";
    request->io.max_nbytes = urls_limit_memory(request->in, out, request->io.max_nbytes);
    int code = input_open(request->verb, request->in, request->quiet, &in);
    if (!code)
        code = cli_fail_status(request->verb, urls_open_storage(out, &request->io.storage));
    code = ranks_agree(request->verb, code);
    if (code)
        return code;
    code = set_format_and_limits(request, rsd_checkpoint_format(in));
    if (code == GO_ON)
        code = check_verify(request);
    if (code == GO_ON)
        code = check_rules(request, in);
    if (code == GO_ON && request->kind == MERGE)
        code = find_side_files(request);
    if (code == GO_ON && request->kind == CONVERT && request->convert.format == RSD_FORMAT_DCP)
        find_megatron_files(request, in);
    if (code == GO_ON)
        code = input_check_files(request->verb, request->in, in, NULL, NULL);
    if (!code)
        code = cli_fail_status(request->verb,
                               rsd_pool_new((int32_t)request->threads, &request->io.pool));
    code = ranks_agree(request->verb, code);
    if (!code)
        code = convert_and_report(request, in);
    rsd_pool_free(request->io.pool);
    rsd_checkpoint_close(in);
    return code;
}
