/* test_rules.c - rules of a conversion: expressions, presets and functions, one message for a problem of many tensors,
 * and every allocation fails once. */
#include "alloc_faults.h"
#include "folder.h"
#include "reshard.h"
#include "tap.h"
#include "truth.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char directory[256];        /* of this test */
static rsd_checkpoint *checkpoint; /* model.up.weight, optim.state.up.weight.exp_avg ... */

/* The messages of a check. */
struct messages {
    char problems[2048], notes[2048];
};

static rsd_status add_message(void *context, int32_t is_problem, const char *text)
{
    struct messages *messages = context;
    char *to = is_problem ? messages->problems : messages->notes;
    size_t n = strlen(to);
    snprintf(to + n, sizeof messages->notes - n, "%s\n", text);
    return RSD_OK;
}

static rsd_rules *new_rules(const char *mesh_text, const rsd_rules_options *options)
{
    rsd_rules *rules = NULL;
    rsd_mesh *mesh;
    OK(rsd_rules_new(options, &rules));
    if (mesh_text && OK(rsd_mesh_parse(mesh_text, &mesh))) {
        OK(rsd_rules_set_mesh(rules, mesh));
        rsd_mesh_free(mesh);
    }
    return rules;
}

/* Checks rules, whose problems must begin with this text and whose notes must be that; frees them. */
static void check_says(rsd_rules *rules, const char *problems, const char *notes)
{
    struct messages messages = {"", ""};
    int64_t nproblems = -1;
    OK(rsd_rules_check(rules, checkpoint, add_message, &messages, &nproblems));
    CHECK(strncmp(messages.problems, problems, strlen(problems)) == 0, "problems: %s",
          messages.problems);
    CHECK(strcmp(messages.notes, notes) == 0, "notes: %s", messages.notes);
    CHECK((nproblems > 0) == (problems[0] != 0), "%lld problems", (long long)nproblems);
    rsd_rules_free(rules);
}

/* What becomes of a tensor: "NAME DTYPE LAYOUT", or "left out". Valid until the next call. */
static const char *mapped(rsd_rules *rules, const char *name)
{
    static char text[512];
    int64_t index;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    OK(rsd_checkpoint_find(checkpoint, name, &index));
    OK(rsd_checkpoint_tensor(checkpoint, index, &tensor));
    rsd_tensor_target target = {
        .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor.dtype, .name = tensor.name};
    if (!OK(rsd_rules_map(rules, &tensor, &target)))
        return rsd_error();
    if (!target.keep)
        return "left out";
    char *layout = NULL;
    if (target.layout)
        OK(rsd_layout_print(target.layout, &layout));
    snprintf(text, sizeof text, "%s %s %s", target.name, rsd_dtype_name(target.dtype),
             layout ? strchr(layout, '@') : "whole");
    rsd_free(layout);
    rsd_layout_free(target.layout);
    return text;
}

#define MAPS(rules, name, expected)                                                                \
    do {                                                                                           \
        const char *is_ = mapped(rules, name);                                                     \
        CHECK(strcmp(is_, expected) == 0, "%s: %s, not %s", name, is_, expected);                  \
    } while (0)

