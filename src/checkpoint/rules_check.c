/* rules_check.c - applies rules to all tensors of a checkpoint, and reports all problems at once. Lists the presets that
 * fit.
 *
 * Tensors that fail for the same reason are one message, with their number and the first names.
 */
#include "rules.h"

enum { MOST_REASONS = 20, MOST_NAMES = 3 };

struct failed_tensors {
    char *reason;
    struct text names; /* of the first of them */
    int64_t n;
};

struct rules_check {
    rsd_rules *rules;
    rsd_on_rule_message *on_message;
    void *context;
    bool *kept; /* by tensor */
    int64_t nkept, nproblems;
    struct failed_tensors failed[MOST_REASONS];
    size_t nreasons;
    int64_t nothers; /* failed for more reasons than are kept */
};

/* Passes a text on to the caller, and frees it. */
static rsd_status send_message(struct rules_check *check, bool is_problem, struct text *text)
{
    char *chars;
    TRY(text_take(text, &chars));
    rsd_status status =
        check->on_message ? check->on_message(check->context, is_problem, chars) : RSD_OK;
    check->nproblems += is_problem;
    mem_free(chars);
    return status;
}

/* Finds the tensors that failed for the reason of the last error; NULL: there are too many reasons. */
static struct failed_tensors *find_reason(struct rules_check *check)
{
    size_t i = 0;
    while (i < check->nreasons && strcmp(check->failed[i].reason, rsd_error()) != 0)
        i++;
    if (i == MOST_REASONS)
        return NULL;
    if (i == check->nreasons) {
        check->failed[i].reason = text_copy(rsd_error());
        check->nreasons += check->failed[i].reason != NULL;
    }
    return &check->failed[i];
}

/* Records a tensor under the reason for which it cannot be mapped. */
static rsd_status note_failed_tensor(struct rules_check *check, const rsd_tensor_info *tensor)
{
    struct failed_tensors *failed = find_reason(check);
    if (!failed) {
        check->nothers++;
        return RSD_OK;
    }
    if (!failed->reason)
        return RSD_ENOMEM;
    if (failed->n++ > MOST_NAMES)
        return RSD_OK;
    struct text *names = &failed->names;
    text_add(names, "%s", failed->n > 1 ? ", " : "");
    if (failed->n > MOST_NAMES) {
        text_add(names, "...");
        return RSD_OK;
    }
    text_add(names, "%s %s[", tensor->name, rsd_dtype_name(tensor->dtype));
    for (int32_t d = 0; d < tensor->ndim; d++)
        text_add(names, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
    text_add(names, "]");
    return RSD_OK;
}

static bool is_problem_of_tensor(rsd_status status)
{
    return status == RSD_EINVAL || status == RSD_EMISMATCH || status == RSD_ELIMIT ||
           status == RSD_EUNSUPPORTED;
}

/* Maps a tensor. *keep says whether the rules keep it, also if it cannot be mapped. */
static rsd_status map_one_tensor(rsd_rules *rules, size_t index, rsd_tensor_info *tensor,
                                 bool *keep)
{
    TRY(rsd_checkpoint_tensor(rules->checkpoint, (int64_t)index, tensor));
    rsd_tensor_target target = {
        .struct_nbytes = sizeof target, .keep = 1, .dtype = tensor->dtype, .name = tensor->name};
    rsd_status status = rules_map_tensor(rules, tensor, &target);
    rsd_layout_free(target.layout);
    *keep = target.keep != 0;
    return status;
}

/* Maps one tensor, and records why it cannot be mapped. */
static rsd_status check_tensor(struct rules_check *check, size_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_status status = map_one_tensor(check->rules, index, &tensor, &check->kept[index]);
    if (is_problem_of_tensor(status))
        status = note_failed_tensor(check, &tensor);
    check->nkept += check->kept[index];
    return status;
}

/* Adds the presets that fit the tensors that are kept and are not optimizer state. */
static rsd_status add_fitting_presets(const rsd_rules *rules, const bool *kept, struct text *text)
{
    const struct catalog *catalog = &rules->checkpoint->catalog;
    struct name_list names = {0};
    rsd_status status = RSD_OK;
    int64_t parameter;
    for (size_t i = 0; i < catalog->ntensors && !status; i++) {
        const char *name = catalog->tensors[i].name;
        if (kept[i] && catalog->tensors[i].ndim > 0 &&
            !parameter_index_find(&rules->parameters, name, &parameter))
            status = name_list_add(&names, (struct slice){name, strlen(name)});
    }
    if (!status)
        status = preset_list_fitting(&names, rules->mesh, text);
    name_list_drop(&names);
    return status;
}

rsd_status rsd_rules_presets(rsd_rules *rules, rsd_checkpoint *checkpoint, char **names)
{
    TRY(rules_use_checkpoint(rules, checkpoint));
    size_t ntensors = checkpoint->catalog.ntensors;
    bool *kept = mem_new(ntensors, sizeof *kept);
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    struct text text = {0};
    rsd_status status = kept ? RSD_OK : RSD_ENOMEM;
    for (size_t i = 0; i < ntensors && !status; i++) {
        status = map_one_tensor(rules, i, &tensor, &kept[i]);
        if (is_problem_of_tensor(status))
            status = RSD_OK; /* of the rules so far */
    }
    if (!status)
        status = add_fitting_presets(rules, kept, &text);
    mem_free(kept);
    if (!status)
        return text_take(&text, names);
    text_drop(&text);
    return status;
}

/* Sends one message for each reason, with the number of tensors and the first names. */
static rsd_status report_failed_tensors(struct rules_check *check)
{
    struct text text = {0};
    for (size_t i = 0; i < check->nreasons; i++) {
        const struct failed_tensors *failed = &check->failed[i];
        if (failed->names.failed)
            return fail(RSD_ENOMEM, "no memory for text");
        text_add(&text, "%lld of %lld tensors (%s): %s", (long long)failed->n,
                 (long long)check->nkept, failed->names.chars, failed->reason);
        if (strcmp(failed->reason, RULES_NO_MATCH) == 0) {
            text_add(&text, "; presets that fit: ");
            rsd_status status = add_fitting_presets(check->rules, check->kept, &text);
            if (status) {
                text_drop(&text);
                return status;
            }
        }
        TRY(send_message(check, true, &text));
    }
    if (!check->nothers)
        return RSD_OK;
    text_add(&text, "%lld more tensors cannot be mapped for other reasons",
             (long long)check->nothers);
    return send_message(check, true, &text);
}

static rsd_status matches_kept_tensor(const struct rules_check *check, const struct rule *rule,
                                      bool *matches)
{
    const struct catalog *catalog = &check->rules->checkpoint->catalog;
    *matches = false;
    for (size_t i = 0; i < catalog->ntensors && !*matches; i++)
        if (check->kept[i])
            TRY(expression_match(&rule->expression, &check->rules->options,
                                 catalog->tensors[i].name, matches));
    return RSD_OK;
}

/* Adds what to do with a rule that matches only a part of names, as that of ONLY may. */
static rsd_status explain_part_match(const struct rules_check *check, const struct rule *rule,
                                     struct text *text)
{
    const struct catalog *catalog = &check->rules->checkpoint->catalog;
    struct expression part;
    size_t n = 0;
    const char *first = NULL;
    TRY(expression_open(&part, (struct slice){rule->expression.text, strlen(rule->expression.text)},
                        false, rule->expression.posix));
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->ntensors && !status; i++) {
        bool matches = false;
        if (check->kept[i])
            status =
                expression_match(&part, &check->rules->options, catalog->tensors[i].name, &matches);
        n += matches;
        first = matches && !first ? catalog->tensors[i].name : first;
    }
    if (n)
        text_add(text,
                 ": it must match the whole name, and matches a part of %zu, such as %s; "
                 "write '.*%s.*'",
                 n, first, rule->expression.text);
    expression_drop(&part);
    return status;
}

