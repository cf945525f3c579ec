/* conversion.c - carries out what convert, merge, split and plan ask for, and reports what was done. */
#include "cli.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

/* ---- what each verb means ---- */

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n > m && strcmp(text + n - m, end) == 0;
}

static int set_verb(struct conversion *request, rsd_format in)
{
    rsd_convert_options *convert = &request->convert;
    if (request->kind == PLAN)
        convert->dry = 1;
    if (request->kind == MERGE) {
        convert->format = RSD_FORMAT_SAFETENSORS;
        if (!convert->max_shard_nbytes && !ends_with(request->out, ".safetensors"))
            convert->max_shard_nbytes = 5000000000;
    } else if (request->kind == SPLIT) {
        convert->format = RSD_FORMAT_SAFETENSORS;
        convert->every_replica = 1;
        if (!request->has_mesh)
            return complain("split", EXIT_USAGE, "a --mesh is needed, such as tp=4");
    } else if (!convert->format) {
        bool safe = ends_with(request->out, ".safetensors") || in != RSD_FORMAT_DCP;
        convert->format = safe ? RSD_FORMAT_SAFETENSORS : RSD_FORMAT_DCP;
    }
    if (convert->max_shard_nbytes &&
        (convert->format != RSD_FORMAT_SAFETENSORS || request->has_mesh))
        return complain(request->verb, EXIT_USAGE,
                        "--max-shard-size is for safetensors of whole tensors");
    return GO_ON;
}