static void place_tensors(void)
{
    CASE("placements: the first rule that matches, the default, and state with its parameter");
    rsd_rules *rules = new_rules("dp=2,TP=2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "S0,S0"));
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "Replicate,R"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model[.]up[.]weight=R,Colwise"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model[.]up[.](b|c=)ias=R,Shard(dim=0)"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model.*weight=[dp.TP, -]"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, ".*down[.]weight[.]exp_avg_sq=S(1),R"));
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    MAPS(rules, "model.up.weight", "model.up.weight f32 @ dp=2,TP=2 : R,S(0)");
    MAPS(rules, "model.down.weight", "model.down.weight f32 @ dp=2,TP=2 : S(0),S(0)");
    MAPS(rules, "model.up.bias", "model.up.bias f32 @ dp=2,TP=2 : R,S(0)");
    MAPS(rules, "optim.state.up.weight.exp_avg",
         "optim.state.up.weight.exp_avg f32 @ dp=2,TP=2 : R,S(0)");
    MAPS(rules, "optim.state.up.weight.step", "optim.state.up.weight.step f32 @ dp=2,TP=2 : R,R");
    MAPS(rules, "optim.state.down.weight.exp_avg_sq",
         "optim.state.down.weight.exp_avg_sq f32 @ dp=2,TP=2 : S(1),R");
    rsd_rules_free(rules);

    CASE("an axis may be named as an alias");
    rules = new_rules("replicate=2,colwise=2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, ".*weight=[ replicate.colwise, -]"));
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "replicate , COLWISE"));
    OK(rsd_rules_add(rules, RSD_RULE_EXCLUDE, "norm"));
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    MAPS(rules, "model.up.weight", "model.up.weight f32 @ replicate=2,colwise=2 : S(0),S(0)");
    MAPS(rules, "model.up.bias", "model.up.bias f32 @ replicate=2,colwise=2 : R,S(0)");
    rsd_rules_free(rules);

    CASE("presets find the axis tp in upper and lower case, and are computed again for another "
         "mesh");
    rules = new_rules("TP=2,dp=2", NULL);
    OK(rsd_rules_set_preset(rules, "llama-tp"));
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "R,R"));
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    MAPS(rules, "model.norm.weight", "model.norm.weight f32 @ TP=2,dp=2 : R,R");
    OK(rsd_rules_set_preset(rules, "fsdp"));
    rsd_mesh *mesh;
    OK(rsd_mesh_parse("4", &mesh));
    OK(rsd_rules_set_mesh(rules, mesh));
    rsd_mesh_free(mesh);
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    MAPS(rules, "model.norm.weight", "model.norm.weight f32 @ 4 : S(0)");
    FAILS(RSD_EINVAL, "unknown preset", rsd_rules_set_preset(rules, "fsdp+nosuch"));
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL)); /* it is still the preset before */
    MAPS(rules, "model.norm.weight", "model.norm.weight f32 @ 4 : S(0)");
    rsd_rules_free(rules);
    FAILS(RSD_EINVAL, "fsdp, hsdp, llama-tp, moe-tp, qwen-tp, gpt2-tp, bert-tp, replicate",
          rsd_rules_set_preset(rules = new_rules("2", NULL), "tpu"));
    OK(rsd_rules_set_preset(rules, "hsdp"));
    FAILS(RSD_EINVAL, "two axes", rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    rsd_rules_free(rules);
}

