/* rules.c - decides what becomes of each tensor of a conversion: kept or not, its name, dtype and layout.
 *
 * Placement rules are tried in this order: those added one by one, those of files, those of the preset. The
 * first that matches the whole name applies. Optimizer state with the shape of its parameter has the layout
 * of that parameter.
 */
#include "rules.h"

#include <errno.h>
#include <stdio.h>

rsd_status rsd_rules_new(const rsd_rules_options *options, rsd_rules **rules)
{
    rsd_rules_options copy;
    TRY(options_copy("rsd_rules_options", options, &copy, sizeof copy));
    rsd_rules *made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    made->options = copy;
    *rules = made;
    return RSD_OK;
}

static void drop_rule(struct rule *rule)
{
    expression_drop(&rule->expression);
    mem_free(rule->value);
    mem_free(rule->origin);
}

void rsd_rules_free(rsd_rules *rules)
{
    if (!rules)
        return;
    for (size_t i = 0; i < rules->n; i++)
        drop_rule(&rules->list[i]);
    mem_free(rules->list);
    mem_free(rules->name);
    model_part_drop(&rules->model);
    parameter_index_drop(&rules->parameters);
    rsd_mesh_free(rules->mesh);
    mem_free(rules);
}

/* ---- adding ---- */

rsd_status rsd_rules_set_mesh(rsd_rules *rules, const rsd_mesh *mesh)
{
    rsd_mesh_free(rules->mesh);
    rules->mesh = rsd_mesh_share(mesh);
    return RSD_OK;
}

rsd_status rsd_rules_set_preset(rsd_rules *rules, const char *name)
{
    return preset_find(name, &rules->preset, &rules->with_fsdp);
}

/* Takes over what the rule owns, also on failure. */
static rsd_status insert_rule(rsd_rules *rules, struct rule *rule)
{
    bool once =
        !rule->expression.text && (rule->kind == RSD_RULE_DEFAULT || rule->kind == RSD_RULE_CAST);
    for (size_t i = 0; i < rules->n && once; i++)
        if (rules->list[i].kind == rule->kind && !rules->list[i].expression.text) {
            drop_rule(&rules->list[i]);
            rules->list[i] = *rule;
            return RSD_OK;
        }
    rsd_status status = GROW(rules->list, rules->capacity, rules->n + 1);
    if (status) {
        drop_rule(rule);
        return status;
    }
    size_t at = rules->n++;
    for (; at > 0 && rules->list[at - 1].source > rule->source; at--)
        rules->list[at] = rules->list[at - 1];
    rules->list[at] = *rule;
    return RSD_OK;
}

rsd_status rules_add_place(rsd_rules *rules, enum rule_source source, const char *label,
                           struct slice expression, const char *placements)
{
    struct rule rule = {.kind = RSD_RULE_PLACE, .source = source};
    struct text origin = {0};
    bool posix = source == FROM_PRESET || !rules->options.match;
    TRY(expression_open(&rule.expression, expression, true, posix));
    rule.value = text_copy(placements);
    rsd_status status = rule.value ? RSD_OK : RSD_ENOMEM;
    text_add(&origin, "%s '%s'", label, rule.expression.text);
    if (!status)
        status = text_take(&origin, &rule.origin);
    if (!status)
        return insert_rule(rules, &rule);
    text_drop(&origin);
    drop_rule(&rule);
    return status;
}

/* Splits EXPRESSION=VALUE at the last equals sign that is not in parentheses; *value is NULL if one of the three is missing. */
static struct slice split_at_equals(const char *text, const char **value)
{
    const char *equals = text_find_equals(text);
    *value = equals && equals > text && equals[1] ? equals + 1 : NULL;
    return (struct slice){text, equals ? (size_t)(equals - text) : 0};
}

static rsd_status make_place(rsd_rules *rules, const char *text)
{
    const char *placements;
    struct slice expression = split_at_equals(text, &placements);
    if (!placements)
        return fail(RSD_EINVAL, "place '%s' must be REGEX=PLACEMENTS", text);
    return rules_add_place(rules, FROM_CALLER, "place", expression, placements);
}

static rsd_status make_cast(const rsd_rules *rules, const char *text, struct rule *rule)
{
    const char *value;
    struct slice expression = split_at_equals(text, &value);
    TRY(rsd_dtype_parse(value ? value : text, &rule->dtype));
    return value ? expression_open(&rule->expression, expression, true, !rules->options.match)
                 : RSD_OK;
}