/* config.json, tokenizer.json, tokenizer.model, *.txt and the like: what is beside weights, and is none. */
static bool is_side_file(const char *name)
{
    static const char *const ends[] = {".json", ".model",    ".txt", ".jinja",
                                       ".py",   ".tiktoken", NULL};
    if (name[0] == '.' || ends_with(name, ".index.json") || strstr(name, "reshard-"))
        return false;
    for (const char *const *end = ends; *end; end++)
        if (ends_with(name, *end))
            return true;
    return false;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int find_side_files(struct conversion *request)
{
    const char *folder = request->config_from ? request->config_from : request->in;
    if (ends_with(request->out, ".safetensors"))
        return !request->config_from
                   ? GO_ON
                   : complain("merge", EXIT_USAGE, "--config-from is for an OUT that is a folder");
    DIR *entries = opendir(folder);
    if (!entries && request->config_from)
        return complain("merge", EXIT_USAGE, "--config-from %s: %s", folder, strerror(errno));
    if (!entries)
        return GO_ON; /* one file, which has nothing beside it */
    for (struct dirent *entry; (entry = readdir(entries));) {
        char *path = need_text("%s/%s", folder, entry->d_name);
        struct stat about;
        if (!is_side_file(entry->d_name) || stat(path, &about) != 0 || !S_ISREG(about.st_mode)) {
            free(path);
            continue;
        }
        request->side_files = need_memory(
            realloc(request->side_files, (request->nside_files + 1) * sizeof *request->side_files));
        request->side_files[request->nside_files++] = path;
    }
    closedir(entries);
    if (request->nside_files > 1)
        qsort(request->side_files, request->nside_files, sizeof *request->side_files, by_text);
    request->convert.side_files = (const char *const *)request->side_files;
    request->convert.nside_files = (int64_t)request->nside_files;
    return GO_ON;
}

/* ---- reports ---- */

static int64_t free_space(const char *path)
{
    struct statvfs about;
    char *above = need_text("%s", path);
    for (;;) { /* the nearest folder that is there */
        if (statvfs(*above ? above : ".", &about) == 0)
            break;
        char *slash = strrchr(above, '/');
        if (!slash) {
            above[0] = '\0';
            if (statvfs(".", &about) != 0)
                about.f_bavail = 0;
            break;
        }
        *(slash == above ? slash + 1 : slash) = '\0';
    }
    free(above);
    return (int64_t)(about.f_bavail * about.f_frsize);
}

static void print_json(const struct conversion *request, rsd_format in, const rsd_report *report)
{
    printf("{\"verb\": \"%s\", \"in\": ", request->verb);
    print_json_string(stdout, request->in);
    printf(", \"out\": ");
    print_json_string(stdout, request->out);
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
        printf("\"memory_limit\": %lld, \"free\": %lld",
               (long long)(request->convert.max_nbytes ? request->convert.max_nbytes
                                                       : (int64_t)256 << 20),
               (long long)free_space(request->out));
    else
        printf("\"memory\": %lld, \"seconds\": %.3f", (long long)report->nbytes_memory,
               report->seconds);
    if (!request->convert.dry && request->verify)
        printf(", \"verified\": %lld", (long long)request->nverified);
    printf("}\n");
}

static void print_text(const struct conversion *request, rsd_format in, const rsd_report *report)
{
    bool dry = request->convert.dry;
    printf("%-8s %s, %s\n", "from", plain_text(request->in), rsd_format_name(in));
    if (request->kind != PLAN)
        printf("%-8s %s, %s\n", "to", plain_text(request->out),
               rsd_format_name(request->convert.format));
    else
        printf("%-8s %s\n", "to", rsd_format_name(request->convert.format));
    printf("%-8s %lld", "tensors", (long long)report->ntensors);
    if (report->nleft_out)
        printf(", %lld tensors and values left out", (long long)report->nleft_out);
    printf("\n%-8s %s", "read", size_text(report->nbytes_read));
    if (!dry && report->nbytes_unchecked >= report->nbytes_read)
        printf(", which have no CRCs");
    else if (!dry)
        printf(", CRCs checked");
    if (!dry && report->nbytes_unchecked && report->nbytes_unchecked < report->nbytes_read)
        printf(" but for %s that have none, or were read in part",
               size_text(report->nbytes_unchecked));
    printf("\n%-8s %s in %lld file%s%s\n", "written", size_text(report->nbytes_written),
           (long long)report->nfiles_written, report->nfiles_written == 1 ? "" : "s",
           dry && request->convert.compress ? ", less when compressed" : "");
    if (dry) {
        int64_t limit =
            request->convert.max_nbytes ? request->convert.max_nbytes : (int64_t)256 << 20;
        printf("%-8s buffers of at most %s\n", "memory", size_text(limit));
        printf("%-8s %s needed, %s free\n", "space", size_text(report->nbytes_written),
               size_text(free_space(request->out)));
    } else {
        printf("%-8s buffers of %s\n", "memory", size_text(report->nbytes_memory));
        printf("%-8s %.2f s, %s/s\n", "time", report->seconds,
               size_text((int64_t)((double)report->nbytes_written /
                                   (report->seconds > 0 ? report->seconds : 1))));
        if (request->verify)
            printf("%-8s %lld tensors have the same digests in both\n", "verified",
                   (long long)request->nverified);
    }
}

static void list_left_out(const struct conversion *request, rsd_checkpoint *in)
{
    enum { MOST_TOLD = 20 };
    int64_t nvalues = rsd_checkpoint_nvalues(in), n = 0;
    if (request->quiet)
        return;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(in); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        rsd_tensor_target choice = {.struct_nbytes = sizeof choice, .keep = 1};
        if (rsd_checkpoint_tensor(in, i, &tensor) == RSD_OK &&
            rsd_rules_map(request->rules, &tensor, &choice) == RSD_OK && !choice.keep &&
            n++ < MOST_TOLD)
            fprintf(stderr, "reshard %s: left out: %s\n", request->verb, plain_text(tensor.name));
        rsd_layout_free(choice.layout);
    }
    if (n > MOST_TOLD)
        fprintf(stderr, "reshard %s: left out: %lld more tensors\n", request->verb,
                (long long)n - MOST_TOLD);
    if (request->convert.format == RSD_FORMAT_SAFETENSORS)
        for (int64_t i = 0; i < nvalues && i < MOST_TOLD; i++)
            fprintf(stderr, "reshard %s: left out: %s, which is no tensor\n", request->verb,
                    plain_text(rsd_checkpoint_value_name(in, i)));
    if (request->convert.format == RSD_FORMAT_SAFETENSORS && nvalues > MOST_TOLD)
        fprintf(stderr, "reshard %s: left out: %lld more that are no tensors\n", request->verb,
                (long long)nvalues - MOST_TOLD);
}

