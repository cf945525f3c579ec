/* cmd_convert.c - the options of `reshard convert`, `merge`, `split`, and `plan` of a checkpoint. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const char convert_help[] =
    "usage: reshard convert [options] IN OUT\n"
    "\n"
    "Write a checkpoint in another format or layout. The first rule that matches a tensor "
    "applies;\n"
    "optimizer state follows its parameter. Without --mesh, tensors stay whole, and a note names "
    "the\n"
    "presets that fit.\n"
    "\n"
    "  reshard convert ckpt/ ckpt8/ --format dcp --mesh 8 --place '.*=S(0)'\n"
    "  reshard convert hf/ tp4/ --format dcp --mesh tp=4 --preset llama-tp\n"
    "\n";

static const char merge_help[] =
    "usage: reshard merge [options] IN OUT\n"
    "\n"
    "Write whole tensors as safetensors that transformers loads. OUT is a directory, or one file "
    "if\n"
    "it ends in .safetensors. Only the model of what a trainer wrote is written, under the names "
    "that\n"
    "it has without the trainer: below 'model', 'state_dict' or 'module', without '_orig_mod.'.\n"
    "Configs and tokenizer files are copied.\n"
    "\n"
    "  reshard merge step-1000/ hf/ --max-shard-size 5GB\n"
    "\n";

static const char split_help[] =
    "usage: reshard split [options] IN OUT\n"
    "\n"
    "Write one safetensors file per rank, with every tensor or shard that the rank needs.\n"
    "Replicated tensors are in every file. Configs and tokenizer files are copied.\n"
    "\n"
    "  reshard split hf/ tp4/ --mesh tp=4 --preset llama-tp\n"
    "\n";

/* The functions below store the value of an option. They return GO_ON, or the exit code after a message. */

static int take_format(const struct given_option *given)
{
    static const rsd_format formats[] = {RSD_FORMAT_DCP, RSD_FORMAT_SAFETENSORS,
                                         RSD_FORMAT_TORCH_SAVE, RSD_FORMAT_FSDP};
    struct conversion *request = given->request;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcasecmp(given->value, rsd_format_name(formats[i])) == 0) {
            request->convert.format = formats[i];
            return GO_ON;
        }
    return cli_fail(given->verb, EXIT_USAGE,
                    "--format %s must be dcp, safetensors, torch.save or fsdp", given->value);
}

static int take_reflink(const struct given_option *given)
{
    static const char *const names[] = {[RSD_REFLINK_AUTO] = "auto",
                                        [RSD_REFLINK_ALWAYS] = "always",
                                        [RSD_REFLINK_NEVER] = "never"};
    struct conversion *request = given->request;
    for (int i = 0; i < 3; i++)
        if (strcmp(given->value, names[i]) == 0) {
            request->convert.reflink = (rsd_reflink)i;
            return GO_ON;
        }
    return cli_fail(given->verb, EXIT_USAGE, "--reflink %s must be auto, always or never",
                    given->value);
}

static int take_compression(const struct given_option *given)
{
    struct conversion *request = given->request;
    long long level = 3;
    if (strcmp(given->value, "none") == 0)
        level = 0;
    else if (strcmp(given->value, "zstd") != 0 &&
             (strncmp(given->value, "zstd:", 5) != 0 ||
              !cli_parse_number(given->value + 5, 1, 19, &level)))
        return cli_fail(given->verb, EXIT_USAGE,
                        "--compress %s must be none, zstd, or zstd:1 to zstd:19", given->value);
    request->convert.compress = (int32_t)level;
    return GO_ON;
}

/* Returns GO_ON, or the exit code for a rule that was refused. */
static int check_rule(const char *verb, rsd_status status)
{
    if (status == RSD_ENOMEM)
        return cli_fail_status(verb, status);
    return status ? cli_fail(verb, EXIT_USAGE, "%s", rsd_error()) : GO_ON;
}

/* Adds a rule; the number of the row is its kind. */
static int add_rule(const struct given_option *given)
{
    const struct conversion *request = given->request;
    return check_rule(given->verb, rsd_rules_add(request->rules, (rsd_rule)given->number,
                                                 given->value ? given->value : ""));
}