static rsd_status make_rename(const char *text, struct rule *rule)
{
    char *old;
    TRY(substitution_split(text, &old, &rule->value, &rule->everywhere));
    rsd_status status =
        expression_open(&rule->expression, (struct slice){old, strlen(old)}, false, true);
    mem_free(old);
    if (status)
        mem_free(rule->value);
    return status;
}

rsd_status rsd_rules_add(rsd_rules *rules, rsd_rule kind, const char *text)
{
    struct rule rule = {.kind = kind};
    switch (kind) {
    case RSD_RULE_PLACE:
        return make_place(rules, text);
    case RSD_RULE_DEFAULT:
        rule.value = text_copy(text);
        if (!rule.value)
            return RSD_ENOMEM;
        break;
    case RSD_RULE_ONLY:
    case RSD_RULE_EXCLUDE:
        TRY(expression_open(&rule.expression, (struct slice){text, strlen(text)}, false,
                            !rules->options.match));
        break;
    case RSD_RULE_STRIP_PREFIX:
    case RSD_RULE_PART:
    case RSD_RULE_MODEL:
        rule.value = text_copy(text);
        if (!rule.value)
            return RSD_ENOMEM;
        break;
    case RSD_RULE_RENAME:
        TRY(make_rename(text, &rule));
        break;
    case RSD_RULE_CONFIG:
        return heads_read_config(rules, text);
    case RSD_RULE_HEADS:
        return heads_parse_counts(rules, text);
    case RSD_RULE_KV_HEADS:
        rules->replicate_kv = strcmp(text, "replicate") == 0;
        return rules->replicate_kv ? RSD_OK
                                   : fail(RSD_EINVAL, "KV heads '%s' must be replicate", text);
    case RSD_RULE_CAST:
        TRY(make_cast(rules, text, &rule));
        break;
    default:
        return fail(RSD_EINVAL, "invalid kind of rule %d", (int)kind);
    }
    return insert_rule(rules, &rule);
}

/* ---- files ---- */

/* Adds the rule of one line, which is changed. */
static rsd_status add_rule_line(rsd_rules *rules, const char *path, int number, char *line)
{
    static const char blanks[] = " \t\r";
    struct text label = {0};
    line[strcspn(line, "#")] = '\0';
    line += strspn(line, blanks);
    for (size_t n = strlen(line); n > 0 && strchr(blanks, line[n - 1]);)
        line[--n] = '\0';
    if (!*line)
        return RSD_OK;
    struct slice expression = {line, strcspn(line, blanks)};
    const char *placements = line + expression.nbytes + strspn(line + expression.nbytes, blanks);
    if (!*placements)
        return fail(RSD_EINVAL, "%s:%d: a rule must be REGEX PLACEMENTS", path, number);
    text_add(&label, "%s:%d:", path, number);
    rsd_status status = RSD_ENOMEM;
    if (!label.failed)
        status = rules_add_place(rules, FROM_FILE, label.chars, expression, placements);
    text_drop(&label);
    return status == RSD_EINVAL ? fail_in(status, "%s:%d: ", path, number) : status;
}

/* Reads a text until its end, or until it is too long. A user's file adds to the budget as a checkpoint's does. */
static rsd_status read_user_text(FILE *file, const char *path, struct bytes *out)
{
    enum { MAX_TEXT_NBYTES = 1 << 24 };
    char block[4096];
    for (size_t n; !out->failed && (n = fread(block, 1, sizeof block, file)) > 0;) {
        const char *zero = memchr(block, 0, n);
        if (zero)
            return fail(RSD_EINVAL, "%s is not a text: byte %zu is zero", path,
                        out->n + (size_t)(zero - block));
        if (out->n + n > MAX_TEXT_NBYTES)
            return fail(RSD_ELIMIT, "%s has more than %d bytes", path, (int)MAX_TEXT_NBYTES);
        budget_add_file(n);
        budget_add_input(n);
        bytes_put(out, block, n);
    }
    return ferror(file) ? fail(RSD_EIO, "%s: %s", path, strerror(errno)) : RSD_OK;
}

rsd_status rules_read_file(const char *path, struct bytes *out)
{
    FILE *file = fopen(path, "r");
    if (!file)
        return fail(errno == ENOENT ? RSD_ENOENT : RSD_EIO, "%s: %s", path, strerror(errno));
    rsd_status status = read_user_text(file, path, out);
    fclose(file);
    bytes_put(out, "", 1);
    return status ? status : out->failed ? RSD_ENOMEM : RSD_OK;
}

