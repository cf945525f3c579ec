/* cmd_plan.c - `reshard plan`: what a move between two layouts would do. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_RANKS_ON_NODES = 1 << 26 };

struct plan_request {
    const char *problem;
    bool pieces, no_picture;
    struct page_paths pages;
    int32_t flags;
    long long rank, ranks_per_node; /* -1, 0: not given */
};

static int set_explain_flag(const struct given_option *given)
{
    struct plan_request *request = given->request;
    request->flags |= (int32_t)given->number;
    return GO_ON;
}

static int take_rank(const struct given_option *given)
{
    return cli_parse_number(given->value, 0, INT32_MAX, options_field(given))
               ? GO_ON
               : cli_fail("plan", EXIT_USAGE, "--rank %s must be a rank", given->value);
}

static int take_ranks_per_node(const struct given_option *given)
{
    return cli_parse_number(given->value, 1, INT32_MAX, options_field(given))
               ? GO_ON
               : cli_fail("plan", EXIT_USAGE, "--ranks-per-node %s must be from 1 to %d",
                          given->value, INT32_MAX);
}

static const struct cli_option problem_options[] = {
    OPTION("json", NULL, "Print one JSON object", set_explain_flag, RSD_EXPLAIN_JSON, 0),
    OPTION("pairs", NULL, "Add the bytes between every pair of ranks", set_explain_flag,
           RSD_EXPLAIN_PAIRS, 0),
    OPTION("ranks", NULL, "Add the totals of every rank", set_explain_flag, RSD_EXPLAIN_RANKS, 0),
    OPTION("pieces", NULL, "Print only the pieces, one JSON object per line", options_set_flag,
           offsetof(struct plan_request, pieces), 0),
    OPTION("rank", "N", "With --pieces: print only what rank N sends or receives", take_rank,
           offsetof(struct plan_request, rank), 0),
    OPTION("ranks-per-node", "N", "Report bytes between nodes of N ranks each: 0 to N-1, and so on",
           take_ranks_per_node, offsetof(struct plan_request, ranks_per_node), 0),
    OPTION("no-picture", NULL, "Print no picture", options_set_flag,
           offsetof(struct plan_request, no_picture), 0),
    OPTION("svg", "FILE", "Write the picture to FILE as SVG", options_set_text,
           offsetof(struct plan_request, pages.svg), 0),
    OPTION("html", "FILE", "Write the picture to FILE as an HTML page that shows the numbers",
           options_set_text, offsetof(struct plan_request, pages.html), 0),
    {0},
};

static const char problem_help[] =
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
    "Options with a PROBLEM:\n";

const struct cli_verb plan_of_problem = {
    .name = "plan",
    .help = problem_help,
    .help_column = 24,
    .options = problem_options,
    .other_use = &plan_of_checkpoint,
    .other_needs = "a checkpoint. A PROBLEM contains its meshes and placements, as in "
                   "'f32[4096,4096] : 2x4:S0,S1 -> 8:S1'"};

/* Reads the command line of a PROBLEM. Returns GO_ON or an exit code. */
static int read_problem_options(int argc, char **argv, struct plan_request *request)
{
    int code = options_read(&plan_of_problem, argc, argv, request);
    if (code != GO_ON)
        return code;
    if (request->rank >= 0 && !request->pieces)
        return cli_fail("plan", EXIT_USAGE, "--rank needs --pieces");
    if (request->pieces &&
        (request->flags || request->no_picture || request->pages.svg || request->pages.html))
        return cli_fail("plan", EXIT_USAGE, "--pieces excludes all other output options");
    if (optind + 1 != argc)
        return cli_fail("plan", EXIT_USAGE,
                        "one PROBLEM in quotes, or one checkpoint, is needed; see reshard plan "
                        "--help");
    request->problem = argv[optind];
    return GO_ON;
}

static void print_piece(const rsd_piece *piece)
{
    printf("{\"from\": %d, \"to\": %d, \"stage\": %d, \"op\": \"%s\"", (int)piece->from,
           (int)piece->to, (int)piece->stage, piece->reduce ? "reduce" : "copy");
    printf(", \"lo\": ");
    cli_print_json_list(stdout, piece->box.ndim, piece->box.lo);
    printf(", \"len\": ");
    cli_print_json_list(stdout, piece->box.ndim, piece->box.len);
    printf(", \"bytes\": %lld}\n", (long long)piece->nbytes);
}

