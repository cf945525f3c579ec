/* rules_presets.c - built-in placement rules, as data. */
#include "rules.h"

enum preset_axis {
    EVERY_AXIS,
    LAST_AXIS,
    TP_AXIS, /* The axis named tp, in any case; without one, the last. */
    NO_AXIS
};

struct preset_rule {
    const char *expression;
    enum preset_axis axis;
    const char *placement; /* on that axis; tensors are replicated on all others */
};

struct preset {
    const char *name;
    int32_t naxes;    /* that the mesh must have; 0: any number */
    const char *mesh; /* what such a mesh is, for messages */
    struct preset_rule rules[6];
};

static const struct preset presets[] = {
    {"fsdp", 0, NULL, {{".*", EVERY_AXIS, "S(0)"}}},
    {"hsdp",
     2,
     "two axes, the replicas first: dp_replicate=2,dp_shard=4",
     {{".*", LAST_AXIS, "S(0)"}}},
    {"llama-tp",
     0,
     NULL,
     {{"(.*[.])?(q_proj|k_proj|v_proj|gate_proj|up_proj)[.](weight|bias)", TP_AXIS, "S(0)"},
      {"(.*[.])?(o_proj|down_proj)[.]weight", TP_AXIS, "S(1)"},
      {"(.*[.])?(embed_tokens|lm_head)[.]weight", TP_AXIS, "S(0)"},
      {"(.*[.])?(o_proj|down_proj)[.]bias", NO_AXIS, NULL},
      {"(.*[.])?[A-Za-z_]*(norm|layernorm)[.](weight|bias)", NO_AXIS, NULL},
      {"(.*[.])?rotary_emb[.]inv_freq", NO_AXIS, NULL}}},
    {"replicate", 0, NULL, {{".*", NO_AXIS, NULL}}},
};

enum { NPRESETS = sizeof presets / sizeof *presets };

rsd_status preset_find(const char *name, const struct preset **preset)
{
    struct text names = {0};
    for (size_t i = 0; i < NPRESETS; i++)
        if (strcmp(presets[i].name, name) == 0) {
            *preset = &presets[i];
            return RSD_OK;
        }
    for (size_t i = 0; i < NPRESETS; i++)
        text_add(&names, "%s%s", i ? ", " : "", presets[i].name);
    if (names.failed)
        return RSD_ENOMEM;
    error_set("unknown preset '%s'; the presets are %s", name, names.chars);
    text_drop(&names);
    return RSD_EINVAL;
}

const char *preset_name(const struct preset *preset)
{
    return preset->name;
}

static int32_t find_tp_axis(const rsd_mesh *mesh)
{
    int32_t n = rsd_mesh_naxes(mesh);
    for (int32_t axis = 0; axis < n; axis++)
        if (rsd_mesh_name(mesh, axis) && strcasecmp(rsd_mesh_name(mesh, axis), "tp") == 0)
            return axis;
    return n - 1;
}

static bool is_cut_by(const struct preset_rule *rule, const rsd_mesh *mesh, int32_t axis)
{
    return rule->axis == EVERY_AXIS ||
           (rule->axis == LAST_AXIS && axis == rsd_mesh_naxes(mesh) - 1) ||
           (rule->axis == TP_AXIS && axis == find_tp_axis(mesh));
}

static rsd_status add_preset_rule(const struct preset *preset, const struct preset_rule *rule,
                                  rsd_rules *rules)
{
    struct text text = {0}, label = {0};
    for (int32_t axis = 0; axis < rsd_mesh_naxes(rules->mesh); axis++)
        text_add(&text, "%s%s", axis ? "," : "",
                 is_cut_by(rule, rules->mesh, axis) ? rule->placement : "R");
    text_add(&label, "preset %s:", preset->name);
    rsd_status status = RSD_ENOMEM;
    if (!text.failed && !label.failed)
        status =
            rules_add_place(rules, FROM_PRESET, label.chars,
                            (struct slice){rule->expression, strlen(rule->expression)}, text.chars);
    text_drop(&text);
    text_drop(&label);
    return status;
}

rsd_status preset_add_rules(const struct preset *preset, rsd_rules *rules)
{
    if (preset->naxes && rsd_mesh_naxes(rules->mesh) != preset->naxes)
        return fail(RSD_EINVAL, "preset %s needs a mesh of %s", preset->name, preset->mesh);
    for (size_t i = 0; i < sizeof preset->rules / sizeof *preset->rules; i++)
        if (preset->rules[i].expression)
            TRY(add_preset_rule(preset, &preset->rules[i], rules));
    return RSD_OK;
}