rsd_status rsd_rules_add_file(rsd_rules *rules, const char *path)
{
    enum { MAX_LINES = 50000 }; /* a rule takes a few kilobytes */
    struct bytes content = {0};
    rsd_status status = rules_read_file(path, &content);
    char *line = (char *)content.data;
    for (int number = 1; !status && line; number++) {
        char *end = strchr(line, '\n');
        if (end)
            *end++ = '\0';
        if (number > MAX_LINES && *line)
            status = fail(RSD_ELIMIT, "%s has more than %d lines", path, (int)MAX_LINES);
        else
            status = add_rule_line(rules, path, number, line);
        line = end;
    }
    bytes_drop(&content);
    return status;
}

/* ---- the checkpoint ---- */

/* Whether the path of a tensor, such as ["model", "w", 0], starts at a key. */
static bool is_in_part(const char *path, const char *key)
{
    size_t n = strlen(key);
    if (!path || strncmp(path, "[\"", 2) != 0 || strncmp(path + 2, key, n) != 0 ||
        path[2 + n] != '"')
        return false;
    path += 3 + n;
    return path[strspn(path, " ")] == ',';
}

static bool has_part(const rsd_checkpoint *checkpoint, const char *key)
{
    for (size_t i = 0; i < checkpoint->catalog.ntensors; i++)
        if (is_in_part(checkpoint->catalog.tensors[i].path, key))
            return true;
    return false;
}

/* Returns EINVAL if a rule needs a mesh and none is set. */
static rsd_status check_mesh(const rsd_rules *rules)
{
    if (rules->mesh)
        return RSD_OK;
    if (rules->preset)
        return fail(RSD_EINVAL, "preset %s needs a mesh", preset_name(rules->preset));
    for (size_t i = 0; i < rules->n; i++)
        if (rules->list[i].kind == RSD_RULE_PLACE)
            return fail(RSD_EINVAL, "%s needs a mesh", rules->list[i].origin);
        else if (rules->list[i].kind == RSD_RULE_DEFAULT)
            return fail(RSD_EINVAL, "default '%s' needs a mesh", rules->list[i].value);
    return RSD_OK;
}

static bool has_rule(const rsd_rules *rules, rsd_rule kind)
{
    for (size_t i = 0; i < rules->n; i++)
        if (rules->list[i].kind == kind)
            return true;
    return false;
}

static rsd_status find_model(rsd_rules *rules, const rsd_checkpoint *checkpoint)
{
    bool chosen = has_rule(rules, RSD_RULE_ONLY) || has_rule(rules, RSD_RULE_STRIP_PREFIX);
    model_part_drop(&rules->model);
    return has_rule(rules, RSD_RULE_MODEL) ? model_part_find(&rules->model, checkpoint, chosen)
                                           : RSD_OK;
}

rsd_status rules_use_checkpoint(rsd_rules *rules, const rsd_checkpoint *checkpoint)
{
    rules->checkpoint = NULL;
    TRY(check_mesh(rules));
    while (rules->n > 0 && rules->list[rules->n - 1].source == FROM_PRESET)
        drop_rule(&rules->list[--rules->n]); /* of an earlier checkpoint */
    if (rules->preset)
        TRY(preset_add_rules(rules->preset, rules));
    parameter_index_drop(&rules->parameters);
    TRY(parameter_index_open(&rules->parameters, checkpoint));
    rules->part = NULL;
    rules->nexperts = experts_count(checkpoint);
    TRY(find_model(rules, checkpoint));
    rules->checkpoint = checkpoint;
    for (size_t i = 0; i < rules->n && !rules->part; i++)
        if (rules->list[i].kind == RSD_RULE_PART && has_part(checkpoint, rules->list[i].value))
            rules->part = rules->list[i].value;
    return RSD_OK;
}

/* ---- one tensor ---- */

/* Finds the first rule of a kind, of these sources, that matches or has no expression; NULL: none. */
static rsd_status find_rule(const rsd_rules *rules, rsd_rule kind, enum rule_source last,
                            const char *name, struct rule **found)
{
    bool matches = false;
    *found = NULL;
    for (size_t i = 0; i < rules->n && rules->list[i].source <= last && !matches; i++) {
        struct rule *rule = &rules->list[i];
        if (rule->kind != kind)
            continue;
        matches = !rule->expression.text;
        if (!matches)
            TRY(expression_match(&rule->expression, &rules->options, name, &matches));
        *found = matches ? rule : NULL;
    }
    return RSD_OK;
}

