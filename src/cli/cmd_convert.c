/* cmd_convert.c - the options of `reshard convert`, `merge`, `split`, and `plan` of a checkpoint. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define COMMON_HELP                                                                                \
    "  --only REGEX          Select tensors whose name contains a match. May be repeated\n"        \
    "  --exclude REGEX       Leave out tensors whose name contains a match. May be repeated\n"     \
    "  --rename 's/A/B/'     Replace A by B in names; \\1, & and s/A/B/g as in sed. May be "       \
    "repeated\n"                                                                                   \
    "  --strip-prefix TEXT   Remove TEXT from the start of names. May be repeated\n"               \
    "  --cast DTYPE          Convert floating-point tensors to bf16, f16, f32 or "                 \
    "f64\n" INPUT_HELP(                                                                            \
        "        ") "  --max-memory SIZE     Limit buffers to SIZE. Default: 256MB\n"              \
                    "  --threads N           Use N threads. Default: one per core, at most 16\n"   \
                    "  --dry-run             Report what would be done; write nothing\n"           \
                    "  --estimate            With --dry-run and plan: measure both ends, and "     \
                    "estimate the time\n"                                                          \
                    "  --resume              Continue a run that was stopped\n"                    \
                    "  --verify              Read the result again and compare it with IN\n"       \
                    "  --force               Replace an existing checkpoint; keep other files "    \
                    "of its directory\n"                                                           \
                    "  --reflink WHEN        Share extents with IN: auto, always or never. "       \
                    "Default: auto\n"                                                              \
                    "  --unchecked           Do not read shared data of safetensors output to "    \
                    "check its CRCs\n"                                                             \
                    "  --torch-places        Place data as torch does, not at multiples of "       \
                    "4096 bytes\n"                                                                 \
                    "  --json                Print the report as one JSON object\n"                \
                    "  -q, --quiet           Print no progress, notes or report\n"                 \
                    "  -h, --help            Print this help\n"

#define TARGET_HELP                                                                                \
    "  --mesh MESH           Write for the ranks of MESH: 8, 2x4 or dp=2,tp=4\n"                   \
    "  --place 'RE=PLACES'   Shard tensors whose whole name matches RE: one placement per mesh\n"  \
    "                        axis (S(0), S(1), R, colwise, rowwise, S(0;32,8,8)), or the axes\n"   \
    "                        of each dim ([tp, -]). May be repeated\n"                             \
    "  --rules FILE          Read such rules from FILE, one 'RE PLACES' per line\n"                \
    "  --preset NAME         Apply built-in rules: fsdp, hsdp, llama-tp, moe-tp, qwen-tp,\n"       \
    "                        gpt2-tp, bert-tp or replicate; fsdp+llama-tp and so on for both\n"    \
    "  --replicate-kv-heads  Let ranks share a KV head, if there are more ranks than KV heads\n"   \
    "  --default PLACES      Shard tensors that no rule matches. Default: report an error\n"

#define CONFIG_HELP                                                                                \
    "  --config-from DIR     Copy configs, tokenizer files and README from DIR, with its\n"        \
    "                        subdirectories. Default: IN, IN/huggingface, or beside IN\n"

#define FORMAT_HELP                                                                                \
    "  --format FORMAT       Write dcp, safetensors, torch.save or fsdp. Default: by OUT,\n"       \
    "                        else as IN\n"
#define COMPRESS_HELP                                                                              \
    "  --compress zstd[:N]   Compress DCP files, N from 1 to 19. Default: none; N is 3\n"
#define SHARD_SIZE_HELP                                                                            \
    "  --max-shard-size SIZE Limit files of whole tensors to SIZE. Default: one file\n"

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
    "\n" FORMAT_HELP TARGET_HELP COMPRESS_HELP SHARD_SIZE_HELP COMMON_HELP;

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
    "\n"
    "  --max-shard-size SIZE Limit files to SIZE. Default: 5GB\n"
    "  --all                 Write every tensor under its own name\n" CONFIG_HELP COMMON_HELP;

static const char split_help[] =
    "usage: reshard split [options] IN OUT\n"
    "\n"
    "Write one safetensors file per rank, with every tensor or shard that the rank needs.\n"
    "Replicated tensors are in every file. Configs and tokenizer files are copied.\n"
    "\n"
    "  reshard split hf/ tp4/ --mesh tp=4 --preset llama-tp\n"
    "\n" TARGET_HELP CONFIG_HELP COMMON_HELP;

static const char plan_help[] =
    "usage: reshard plan [options] 'PROBLEM'\n"
    "       reshard plan [options] CHECKPOINT [OUT]\n"
    "\n"
    "Report what a move between two layouts would do: bytes, messages, the traffic between ranks,\n"
    "and the lower bound. Nothing is moved. A PROBLEM names a tensor and two layouts, and a dtype\n"
    "that elements are converted to, if they are:\n"
    "\n"
    "  reshard plan 'f32[4096,4096] : 2x4:S0,S1 -> 8:S1'\n"
    "  reshard plan 'f32[4096,4096] : 2x4:S0,S1 -> bf16 8:S1'\n"
    "\n"
    "For a CHECKPOINT, report what 'reshard convert' would do with the same options: files, bytes\n"
    "and memory, and what each rank holds and reads. No tensor data is read:\n"
    "\n"
    "  reshard plan ckpt/ --format dcp --mesh 8 --preset fsdp --ranks\n"
    "\n"
    "Options with a PROBLEM:\n"
    "  --json                Print one JSON object\n"
    "  --pairs               Add the bytes between every pair of ranks\n"
    "  --ranks               Add the totals of every rank\n"
    "  --pieces              Print only the pieces, one JSON object per line\n"
    "  --rank N              With --pieces: print only what rank N sends or receives\n"
    "  --ranks-per-node N    Report bytes between nodes of N ranks each: 0 to N-1, and so on\n"
    "  --no-picture          Print no picture\n"
    "  --svg FILE            Write the picture to FILE as SVG\n"
    "  --html FILE           Write the picture to FILE as an HTML page that shows the numbers\n"
    "  -h, --help            Print this help\n"
    "\n";

static const char plan_checkpoint_help[] =
    "Options with a CHECKPOINT:\n"
    "  --ranks               Add what each rank of MESH holds and reads: bytes and files\n"
    "  --svg FILE            Write a picture of what each rank reads of each file as SVG\n"
    "  --html FILE           Write that picture as an HTML page\n" FORMAT_HELP TARGET_HELP
        COMPRESS_HELP SHARD_SIZE_HELP COMMON_HELP;

int cli_show_plan_help(void)
{
    cli_show_help(plan_help);
    return cli_show_help(plan_checkpoint_help);
}

static const char *const verb_names[] = {"convert", "merge", "split", "plan"};

/* ---- options ---- */