static int add_placement(const struct given_option *given)
{
    ((struct conversion *)given->request)->needs_mesh = given->name;
    return add_rule(given);
}

static int add_rules_file(const struct given_option *given)
{
    struct conversion *request = given->request;
    request->needs_mesh = given->name;
    return check_rule(given->verb, rsd_rules_add_file(request->rules, given->value));
}

static int set_preset(const struct given_option *given)
{
    struct conversion *request = given->request;
    request->needs_mesh = given->name;
    request->has_preset = true;
    return check_rule(given->verb, rsd_rules_set_preset(request->rules, given->value));
}

static int replicate_kv_heads(const struct given_option *given)
{
    const struct conversion *request = given->request;
    return check_rule(given->verb, rsd_rules_add(request->rules, RSD_RULE_KV_HEADS, "replicate"));
}

static int take_cast(const struct given_option *given)
{
    struct conversion *request = given->request;
    rsd_dtype dtype;
    if (rsd_dtype_parse(given->value, &dtype) ||
        (dtype != RSD_BF16 && dtype != RSD_F16 && dtype != RSD_F32 && dtype != RSD_F64))
        return cli_fail(given->verb, EXIT_USAGE, "--cast %s must be bf16, f16, f32 or f64",
                        given->value);
    request->cast = dtype;
    return add_rule(given);
}

static int take_mesh(const struct given_option *given)
{
    struct conversion *request = given->request;
    rsd_mesh *mesh = NULL;
    if (rsd_mesh_parse(given->value, &mesh))
        return cli_fail(given->verb, EXIT_USAGE, "--mesh '%s': %s", given->value, rsd_error());
    request->has_mesh = true;
    int code = check_rule(given->verb, rsd_rules_set_mesh(request->rules, mesh));
    rsd_mesh_free(mesh);
    return code;
}

/* ---- options ---- */

#define FLAG(name, help, field, verbs)                                                             \
    OPTION(name, NULL, help, options_set_flag, offsetof(struct conversion, field), verbs)
#define ONE(name, help, field, verbs)                                                              \
    OPTION(name, NULL, help, options_set_one, offsetof(struct conversion, convert.field), verbs)
#define TEXT(name, value, help, field, verbs)                                                      \
    OPTION(name, value, help, options_set_text, offsetof(struct conversion, field), verbs)
#define SIZE(name, help, field, verbs)                                                             \
    OPTION(name, "SIZE", help, options_set_size, offsetof(struct conversion, field), verbs)

/* Bits of verbs. */
enum {
    OF_CONVERT = 1 << CONVERT,
    OF_MERGE = 1 << MERGE,
    OF_SPLIT = 1 << SPLIT,
    OF_PLAN = 1 << PLAN,
    OF_LAYOUTS = OF_CONVERT | OF_SPLIT | OF_PLAN
};

