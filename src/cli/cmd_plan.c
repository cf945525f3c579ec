/* cmd_plan.c - `reshard plan`: what a move between two layouts would do. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_RANKS_ON_NODES = 1 << 26 };

struct plan_request {
    const char *problem;
    bool json, pieces, no_picture;
    struct page_paths pages;
    int32_t flags;
    long long rank, ranks_per_node; /* -1, 0: not given */
};

enum { JSON = 256, PAIRS, RANKS, PIECES, RANK, RANKS_PER_NODE, NO_PICTURE, SVG, HTML };

const struct option problem_options[] = {
    {"json", no_argument, NULL, JSON},
    {"pairs", no_argument, NULL, PAIRS},
    {"ranks", no_argument, NULL, RANKS},
    {"pieces", no_argument, NULL, PIECES},
    {"rank", required_argument, NULL, RANK},
    {"ranks-per-node", required_argument, NULL, RANKS_PER_NODE},
    {"no-picture", no_argument, NULL, NO_PICTURE},
    {"svg", required_argument, NULL, SVG},
    {"html", required_argument, NULL, HTML},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* Returns GO_ON or an exit code. */
static int take_problem_option(int option, char **argv, struct plan_request *request)
{
    switch (option) {
    case 'h':
        return cli_show_plan_help();
    case JSON:
        request->json = true;
        request->flags |= RSD_EXPLAIN_JSON;
        return GO_ON;
    case PAIRS:
        request->flags |= RSD_EXPLAIN_PAIRS;
        return GO_ON;
    case RANKS:
        request->flags |= RSD_EXPLAIN_RANKS;
        return GO_ON;
    case PIECES:
        request->pieces = true;
        return GO_ON;
    case NO_PICTURE:
        request->no_picture = true;
        return GO_ON;
    case SVG:
        request->pages.svg = optarg;
        return GO_ON;
    case HTML:
        request->pages.html = optarg;
        return GO_ON;
    case RANK:
        return cli_parse_number(optarg, 0, INT32_MAX, &request->rank)
                   ? GO_ON
                   : cli_fail("plan", EXIT_USAGE, "--rank %s must be a rank", optarg);
    case RANKS_PER_NODE:
        return cli_parse_number(optarg, 1, INT32_MAX, &request->ranks_per_node)
                   ? GO_ON
                   : cli_fail("plan", EXIT_USAGE, "--ranks-per-node %s must be from 1 to %d",
                              optarg, INT32_MAX);
    default:
        if (option == '?' && !optopt && cli_has_option(conversion_options, argv[optind - 1]))
            return cli_fail("plan", EXIT_USAGE,
                            "option %s needs a checkpoint. A PROBLEM contains its meshes and "
                            "placements, as in 'f32[4096,4096] : 2x4:S0,S1 -> 8:S1'",
                            argv[optind - 1]);
        return cli_fail_option("plan", option, argv, problem_options, NULL, NULL);
    }
}

static int read_problem_options(int argc, char **argv, struct plan_request *request)
{
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":h", problem_options, NULL)) != -1;) {
        int code = take_problem_option(option, argv, request);
        if (code != GO_ON)
            return code;
    }
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
    if (request->json)
        putchar('\n');
    else if (!request->no_picture)
        status = draw_traffic(stdout, plan);
    return status;
}

/* Returns EXIT_YES or an exit code. */
static int plan_on_nodes(const rsd_layout *src, const rsd_layout *dst, long long ranks_per_node,
                         rsd_plan **plan)
{
    rsd_plan_options options = {.struct_nbytes = sizeof options, .cast = 1};
    if (ranks_per_node == 0)
        return cli_fail_status("plan", rsd_plan_new(src, dst, &options, plan));
    int64_t world = rsd_layout_world(src) > rsd_layout_world(dst) ? rsd_layout_world(src)
                                                                  : rsd_layout_world(dst);
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

/* Finds an option of either use of plan that takes the next argument as its value. */
static bool takes_next_argument(const char *argument)
{
    const struct option *const tables[] = {problem_options, conversion_options};
    for (size_t i = 0; i < 2; i++)
        for (const struct option *option = tables[i]; option->name; option++)
            if (option->has_arg && strncmp(argument, "--", 2) == 0 &&
                strcmp(argument + 2, option->name) == 0)
                return true;
    return false;
}

/* Whether the argument of plan is a checkpoint: a path that exists, or a text that no PROBLEM can be. */
static bool names_checkpoint(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (takes_next_argument(argv[i]))
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
    code = plan_on_nodes(src, dst, request.ranks_per_node, &plan);
    if (!code)
        code = cli_fail_status("plan", print_plan(plan, &request));
    rsd_plan_free(plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return code;
}