enum {
    FORMAT = 256,
    MESH,
    PLACE,
    RULES,
    PRESET,
    DEFAULT,
    REPLICATE_KV_HEADS,
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
    RANKS,
    ESTIMATE,
    SVG,
    HTML,
    CONFIG_FROM,
    REFLINK,
    UNCHECKED,
    TORCH_PLACES
};

const struct option conversion_options[] = {
    {"format", required_argument, NULL, FORMAT},
    {"mesh", required_argument, NULL, MESH},
    {"place", required_argument, NULL, PLACE},
    {"rules", required_argument, NULL, RULES},
    {"preset", required_argument, NULL, PRESET},
    {"default", required_argument, NULL, DEFAULT},
    {"replicate-kv-heads", no_argument, NULL, REPLICATE_KV_HEADS},
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
    {"ranks", no_argument, NULL, RANKS},
    {"estimate", no_argument, NULL, ESTIMATE},
    {"svg", required_argument, NULL, SVG},
    {"html", required_argument, NULL, HTML},
    {"config-from", required_argument, NULL, CONFIG_FROM},
    {"reflink", required_argument, NULL, REFLINK},
    {"unchecked", no_argument, NULL, UNCHECKED},
    {"torch-places", no_argument, NULL, TORCH_PLACES},
    /* Python's words for the same. */
    {"overwrite", no_argument, NULL, FORCE},
    {"everything", no_argument, NULL, ALL},
    {"max-nbytes", required_argument, NULL, MAX_MEMORY},
    INPUT_OPTIONS,
    {"quiet", no_argument, NULL, 'q'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* Returns the verbs that an option applies to, as bits; 0: all of them. */
static unsigned verbs_of_option(int option)
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
    case REPLICATE_KV_HEADS:
        return 1u << CONVERT | 1u << SPLIT | 1u << PLAN;
    case MAX_SHARD_SIZE:
        return 1u << CONVERT | 1u << MERGE | 1u << PLAN;
    case ALL:
        return 1u << MERGE;
    case RANKS:
    case SVG:
    case HTML:
        return 1u << PLAN;
    case CONFIG_FROM:
        return 1u << MERGE | 1u << SPLIT;
    default:
        return 0;
    }
}

/* Returns whether the verb has an option. */
static bool takes_option(const void *context, int option)
{
    const struct conversion *request = context;
    unsigned verbs = verbs_of_option(option);
    return !verbs || verbs & 1u << request->kind;
}