/* Returns whether the rules keep a tensor: by the part of the model, then by only, then by exclude. */
static rsd_status select_tensor(const rsd_rules *rules, const rsd_tensor_info *tensor, bool *keep)
{
    struct rule *rule;
    *keep = !rules->part || is_in_part(tensor->path, rules->part);
    if (rules->model.known)
        TRY(model_part_has(&rules->model, tensor->path, tensor->name, keep));
    for (size_t i = 0; i < rules->n && *keep; i++)
        if (rules->list[i].kind == RSD_RULE_ONLY) {
            TRY(find_rule(rules, RSD_RULE_ONLY, FROM_CALLER, tensor->name, &rule));
            *keep = rule != NULL;
            break;
        }
    if (!*keep)
        return RSD_OK;
    TRY(find_rule(rules, RSD_RULE_EXCLUDE, FROM_CALLER, tensor->name, &rule));
    *keep = !rule;
    return RSD_OK;
}

/* Sets rules->name to the new name of a tensor: without its part and one prefix, then renamed. */
static rsd_status make_kept_name(rsd_rules *rules, const char *name)
{
    bool stripped = false;
    size_t npart = rules->part ? strlen(rules->part) : 0;
    if (npart && strncmp(name, rules->part, npart) == 0 && name[npart] == '.')
        name += npart + 1;
    for (size_t i = 0; i < rules->n && !stripped; i++) {
        const struct rule *rule = &rules->list[i];
        size_t n = rule->kind == RSD_RULE_STRIP_PREFIX ? strlen(rule->value) : 0;
        stripped = n > 0 && strncmp(name, rule->value, n) == 0 && name[n];
        name += stripped ? n : 0;
    }
    mem_free(rules->name);
    rules->name = text_copy(name);
    if (!rules->name)
        return RSD_ENOMEM;
    for (size_t i = 0; i < rules->n; i++) {
        const struct rule *rule = &rules->list[i];
        if (rule->kind == RSD_RULE_RENAME)
            TRY(substitution_apply(&rule->expression, rule->value, rule->everywhere, &rules->name));
    }
    return RSD_OK;
}

static rsd_status make_name(rsd_rules *rules, const char *name)
{
    char *in_model = NULL;
    if (rules->model.known)
        TRY(model_part_name(&rules->model, name, &in_model));
    rsd_status status = make_kept_name(rules, in_model ? in_model : name);
    mem_free(in_model);
    return status;
}

static rsd_status choose_dtype(const rsd_rules *rules, const rsd_tensor_info *tensor,
                               rsd_dtype *dtype)
{
    struct rule *rule;
    TRY(find_rule(rules, RSD_RULE_CAST, FROM_CALLER, tensor->name, &rule));
    bool applies = rule && (rule->expression.text || dtype_class(tensor->dtype) == CLASS_FLOAT);
    *dtype = applies ? rule->dtype : tensor->dtype;
    return RSD_OK;
}

