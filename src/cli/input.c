/* input.c - opens checkpoints, and checks that their files exist before the work starts. */
#include "cli.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- options ---- */

static rsd_open_options input_options = {.struct_nbytes = sizeof input_options};
static const char **from_rules; /* of --from */
static const char *from_mesh;
static const char *input_heads; /* of --heads */
static bool heads_are_used;     /* by rules; else they are for --names only */

static int set_input_flag(const struct given_option *given)
{
    int32_t one = 1;
    memcpy((char *)&input_options + given->number, &one, sizeof one);
    return GO_ON;
}

static int take_model_dtype(const struct given_option *given)
{
    input_options.model_dtype = 1;
    return strcmp(given->value, "model") == 0
               ? GO_ON
               : cli_fail(given->verb, EXIT_USAGE, "--dtype %s must be model", given->value);
}

static int take_vocab_size(const struct given_option *given)
{
    long long number = 0;
    if (!cli_parse_number(given->value, 1, LLONG_MAX, &number))
        return cli_fail(given->verb, EXIT_USAGE, "--vocab-size %s must be a number of at least 1",
                        given->value);
    input_options.vocab_size = number;
    return GO_ON;
}

static int add_from_rule(const struct given_option *given)
{
    size_t n = (size_t)input_options.nfrom_rules++;
    from_rules = cli_need_memory(realloc(from_rules, (n + 1) * sizeof *from_rules));
    from_rules[n] = given->value;
    input_options.from_rules = from_rules;
    return GO_ON;
}

static int set_from_mesh(const struct given_option *given)
{
    from_mesh = given->value;
    return GO_ON;
}

static int set_names(const struct given_option *given)
{
    input_options.names = given->value;
    return GO_ON;
}

/* Takes the attention heads, and those of keys and values. */
static int take_heads(const struct given_option *given)
{
    long long heads = 0, keys = 0;
    int end = 0;
    const char *value = given->value;
    bool both = sscanf(value, "%lld,%lld%n", &heads, &keys, &end) == 2 && !value[end];
    if (!both && cli_parse_number(value, 1, INT_MAX, &heads))
        keys = heads;
    if (heads < 1 || keys < 1 || heads > INT_MAX || keys > heads)
        return cli_fail(given->verb, EXIT_USAGE, "--heads %s must be N or N,K, such as 32,8",
                        value);
    input_heads = value;
    input_options.nheads = heads;
    input_options.nkv_heads = keys;
    return GO_ON;
}

bool input_follows_links(void)
{
    return input_options.follow_links != 0;
}

const char *input_use_heads(void)
{
    heads_are_used = true;
    return input_heads;
}

#define INPUT_FLAG(name, help, field)                                                              \
    OPTION(name, NULL, help, set_input_flag, offsetof(rsd_open_options, field), 0)

const struct cli_option input_option_rows[] = {
    INPUT_FLAG("follow-links", "Follow links that lead out of a checkpoint", follow_links),
    INPUT_FLAG("as-is", "Read one rank's file of several by itself", as_is),
    INPUT_FLAG("take-rank-0", "Take the lowest rank's copy where copies differ", take_rank_0),
    OPTION("dtype", "model", "Read DeepSpeed's parameters in the model's dtype. Default: fp32",
           take_model_dtype, 0, 0),
    INPUT_FLAG("unstack", "Read Megatron's stacked layers one by one", unstack),
    OPTION("vocab-size", "N", "Read N rows of Megatron's padded vocabulary. Default: all",
           take_vocab_size, 0, 0),
    OPTION("from", "'RE=P'",
           "Join parts of tensors whose whole name matches RE: S(0), S(1), R,\n"
           "or Megatron's gated. May be repeated",
           add_from_rule, 0, 0),
    OPTION("from-mesh", "M", "Read one file per rank of the mesh M, cut as --from says, else R",
           set_from_mesh, 0, 0),
    OPTION("names", "MAP", "Read tensors under other names; see reshard names", set_names, 0, 0),
    OPTION("heads", "N[,K]", "Attention heads, and those of keys, for --names and --preset",
           take_heads, 0, 0),
    {0},
};

/* ---- opening ---- */

/* Makes the rules of --from-mesh: tensors that no --from matches are copies. */
static rsd_status make_from_rules(rsd_rules *rules)
{
    rsd_mesh *mesh;
    rsd_status status = rsd_mesh_parse(from_mesh, &mesh);
    if (status)
        return status;
    char *copies = cli_text("R");
    for (int32_t a = 1; a < rsd_mesh_naxes(mesh); a++)
        copies = cli_text("%s,R", copies);
    status = rsd_rules_set_mesh(rules, mesh);
    for (int64_t i = 0; i < input_options.nfrom_rules && !status; i++)
        status = rsd_rules_add(rules, RSD_RULE_PLACE, from_rules[i]);
    if (!status)
        status = rsd_rules_add(rules, RSD_RULE_DEFAULT, copies);
    rsd_mesh_free(mesh);
    return status;
}

