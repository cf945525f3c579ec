/* cmd_convert.c - `reshard convert`, `merge`, `split`, and `plan` of a checkpoint: one conversion, asked for
 * in four ways. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define COMMON_HELP                                                                                \
    "  --only REGEX          only tensors in whose names this is found (may be repeated)\n"        \
    "  --exclude REGEX       not these\n"                                                          \
    "  --rename 's/A/B/'     what they are called then (may be repeated, \\1 and & work)\n"        \
    "  --strip-prefix TEXT   taken off the names\n"                                                \
    "  --cast DTYPE          floats become bf16, f16, f32 or f64, rounded as torch does\n"         \
    "  --max-memory SIZE     for buffers (256MiB)\n"                                               \
    "  --threads N           as many as there are cores, at most 16\n"                             \
    "  --dry-run             say what would be done, write nothing\n"                              \
    "  --resume              go on from what a stopped run left\n"                                 \
    "  --verify              read the result again, and compare it with the source\n"              \
    "  --force               replace a checkpoint that is there; other files there are kept\n"     \
    "  --json                the report as one JSON object\n"                                      \
    "  -q, --quiet           no progress, no notes\n"                                              \
    "  -h, --help\n"

#define TARGET_HELP                                                                                \
    "  --mesh MESH           8, 2x4 or dp=2,tp=4\n"                                                \
    "  --place 'RE=PLACES'   how tensors of this name are cut, one placement per mesh axis:\n"     \
    "                        S(0), S(1), R, colwise, rowwise, S(0;32,8,8), or [tp, -]\n"           \
    "  --rules FILE          the same, one `RE PLACES` a line, # for comments\n"                   \
    "  --preset NAME         fsdp, hsdp, llama-tp or replicate\n"                                  \
    "  --default PLACES      for what no rule matches; without it that is an error\n"

static const char convert_help[] =
    "usage: reshard convert [options] IN OUT\n"
    "\n"
    "Writes a checkpoint in another format or layout. Names match as a whole, the first rule "
    "wins;\n"
    "optimizer state goes with its parameter. Without a mesh the tensors stay whole.\n"
    "\n"
    "  reshard convert ckpt/ ckpt8/ --format dcp --mesh 8 --place '.*=S(0)'\n"
    "  reshard convert hf/ tp4/ --format dcp --mesh tp=4 --preset llama-tp\n"
    "\n"
    "  --format FORMAT       dcp or safetensors; else as OUT's name or IN's format "
    "say\n" TARGET_HELP
    "  --compress zstd[:N]   dcp: compressed, as torch's ZStandard extension does\n"
    "  --max-shard-size SIZE safetensors of whole tensors: of one file\n" COMMON_HELP;

static const char merge_help[] =
    "usage: reshard merge [options] IN OUT\n"
    "\n"
    "Writes whole tensors as safetensors that transformers loads: OUT is a folder, or one file if\n"
    "it ends in .safetensors. Of a dict with a part `model`, only that is taken, without its "
    "prefix.\n"
    "config.json, tokenizer and the like are copied along.\n"
    "\n"
    "  reshard merge step-1000/ hf/ --max-shard-size 5GB\n"
    "\n"
    "  --max-shard-size SIZE of one file (5GB)\n"
    "  --all                 every tensor, under its own name\n"
    "  --config-from DIR     side files from there instead of from IN\n" COMMON_HELP;

static const char split_help[] =
    "usage: reshard split [options] IN OUT\n"
    "\n"
    "Writes one safetensors file a rank, each with everything that rank needs; replicas are\n"
    "repeated.\n"
    "\n"
    "  reshard split hf/ tp4/ --mesh tp=4 --preset llama-tp\n"
    "\n" TARGET_HELP COMMON_HELP;

static const char plan_help[] =
    "usage: reshard plan [options] IN\n"
    "\n"
    "Says what `reshard convert IN OUT` with the same options would do: files, bytes, memory. "
    "Reads\n"
    "no byte of any tensor.\n"
    "\n"
    "  --format FORMAT, --compress zstd[:N], --max-shard-size SIZE\n" TARGET_HELP COMMON_HELP;

static const char *const verb_names[] = {"convert", "merge", "split", "plan"};

/* ---- options ---- */

enum {
    FORMAT = 256,
    MESH,
    PLACE,
    RULES,
    PRESET,
    DEFAULT,
    COMPRESS,
    MAX_SHARD_SIZE,
    ONLY,
    EXCLUDE,
    RENAME,
    STRIP_PREFIX,
    CAST,
    MAX_MEMORY,
    THREADS,
    DRY_RUN,
    RESUME,
    VERIFY,
    FORCE,
    JSON,
    ALL,
    CONFIG_FROM
};

