/* cmd_uploads.c - lists and removes uploads that a killed run has left in a bucket. */
#include "cli.h"

static const char uploads_help[] =
    "usage: reshard uploads [options] s3://BUCKET/PREFIX\n\n"
    "List uploads below PREFIX that were begun and not finished, such as those of killed runs.\n"
    "The bucket keeps their parts until the run is resumed or they are removed.\n\n";

static const struct cli_option uploads_options[] = {
    OPTION("remove", NULL, "Remove them. Not while a run writes below PREFIX", options_set_flag, 0,
           0),
    {0},
};
static const struct cli_verb uploads_verb = {
    .name = "uploads", .help = uploads_help, .help_column = 23, .options = uploads_options};

static rsd_status print_upload(void *context, const char *path, const char *begun,
                               const char *identifier)
{
    (void)context, (void)identifier;
    printf("%-24s  %s\n", cli_plain_text(begun), cli_plain_text(path));
    return RSD_OK;
}

int command_uploads(int argc, char **argv)
{
    rsd_storage *storage;
    bool remove = false;
    int64_t n = 0;
    int code = options_read(&uploads_verb, argc, argv, &remove);
    if (code != GO_ON)
        return code;
    if (argc - optind != 1)
        return cli_fail("uploads", EXIT_USAGE, "expected one path; see reshard uploads --help");
    const char *path = argv[optind];
    rsd_status status = urls_open_storage(path, &storage);
    if (!status)
        status = rsd_storage_uploads(storage, path, remove, print_upload, NULL, &n);
    if (status)
        return cli_fail_status("uploads", status);
    printf("%lld upload%s%s\n", (long long)n, n == 1 ? "" : "s", remove ? " removed" : "");
    return EXIT_YES;
}