/* Opens a directory with one file per rank of --from-mesh. */
static int open_ranks(const char *verb, const char *path, rsd_open_options options,
                      rsd_checkpoint **checkpoint)
{
    rsd_rules *rules = NULL;
    rsd_status status = rsd_rules_new(NULL, &rules);
    if (!status)
        status = make_from_rules(rules);
    options.from = rules;
    options.nfrom_rules = 0;
    int code = status ? cli_fail(verb, EXIT_USAGE, "--from-mesh %s: %s", from_mesh, rsd_error())
                      : cli_fail_status(verb, rsd_checkpoint_open(path, &options, checkpoint));
    rsd_rules_free(rules);
    return code;
}

int input_open(const char *verb, const char *path, bool quiet, rsd_checkpoint **checkpoint)
{
    if (!*path)
        return cli_fail(verb, EXIT_USAGE, "the path of the checkpoint is empty");
    if (input_heads && !input_options.names && !heads_are_used)
        return cli_fail(verb, EXIT_USAGE,
                        "--heads needs --names, or --preset of convert and split");
    rsd_open_options options = input_options;
    if (!options.names)
        options.nheads = options.nkv_heads = 0;
    int code = cli_fail_status(verb, urls_open_storage(path, &options.storage));
    if (!code)
        code = from_mesh ? open_ranks(verb, path, options, checkpoint)
                         : cli_fail_status(verb, rsd_checkpoint_open(path, &options, checkpoint));
    for (int64_t i = 0; !code && !quiet && rsd_checkpoint_note(*checkpoint, i); i++)
        cli_note(verb, "%s: %s", path, rsd_checkpoint_note(*checkpoint, i));
    return code;
}

rsd_tensor_info input_tensor(const rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_status status = rsd_checkpoint_tensor(checkpoint, index, &tensor);
    if (status)
        exit(cli_fail_status(NULL, status));
    return tensor;
}

rsd_extent input_extent(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t box)
{
    rsd_extent extent = {.struct_nbytes = sizeof extent};
    rsd_status status = rsd_checkpoint_box(checkpoint, tensor, box, &extent);
    if (status)
        exit(cli_fail_status(NULL, status));
    return extent;
}

/* Marks the files that have an extent which is needed. */
static bool *mark_files(const rsd_checkpoint *checkpoint, input_needs *needs, const void *context)
{
    size_t nfiles = (size_t)rsd_checkpoint_nfiles(checkpoint);
    bool *marks = cli_need_memory(calloc(nfiles + 1, 1));
    memset(marks, !needs, nfiles);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint) && needs; i++) {
        rsd_tensor_info tensor = input_tensor(checkpoint, i);
        for (int64_t k = 0; k < tensor.nboxes; k++) {
            rsd_extent extent = input_extent(checkpoint, i, k);
            if (extent.file >= 0 && needs(context, &tensor, &extent))
                marks[extent.file] = true;
        }
    }
    return marks;
}

/* Returns the directory of the files, with a slash at its end. */
static char *find_input_directory(const char *path)
{
    struct stat about;
    const char *slash = strrchr(path, '/');
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode))
        return cli_text("%s%s", path, slash && !slash[1] ? "" : "/");
    return cli_text("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
}

int input_check_files(const char *verb, const char *path, const rsd_checkpoint *checkpoint,
                      input_needs *needs, const void *context)
{
    if (urls_is_url(path)) /* a request for each would cost more than a late error */
        return EXIT_YES;
    bool *marks = mark_files(checkpoint, needs, context);
    char *directory = find_input_directory(path);
    struct name_sample bad = {0};
    int error = 0;
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(checkpoint); i++) {
        char *file = cli_text("%s%s", directory, rsd_checkpoint_file(checkpoint, i));
        if (marks[i] && access(file, R_OK) != 0) {
            error = errno;
            name_sample_add(&bad, file);
        }
    }
    int code = !bad.n ? EXIT_YES : error == ENOENT ? EXIT_UNREADABLE : EXIT_IO;
    if (bad.n == 1)
        cli_fail(verb, code, "%s: %s", bad.names, strerror(error));
    else if (bad.n > 1)
        cli_fail(verb, code, "%lld files cannot be read: %s: %s", (long long)bad.n, bad.names,
                 strerror(error));
    free(marks);
    return code;
}