/* The functions below store the value of an option. They return GO_ON, or the exit code after a message. */

static int take_format(struct conversion *request, const char *text)
{
    if (strcasecmp(text, "dcp") == 0)
        request->convert.format = RSD_FORMAT_DCP;
    else if (strcasecmp(text, "safetensors") == 0)
        request->convert.format = RSD_FORMAT_SAFETENSORS;
    else if (strcasecmp(text, "torch.save") == 0)
        request->convert.format = RSD_FORMAT_TORCH_SAVE;
    else if (strcasecmp(text, "fsdp") == 0)
        request->convert.format = RSD_FORMAT_FSDP;
    else
        return cli_fail(request->verb, EXIT_USAGE,
                        "--format %s must be dcp, safetensors, torch.save or fsdp", text);
    return GO_ON;
}

static int take_reflink(struct conversion *request, const char *text)
{
    static const char *const names[] = {[RSD_REFLINK_AUTO] = "auto",
                                        [RSD_REFLINK_ALWAYS] = "always",
                                        [RSD_REFLINK_NEVER] = "never"};
    for (int i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0) {
            request->convert.reflink = (rsd_reflink)i;
            return GO_ON;
        }
    return cli_fail(request->verb, EXIT_USAGE, "--reflink %s must be auto, always or never", text);
}

static int take_compression(struct conversion *request, const char *text)
{
    long long level = 3;
    if (strcmp(text, "none") == 0)
        level = 0;
    else if (strcmp(text, "zstd") != 0 &&
             (strncmp(text, "zstd:", 5) != 0 || !cli_parse_number(text + 5, 1, 19, &level)))
        return cli_fail(request->verb, EXIT_USAGE,
                        "--compress %s must be none, zstd, or zstd:1 to zstd:19", text);
    request->convert.compress = (int32_t)level;
    return GO_ON;
}

static int take_rule(const struct conversion *request, rsd_status status)
{
    if (status == RSD_ENOMEM)
        return cli_fail_status(request->verb, status);
    return status ? cli_fail(request->verb, EXIT_USAGE, "%s", rsd_error()) : GO_ON;
}

static int take_placement_rule(struct conversion *request, const char *option, rsd_status status)
{
    request->needs_mesh = option;
    return take_rule(request, status);
}

static int take_cast(struct conversion *request, const char *text)
{
    rsd_dtype dtype;
    if (rsd_dtype_parse(text, &dtype) ||
        (dtype != RSD_BF16 && dtype != RSD_F16 && dtype != RSD_F32 && dtype != RSD_F64))
        return cli_fail(request->verb, EXIT_USAGE, "--cast %s must be bf16, f16, f32 or f64", text);
    request->cast = dtype;
    return take_rule(request, rsd_rules_add(request->rules, RSD_RULE_CAST, text));
}

static int take_mesh(struct conversion *request, const char *text)
{
    rsd_mesh *mesh = NULL;
    if (rsd_mesh_parse(text, &mesh))
        return cli_fail(request->verb, EXIT_USAGE, "--mesh '%s': %s", text, rsd_error());
    request->has_mesh = true;
    int code = take_rule(request, rsd_rules_set_mesh(request->rules, mesh));
    rsd_mesh_free(mesh);
    return code;
}

static int take_threads(struct conversion *request, const char *text)
{
    return cli_parse_number(text, 1, 4096, &request->threads)
               ? GO_ON
               : cli_fail(request->verb, EXIT_USAGE, "--threads %s must be from 1 to 4096", text);
}

/* Takes an option without a value. */
static int take_flag(struct conversion *request, int option)
{
    switch (option) {
    case DRY_RUN:
        request->convert.dry = 1;
        break;
    case RESUME:
        request->convert.resume = 1;
        break;
    case FORCE:
        request->convert.overwrite = 1;
        break;
    case VERIFY:
        request->verify = true;
        break;
    case JSON:
        request->json = true;
        break;
    case ALL:
        request->all = true;
        break;
    case RANKS:
        request->ranks = true;
        break;
    case ESTIMATE:
        request->estimate = true;
        break;
    case UNCHECKED:
        request->convert.unchecked = 1;
        break;
    case TORCH_PLACES:
        request->convert.torch_places = 1;
        break;
    default:
        request->quiet = true;
        break;
    }
    return GO_ON;
}