static void name_and_cast(void)
{
    CASE("names, dtypes, and the part of a state dict");
    rsd_rules *rules = new_rules(NULL, NULL);
    OK(rsd_rules_add(rules, RSD_RULE_PART, "nosuch"));
    OK(rsd_rules_add(rules, RSD_RULE_PART, "model"));
    OK(rsd_rules_add(rules, RSD_RULE_EXCLUDE, "bias$"));
    OK(rsd_rules_add(rules, RSD_RULE_STRIP_PREFIX, "down."));
    OK(rsd_rules_add(rules, RSD_RULE_STRIP_PREFIX, "norm"));
    OK(rsd_rules_add(rules, RSD_RULE_RENAME, "s/([a-z]+)[.]/<\\1&>/"));
    OK(rsd_rules_add(rules, RSD_RULE_RENAME, "s|w|/\\||g"));
    OK(rsd_rules_add(rules, RSD_RULE_CAST, "f64"));
    OK(rsd_rules_add(rules, RSD_RULE_CAST, "bf16"));
    OK(rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
    MAPS(rules, "model.up.weight", "<upup.>/|eight bf16 whole");
    MAPS(rules, "model.down.weight", "/|eight bf16 whole");
    MAPS(rules, "model.norm.weight", "./|eight bf16 whole");
    MAPS(rules, "model.pos", "pos i64 whole");
    MAPS(rules, "model.up.bias", "left out");
    MAPS(rules, "optim.state.up.weight.step", "left out");
    rsd_rules_free(rules);

    CASE("a cast of some tensors, from any dtype");
    rules = new_rules(NULL, NULL);
    OK(rsd_rules_add(rules, RSD_RULE_CAST, "model[.]pos=i32"));
    OK(rsd_rules_add(rules, RSD_RULE_CAST, "model.*=f64"));
    MAPS(rules, "model.pos", "model.pos i32 whole");
    MAPS(rules, "model.up.bias", "model.up.bias f64 whole");
    MAPS(rules, "optim.state.up.bias.exp_avg", "optim.state.up.bias.exp_avg f32 whole");
    rsd_rules_free(rules);
}

static void refuse_rules(void)
{
    CASE("invalid rules");
    static const struct {
        rsd_rule kind;
        const char *text, *reason;
    } cases[] = {
        {RSD_RULE_PLACE, "x", "REGEX=PLACEMENTS"},
        {RSD_RULE_PLACE, "=S0", "REGEX=PLACEMENTS"},
        {RSD_RULE_PLACE, "x=", "REGEX=PLACEMENTS"},
        {RSD_RULE_PLACE, "(=S0", "'('"},
        {RSD_RULE_ONLY, "a\\d", "[0-9]"},
        {RSD_RULE_EXCLUDE, "(?:a)", "(?"},
        {RSD_RULE_RENAME, "x/a/b/", "s/OLD/NEW/"},
        {RSD_RULE_RENAME, "s/a/b", "s/OLD/NEW/"},
        {RSD_RULE_RENAME, "s/a/b/x", "s/OLD/NEW/"},
        {RSD_RULE_RENAME, "s", "s/OLD/NEW/"},
        {RSD_RULE_RENAME, "s/*/b/", "'*'"},
        {RSD_RULE_CAST, "f99", "f99"},
        {RSD_RULE_CAST, "(=f32", "'('"},
        {(rsd_rule)99, "x", "99"},
    };
    rsd_rules *rules = new_rules(NULL, NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        FAILS(RSD_EINVAL, cases[i].reason, rsd_rules_add(rules, cases[i].kind, cases[i].text));
    FAILS(RSD_ENOENT, "nosuch", rsd_rules_add_file(rules, "/nosuch"));
    FAILS(RSD_EIO, "directory", rsd_rules_add_file(rules, "/"));
    rsd_rules_free(rules);
    rsd_rules_free(NULL);

    CASE("rules that need a mesh or a check");
    static const rsd_rule kinds[] = {RSD_RULE_PLACE, RSD_RULE_DEFAULT};
    for (size_t i = 0; i < 2; i++) {
        rules = new_rules(NULL, NULL);
        OK(rsd_rules_add(rules, kinds[i], ".*=S0"));
        FAILS(RSD_EINVAL, "mesh", rsd_rules_check(rules, checkpoint, NULL, NULL, NULL));
        rsd_rules_free(rules);
    }
    rules = new_rules("2", NULL);
    OK(rsd_rules_set_preset(rules, "fsdp"));
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor, .name = "w"};
    rsd_tensor_target target = {.struct_nbytes = sizeof target};
    FAILS(RSD_EINVAL, "rsd_rules_check", rsd_rules_map(rules, &tensor, &target));
    rsd_rules_free(rules);
}

/* To match a name of 100 KB against such an expression would take minutes. */
static void match_long_names(void)
{
    CASE("names of more than 2000 bytes are not matched");
    enum { LENGTH = 2001 };
    static const struct {
        rsd_rule kind;
        const char *text;
    } cases[] = {{RSD_RULE_ONLY, ".*\\.weight$"},
                 {RSD_RULE_EXCLUDE, ".*\\.weight$"},
                 {RSD_RULE_RENAME, "s/.*\\.weight$/w/"}};
    char *name = malloc(LENGTH + 1);
    memset(name, '.', LENGTH);
    name[LENGTH] = '\0';
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor, .name = name};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rsd_tensor_target target = {.struct_nbytes = sizeof target};
        rsd_rules *rules = new_rules(NULL, NULL);
        OK(rsd_rules_add(rules, cases[i].kind, cases[i].text));
        FAILS(RSD_ELIMIT, "cannot be matched", rsd_rules_map(rules, &tensor, &target));
        tensor.name = name + 1;
        OK(rsd_rules_map(rules, &tensor, &target));
        tensor.name = name;
        rsd_rules_free(rules);
    }
    free(name);
}