/* A piece that stays on its rank is on both sides, and is printed once. */
static rsd_status print_pieces_of_side(const rsd_plan *plan, int32_t rank, rsd_side side)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    rsd_status status = rsd_plan_walk(plan, rank, side, &cursor);
    if (status)
        return status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece && !ferror(stdout))
        if (side == RSD_RECEIVES || piece->from != piece->to)
            print_piece(piece);
    rsd_cursor_free(cursor);
    return status;
}

static rsd_status print_rank_pieces(const rsd_plan *plan, long long rank)
{
    if (rank < 0)
        return print_pieces_of_side(plan, RSD_EVERY_RANK, RSD_RECEIVES);
    rsd_status status = print_pieces_of_side(plan, (int32_t)rank, RSD_RECEIVES);
    return status ? status : print_pieces_of_side(plan, (int32_t)rank, RSD_SENDS);
}

static rsd_status print_plan(const rsd_plan *plan, const struct plan_request *request)
{
    if (request->pieces)
        return print_rank_pieces(plan, request->rank);
    char *text;
    rsd_status status = rsd_plan_explain(plan, request->flags, &text);
    if (status)
        return status;
    status = page_write_traffic(&request->pages, plan);
    if (!status)
        fputs(text, stdout);
    rsd_free(text);
    if (status)
        return status;
    if (request->flags & RSD_EXPLAIN_JSON)
        putchar('\n');
    else if (!request->no_picture)
        status = draw_traffic(stdout, plan);
    return status;
}

static int64_t count_ranks(const rsd_layout *src, const rsd_layout *dst)
{
    int64_t nsenders = rsd_layout_world(src), nreceivers = rsd_layout_world(dst);
    return nsenders > nreceivers ? nsenders : nreceivers;
}

/* Returns EXIT_YES or an exit code. */
static int plan_on_nodes(const rsd_layout *src, const rsd_layout *dst, long long ranks_per_node,
                         rsd_plan **plan)
{
    rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
    if (ranks_per_node == 0)
        return cli_fail_status("plan", rsd_plan_new(src, dst, &options, plan));
    int64_t world = count_ranks(src, dst);
    if (world > MOST_RANKS_ON_NODES)
        return cli_fail("plan", EXIT_USAGE, "--ranks-per-node: %lld ranks exceed the limit of %d",
                        (long long)world, (int)MOST_RANKS_ON_NODES);
    int32_t *node_of = cli_need_memory(calloc((size_t)world + 1, sizeof *node_of));
    for (int64_t rank = 0; rank < world; rank++)
        node_of[rank] = (int32_t)(rank / ranks_per_node);
    options.nranks = world;
    options.node_of = node_of;
    rsd_status status = rsd_plan_new(src, dst, &options, plan);
    free(node_of);
    return cli_fail_status("plan", status);
}

/* Whether the argument of plan is a checkpoint: a path that exists, or a text that no PROBLEM can be. */
static bool names_checkpoint(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (options_take_value(&plan_of_problem, argv[i]) ||
            options_take_value(&plan_of_checkpoint, argv[i]))
            i++;
        else if (argv[i][0] != '-')
            return access(argv[i], F_OK) == 0 || !strpbrk(argv[i], "[>");
    return false;
}

int command_plan(int argc, char **argv)
{
    if (names_checkpoint(argc, argv))
        return command_plan_checkpoint(argc, argv);
    struct plan_request request = {.rank = -1};
    int code = read_problem_options(argc, argv, &request);
    if (code != GO_ON)
        return code;
    rsd_layout *src, *dst;
    rsd_status status = rsd_problem_parse(request.problem, &src, &dst);
    if (status == RSD_EINVAL)
        return cli_fail("plan", EXIT_USAGE, "%s", rsd_error());
    if (status)
        return cli_fail_status("plan", status);
    rsd_plan *plan = NULL;
    if (request.rank >= count_ranks(src, dst))
        code = cli_fail("plan", EXIT_USAGE, "--rank %lld is not a rank of the layouts, 0 to %lld",
                        request.rank, (long long)count_ranks(src, dst) - 1);
    else
        code = plan_on_nodes(src, dst, request.ranks_per_node, &plan);
    if (!code)
        code = cli_fail_status("plan", print_plan(plan, &request));
    rsd_plan_free(plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return code;
}
