/* target.c - what becomes of each tensor: is it taken, what is it called, how is it cut.
 *
 * Rules are asked in order (--place, then the rules file, then the preset), the first that matches the whole
 * name decides. Optimizer state has the shape of its parameter and follows it. What cannot be done is
 * collected and said at once, since to learn of one tensor at a time costs an evening.
 */
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- rules ---- */

/* colwise and rowwise are what others call the cuts of a linear layer's weight. */
static char *spell_out(const char *placements)
{
    static const struct {
        const char *alias, *means;
    } aliases[] = {{"colwise", "S(0)"}, {"rowwise", "S(1)"}, {"replicate", "R"}};
    char *out = need_text("%s", "");
    for (const char *c = placements; *c;) {
        const char *means = NULL;
        size_t n = 1;
        bool starts = c == placements || !isalnum((unsigned char)c[-1]);
        for (size_t i = 0; i < sizeof aliases / sizeof *aliases && starts; i++) {
            size_t length = strlen(aliases[i].alias);
            if (strncasecmp(c, aliases[i].alias, length) == 0 &&
                !isalnum((unsigned char)c[length])) {
                means = aliases[i].means;
                n = length;
            }
        }
        char *longer = means ? need_text("%s%s", out, means) : need_text("%s%c", out, *c);
        free(out);
        out = longer;
        c += n;
    }
    return out;
}

static bool add_rule(struct target *target, const char *regex, const char *placements, char *from,
                     bool place)
{
    struct rule rule = {.from = from, .place = place};
    if (!pattern_compile(target->verb, regex, true, &rule.pattern)) {
        free(from);
        return false;
    }
    rule.placements = spell_out(placements);
    target->rules =
        need_memory(realloc(target->rules, (target->nrules + 1) * sizeof *target->rules));
    size_t at = target->nrules++;
    for (; place && at > 0 && !target->rules[at - 1].place; at--)
        target->rules[at] = target->rules[at - 1]; /* --place is asked first, wherever it stands */
    target->rules[at] = rule;
    return true;
}

bool target_add_place(struct target *target, const char *text)
{
    const char *equals = strrchr(text, '=');
    if (!equals || equals == text || !equals[1]) {
        complain(target->verb, EXIT_USAGE, "--place '%s': REGEX=PLACEMENTS is needed", text);
        return false;
    }
    char *regex = need_text("%.*s", (int)(equals - text), text);
    bool fine = add_rule(target, regex, equals + 1, need_text("--place '%s'", text), true);
    free(regex);
    return fine;
}

/* REGEX PLACEMENTS, split at the first space. */
static bool add_line(struct target *target, const char *path, int number, char *line)
{
    line += strspn(line, " \t");
    line[strcspn(line, "#\r\n")] = '\0';
    for (size_t n = strlen(line); n > 0 && isspace((unsigned char)line[n - 1]);)
        line[--n] = '\0';
    if (!*line)
        return true;
    size_t length = strcspn(line, " \t");
    const char *placements = line + length + strspn(line + length, " \t");
    if (!*placements) {
        complain(target->verb, EXIT_USAGE, "%s:%d: a rule is REGEX PLACEMENTS", path, number);
        return false;
    }
    line[length] = '\0';
    return add_rule(target, line, placements, need_text("%s:%d", path, number), false);
}

bool target_add_rules(struct target *target, const char *path)
{
    FILE *file = fopen(path, "r");
    if (!file) {
        complain(target->verb, EXIT_USAGE, "%s: %s", path, strerror(errno));
        return false;
    }
    char *line = NULL;
    size_t capacity = 0;
    bool fine = true;
    for (int number = 1; fine && getline(&line, &capacity, file) >= 0; number++)
        fine = add_line(target, path, number, line);
    if (fine && ferror(file)) {
        complain(target->verb, EXIT_USAGE, "%s: %s", path, strerror(errno));
        fine = false;
    }
    free(line);
    fclose(file);
    return fine;
}