static bool is_same_shape(const rsd_tensor_info *a, const rsd_tensor_info *b)
{
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

/* Optimizer state has the rule of its parameter, unless the caller added one for the state itself. */
static rsd_status choose_place(const rsd_rules *rules, const rsd_tensor_info *tensor,
                               struct rule **rule)
{
    rsd_tensor_info parameter = {.struct_nbytes = sizeof parameter};
    int64_t index;
    TRY(find_rule(rules, RSD_RULE_PLACE, FROM_CALLER, tensor->name, rule));
    if (!*rule && parameter_index_find(&rules->parameters, tensor->name, &index)) {
        TRY(rsd_checkpoint_tensor(rules->checkpoint, index, &parameter));
        if (is_same_shape(tensor, &parameter))
            TRY(find_rule(rules, RSD_RULE_PLACE, FROM_PRESET, parameter.name, rule));
    }
    if (!*rule)
        TRY(find_rule(rules, RSD_RULE_PLACE, FROM_PRESET, tensor->name, rule));
    return *rule ? RSD_OK : find_rule(rules, RSD_RULE_DEFAULT, FROM_CALLER, tensor->name, rule);
}

static rsd_status parse_tensor_placements(const rsd_mesh *mesh, const rsd_tensor_info *tensor,
                                          const char *placements, rsd_layout **layout)
{
    if (tensor->ndim == 0) {
        const rsd_placement replicated[RSD_MAX_AXES] = {{.kind = RSD_REPLICATE}}; /* which is 0 */
        return rsd_layout_new(tensor->dtype, 0, NULL, mesh, replicated, layout);
    }
    rsd_status status =
        rsd_layout_parse_on(tensor->dtype, tensor->ndim, tensor->shape, mesh, placements, layout);
    return status ? fail_in(status, "placements '%s': ", placements) : RSD_OK;
}

/* Makes the layout of a tensor from the rule that matches it. A scalar needs no rule. */
static rsd_status make_layout(rsd_rules *rules, const rsd_tensor_info *tensor, rsd_layout **layout)
{
    struct rule *rule;
    TRY(choose_place(rules, tensor, &rule));
    if (!rule && tensor->ndim > 0)
        return fail(RSD_EINVAL, RULES_NO_MATCH);
    if (rule)
        rule->used = true;
    bool is_expert = rule && rule->whole == EXPERT;
    if (rule && rule->whole && !is_expert) {
        *layout = NULL;
        rsd_status status = heads_make_layout(rules, rule, tensor, layout);
        if (status || *layout)
            return status;
    }
    char *expanded = NULL;
    rsd_mesh *mesh = NULL; /* of those ranks that have an expert */
    TRY(heads_expand_segments(rule ? rule->value : "", tensor, &expanded));
    rsd_status status = is_expert ? experts_make_mesh(rules, rule, tensor->name, &mesh) : RSD_OK;
    if (!status)
        status = parse_tensor_placements(mesh ? mesh : rules->mesh, tensor, expanded, layout);
    rsd_mesh_free(mesh);
    mem_free(expanded);
    return status && rule && rule->origin ? fail_in(status, "%s: ", rule->origin) : status;
}

rsd_status rsd_rules_layout(const rsd_mesh *mesh, const rsd_tensor_info *tensor,
                            const char *placements, rsd_layout **layout)
{
    return parse_tensor_placements(mesh, tensor, placements, layout);
}

rsd_status rules_map_tensor(rsd_rules *rules, const rsd_tensor_info *tensor,
                            rsd_tensor_target *target)
{
    bool keep;
    TRY(select_tensor(rules, tensor, &keep));
    target->keep = keep;
    if (!keep)
        return RSD_OK;
    TRY(make_name(rules, tensor->name));
    TRY(choose_dtype(rules, tensor, &target->dtype));
    target->name = rules->name;
    if (rules->options.decide)
        TRY(rules->options.decide(rules->options.context, tensor, target));
    bool cut = target->keep && rules->mesh && !target->layout;
    return cut ? make_layout(rules, tensor, &target->layout) : RSD_OK;
}

static bool needs_checkpoint(const rsd_rules *rules)
{
    bool needs = rules->mesh != NULL;
    for (size_t i = 0; i < rules->n; i++)
        needs =
            needs || rules->list[i].kind == RSD_RULE_PART || rules->list[i].kind == RSD_RULE_MODEL;
    return needs;
}

rsd_status rsd_rules_map(void *context, const rsd_tensor_info *tensor, rsd_tensor_target *target)
{
    rsd_rules *rules = context;
    if (!rules->checkpoint && needs_checkpoint(rules))
        return fail(RSD_EINVAL, "rsd_rules_map needs a call of rsd_rules_check first");
    rsd_status status = rules_map_tensor(rules, tensor, target);
    return status ? fail_in(status, "%s: ", tensor->name) : RSD_OK;
}

/* ---- files of ranks ---- */

/* Finds the placements of a part, which the rules have for any tensor of its name and number of dims. */
static rsd_status place_part(void *context, const rsd_checkpoint *first, size_t tensor,
                             rsd_placement *placements)
{
    rsd_rules *rules = context;
    rsd_tensor_info info = {.struct_nbytes = sizeof info};
    rsd_tensor_target target = {.struct_nbytes = sizeof target, .keep = 1};
    if (tensor == SIZE_MAX)
        return rules_use_checkpoint(rules, first);
    TRY(rsd_checkpoint_tensor(first, (int64_t)tensor, &info));
    rsd_status status = make_layout(rules, &info, &target.layout);
    for (int32_t a = 0; a < rsd_mesh_naxes(rules->mesh) && !status; a++)
        status = rsd_layout_placement(target.layout, a, &placements[a]);
    rsd_layout_free(target.layout);
    return status;
}

rsd_status rules_open_joined(rsd_checkpoint *checkpoint, const struct store_listing *listing,
                             const rsd_open_options *options)
{
    rsd_rules *rules = options->from;
    if (!rules->mesh)
        return fail(RSD_EINVAL, "rules of files of ranks need a mesh");
    rsd_status status =
        format_open_joined(checkpoint, listing, options, rules->mesh, place_part, rules);
    rules->checkpoint = NULL; /* the first file is closed */
    return status;
}