/* Stores one option in the request, or adds it to the rules. Returns GO_ON or an exit code. */
static int take_option(struct conversion *request, int option, const char *value)
{
    rsd_rules *rules = request->rules;
    switch (option) {
    case FORMAT:
        return take_format(request, value);
    case MESH:
        return take_mesh(request, value);
    case PLACE:
        return take_placement_rule(request, "--place", rsd_rules_add(rules, RSD_RULE_PLACE, value));
    case RULES:
        return take_placement_rule(request, "--rules", rsd_rules_add_file(rules, value));
    case PRESET:
        request->has_preset = true;
        return take_placement_rule(request, "--preset", rsd_rules_set_preset(rules, value));
    case DEFAULT:
        return take_placement_rule(request, "--default",
                                   rsd_rules_add(rules, RSD_RULE_DEFAULT, value));
    case REPLICATE_KV_HEADS:
        return take_rule(request, rsd_rules_add(rules, RSD_RULE_KV_HEADS, "replicate"));
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
        return take_compression(request, value);
    case MAX_SHARD_SIZE:
        return cli_take_size(request->verb, "--max-shard-size", value,
                             &request->convert.max_shard_nbytes);
    case MAX_MEMORY:
        return cli_take_size(request->verb, "--max-memory", value, &request->io.max_nbytes);
    case THREADS:
        return take_threads(request, value);
    case REFLINK:
        return take_reflink(request, value);
    case CONFIG_FROM:
        request->config_from = value;
        return GO_ON;
    case SVG:
        request->pages.svg = value;
        return GO_ON;
    case HTML:
        request->pages.html = value;
        return GO_ON;
    default:
        return input_take_option(option) ? GO_ON : take_flag(request, option);
    }
}

/* Reads the command line into the request. Returns GO_ON or an exit code. */
static int read_conversion_options(int argc, char **argv, struct conversion *request)
{
    static const char *const helps[] = {convert_help, merge_help, split_help};
    const char *verb = request->verb;
    opterr = 0;
    for (int option, index = 0;
         (option = getopt_long(argc, argv, ":hq", conversion_options, &index)) != -1;) {
        if (option == 'h')
            return request->kind == PLAN ? cli_show_plan_help()
                                         : cli_show_help(helps[request->kind]);
        if (option == '?' && !optopt && request->kind == PLAN &&
            cli_has_option(problem_options, argv[optind - 1]))
            return cli_fail(verb, EXIT_USAGE,
                            "option %s needs a PROBLEM, not a checkpoint; see reshard plan --help",
                            argv[optind - 1]);
        if (option == RANKS && strcmp(argv[optind - 1], "--rank") == 0)
            return cli_fail(verb, EXIT_USAGE,
                            "option --rank needs a PROBLEM, not a checkpoint; see reshard plan "
                            "--help");
        if (option == '?' || option == ':')
            return cli_fail_option(verb, option, argv, conversion_options, takes_option, request);
        if (!takes_option(request, option))
            return cli_fail(verb, EXIT_USAGE,
                            "option --%s is not valid for '%s'; see reshard %s --help",
                            conversion_options[index].name, verb, verb);
        int code = take_option(request, option, optarg);
        if (code != GO_ON)
            return code;
    }
    int least = request->kind == PLAN ? 1 : 2;
    if (argc - optind < least || argc - optind > 2)
        return cli_fail(verb, EXIT_USAGE, "%s; see reshard %s --help",
                        least == 1 ? "one checkpoint is needed" : "IN and OUT are needed", verb);
    request->in = argv[optind];
    request->out = argc - optind == 2 ? argv[optind + 1] : "OUT";
    if (request->needs_mesh && !request->has_mesh)
        return cli_fail(verb, EXIT_USAGE, "%s needs --mesh", request->needs_mesh);
    if (request->estimate && request->kind != PLAN && !request->convert.dry)
        return cli_fail(verb, EXIT_USAGE, "--estimate needs --dry-run");
    if (request->kind == SPLIT && !request->has_mesh)
        return cli_fail(verb, EXIT_USAGE, "--mesh is needed, such as --mesh tp=4");
    const char *heads = request->has_preset ? input_use_heads() : NULL;
    int code =
        heads ? take_rule(request, rsd_rules_add(request->rules, RSD_RULE_HEADS, heads)) : GO_ON;
    if (code != GO_ON)
        return code;
    return request->kind == MERGE && !request->all
               ? take_rule(request, rsd_rules_add(request->rules, RSD_RULE_MODEL, ""))
               : GO_ON;
}

/* Runs convert, merge, split or plan of a checkpoint. Returns the exit code. */
static int run_conversion_verb(enum conversion_kind kind, int argc, char **argv)
{
    struct conversion request = {
        .kind = kind, .verb = verb_names[kind], .threads = cli_default_threads()};
    request.convert.struct_nbytes = sizeof request.convert;
    int code = cli_fail_status(request.verb, rsd_rules_new(NULL, &request.rules));
    if (!code)
        code = read_conversion_options(argc, argv, &request);
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
