/* cmd_plan.c - `reshard plan`: what a move between two layouts would do. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "usage: reshard plan [options] 'PROBLEM'\n"
    "       reshard plan [options] CHECKPOINT\n"
    "\n"
    "Says what a move between two layouts would do: bytes, messages, who sends to whom, and how\n"
    "close that is to the least possible. Nothing is moved. A problem is one line:\n"
    "\n"
    "  reshard plan 'f32[4096,4096] : 2x4:S0,S1 -> 8:S1'\n"
    "\n"
    "For a checkpoint it says what `reshard convert` with the same options would do:\n"
    "\n"
    "  reshard plan ckpt/ --format dcp --mesh 8 --preset fsdp\n"
    "\n"
    "  --json                one JSON object\n"
    "  --pairs, --ranks      with the bytes between every pair, with the totals of every rank\n"
    "  --pieces              every piece, one JSON object a line, and nothing else\n"
    "  --rank N              with --pieces: only what rank N gets or gives\n"
    "  --ranks-per-node N    ranks 0..N-1 share a node, and so on: count what crosses\n"
    "  --no-picture          text without the picture\n"
    "  --svg FILE            the picture as a file\n"
    "  --html FILE           the same as a page, with the numbers where one points\n"
    "  -h, --help\n";

enum { MOST_RANKS_ON_NODES = 1 << 26 };

struct request {
    const char *problem;
    bool json, pieces, no_picture;
    const char *svg, *html;
    int32_t flags;
    long long rank, ranks_per_node; /* -1, 0: not given */
};

enum { JSON = 256, PAIRS, RANKS, PIECES, RANK, RANKS_PER_NODE, NO_PICTURE, SVG, HTML };

static const struct option options[] = {
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

/* -1: go on; else the code to exit with. */
static int read_options(int argc, char **argv, struct request *request)
{
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":h", options, NULL)) != -1;)
        switch (option) {
        case 'h':
            return show_help(help);
        case JSON:
            request->json = true;
            request->flags |= RSD_EXPLAIN_JSON;
            break;
        case PAIRS:
            request->flags |= RSD_EXPLAIN_PAIRS;
            break;
        case RANKS:
            request->flags |= RSD_EXPLAIN_RANKS;
            break;
        case PIECES:
            request->pieces = true;
            break;
        case NO_PICTURE:
            request->no_picture = true;
            break;
        case SVG:
            request->svg = optarg;
            break;
        case HTML:
            request->html = optarg;
            break;
        case RANK:
            if (!parse_number(optarg, 0, INT32_MAX, &request->rank))
                return complain("plan", EXIT_USAGE, "--rank %s: a rank is needed", optarg);
            break;
        case RANKS_PER_NODE:
            if (!parse_number(optarg, 1, INT32_MAX, &request->ranks_per_node))
                return complain("plan", EXIT_USAGE,
                                "--ranks-per-node %s: a number from 1 to 2147483647 is needed",
                                optarg);
            break;
        default:
            return complain_option("plan", option, argv);
        }
    if (request->rank >= 0 && !request->pieces)
        return complain("plan", EXIT_USAGE, "--rank goes with --pieces");
    if (request->pieces && (request->flags || request->no_picture || request->svg || request->html))
        return complain("plan", EXIT_USAGE, "--pieces prints pieces and nothing else");
    if (optind + 1 != argc)
        return complain("plan", EXIT_USAGE,
                        "one problem is needed, in quotes; see reshard plan --help");
    request->problem = argv[optind];
    return -1;
}

static void print_list(const char *name, int32_t n, const int64_t *values)
{
    printf(", \"%s\": [", name);
    for (int32_t i = 0; i < n; i++)
        printf("%s%lld", i ? ", " : "", (long long)values[i]);
    putchar(']');
}

static void print_piece(const rsd_piece *piece)
{
    printf("{\"from\": %d, \"to\": %d, \"stage\": %d, \"op\": \"%s\"", (int)piece->from,
           (int)piece->to, (int)piece->stage, piece->reduce ? "reduce" : "copy");
    print_list("lo", piece->box.ndim, piece->box.lo);
    print_list("len", piece->box.ndim, piece->box.len);
    printf(", \"bytes\": %lld}\n", (long long)piece->nbytes);
}

