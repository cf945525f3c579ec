/* conversion.c - runs what convert, merge, split and plan of a checkpoint request, and prints the report. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MERGE_SHARD_GB = 5 };

/* ---- what each verb means ---- */

static bool names_torch_file(const char *path)
{
    return cli_has_suffix(path, ".pt") || cli_has_suffix(path, ".pth") ||
           cli_has_suffix(path, ".bin");
}

/* Sets the output format and the options that the verb implies. Returns GO_ON or an exit code. */
static int set_format_and_limits(struct conversion *request, rsd_format in)
{
    rsd_convert_options *convert = &request->convert;
    bool torch_file = names_torch_file(request->out);
    bool one_file = cli_has_suffix(request->out, ".safetensors") || torch_file;
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

/* ---- verification ---- */

static rsd_status print_output_finding(void *context, const char *text)
{
    const struct conversion *request = context;
    cli_fail(request->verb, EXIT_NO, "%s", text);
    return RSD_OK;
}

static rsd_status note_changed_tensor(void *context, const char *name, rsd_difference difference,
                                      const char *text)
{
    (void)difference;
    (void)text;
    name_sample_add(context, name);
    return RSD_OK;
}

/* Compares the output with the input, under the names and in the dtypes that the rules chose. */
static rsd_status compare_with_input(struct conversion *request, rsd_checkpoint *out)
{
    struct name_sample changed = {0};
    int64_t n = 0;
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_diff_options options = {.struct_nbytes = sizeof options,
                                .map = rsd_rules_map,
                                .map_context = request->rules,
                                .io = &request->io};
    rsd_status status =
        rsd_diff(request->input, out, &options, note_changed_tensor, &changed, &n, &report);
    request->nverified = report.ntensors;
    if (!status && n)
        request->verify_code =
            cli_fail(request->verb, EXIT_NO, "%s: %lld tensor%s from %s: %s", request->out,
                     (long long)n, n == 1 ? " differs" : "s differ", request->in, changed.names);
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
        status = compare_with_input(request, out);
    progress_end(&progress);
    request->io.context = before;
    if (!status && nfindings)
        request->verify_code = cli_fail(request->verb, EXIT_NO, "%s is damaged", request->out);
    return status ? status : request->verify_code ? RSD_EFORMAT : RSD_OK;
}

/* ---- running ---- */

/* Returns the staging directory that a stopped run has left; NULL: none. */
static char *find_staging_directory(const char *out)
{
    struct stat about;
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/')
        n--;
    char *staging = cli_text("%.*s.reshard-part", (int)n, out);
    return stat(staging, &about) == 0 ? staging : NULL;
}

/* Prints why a conversion stopped, and what to do. */
static int explain_stop(const struct conversion *request, rsd_status status)
{
    const char *verb = request->verb;
    char *staging = find_staging_directory(request->out);
    bool resumable = status == RSD_ECANCELLED || status == RSD_EIO || status == RSD_ENOENT ||
                     status == RSD_EPEER || status == RSD_ETIMEOUT || status == RSD_ENOMEM;
    int code = status == RSD_ECANCELLED ? cli_fail(verb, EXIT_INTERRUPTED, "interrupted")
                                        : cli_fail_status(verb, status);
    if (staging && resumable)
        cli_note(verb, "complete data is kept in %s; continue with --resume", staging);
    if (!staging && status == RSD_EEXIST && !request->convert.overwrite)
        cli_note(verb, "use --force to replace an existing checkpoint");
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
        report_notes(request, in);
    struct rank_loads loads = {0};
    int code = EXIT_YES;
    if (request->ranks || request->pages.svg || request->pages.html)
        code = rank_loads_count(&loads, request, in);
    if (!code && loads.list)
        rank_loads_draw(&loads, request);
    if (!code)
        code = report_print(request, in, &report, &loads);
    rank_loads_drop(&loads);
    if (code)
        return code;
    return request->convert.dry ? report_check_space(request, &report)
                                : side_files_copy_below(request);
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

/* Whether tensors are written whole without a word about it: OUT is not one file, and could have shards. */
static bool writes_whole_tensors(const struct conversion *request)
{
    const rsd_convert_options *convert = &request->convert;
    return request->kind != MERGE && !request->has_mesh && !convert->max_shard_nbytes &&
           convert->format != RSD_FORMAT_TORCH_SAVE &&
           !cli_has_suffix(request->out, ".safetensors");
}

/* Notes that tensors are written whole, and what would shard them. */
static rsd_status note_whole_tensors(const struct conversion *request, rsd_checkpoint *in)
{
    char *presets;
    rsd_status status = rsd_rules_presets(request->rules, in, &presets);
    if (status)
        return status;
    cli_note(request->verb,
             "tensors are written whole; --mesh with --place or --preset shards them; "
             "presets that fit: %s",
             presets);
    rsd_free(presets);
    return RSD_OK;
}

/* Prints all problems of the rules for this input. Returns GO_ON, or EXIT_CANNOT if there are any. */
static int check_rules(struct conversion *request, rsd_checkpoint *in)
{
    int64_t nproblems = 0;
    char *config = request->has_mesh ? side_files_find_config(request) : NULL;
    if (config && rsd_rules_add(request->rules, RSD_RULE_CONFIG, config) && !request->quiet)
        cli_note(request->verb, "the number of heads is not known: %s", rsd_error());
    rsd_status status =
        rsd_rules_check(request->rules, in, print_rule_message, request, &nproblems);
    if (!status && !nproblems && !request->quiet && writes_whole_tensors(request))
        status = note_whole_tensors(request, in);
    return status ? cli_fail_status(request->verb, status) : nproblems ? EXIT_CANNOT : GO_ON;
}

/* Collective. Checks on each rank return GO_ON or an exit code; ranks_agree compares them before the work starts. */
int conversion_run(struct conversion *request)
{
    rsd_checkpoint *in;
    const char *out = request->out;
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
        code = side_files_find(request, in);
    if (code == GO_ON)
        code = check_rules(request, in);
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