void target_set_default(struct target *target, const char *placements)
{
    free(target->otherwise);
    target->otherwise = spell_out(placements);
}

bool target_set_mesh(struct target *target, const char *text)
{
    rsd_mesh *mesh;
    if (rsd_mesh_parse(text, &mesh)) {
        complain(target->verb, EXIT_USAGE, "--mesh '%s': %s", text, rsd_error());
        return false;
    }
    rsd_mesh_free(target->mesh);
    target->mesh = mesh;
    return true;
}

/* ---- presets ---- */

/* The axis that is called tp, else the last. */
static int find_tp(const rsd_mesh *mesh)
{
    int n = rsd_mesh_naxes(mesh);
    for (int axis = 0; axis < n; axis++)
        if (rsd_mesh_name(mesh, axis) && strcasecmp(rsd_mesh_name(mesh, axis), "tp") == 0)
            return axis;
    return n - 1;
}

/* One placement for an axis, another for all others. */
static char *place_axis(int n, int axis, const char *one, const char *others)
{
    char *out = need_text("%s", "");
    for (int i = 0; i < n; i++) {
        char *longer = need_text("%s%s%s", out, i ? "," : "", i == axis ? one : others);
        free(out);
        out = longer;
    }
    return out;
}

static bool add_preset(struct target *target, const char *regex, int n, int axis, const char *one,
                       const char *others)
{
    char *placements = place_axis(n, axis, one, others);
    bool fine = add_rule(target, regex, placements, need_text("preset %s", target->preset), false);
    free(placements);
    return fine;
}

bool target_set_preset(struct target *target, const char *name)
{
    static const char *const known[] = {"fsdp", "hsdp", "llama-tp", "replicate", NULL};
    for (const char *const *preset = known; *preset; preset++)
        if (strcmp(*preset, name) == 0) {
            target->preset = *preset;
            return true;
        }
    complain(target->verb, EXIT_USAGE, "--preset %s: there are fsdp, hsdp, llama-tp and replicate",
             name);
    return false;
}

static int expand_preset(struct target *target)
{
    if (!target->preset)
        return GO_ON;
    if (!target->mesh)
        return complain(target->verb, EXIT_USAGE, "--preset %s needs a --mesh", target->preset);
    int tp = find_tp(target->mesh), n = rsd_mesh_naxes(target->mesh);
    bool fine;
    if (strcmp(target->preset, "fsdp") == 0) {
        fine = add_preset(target, ".*", n, -1, "", "S(0)");
    } else if (strcmp(target->preset, "replicate") == 0) {
        fine = add_preset(target, ".*", n, -1, "", "R");
    } else if (strcmp(target->preset, "hsdp") == 0) {
        if (n != 2)
            return complain(target->verb, EXIT_CANNOT,
                            "preset hsdp: a mesh of two axes is needed, replicas first: --mesh "
                            "dp_replicate=2,dp_shard=4");
        fine = add_preset(target, ".*", n, 1, "S(0)", "R");
    } else {
        fine =
            add_preset(target, "(.*[.])?(q_proj|k_proj|v_proj|gate_proj|up_proj)[.](weight|bias)",
                       n, tp, "S(0)", "R") &&
            add_preset(target, "(.*[.])?(o_proj|down_proj)[.]weight", n, tp, "S(1)", "R") &&
            add_preset(target, "(.*[.])?(embed_tokens|lm_head)[.]weight", n, tp, "S(0)", "R") &&
            add_preset(target, "(.*[.])?(o_proj|down_proj)[.]bias", n, -1, "", "R") &&
            add_preset(target, "(.*[.])?[A-Za-z_]*(norm|layernorm)[.](weight|bias)", n, -1, "",
                       "R") &&
            add_preset(target, "(.*[.])?rotary_emb[.]inv_freq", n, -1, "", "R");
    }
    return fine ? GO_ON : EXIT_USAGE;
}

/* ---- parts of a dict ---- */