/* Short expressions that would take all memory or the whole stack to compile. */
static void costly_expressions(void)
{
    CASE("expressions that repeat too much, or have groups in too many groups, are refused");
    enum { DEPTH = 30000 };
    static const char *const costly[] = {
        "(((a{1,255}){1,255}){1,255}){1,255}", "((((((((((((((a+)+)+)+)+)+)+)+)+)+)+)+)+)+)+",
        "(a{99,}){99}", "([^]()[:digit:]]{200}b){200}", "(\\)x{180}){180}"};
    static const char *const fine[] = {
        "layers[.][0-9]{1,4}[.](a|b)+[.]weight", "(a+)+b",    "a{255}", "[(((]", "(\\(a\\)){3}",
        "a{1,20}b{1,20}c{1,20}d{1,20}",          "[]({]x{2,}"};
    rsd_rules *rules = new_rules(NULL, NULL);
    for (size_t i = 0; i < sizeof costly / sizeof *costly; i++)
        FAILS(RSD_ELIMIT, "repeats more than", rsd_rules_add(rules, RSD_RULE_ONLY, costly[i]));
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++)
        OK(rsd_rules_add(rules, RSD_RULE_ONLY, fine[i]));
    char *deep = malloc(DEPTH + 1);
    memset(deep, '(', DEPTH);
    deep[DEPTH] = '\0';
    FAILS(RSD_ELIMIT, "has more than 100 groups in each other",
          rsd_rules_add(rules, RSD_RULE_ONLY, deep));
    free(deep);
    rsd_rules_free(rules);
}

static void report_problems(void)
{
    CASE("one message for a problem of many tensors");
    rsd_rules *rules = new_rules("2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model.*=S(1)"));
    OK(rsd_rules_add(rules, RSD_RULE_EXCLUDE, "norm"));
    check_says(
        rules,
        "7 of 17 tensors (model.pos i64[16], model.up.bias f32[80], model.down.bias f32[16], "
        "...): place 'model.*': placements 'S(1)': ",
        "");

    CASE("rules without effect, and rules that select nothing");
    rules = new_rules("2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "R"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, ".*weight=S(0)"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model.up.weight=R"));
    check_says(rules, "", "place 'model.up.weight' has no effect: earlier rules match first\n");
    rules = new_rules("2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "R"));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "up=S(0)"));
    check_says(rules,
               "place 'up' matches no tensor: it must match the whole name, and matches a part of "
               "8, such as "
               "model.up.weight; write '.*up.*'\n",
               "");
    rules = new_rules(NULL, NULL);
    OK(rsd_rules_add(rules, RSD_RULE_ONLY, "nosuch"));
    check_says(rules, "the rules leave no tensor to write\n", "");
}

/* The presets that fit the checkpoint with a mesh, without one (NULL), and only with tensors that match. */
static void list_presets(const char *mesh, const char *only, const char *expected)
{
    char *names = NULL;
    rsd_rules *rules = new_rules(mesh, NULL);
    if (only)
        OK(rsd_rules_add(rules, RSD_RULE_ONLY, only));
    if (OK(rsd_rules_presets(rules, checkpoint, &names)))
        CHECK(strcmp(names, expected) == 0, "%s, %s: %s", mesh ? mesh : "", only ? only : "",
              names);
    rsd_free(names);
    rsd_rules_free(rules);
}

static void find_presets(void)
{
    CASE("presets that fit the mesh, and names that the rules keep");
    list_presets(NULL, NULL, "fsdp, hsdp, replicate");
    list_presets("4", NULL, "fsdp, replicate");
    list_presets("2x2", NULL, "fsdp, hsdp, replicate");
    list_presets("2x2x2", NULL, "fsdp, replicate");
    list_presets("2", "nosuch", "fsdp, replicate");

    CASE("presets that fit are an error where a check is");
    char *names = NULL;
    rsd_rules *rules = new_rules(NULL, NULL);
    OK(rsd_rules_add(rules, RSD_RULE_DEFAULT, "R"));
    FAILS(RSD_EINVAL, "mesh", rsd_rules_presets(rules, checkpoint, &names));
    CHECK(!names);
    rsd_rules_free(rules);
}