/* ---- running ---- */

static rsd_status tell_finding(void *context, const char *text)
{
    const struct conversion *request = context;
    complain(request->verb, EXIT_NO, "%s", text);
    return RSD_OK;
}

/* The tensors that are the same in both, but for their layouts: their numbers here and there. */
struct pairs {
    int64_t *in, *out;
    size_t n;
};

static rsd_status find_pairs(struct conversion *request, rsd_checkpoint *in, rsd_checkpoint *out,
                             struct pairs *pairs)
{
    int64_t ntensors = rsd_checkpoint_ntensors(in);
    pairs->in = need_memory(calloc((size_t)ntensors + 1, sizeof *pairs->in));
    pairs->out = need_memory(calloc((size_t)ntensors + 1, sizeof *pairs->out));
    rsd_status status = RSD_OK;
    for (int64_t i = 0, index; !status && i < ntensors; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor}, other = tensor;
        rsd_tensor_target choice = {.struct_nbytes = sizeof choice, .keep = 1};
        status = rsd_checkpoint_tensor(in, i, &tensor);
        if (!status)
            status = rsd_rules_map(request->rules, &tensor, &choice);
        rsd_layout_free(choice.layout);
        if (status || !choice.keep)
            continue;
        status = rsd_checkpoint_find(out, choice.name, &index);
        if (!status)
            status = rsd_checkpoint_tensor(out, index, &other);
        if (status || other.dtype != tensor.dtype)
            continue; /* a cast tensor is another one */
        pairs->in[pairs->n] = i;
        pairs->out[pairs->n++] = index;
    }
    return status;
}

static int compare_digests(struct conversion *request, rsd_checkpoint *in, rsd_checkpoint *out,
                           const rsd_prove_options *how)
{
    const char *verb = request->verb;
    struct pairs pairs = {0};
    int code = EXIT_YES;
    rsd_status status = find_pairs(request, in, out, &pairs);
    char(*a)[RSD_DIGEST_NCHARS] = need_memory(calloc(pairs.n + 1, sizeof *a));
    char(*b)[RSD_DIGEST_NCHARS] = need_memory(calloc(pairs.n + 1, sizeof *b));
    if (!status)
        status = rsd_digest(in, (int64_t)pairs.n, pairs.in, how, a, NULL);
    if (!status)
        status = rsd_digest(out, (int64_t)pairs.n, pairs.out, how, b, NULL);
    for (size_t i = 0; i < pairs.n && !status && !code; i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        status = rsd_checkpoint_tensor(out, pairs.out[i], &tensor);
        request->nverified++;
        if (!status && strcmp(a[i], b[i]) != 0)
            code = complain(verb, EXIT_NO, "%s: %s is not what it was in %s", request->out,
                            tensor.name, request->in);
    }
    if (status)
        code = complain_status(verb, status);
    free(a);
    free(b);
    free(pairs.in);
    free(pairs.out);
    return code;
}

/* Compares what was written with what it was written from, where dtypes are the same. */
static int verify_result(struct conversion *request, rsd_checkpoint *in)
{
    const char *verb = request->verb;
    rsd_checkpoint *out = NULL;
    int64_t nfindings = 0;
    struct progress progress;
    int code =
        together_code(verb, complain_status(verb, rsd_checkpoint_open(request->out, NULL, &out)));
    if (code) {
        rsd_checkpoint_close(out);
        return code;
    }
    progress_start(&progress, "verify", request->quiet);
    rsd_prove_options how = {.struct_nbytes = sizeof how,
                             .pool = request->convert.pool,
                             .max_nbytes = request->convert.max_nbytes,
                             .on_progress = progress_tell,
                             .context = &progress,
                             .transport = together()};
    rsd_status status = rsd_verify(out, &how, tell_finding, request, &nfindings, NULL);
    if (!status)
        code = compare_digests(request, in, out, &how);
    progress_end(&progress);
    if (status)
        code = complain_status(verb, status);
    else if (nfindings)
        code = complain(verb, EXIT_NO, "%s: damaged", request->out);
    rsd_checkpoint_close(out);
    return code;
}