/* The text at the start of a path such as ["model", "w", 0]; -1: it is not that text. */
static long after_first(const char *path, const char *text)
{
    size_t n = strlen(text);
    if (path[0] != '[' || path[1] != '"' || strncmp(path + 2, text, n) != 0 || path[2 + n] != '"')
        return -1;
    const char *rest = path + 3 + n;
    rest += strspn(rest, " ");
    return *rest == ',' ? (long)(rest - path) : -1;
}

static bool has_model_part(const struct target *target)
{
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(target->checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (rsd_checkpoint_tensor(target->checkpoint, i, &tensor) == RSD_OK && tensor.path &&
            after_first(tensor.path, "model") > 0)
            return true;
    }
    return false;
}

/* ---- one tensor ---- */

static bool is_wanted(const struct target *target, const rsd_tensor_info *tensor)
{
    bool wanted = target->nonly == 0;
    for (size_t i = 0; i < target->nonly; i++)
        wanted = wanted || pattern_matches(&target->only[i], tensor->name);
    for (size_t i = 0; i < target->nwithout; i++)
        wanted = wanted && !pattern_matches(&target->without[i], tensor->name);
    if (target->model_only && (!tensor->path || after_first(tensor->path, "model") < 0))
        return false;
    return wanted;
}

static char *new_name(const struct target *target, const rsd_tensor_info *tensor)
{
    const char *name = tensor->name;
    if (target->model_only && strncmp(name, "model.", 6) == 0)
        name += 6;
    for (size_t i = 0; i < target->nprefixes; i++) {
        size_t n = strlen(target->prefixes[i]);
        if (strncmp(name, target->prefixes[i], n) == 0 && name[n]) {
            name += n;
            break;
        }
    }
    char *out = need_text("%s", name);
    for (size_t i = 0; i < target->nrenames; i++) {
        char *renamed = substitution_apply(&target->renames[i], out);
        free(out);
        out = renamed;
    }
    return out;
}

static struct rule *find_rule(const struct target *target, const char *name, bool place_only)
{
    for (size_t i = 0; i < target->nrules; i++)
        if ((target->rules[i].place || !place_only) &&
            pattern_matches(&target->rules[i].pattern, name))
            return &target->rules[i];
    return NULL;
}

static bool same_shape(const rsd_tensor_info *a, const rsd_tensor_info *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int32_t d = 0; d < a->ndim; d++)
        if (a->shape[d] != b->shape[d])
            return false;
    return true;
}

/* State that has the shape of its parameter goes with it, unless it has a --place of its own. */
static struct rule *rule_of(const struct target *target, const rsd_tensor_info *tensor)
{
    rsd_tensor_info parameter = {.struct_nbytes = sizeof parameter};
    int64_t index;
    struct rule *rule = find_rule(target, tensor->name, true);
    if (!rule && find_parameter(&target->names, tensor->name, &index) &&
        rsd_checkpoint_tensor(target->checkpoint, index, &parameter) == RSD_OK &&
        same_shape(tensor, &parameter))
        rule = find_rule(target, parameter.name, false);
    return rule ? rule : find_rule(target, tensor->name, false);
}

static rsd_status make_layout(const struct target *target, const rsd_tensor_info *tensor,
                              rsd_layout **layout)
{
    struct rule *rule = rule_of(target, tensor);
    const char *placements = rule ? rule->placements : target->otherwise;
    if (rule)
        rule->used = true;
    if (!placements && tensor->ndim > 0) {
        complain(target->verb, 0, "%s: no rule for it, and no --default", tensor->name);
        return RSD_EINVAL;
    }
    char *replicated = place_axis(rsd_mesh_naxes(target->mesh), -1, "", "R");
    if (tensor->ndim == 0)
        placements = replicated;
    rsd_status status = rsd_layout_parse_on(tensor->dtype, tensor->ndim, tensor->shape,
                                            target->mesh, placements, layout);
    if (status)
        complain(target->verb, 0, "%s: %s as '%s': %s", tensor->name,
                 tensor_text(tensor->dtype, tensor->ndim, tensor->shape), placements, rsd_error());
    free(replicated);
    return status;
}