static void read_file(void)
{
    CASE("rules of a file come after those of the caller");
    const char *path = path_in(directory, "rules");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    static const char text[] =
        "# comment\n\n  .*up[.]weight\tS(1)  # more\r\n.*weight S(0)\nx R\n.* R";
    CHECK(fd >= 0 && write(fd, text, sizeof text - 1) == (ssize_t)sizeof text - 1);
    rsd_rules *rules = new_rules("2", NULL);
    OK(rsd_rules_add_file(rules, path));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model.down.weight=B(1)"));
    struct messages messages = {"", ""};
    int64_t nproblems;
    OK(rsd_rules_check(rules, checkpoint, add_message, &messages, &nproblems));
    CHECK(nproblems == 0 && strstr(messages.notes, ":5: 'x' matches no tensor"), "%s",
          messages.notes);
    MAPS(rules, "model.up.weight", "model.up.weight f32 @ 2 : S(1)");
    MAPS(rules, "model.down.weight", "model.down.weight f32 @ 2 : B(1)");
    MAPS(rules, "model.up.bias", "model.up.bias f32 @ 2 : R");
    CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, "a S(0)\nlonely\n", 14, 0) == 14);
    FAILS(RSD_EINVAL, ":2: ", rsd_rules_add_file(rules, path));
    CHECK(pwrite(fd, "( S(0)\n", 7, 0) == 7);
    FAILS(RSD_EINVAL, ":1: '('", rsd_rules_add_file(rules, path));
    rsd_rules_free(rules);
    close(fd);
}

/* ---- functions ---- */

/* Expressions are texts in which * stands for anything at the end. */
static rsd_status match_start(void *context, const char *expression, int32_t whole,
                              const char *name, int32_t *matches)
{
    size_t n = strlen(expression);
    (void)context;
    if (strcmp(expression, "fails") == 0)
        return rsd_set_error(RSD_ECANCELLED, "matching failed");
    if (!whole)
        *matches = strstr(name, expression) != NULL;
    else if (n > 0 && expression[n - 1] == '*')
        *matches = strncmp(expression, name, n - 1) == 0;
    else
        *matches = strcmp(expression, name) == 0;
    return RSD_OK;
}

static rsd_status decide(void *context, const rsd_tensor_info *tensor, rsd_tensor_target *target)
{
    if (strcmp(tensor->name, "model.pos") == 0)
        return rsd_set_error(RSD_EINVAL, "not this one");
    if (strcmp(tensor->name, "model.up.bias") == 0)
        target->keep = 0;
    if (strcmp(tensor->name, "model.down.bias") == 0) {
        target->name = "other";
        target->dtype = RSD_F16;
        return rsd_rules_layout(context, tensor, "colwise", &target->layout);
    }
    return RSD_OK;
}

static void use_functions(void)
{
    CASE("functions of the caller match expressions and decide about tensors");
    rsd_mesh *mesh;
    OK(rsd_mesh_parse("2", &mesh));
    rsd_rules_options options = {
        .struct_nbytes = sizeof options, .match = match_start, .decide = decide, .context = mesh};
    rsd_rules *rules = new_rules("2", &options);
    OK(rsd_rules_add(rules, RSD_RULE_ONLY, "model."));
    OK(rsd_rules_add(rules, RSD_RULE_PLACE, "model.up.*=S(0)"));
    OK(rsd_rules_set_preset(rules, "replicate"));
    struct messages messages = {"", ""};
    int64_t nproblems;
    OK(rsd_rules_check(rules, checkpoint, add_message, &messages, &nproblems));
    CHECK(strcmp(messages.problems, "1 of 6 tensors (model.pos i64[16]): not this one\n") == 0,
          "%s", messages.problems);
    MAPS(rules, "model.up.weight", "model.up.weight f32 @ 2 : S(0)");
    MAPS(rules, "model.up.bias", "left out");
    MAPS(rules, "model.down.bias", "other f16 @ 2 : S(0)");
    MAPS(rules, "model.down.weight", "model.down.weight f32 @ 2 : R");
    MAPS(rules, "optim.state.up.bias.step", "left out");
    OK(rsd_rules_add(rules, RSD_RULE_EXCLUDE, "fails"));
    FAILS(RSD_ECANCELLED, "matching failed",
          rsd_rules_check(rules, checkpoint, NULL, NULL, &nproblems));
    rsd_rules_free(rules);
    rsd_mesh_free(mesh);
}

/* ---- memory ---- */