/* What a rank gets from itself is walked on both sides, and printed once. */
static rsd_status print_side(const rsd_plan *plan, int32_t rank, rsd_side side)
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

static rsd_status print_pieces(const rsd_plan *plan, long long rank)
{
    if (rank < 0)
        return print_side(plan, RSD_EVERY_RANK, RSD_RECEIVES);
    rsd_status status = print_side(plan, (int32_t)rank, RSD_RECEIVES);
    return status ? status : print_side(plan, (int32_t)rank, RSD_SENDS);
}

static rsd_status print_plan(const rsd_plan *plan, const struct request *request)
{
    if (request->pieces)
        return print_pieces(plan, request->rank);
    char *text;
    rsd_status status = rsd_plan_explain(plan, request->flags, &text);
    if (status)
        return status;
    if (request->svg)
        status = page_traffic(request->svg, false, plan);
    if (!status && request->html)
        status = page_traffic(request->html, true, plan);
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

/* 0, or the code to exit with. */
static int plan_on_nodes(const rsd_layout *src, const rsd_layout *dst, long long ranks_per_node,
                         rsd_plan **plan)
{
    if (ranks_per_node == 0)
        return complain_status("plan", rsd_plan_new(src, dst, NULL, plan));
    int64_t world = rsd_layout_world(src) > rsd_layout_world(dst) ? rsd_layout_world(src)
                                                                  : rsd_layout_world(dst);
    if (world > MOST_RANKS_ON_NODES)
        return complain("plan", EXIT_USAGE, "--ranks-per-node: %lld ranks are more than %d",
                        (long long)world, (int)MOST_RANKS_ON_NODES);
    int32_t *node_of = calloc((size_t)world + 1, sizeof *node_of);
    if (!node_of)
        return complain("plan", EXIT_IO, "no memory for the nodes of %lld ranks", (long long)world);
    for (int64_t rank = 0; rank < world; rank++)
        node_of[rank] = (int32_t)(rank / ranks_per_node);
    rsd_plan_options on_nodes = {
        .struct_nbytes = sizeof on_nodes, .nranks = world, .node_of = node_of};
    rsd_status status = rsd_plan_new(src, dst, &on_nodes, plan);
    free(node_of);
    return complain_status("plan", status);
}

static bool takes_value(const char *argument)
{
    static const char *const names[] = {"--rank", "--ranks-per-node", "--svg", "--html", NULL};
    for (const char *const *name = names; *name; name++)
        if (strcmp(argument, *name) == 0)
            return true;
    return false;
}

/* Is a checkpoint meant, rather than a problem? What is there is one, and so is what looks like no problem,
 * or comes with a mesh, which only a conversion has. */
static bool names_a_path(int argc, char **argv)
{
    bool problem = false, other = false;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (takes_value(argument))
            i++;
        else if (strncmp(argument, "--mesh", 6) == 0 ||
                 (argument[0] != '-' && access(argument, F_OK) == 0))
            return true;
        else if (argument[0] != '-' && strpbrk(argument, "[>"))
            problem = true;
        else if (argument[0] != '-')
            other = true;
    }
    return other && !problem;
}

int command_plan(int argc, char **argv)
{
    if (names_a_path(argc, argv))
        return command_plan_checkpoint(argc, argv);
    struct request request = {.rank = -1};
    int code = read_options(argc, argv, &request);
    if (code >= 0)
        return code;
    rsd_layout *src, *dst;
    rsd_status status = rsd_problem_parse(request.problem, &src, &dst);
    if (status == RSD_EINVAL)
        return complain("plan", EXIT_USAGE, "%s", rsd_error());
    if (status)
        return complain_status("plan", status);
    rsd_plan *plan = NULL;
    code = plan_on_nodes(src, dst, request.ranks_per_node, &plan);
    if (!code)
        code = complain_status("plan", print_plan(plan, &request));
    rsd_plan_free(plan);
    rsd_layout_free(src);
    rsd_layout_free(dst);
    return code;
}