/* Where a run that was stopped leaves what is complete; NULL: there is nothing. Owned. */
static char *find_part(const char *out)
{
    struct stat about;
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/')
        n--;
    char *part = need_text("%.*s.reshard-part", (int)n, out);
    if (stat(part, &about) == 0)
        return part;
    free(part);
    return NULL;
}

static int explain_stop(const struct conversion *request, rsd_status status)
{
    const char *verb = request->verb;
    char *part = find_part(request->out);
    bool resumable = status == RSD_ECANCELLED || status == RSD_EIO || status == RSD_ENOENT ||
                     status == RSD_EPEER || status == RSD_ETIMEOUT;
    int code = status == RSD_ECANCELLED ? complain(verb, EXIT_INTERRUPTED, "stopped")
                                        : complain_status(verb, status);
    if (part && resumable)
        complain(verb, code, "what is complete is kept in %s: --resume goes on from there", part);
    if (!part && status == RSD_EEXIST && !request->convert.overwrite)
        complain(verb, code, "--force replaces a checkpoint that is there");
    free(part);
    return code;
}

static int run(struct conversion *request, rsd_checkpoint *in)
{
    const char *verb = request->verb;
    struct progress progress;
    rsd_report report = {.struct_nbytes = sizeof report};
    progress_start(&progress, verb, request->quiet || request->convert.dry);
    request->convert.choose = rsd_rules_map;
    request->convert.choose_context = request->rules;
    request->convert.on_progress = progress_tell;
    request->convert.context = &progress;
    request->convert.transport = together();
    rsd_status status = rsd_convert(in, request->out, &request->convert, &report);
    progress_end(&progress);
    if (status)
        return explain_stop(request, status);
    if (request->kind != PLAN)
        list_left_out(request, in);
    bool verify = request->verify && !request->convert.dry;
    int code = verify ? verify_result(request, in) : EXIT_YES;
    if (code)
        return code;
    if (request->json)
        print_json(request, rsd_checkpoint_format(in), &report);
    else if (!request->quiet || request->convert.dry)
        print_text(request, rsd_checkpoint_format(in), &report);
    return EXIT_YES;
}

static rsd_status print_message(void *context, int32_t is_problem, const char *text)
{
    const struct conversion *request = context;
    if (is_problem)
        complain(request->verb, EXIT_CANNOT, "%s", text);
    else if (!request->quiet)
        complain(request->verb, EXIT_YES, "note: %s", text);
    return RSD_OK;
}

static int check_rules(struct conversion *request, rsd_checkpoint *in)
{
    int64_t nproblems = 0;
    rsd_status status = rsd_rules_check(request->rules, in, print_message, request, &nproblems);
    if (status)
        return complain_status(request->verb, status);
    return nproblems ? EXIT_CANNOT : GO_ON;
}

/* After a checkpoint was replaced by its own conversion there is nothing left to compare it with. */
static int check_verify(const struct conversion *request)
{
    struct stat in, out;
    bool same = stat(request->in, &in) == 0 && stat(request->out, &out) == 0 &&
                in.st_dev == out.st_dev && in.st_ino == out.st_ino;
    if (request->verify && !request->convert.dry && same)
        return complain(request->verb, EXIT_CANNOT,
                        "--verify compares with %s, which would be replaced: write elsewhere first",
                        request->in);
    return GO_ON;
}

int conversion_run(struct conversion *request)
{
    rsd_checkpoint *in;
    int code = together_code(request->verb, open_checkpoint(request->verb, request->in, &in));
    if (code)
        return code;
    code = set_verb(request, rsd_checkpoint_format(in));
    if (code == GO_ON)
        code = check_verify(request);
    if (code == GO_ON)
        code = check_rules(request, in);
    if (code == GO_ON && request->kind == MERGE)
        code = find_side_files(request);
    if (code == GO_ON)
        code = need_files(request->verb, request->in, in, NULL, NULL);
    if (!code)
        code = complain_status(request->verb,
                               rsd_pool_new((int32_t)request->threads, &request->convert.pool));
    code = together_code(request->verb, code);
    if (!code)
        code = run(request, in);
    rsd_pool_free(request->convert.pool);
    rsd_checkpoint_close(in);
    return code;
}