static const struct cli_option conversion_options[] = {
    FLAG("ranks", "Add what each rank of MESH holds and reads: bytes and files", ranks, OF_PLAN),
    TEXT("svg", "FILE", "Write a picture of what each rank reads of each file as SVG", pages.svg,
         OF_PLAN),
    TEXT("html", "FILE", "Write that picture as an HTML page", pages.html, OF_PLAN),
    OPTION("format", "FORMAT",
           "Write dcp, safetensors, torch.save or fsdp. Default: by OUT,\n"
           "else as IN",
           take_format, 0, OF_CONVERT | OF_PLAN),
    OPTION("mesh", "MESH", "Write for the ranks of MESH: 8, 2x4 or dp=2,tp=4", take_mesh, 0,
           OF_LAYOUTS),
    OPTION("to", "MESH", NULL, take_mesh, 0, OF_LAYOUTS), /* else it is short for --torch-places */
    OPTION("place", "'RE=PLACES'",
           "Shard tensors whose whole name matches RE: one placement per mesh\n"
           "axis (S(0), S(1), R, colwise, rowwise, S(0;32,8,8)), or the axes\n"
           "of each dim ([tp, -]). May be repeated",
           add_placement, RSD_RULE_PLACE, OF_LAYOUTS),
    OPTION("rules", "FILE", "Read such rules from FILE, one 'RE PLACES' per line", add_rules_file,
           0, OF_LAYOUTS),
    OPTION("preset", "NAME",
           "Apply built-in rules: fsdp, hsdp, llama-tp, moe-tp, qwen-tp,\n"
           "gpt2-tp, bert-tp or replicate; fsdp+llama-tp and so on for both",
           set_preset, 0, OF_LAYOUTS),
    OPTION("replicate-kv-heads", NULL,
           "Let ranks share a KV head, if there are more ranks than KV heads", replicate_kv_heads,
           0, OF_LAYOUTS),
    OPTION("default", "PLACES", "Shard tensors that no rule matches. Default: report an error",
           add_placement, RSD_RULE_DEFAULT, OF_LAYOUTS),
    OPTION("compress", "zstd[:N]", "Compress DCP files, N from 1 to 19. Default: none; N is 3",
           take_compression, 0, OF_CONVERT | OF_PLAN),
    SIZE("max-shard-size", "Limit files of whole tensors to SIZE. Default: one file",
         convert.max_shard_nbytes, OF_CONVERT | OF_PLAN),
    SIZE("max-shard-size", "Limit files to SIZE. Default: 5GB", convert.max_shard_nbytes, OF_MERGE),
    FLAG("all", "Write every tensor under its own name", all, OF_MERGE),
    FLAG("everything", NULL, all, OF_MERGE), /* Python's word */
    TEXT("config-from", "DIR",
         "Copy configs, tokenizer files and README from DIR, with its\n"
         "subdirectories. Default: IN, IN/huggingface, or beside IN",
         config_from, OF_MERGE | OF_SPLIT),
    OPTION("only", "REGEX", "Select tensors whose name contains a match. May be repeated", add_rule,
           RSD_RULE_ONLY, 0),
    OPTION("exclude", "REGEX", "Leave out tensors whose name contains a match. May be repeated",
           add_rule, RSD_RULE_EXCLUDE, 0),
    OPTION("rename", "'s/A/B/'",
           "Replace A by B in names; \\1, & and s/A/B/g as in sed. May be repeated", add_rule,
           RSD_RULE_RENAME, 0),
    OPTION("strip-prefix", "TEXT", "Remove TEXT from the start of names. May be repeated", add_rule,
           RSD_RULE_STRIP_PREFIX, 0),
    OPTION("cast", "DTYPE", "Convert floating-point tensors to bf16, f16, f32 or f64", take_cast,
           RSD_RULE_CAST, 0),
    OPTION_TABLE(input_option_rows),
    SIZE("max-memory", "Limit buffers to SIZE. Default: 256MB", io.max_nbytes, 0),
    SIZE("max-nbytes", NULL, io.max_nbytes, 0), /* Python's word */
    OPTION("threads", "N", "Use N threads. Default: one per core, at most 16", options_set_threads,
           offsetof(struct conversion, threads), 0),
    ONE("dry-run", "Report what would be done; write nothing", dry, 0),
    FLAG("estimate", "With --dry-run and plan: measure both ends, and estimate the time", estimate,
         0),
    ONE("resume", "Continue a run that was stopped", resume, 0),
    FLAG("verify", "Read the result again and compare it with IN", verify, 0),
    ONE("force", "Replace an existing checkpoint; keep other files of its directory", overwrite, 0),
    ONE("overwrite", NULL, overwrite, 0), /* Python's word */
    OPTION("reflink", "WHEN", "Share extents with IN: auto, always or never. Default: auto",
           take_reflink, 0, 0),
    ONE("unchecked", "Do not read shared data of safetensors output to check its CRCs", unchecked,
        0),
    ONE("torch-places", "Place data as torch does, not at multiples of 4096 bytes", torch_places,
        0),
    FLAG("json", "Print the report as one JSON object", json, 0),
    {"quiet", NULL, "Print no progress, notes or report", options_set_flag,
     offsetof(struct conversion, quiet), 0, 'q', NULL},
    {0},
};