static const struct option options[] = {
    {"format", required_argument, NULL, FORMAT},
    {"mesh", required_argument, NULL, MESH},
    {"place", required_argument, NULL, PLACE},
    {"rules", required_argument, NULL, RULES},
    {"preset", required_argument, NULL, PRESET},
    {"default", required_argument, NULL, DEFAULT},
    {"compress", required_argument, NULL, COMPRESS},
    {"max-shard-size", required_argument, NULL, MAX_SHARD_SIZE},
    {"only", required_argument, NULL, ONLY},
    {"exclude", required_argument, NULL, EXCLUDE},
    {"rename", required_argument, NULL, RENAME},
    {"strip-prefix", required_argument, NULL, STRIP_PREFIX},
    {"cast", required_argument, NULL, CAST},
    {"max-memory", required_argument, NULL, MAX_MEMORY},
    {"threads", required_argument, NULL, THREADS},
    {"dry-run", no_argument, NULL, DRY_RUN},
    {"resume", no_argument, NULL, RESUME},
    {"verify", no_argument, NULL, VERIFY},
    {"force", no_argument, NULL, FORCE},
    {"json", no_argument, NULL, JSON},
    {"all", no_argument, NULL, ALL},
    {"config-from", required_argument, NULL, CONFIG_FROM},
    {"quiet", no_argument, NULL, 'q'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* Which verbs an option is of; 0: all. */
static unsigned verbs_of(int option)
{
    switch (option) {
    case FORMAT:
    case COMPRESS:
        return 1u << CONVERT | 1u << PLAN;
    case MESH:
    case PLACE:
    case RULES:
    case PRESET:
    case DEFAULT:
        return 1u << CONVERT | 1u << SPLIT | 1u << PLAN;
    case MAX_SHARD_SIZE:
        return 1u << CONVERT | 1u << MERGE | 1u << PLAN;
    case ALL:
    case CONFIG_FROM:
        return 1u << MERGE;
    default:
        return 0;
    }
}

static bool set_format(struct conversion *request, const char *text)
{
    if (strcasecmp(text, "dcp") == 0)
        request->convert.format = RSD_FORMAT_DCP;
    else if (strcasecmp(text, "safetensors") == 0)
        request->convert.format = RSD_FORMAT_SAFETENSORS;
    else
        complain(request->verb, EXIT_USAGE, "--format %s: dcp or safetensors", text);
    return request->convert.format != 0;
}

static bool set_compress(struct conversion *request, const char *text)
{
    long long level = 3;
    bool fine = strcmp(text, "none") == 0 || strcmp(text, "zstd") == 0 ||
                (strncmp(text, "zstd:", 5) == 0 && parse_number(text + 5, 1, 19, &level));
    if (!fine)
        complain(request->verb, EXIT_USAGE, "--compress %s: none, zstd or zstd:1 to zstd:19", text);
    request->convert.compress = strcmp(text, "none") == 0 ? 0 : (int32_t)level;
    return fine;
}

static bool set_size(const struct conversion *request, const char *option, const char *text,
                     int64_t *nbytes)
{
    if (parse_size(text, nbytes))
        return true;
    complain(request->verb, EXIT_USAGE, "%s %s: a size such as 5GB or 256MiB is needed", option,
             text);
    return false;
}

/* Whether a rule was taken; says why not. */
static bool take_rule(const struct conversion *request, rsd_status status)
{
    if (status)
        complain(request->verb, EXIT_USAGE, "%s", rsd_error());
    return status == RSD_OK;
}

static bool take_cast(struct conversion *request, const char *text)
{
    rsd_dtype dtype;
    bool fine = rsd_dtype_parse(text, &dtype) == RSD_OK &&
                (dtype == RSD_BF16 || dtype == RSD_F16 || dtype == RSD_F32 || dtype == RSD_F64);
    if (!fine)
        complain(request->verb, EXIT_USAGE, "--cast %s: bf16, f16, f32 or f64", text);
    return fine && take_rule(request, rsd_rules_add(request->rules, RSD_RULE_CAST, text));
}

static bool take_mesh(struct conversion *request, const char *text)
{
    rsd_mesh *mesh = NULL;
    if (rsd_mesh_parse(text, &mesh)) {
        complain(request->verb, EXIT_USAGE, "--mesh '%s': %s", text, rsd_error());
        return false;
    }
    request->has_mesh = take_rule(request, rsd_rules_set_mesh(request->rules, mesh));
    rsd_mesh_free(mesh);
    return request->has_mesh;
}

static bool take_option(struct conversion *request, int option, const char *value)
{
    rsd_rules *rules = request->rules;
    switch (option) {
    case FORMAT:
        return set_format(request, value);
    case MESH:
        return take_mesh(request, value);
    case PLACE:
        request->needs_mesh = "--place";
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_PLACE, value));
    case RULES:
        request->needs_mesh = "--rules";
        return take_rule(request, rsd_rules_add_file(rules, value));
    case PRESET:
        request->needs_mesh = "--preset";
        return take_rule(request, rsd_rules_set_preset(rules, value));
    case DEFAULT:
        request->needs_mesh = "--default";
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_DEFAULT, value));
    case ONLY:
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_ONLY, value));
    case EXCLUDE:
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_EXCLUDE, value));
    case RENAME:
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_RENAME, value));
    case STRIP_PREFIX:
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_STRIP_PREFIX, value));
    case CAST:
        return take_cast(request, value);
    case COMPRESS:
        return set_compress(request, value);
    case MAX_SHARD_SIZE:
        return set_size(request, "--max-shard-size", value, &request->convert.max_shard_nbytes);
    case MAX_MEMORY:
        return set_size(request, "--max-memory", value, &request->convert.max_nbytes);
    case THREADS:
        if (parse_number(value, 1, 4096, &request->threads))
            return true;
        complain(request->verb, EXIT_USAGE, "--threads %s: a number from 1 to 4096", value);
        return false;
    case CONFIG_FROM:
        request->config_from = value;
        return true;
    case DRY_RUN:
        request->convert.dry = 1;
        return true;
    case RESUME:
        request->convert.resume = 1;
        return true;
    case FORCE:
        request->convert.overwrite = 1;
        return true;
    case VERIFY:
        request->verify = true;
        return true;
    case JSON:
        request->json = true;
        return true;
    case ALL:
        request->all = true;
        return true;
    default:
        request->quiet = true;
        return true;
    }
}

