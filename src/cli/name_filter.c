/* name_filter.c - --only and --rename of verbs that have no other rules. */
#include "cli.h"

/* Adds a rule of an option. Returns GO_ON or an exit code. */
static int add_filter_rule(const struct given_option *given, rsd_rule kind)
{
    struct name_filter *filter = options_field(given);
    if (!filter->rules && rsd_rules_new(NULL, &filter->rules))
        return cli_fail_status(given->verb, RSD_ENOMEM);
    if (rsd_rules_add(filter->rules, kind, given->value))
        return cli_fail(given->verb, EXIT_USAGE, "%s", rsd_error());
    if (kind == RSD_RULE_ONLY)
        filter->text = given->value;
    return GO_ON;
}

int name_filter_add_only(const struct given_option *given)
{
    return add_filter_rule(given, RSD_RULE_ONLY);
}

int name_filter_add_rename(const struct given_option *given)
{
    return add_filter_rule(given, RSD_RULE_RENAME);
}

bool name_filter_selects(const struct name_filter *filter, const char *name)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor, .name = name};
    rsd_tensor_target target = {.struct_nbytes = sizeof target};
    return !filter->rules ||
           (rsd_rules_map(filter->rules, &tensor, &target) == RSD_OK && target.keep);
}

int64_t name_filter_list(const struct name_filter *filter, const rsd_checkpoint *checkpoint,
                         int64_t *tensors)
{
    int64_t n = 0;
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint); i++) {
        if (!name_filter_selects(filter, input_tensor(checkpoint, i).name))
            continue;
        if (tensors)
            tensors[n] = i;
        n++;
    }
    return n;
}

int name_filter_fail(const struct name_filter *filter, const char *verb)
{
    return cli_fail(verb, EXIT_CANNOT, "--only '%s' matches no tensor", filter->text);
}

void name_filter_drop(struct name_filter *filter)
{
    rsd_rules_free(filter->rules);
}
