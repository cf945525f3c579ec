/* input.c - opens checkpoints, and checks that their files exist before the work starts. */
#include "cli.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static rsd_open_options input_options = {.struct_nbytes = sizeof input_options};

void input_follow_links(void)
{
    input_options.follow_links = 1;
}

bool input_follows_links(void)
{
    return input_options.follow_links != 0;
}

static const char **input_rules; /* of --from */
static const char *input_mesh;   /* of --from-mesh */
static char *invalid_input;      /* what is wrong with an option; NULL: nothing */

static const char *input_heads; /* of --heads */
static bool heads_are_used;     /* by rules; else they are for --names only */

/* Takes the attention heads, and those of keys and values. */
static void take_heads(const char *value)
{
    long long heads = 0, keys = 0;
    int end = 0;
    bool both = sscanf(value, "%lld,%lld%n", &heads, &keys, &end) == 2 && !value[end];
    if (!both && cli_parse_number(value, 1, INT_MAX, &heads))
        keys = heads;
    if (heads < 1 || keys < 1 || heads > INT_MAX || keys > heads)
        invalid_input = cli_new_text("--heads %s must be N or N,K, such as 32,8", value);
    input_heads = value;
    input_options.nheads = heads;
    input_options.nkv_heads = keys;
}

const char *input_use_heads(void)
{
    heads_are_used = true;
    return input_heads;
}

/* Takes an option with a value. An invalid value is reported when a checkpoint is opened. */
static void take_input_value(int option, const char *value)
{
    long long number = 0;
    input_options.model_dtype = input_options.model_dtype || option == INPUT_DTYPE;
    if (option == INPUT_DTYPE && strcmp(value, "model") != 0)
        invalid_input = cli_new_text("--dtype %s must be model", value);
    if (option == INPUT_VOCAB_SIZE && !cli_parse_number(value, 1, LLONG_MAX, &number))
        invalid_input = cli_new_text("--vocab-size %s must be a number of at least 1", value);
    if (option == INPUT_VOCAB_SIZE)
        input_options.vocab_size = number;
    if (option == INPUT_HEADS)
        take_heads(value);
    if (option == INPUT_FROM) {
        size_t n = (size_t)input_options.nfrom_rules++;
        input_rules = cli_need_memory(realloc(input_rules, (n + 1) * sizeof *input_rules));
        input_rules[n] = value;
        input_options.from_rules = input_rules;
    }
}

bool input_take_option(int option)
{
    switch (option) {
    case INPUT_AS_IS:
        input_options.as_is = 1;
        return true;
    case INPUT_TAKE_RANK_0:
        input_options.take_rank_0 = 1;
        return true;
    case INPUT_UNSTACK:
        input_options.unstack = 1;
        return true;
    case INPUT_FROM_MESH:
        input_mesh = optarg;
        return true;
    case INPUT_NAMES:
        input_options.names = optarg;
        return true;
    case INPUT_DTYPE:
    case INPUT_HEADS:
    case INPUT_VOCAB_SIZE:
    case INPUT_FROM:
        take_input_value(option, optarg);
        return true;
    default:
        return false;
    }
}

/* Makes the rules of --from-mesh: tensors that no --from matches are copies. */
static rsd_status make_from_rules(rsd_rules *rules)
{
    rsd_mesh *mesh;
    rsd_status status = rsd_mesh_parse(input_mesh, &mesh);
    if (status)
        return status;
    char *copies = cli_new_text("R");
    for (int32_t a = 1; a < rsd_mesh_naxes(mesh); a++) {
        char *more = cli_new_text("%s,R", copies);
        free(copies);
        copies = more;
    }
    status = rsd_rules_set_mesh(rules, mesh);
    for (int64_t i = 0; i < input_options.nfrom_rules && !status; i++)
        status = rsd_rules_add(rules, RSD_RULE_PLACE, input_rules[i]);
    if (!status)
        status = rsd_rules_add(rules, RSD_RULE_DEFAULT, copies);
    free(copies);
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
    int code = status ? cli_fail(verb, EXIT_USAGE, "--from-mesh %s: %s", input_mesh, rsd_error())
                      : cli_fail_status(verb, rsd_checkpoint_open(path, &options, checkpoint));
    rsd_rules_free(rules);
    return code;
}

int input_open(const char *verb, const char *path, bool quiet, rsd_checkpoint **checkpoint)
{
    if (invalid_input)
        return cli_fail(verb, EXIT_USAGE, "%s", invalid_input);
    if (input_heads && !input_options.names && !heads_are_used)
        return cli_fail(verb, EXIT_USAGE,
                        "--heads needs --names, or --preset of convert and split");
    rsd_open_options options = input_options;
    if (!options.names)
        options.nheads = options.nkv_heads = 0;
    int code = cli_fail_status(verb, urls_open_storage(path, &options.storage));
    if (!code)
        code = input_mesh ? open_ranks(verb, path, options, checkpoint)
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
        return cli_new_text("%s%s", path, slash && !slash[1] ? "" : "/");
    return cli_new_text("%.*s", slash ? (int)(slash - path) + 1 : 0, path);
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
        char *file = cli_new_text("%s%s", directory, rsd_checkpoint_file(checkpoint, i));
        if (marks[i] && access(file, R_OK) != 0) {
            error = errno;
            name_sample_add(&bad, file);
        }
        free(file);
    }
    int code = !bad.n ? EXIT_YES : error == ENOENT ? EXIT_UNREADABLE : EXIT_IO;
    if (bad.n == 1)
        cli_fail(verb, code, "%s: %s", bad.names, strerror(error));
    else if (bad.n > 1)
        cli_fail(verb, code, "%lld files cannot be read: %s: %s", (long long)bad.n, bad.names,
                 strerror(error));
    free(bad.names);
    free(directory);
    free(marks);
    return code;
}