static int read_options(int argc, char **argv, struct conversion *request)
{
    static const char *const helps[] = {convert_help, merge_help, split_help, plan_help};
    const char *verb = verb_names[request->kind];
    opterr = 0;
    for (int option, index = 0; (option = getopt_long(argc, argv, ":hq", options, &index)) != -1;) {
        if (option == 'h')
            return show_help(helps[request->kind]);
        if (option == '?' || option == ':')
            return complain_option(verb, option, argv);
        if (verbs_of(option) && !(verbs_of(option) & 1u << request->kind))
            return complain(verb, EXIT_USAGE, "--%s is not of this verb; see reshard %s --help",
                            options[index].name, verb);
        if (!take_option(request, option, optarg))
            return EXIT_USAGE;
    }
    int needed = request->kind == PLAN ? 1 : 2;
    if (argc - optind != needed)
        return complain(verb, EXIT_USAGE, "%s; see reshard %s --help",
                        needed == 1 ? "one checkpoint is needed" : "IN and OUT are needed", verb);
    request->in = argv[optind];
    request->out = needed == 2 ? argv[optind + 1] : "OUT";
    return GO_ON;
}

static int command(enum conversion_verb kind, int argc, char **argv)
{
    struct conversion request = {
        .kind = kind, .verb = verb_names[kind], .threads = default_threads()};
    request.convert.struct_nbytes = sizeof request.convert;
    rsd_status status = rsd_rules_new(NULL, &request.rules);
    int code = status ? complain_status(request.verb, status) : read_options(argc, argv, &request);
    if (code == GO_ON && request.needs_mesh && !request.has_mesh)
        code = complain(request.verb, EXIT_USAGE, "%s needs --mesh", request.needs_mesh);
    if (code == GO_ON && kind == MERGE && !request.all &&
        !take_rule(&request, rsd_rules_add(request.rules, RSD_RULE_PART, "model")))
        code = EXIT_IO;
    if (code == GO_ON)
        code = conversion_run(&request);
    rsd_rules_free(request.rules);
    for (size_t i = 0; i < request.nside_files; i++)
        free(request.side_files[i]);
    free(request.side_files);
    return code;
}

int command_convert(int argc, char **argv)
{
    return command(CONVERT, argc, argv);
}

int command_merge(int argc, char **argv)
{
    return command(MERGE, argc, argv);
}

int command_split(int argc, char **argv)
{
    return command(SPLIT, argc, argv);
}

int command_plan_checkpoint(int argc, char **argv)
{
    return command(PLAN, argc, argv);
}