static bool is_float(rsd_dtype dtype)
{
    return dtype == RSD_F64 || dtype == RSD_F32 || dtype == RSD_F16 || dtype == RSD_BF16;
}

rsd_status target_choose(void *context, const rsd_tensor_info *tensor, rsd_tensor_target *choice)
{
    struct target *target = context;
    choice->keep = is_wanted(target, tensor);
    if (!choice->keep)
        return RSD_OK;
    free(target->name);
    target->name = new_name(target, tensor);
    choice->name = target->name;
    if (target->cast && is_float(tensor->dtype))
        choice->dtype = target->cast;
    return target->mesh ? make_layout(target, tensor, &choice->layout) : RSD_OK;
}

/* ---- all of them ---- */

static bool matches_any(const struct target *target, const struct rule *rule)
{
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(target->checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        if (rsd_checkpoint_tensor(target->checkpoint, i, &tensor) == RSD_OK &&
            is_wanted(target, &tensor) && pattern_matches(&rule->pattern, tensor.name))
            return true;
    }
    return false;
}

static int note_unused(const struct target *target, bool quiet)
{
    int code = GO_ON;
    for (size_t i = 0; i < target->nrules; i++) {
        const struct rule *rule = &target->rules[i];
        if (rule->used)
            continue;
        bool late = matches_any(target, rule);
        if (rule->place && !late)
            code = complain(target->verb, EXIT_CANNOT, "%s matches no tensor", rule->from);
        else if (!quiet && (rule->place || strncmp(rule->from, "preset ", 7) != 0))
            complain(target->verb, 0, "note: %s: '%s' %s", rule->from, rule->pattern.text,
                     late ? "decides nothing: rules before it match first" : "matches no tensor");
    }
    return code;
}

int target_check(struct target *target, rsd_checkpoint *checkpoint, bool quiet)
{
    int64_t nwanted = 0;
    target->checkpoint = checkpoint;
    if (target->nrules && !target->mesh)
        return complain(target->verb, EXIT_USAGE, "%s needs a --mesh", target->rules[0].from);
    if (target->otherwise && !target->mesh)
        return complain(target->verb, EXIT_USAGE, "--default needs a --mesh");
    names_sort(&target->names, checkpoint);
    int code = expand_preset(target);
    if (code != GO_ON)
        return code;
    target->model_only = target->model_only && has_model_part(target);
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
        rsd_tensor_target choice = {.struct_nbytes = sizeof choice};
        if (rsd_checkpoint_tensor(checkpoint, i, &tensor))
            return complain_status(target->verb, RSD_EINVAL);
        target->nproblems += target_choose(target, &tensor, &choice) != RSD_OK;
        nwanted += choice.keep;
        rsd_layout_free(choice.layout);
    }
    if (target->nproblems)
        return complain(target->verb, EXIT_CANNOT, "%zu of %lld tensors cannot be mapped",
                        target->nproblems, (long long)nwanted);
    if (nwanted == 0)
        return complain(target->verb, EXIT_CANNOT, "no tensor is left to write");
    return note_unused(target, quiet);
}

void target_free(struct target *target)
{
    for (size_t i = 0; i < target->nrules; i++) {
        pattern_free(&target->rules[i].pattern);
        free(target->rules[i].placements);
        free(target->rules[i].from);
    }
    for (size_t i = 0; i < target->nonly; i++)
        pattern_free(&target->only[i]);
    for (size_t i = 0; i < target->nwithout; i++)
        pattern_free(&target->without[i]);
    for (size_t i = 0; i < target->nrenames; i++)
        substitution_free(&target->renames[i]);
    for (size_t i = 0; i < target->nprefixes; i++)
        free(target->prefixes[i]);
    free(target->rules);
    free(target->only);
    free(target->without);
    free(target->renames);
    free(target->prefixes);
    rsd_mesh_free(target->mesh);
    names_free(&target->names);
    free(target->otherwise);
    free(target->name);
}
