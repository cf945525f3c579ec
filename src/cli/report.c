/* report.c - what convert, merge, split and plan of a checkpoint print when they are done. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

enum { DEFAULT_MEMORY_MB = 256 };

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
    if (request->convert.dry && urls_is_url(request->out))
        printf("\"memory_limit\": %lld, \"free\": null", (long long)memory_limit(request));
    else if (request->convert.dry)
        printf("\"memory_limit\": %lld, \"free\": %lld", (long long)memory_limit(request),
               (long long)out_file_space(request->out));
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
        printf("%-8s %s needed", "space", cli_size_text(report->nbytes_written));
        if (!urls_is_url(request->out))
            printf(", %s free", cli_size_text(out_file_space(request->out)));
        printf("\n");
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
        printf("%-8s %lld tensors: equal in both%s\n", "verified", (long long)request->nverified,
               request->cast ? ", after the cast" : "");
}

static void print_left_out(const struct conversion *request, const char *what,
                           const struct name_sample *names)
{
    if (names->n)
        cli_note(request->verb, "%lld %s%s left out: %s", (long long)names->n, what,
                 names->n == 1 ? "" : "s", names->names);
}

/* Notes which tensors --cast did not convert. */
static void note_not_cast(const struct conversion *request, const rsd_checkpoint *in)
{
    struct name_sample names = {0};
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(in) && request->cast; i++) {
        rsd_tensor_info tensor = input_tensor(in, i);
        rsd_tensor_target target = {
            .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor.dtype, .name = tensor.name};
        if (rsd_rules_map(request->rules, &tensor, &target) == RSD_OK && target.keep &&
            target.dtype != request->cast)
            name_sample_add(&names, cli_text("%s %s", target.name, rsd_dtype_name(tensor.dtype)));
        rsd_layout_free(target.layout);
    }
    if (names.n)
        cli_note(request->verb,
                 "%lld tensor%s not cast to %s, since only bf16, f16, f32 and f64 are: %s",
                 (long long)names.n, names.n == 1 ? " was" : "s were",
                 rsd_dtype_name(request->cast), names.names);
}

static bool is_of_optimizer(const char *name)
{
    return strncmp(name, "optimizer.", 10) == 0 || strncmp(name, "optim.", 6) == 0;
}

/* Whether the files of FSDP hold a value; of the optimizer only with its states. */
static bool fsdp_holds_value(const char *name, bool with_states)
{
    return strcmp(name, "lr_scheduler") == 0 || strncmp(name, "lr_scheduler.", 13) == 0 ||
           (with_states && is_of_optimizer(name));
}

void report_notes(const struct conversion *request, const rsd_checkpoint *in)
{
    struct name_sample tensors = {0}, values = {0};
    bool fsdp = request->convert.format == RSD_FORMAT_FSDP, with_states = false;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(in); i++) {
        rsd_tensor_info tensor = input_tensor(in, i);
        rsd_tensor_target target = {.struct_nbytes = sizeof target, .keep = 1};
        if (rsd_rules_map(request->rules, &tensor, &target) == RSD_OK) {
            if (!target.keep)
                name_sample_add(&tensors, tensor.name);
            else if (target.name && is_of_optimizer(target.name))
                with_states = true;
        }
        rsd_layout_free(target.layout);
    }
    if (request->convert.format != RSD_FORMAT_DCP)
        for (int64_t i = 0; i < rsd_checkpoint_nvalues(in); i++) {
            const char *name = rsd_checkpoint_value_name(in, i);
            if (!fsdp || !fsdp_holds_value(name, with_states))
                name_sample_add(&values, name);
        }
    print_left_out(request, "tensor", &tensors);
    print_left_out(request, "value", &values);
    note_not_cast(request, in);
    side_files_note_missing(request);
}

int report_print(const struct conversion *request, const rsd_checkpoint *in,
                 const rsd_report *report, const struct rank_loads *loads)
{
    bool printed = request->json || !request->quiet || request->convert.dry;
    rsd_format format = rsd_checkpoint_format(in);
    int code = EXIT_YES;
    if (request->json)
        print_json_report(request, format, report);
    else if (printed)
        print_text_report(request, format, report);
    if (request->estimate && request->convert.dry)
        code = estimate_print(request, in, report);
    if (loads->list && request->ranks && printed)
        rank_loads_print(loads, request->json);
    printf("%s", request->json ? "}\n" : "");
    return code;
}

/* Whether files of a file system can share extents: btrfs, XFS, bcachefs. */
static bool can_share_extents_at(const char *path)
{
    struct statfs about;
    return statfs(path, &about) != 0 || about.f_type == 0x9123683e || about.f_type == 0x58465342 ||
           about.f_type == 0xca451a4e;
}

int report_check_space(const struct conversion *request, const rsd_report *report)
{
    int64_t space = out_file_space(request->out);
    bool unknown =
        request->kind == PLAN || request->convert.compress || request->convert.resume ||
        urls_is_url(request->out) ||
        (request->convert.reflink != RSD_REFLINK_NEVER && can_share_extents_at(request->in));
    if (unknown || report->nbytes_written <= space)
        return EXIT_YES;
    return cli_fail(request->verb, EXIT_CANNOT, "%s needs %s, but its file system has %s free",
                    request->out, cli_size_text(report->nbytes_written), cli_size_text(space));
}