/* Checks rules that match no tensor, so that the message lists presets. */
static rsd_status check_no_match(const rsd_mesh *mesh)
{
    rsd_rules *rules = NULL;
    struct messages messages = {"", ""};
    int64_t nproblems;
    rsd_status status = rsd_rules_new(NULL, &rules);
    if (!status)
        status = rsd_rules_set_mesh(rules, mesh);
    if (!status)
        status = rsd_rules_check(rules, checkpoint, add_message, &messages, &nproblems);
    rsd_rules_free(rules);
    return status;
}

static rsd_status use_all(const char *file)
{
    static const struct {
        rsd_rule kind;
        const char *text;
    } list[] = {
        {RSD_RULE_PLACE, "model.*=S(1)"},  {RSD_RULE_DEFAULT, "colwise"},
        {RSD_RULE_ONLY, "model|optim"},    {RSD_RULE_EXCLUDE, "bias"},
        {RSD_RULE_STRIP_PREFIX, "model."}, {RSD_RULE_RENAME, "s/(w)eight/\\1/g"},
        {RSD_RULE_CAST, "bf16"},           {RSD_RULE_CAST, "nosuch=f64"},
        {RSD_RULE_PART, "model"},
    };
    rsd_rules *rules = NULL;
    rsd_mesh *mesh = NULL;
    struct messages messages = {"", ""};
    int64_t nproblems;
    char *names = NULL;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_tensor_target target = {.struct_nbytes = sizeof target};
    rsd_status status = rsd_mesh_parse("2x1", &mesh);
    if (!status)
        status = rsd_rules_new(NULL, &rules);
    if (!status)
        status = rsd_rules_set_mesh(rules, mesh);
    if (!status)
        status = rsd_rules_set_preset(rules, "llama-tp");
    for (size_t i = 0; i < sizeof list / sizeof *list && !status; i++)
        status = rsd_rules_add(rules, list[i].kind, list[i].text);
    if (!status)
        status = rsd_rules_add_file(rules, file);
    if (!status)
        status = rsd_rules_check(rules, checkpoint, add_message, &messages, &nproblems);
    if (!status)
        status = rsd_rules_presets(rules, checkpoint, &names);
    if (!status)
        status = rsd_checkpoint_tensor(checkpoint, 0, &tensor);
    if (!status && rsd_rules_map(rules, &tensor, &target) == RSD_ENOMEM) /* it fits no rule */
        status = RSD_ENOMEM;
    if (!status)
        status = check_no_match(mesh);
    rsd_layout_free(target.layout);
    rsd_free(names);
    rsd_rules_free(rules);
    rsd_mesh_free(mesh);
    return status;
}

static void fail_allocations(void)
{
    CASE("every allocation fails once");
    const char *path = path_in(directory, "rules");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, "x S(0)\ny R,R\n", 13) == 13);
    OK(use_all(path));
    long n = 0;
    for (failed = true; failed; n++) {
        failed = false;
        until_failure = n;
        rsd_status status = use_all(path);
        CHECK(status == (failed ? RSD_ENOMEM : RSD_OK), "allocation %ld: %s, %s", n,
              rsd_status_name(status), rsd_error());
    }
    until_failure = -1;
    CHECK(n > 20, "only %ld allocations", n);
    close(fd);
}

static void read_config_text(void)
{
    CASE("the text of a config instead of its path");
    rsd_rules *rules = new_rules("2", NULL);
    OK(rsd_rules_add(rules, RSD_RULE_CONFIG, "{\"num_attention_heads\": 4, \"other\": [1]}"));
    CHECK(rsd_rules_add(rules, RSD_RULE_CONFIG, "{\"num_attention_heads\": ") != RSD_OK &&
              strncmp(rsd_error(), "config.json: ", 13) == 0,
          "%s", rsd_error());
    rsd_rules_free(rules);
}

int main(void)
{
    if (rsd_checkpoint_open(golden_path("fsdp2_adamw", "ckpt"), NULL, &checkpoint))
        return 1;
    snprintf(directory, sizeof directory, "%s", folder_new("rules"));
    place_tensors();
    name_and_cast();
    refuse_rules();
    match_long_names();
    costly_expressions();
    report_problems();
    find_presets();
    read_file();
    use_functions();
    read_config_text();
    fail_allocations();
    rsd_checkpoint_close(checkpoint);
    folder_remove(directory);
    return tap_end();
}