/* A rule of the caller that matches nothing is likely misspelled; files and presets serve many models. */
static rsd_status report_unused_rules(struct rules_check *check)
{
    for (size_t i = 0; i < check->rules->n; i++) {
        const struct rule *rule = &check->rules->list[i];
        struct text text = {0};
        bool matches;
        if (rule->kind != RSD_RULE_PLACE || rule->used || rule->source == FROM_PRESET)
            continue;
        TRY(matches_kept_tensor(check, rule, &matches));
        text_add(&text, "%s %s", rule->origin,
                 matches ? "has no effect: earlier rules match first" : "matches no tensor");
        rsd_status status = matches ? RSD_OK : explain_part_match(check, rule, &text);
        if (status) {
            text_drop(&text);
            return status;
        }
        TRY(send_message(check, !matches && rule->source == FROM_CALLER, &text));
    }
    return RSD_OK;
}

/* Applies the rules to all tensors, and reports the tensors that fail, or else the rules that match none. */
static rsd_status run_check(struct rules_check *check, size_t ntensors)
{
    struct text text = {0};
    for (size_t i = 0; i < check->rules->n; i++)
        check->rules->list[i].used = false;
    for (size_t i = 0; i < ntensors; i++)
        TRY(check_tensor(check, i));
    TRY(report_failed_tensors(check));
    if (check->nkept > 0)
        return report_unused_rules(check);
    text_add(&text, "the rules leave no tensor to write");
    return send_message(check, true, &text);
}

rsd_status rsd_rules_check(rsd_rules *rules, rsd_checkpoint *checkpoint,
                           rsd_on_rule_message *on_message, void *context, int64_t *nproblems)
{
    TRY(rules_use_checkpoint(rules, checkpoint));
    struct rules_check check = {.rules = rules, .on_message = on_message, .context = context};
    check.kept = mem_new(checkpoint->catalog.ntensors, sizeof *check.kept);
    rsd_status status = check.kept ? run_check(&check, checkpoint->catalog.ntensors) : RSD_ENOMEM;
    for (size_t i = 0; i < check.nreasons; i++) {
        mem_free(check.failed[i].reason);
        text_drop(&check.failed[i].names);
    }
    mem_free(check.kept);
    if (!status && nproblems)
        *nproblems = check.nproblems;
    return status;
}