#define CONVERSION_VERB(verb, text, verb_bit)                                                      \
    .name = verb, .help = text, .help_column = 24, .bit = verb_bit, .options = conversion_options

static const struct cli_verb convert_verb = {CONVERSION_VERB("convert", convert_help, OF_CONVERT)};
static const struct cli_verb merge_verb = {CONVERSION_VERB("merge", merge_help, OF_MERGE)};
static const struct cli_verb split_verb = {CONVERSION_VERB("split", split_help, OF_SPLIT)};
const struct cli_verb plan_of_checkpoint = {
    CONVERSION_VERB("plan", "Options with a CHECKPOINT:\n", OF_PLAN), .other_use = &plan_of_problem,
    .other_needs = "a PROBLEM, not a checkpoint; see reshard plan --help", .is_second_use = true};

static const struct cli_verb *const conversion_verbs[] = {
    [CONVERT] = &convert_verb,
    [MERGE] = &merge_verb,
    [SPLIT] = &split_verb,
    [PLAN] = &plan_of_checkpoint,
};

/* Reads the command line into the request. Returns GO_ON or an exit code. */
static int read_conversion_options(int argc, char **argv, struct conversion *request)
{
    const char *verb = request->verb;
    int code = options_read(conversion_verbs[request->kind], argc, argv, request);
    if (code != GO_ON)
        return code;
    int least = request->kind == PLAN ? 1 : 2;
    if (argc - optind > 2)
        return cli_fail(verb, EXIT_USAGE, "unexpected argument '%s'; see reshard %s --help",
                        argv[optind + 2], verb);
    if (argc - optind < least)
        return cli_fail(verb, EXIT_USAGE, "%s; see reshard %s --help",
                        least == 1 ? "one checkpoint is needed" : "IN and OUT are needed", verb);
    request->in = argv[optind];
    request->out = argc - optind == 2 ? argv[optind + 1] : "OUT";
    if (request->needs_mesh && !request->has_mesh)
        return cli_fail(verb, EXIT_USAGE, "--%s needs --mesh", request->needs_mesh);
    if (request->estimate && request->kind != PLAN && !request->convert.dry)
        return cli_fail(verb, EXIT_USAGE, "--estimate needs --dry-run");
    if (request->kind == SPLIT && !request->has_mesh)
        return cli_fail(verb, EXIT_USAGE, "--mesh is needed, such as --mesh tp=4");
    const char *heads = request->has_preset ? input_use_heads() : NULL;
    if (heads)
        code = check_rule(verb, rsd_rules_add(request->rules, RSD_RULE_HEADS, heads));
    if (code == GO_ON && request->kind == MERGE && !request->all)
        code = check_rule(verb, rsd_rules_add(request->rules, RSD_RULE_MODEL, ""));
    return code;
}

/* Runs convert, merge, split or plan of a checkpoint. Returns the exit code. */
static int run_conversion_verb(enum conversion_kind kind, int argc, char **argv)
{
    struct conversion request = {
        .kind = kind, .verb = conversion_verbs[kind]->name, .threads = cli_default_threads()};
    request.convert.struct_nbytes = sizeof request.convert;
    int code = cli_fail_status(request.verb, rsd_rules_new(NULL, &request.rules));
    if (!code)
        code = read_conversion_options(argc, argv, &request);
    if (code == GO_ON)
        code = conversion_run(&request);
    rsd_rules_free(request.rules);
    free(request.side_files);
    return code;
}

int command_convert(int argc, char **argv)
{
    return run_conversion_verb(CONVERT, argc, argv);
}

int command_merge(int argc, char **argv)
{
    return run_conversion_verb(MERGE, argc, argv);
}

int command_split(int argc, char **argv)
{
    return run_conversion_verb(SPLIT, argc, argv);
}

int command_plan_checkpoint(int argc, char **argv)
{
    return run_conversion_verb(PLAN, argc, argv);
}
