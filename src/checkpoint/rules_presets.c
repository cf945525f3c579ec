/* rules_presets.c - built-in placement rules, as data. */
#include "rules.h"

#include <assert.h>

enum preset_axis {
    EVERY_AXIS,
    LAST_AXIS,
    TP_AXIS, /* The axis named tp, in any case; without one, the last, unless it is named ep. */
    EP_AXIS, /* The axis named ep; without one, that of TP_AXIS. */
    NO_AXIS
};

struct preset_rule {
    const char *expression;
    enum preset_axis axis;
    const char *placement; /* on that axis; tensors are replicated on all others */
    enum rule_whole whole; /* what is not cut */
};

struct preset {
    const char *name;
    int32_t naxes;    /* that the mesh must have; 0: any number */
    const char *mesh; /* what such a mesh is, for messages */
    const struct preset_rule *rules;
    bool tensor_parallel; /* fsdp+NAME also shards over the other axes */
};

#define ANY "(.*[.])?"
#define NORMS                                                                                      \
    {                                                                                              \
        ANY "[A-Za-z_]*(norm|layernorm)[.](weight|bias)", NO_AXIS, NULL, NO_HEADS                  \
    }

static const struct preset_rule fsdp_rules[] = {{".*", EVERY_AXIS, "S(0)", NO_HEADS}, {0}};
static const struct preset_rule hsdp_rules[] = {{".*", LAST_AXIS, "S(0)", NO_HEADS}, {0}};
static const struct preset_rule replicate_rules[] = {{".*", NO_AXIS, NULL, NO_HEADS}, {0}};

/* Llama, Mistral, Qwen, Gemma and similar models, as transformers names their parameters. */
#define LLAMA_RULES                                                                                \
    {ANY "q_proj[.](weight|bias)", TP_AXIS, "S(0)", QUERY_HEADS},                                  \
        {ANY "(k_proj|v_proj)[.](weight|bias)", TP_AXIS, "S(0)", KV_HEADS},                        \
        {ANY "(gate_proj|up_proj)[.](weight|bias)", TP_AXIS, "S(0)", NO_HEADS},                    \
        {ANY "o_proj[.]weight", TP_AXIS, "S(1)", QUERY_HEADS},                                     \
        {ANY "down_proj[.]weight", TP_AXIS, "S(1)", NO_HEADS},                                     \
        {ANY "(embed_tokens|lm_head)[.]weight", TP_AXIS, "S(0)", NO_HEADS},                        \
        {ANY "(o_proj|down_proj)[.]bias", NO_AXIS, NULL, NO_HEADS}, NORMS,                         \
    {                                                                                              \
        ANY "rotary_emb[.]inv_freq", NO_AXIS, NULL, NO_HEADS                                       \
    }

static const struct preset_rule llama_rules[] = {LLAMA_RULES, {0}};

/* The same with experts: Mixtral, Qwen, DeepSeek, and experts that are one tensor. */
static const struct preset_rule moe_rules[] = {
    {ANY "experts[.][0-9]+[.](w1|w3|gate_proj|up_proj)[.](weight|bias)", TP_AXIS, "S(0)", EXPERT},
    {ANY "experts[.][0-9]+[.](w2|down_proj)[.]weight", TP_AXIS, "S(1)", EXPERT},
    {ANY "experts[.][0-9]+[.](w2|down_proj)[.]bias", NO_AXIS, NULL, EXPERT},
    {ANY "experts[.](gate_up_proj|down_proj|gate_up_proj_bias|down_proj_bias)", EP_AXIS, "S(0)",
     NO_HEADS},
    {ANY "(gate|router|shared_expert_gate)[.](weight|bias|e_score_correction_bias)", NO_AXIS, NULL,
     NO_HEADS},
    {ANY "(q_b_proj|kv_b_proj)[.]weight", TP_AXIS, "S(0)", QUERY_HEADS},
    {ANY "(q_a_proj|kv_a_proj_with_mqa)[.](weight|bias)", NO_AXIS, NULL, NO_HEADS},
    LLAMA_RULES,
    {0}};

/* GPT-2 keeps weights transposed, with Q, K and V in one. */
static const struct preset_rule gpt2_rules[] = {
    {ANY "attn[.]c_attn[.]weight", TP_AXIS, "S(1;=3)", QUERY_HEADS},
    {ANY "attn[.]c_attn[.]bias", TP_AXIS, "S(0;=3)", QUERY_HEADS},
    {ANY "attn[.]c_proj[.]weight", TP_AXIS, "S(0)", QUERY_HEADS},
    {ANY "mlp[.]c_fc[.]weight", TP_AXIS, "S(1)", NO_HEADS},
    {ANY "mlp[.]c_fc[.]bias", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "mlp[.]c_proj[.]weight", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "(wte|lm_head)[.]weight", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "c_proj[.]bias", NO_AXIS, NULL, NO_HEADS},
    {ANY "wpe[.]weight", NO_AXIS, NULL, NO_HEADS},
    {ANY "ln_(1|2|f)[.](weight|bias)", NO_AXIS, NULL, NO_HEADS},
    {ANY "attn[.](bias|masked_bias)", NO_AXIS, NULL, NO_HEADS},
    {0}};

/* BERT, RoBERTa and similar models. */
static const struct preset_rule bert_rules[] = {
    {ANY "attention[.]self[.](query|key|value)[.](weight|bias)", TP_AXIS, "S(0)", QUERY_HEADS},
    {ANY "attention[.]output[.]dense[.]weight", TP_AXIS, "S(1)", QUERY_HEADS},
    {ANY "intermediate[.]dense[.](weight|bias)", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "output[.]dense[.]weight", TP_AXIS, "S(1)", NO_HEADS},
    {ANY "embeddings[.]word_embeddings[.]weight", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "(cls[.]predictions|lm_head)[.]decoder[.](weight|bias)", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "(cls[.]predictions|lm_head)[.]bias", TP_AXIS, "S(0)", NO_HEADS},
    {ANY "output[.]dense[.]bias", NO_AXIS, NULL, NO_HEADS},
    {ANY "embeddings[.](position_embeddings|token_type_embeddings)[.]weight", NO_AXIS, NULL,
     NO_HEADS},
    {ANY "embeddings[.](position_ids|token_type_ids)", NO_AXIS, NULL, NO_HEADS},
    {ANY "(LayerNorm|layer_norm)[.](weight|bias|gamma|beta)", NO_AXIS, NULL, NO_HEADS},
    {ANY "(pooler|classifier|transform|seq_relationship|lm_head|qa_outputs)([.]dense|[.]out_proj)?"
         "[.](weight|bias)",
     NO_AXIS, NULL, NO_HEADS},
    {0}};

static const struct preset presets[] = {
    {"fsdp", 0, NULL, fsdp_rules, false},
    {"hsdp", 2, "two axes, the replicas first: dp_replicate=2,dp_shard=4", hsdp_rules, false},
    {"llama-tp", 0, NULL, llama_rules, true},
    {"moe-tp", 0, NULL, moe_rules, true},
    {"qwen-tp", 0, NULL, moe_rules, true},
    {"gpt2-tp", 0, NULL, gpt2_rules, true},
    {"bert-tp", 0, NULL, bert_rules, true},
    {"replicate", 0, NULL, replicate_rules, false},
};

enum { NPRESETS = sizeof presets / sizeof *presets, MOST_PRESET_RULES = 24 };
static_assert(sizeof moe_rules / sizeof *moe_rules <= MOST_PRESET_RULES, "as many as the largest");

static const char fsdp_prefix[] = "fsdp+";

rsd_status preset_find(const char *name, const struct preset **preset, bool *with_fsdp)
{
    struct text names = {0};
    const char *words[NPRESETS];
    bool with = strncmp(name, fsdp_prefix, sizeof fsdp_prefix - 1) == 0;
    const char *word = name + (with ? sizeof fsdp_prefix - 1 : 0);
    for (size_t i = 0; i < NPRESETS; i++)
        if (strcmp(presets[i].name, word) == 0 && (!with || presets[i].tensor_parallel)) {
            *preset = &presets[i];
            *with_fsdp = with;
            return RSD_OK;
        }
    for (size_t i = 0; i < NPRESETS; i++) {
        words[i] = presets[i].name;
        text_add(&names, "%s%s", i ? ", " : "", words[i]);
    }
    if (names.failed) {
        text_drop(&names);
        return RSD_ENOMEM;
    }
    const char *nearest = rsd_nearest_word(word, NPRESETS, words);
    if (nearest && strcmp(nearest, word) != 0)
        error_set("unknown preset '%s'; did you mean '%s%s'?", name, with ? fsdp_prefix : "",
                  nearest);
    else
        error_set("unknown preset '%s'; the presets are %s; fsdp+NAME adds FSDP to one with -tp",
                  name, names.chars);
    text_drop(&names);
    return RSD_EINVAL;
}

const char *preset_name(const struct preset *preset)
{
    return preset->name;
}

/* ---- rules for a mesh ---- */

/* Finds an axis by its name, in any case; -1: none. */
static int32_t find_axis(const rsd_mesh *mesh, const char *name)
{
    for (int32_t axis = 0; axis < rsd_mesh_naxes(mesh); axis++)
        if (rsd_mesh_name(mesh, axis) && strcasecmp(rsd_mesh_name(mesh, axis), name) == 0)
            return axis;
    return -1;
}

/* Returns the axis that cuts, of a rule for one axis; -1: none or all. */
static int32_t find_cut_axis(enum preset_axis axis, const rsd_mesh *mesh)
{
    int32_t last = rsd_mesh_naxes(mesh) - 1;
    int32_t tp = find_axis(mesh, "tp"), ep = find_axis(mesh, "ep");
    tp = tp >= 0 ? tp : last != ep ? last : -1;
    if (axis == EP_AXIS)
        return ep >= 0 ? ep : tp;
    return axis == TP_AXIS ? tp : axis == LAST_AXIS ? last : -1;
}

/* Adds the placement of FSDP over another axis: below a cut of the same dim, as FSDP2 of torch has it. */
static void add_fsdp_placement(struct text *text, const rsd_mesh *mesh, int32_t axis, int32_t cut,
                               const char *placement)
{
    const char *name = rsd_mesh_name(mesh, axis);
    bool same_dim = cut >= 0 && placement && strncmp(placement, "S(0)", 4) == 0;
    bool segments = placement && strncmp(placement, "S(0;", 4) == 0; /* lengths of the whole dim */
    if (segments || (name && strcasecmp(name, "dp_replicate") == 0))
        text_add(text, "R");
    else if (same_dim && axis < cut)
        text_add(text, "_S(0,%lld)", (long long)rsd_mesh_count(mesh, cut));
    else
        text_add(text, "S(0)");
}

/* Adds a rule of a preset, with one placement for each axis of the mesh. */
static rsd_status add_preset_rule(const struct preset *preset, const struct preset_rule *rule,
                                  rsd_rules *rules)
{
    struct text text = {0}, label = {0};
    int32_t cut = find_cut_axis(rule->axis, rules->mesh);
    int32_t experts = rule->whole == EXPERT ? find_axis(rules->mesh, "ep") : -1;
    for (int32_t axis = 0; axis < rsd_mesh_naxes(rules->mesh); axis++) {
        if (axis == experts)
            continue;
        text_add(&text, "%s", text.chars ? "," : "");
        if (rule->axis == EVERY_AXIS || axis == cut)
            text_add(&text, "%s", rule->placement);
        else if (rules->with_fsdp && axis != find_cut_axis(TP_AXIS, rules->mesh))
            add_fsdp_placement(&text, rules->mesh, axis, cut, rule->placement);
        else
            text_add(&text, "R");
    }
    if (rsd_mesh_naxes(rules->mesh) == 1 && experts == 0)
        text_add(&text, "R"); /* one rank has the expert */
    text_add(&label, "preset %s:", preset->name);
    rsd_status status = RSD_ENOMEM;
    if (!text.failed && !label.failed)
        status =
            rules_add_place(rules, FROM_PRESET, label.chars,
                            (struct slice){rule->expression, strlen(rule->expression)}, text.chars);
    if (!status) {
        struct rule *added = &rules->list[rules->n - 1];
        added->whole = rule->whole == EXPERT && experts < 0 ? NO_HEADS : rule->whole;
        added->axis = rule->whole == EXPERT ? experts : cut;
    }
    text_drop(&text);
    text_drop(&label);
    return status;
}

rsd_status preset_add_rules(const struct preset *preset, rsd_rules *rules)
{
    if (preset->naxes && rsd_mesh_naxes(rules->mesh) != preset->naxes)
        return fail(RSD_EINVAL, "preset %s needs a mesh of %s", preset->name, preset->mesh);
    if (rules->with_fsdp && rsd_mesh_naxes(rules->mesh) < 2)
        return fail(RSD_EINVAL, "preset fsdp+%s needs a mesh of two axes, such as dp=2,tp=4",
                    preset->name);
    for (const struct preset_rule *rule = preset->rules; rule->expression; rule++)
        TRY(add_preset_rule(preset, rule, rules));
    return RSD_OK;
}

/* ---- presets that fit ---- */

/* How well a preset for tensor parallelism fits to names. */
struct preset_fit {
    const struct preset *preset;
    size_t nmatched; /* names for which it has a rule */
    size_t nrules;
    bool cuts; /* one of these rules cuts */
};

/* Counts the names for which a preset has a rule. */
static rsd_status count_matches(const struct preset *preset, const struct name_list *names,
                                struct preset_fit *fit)
{
    struct expression expressions[MOST_PRESET_RULES];
    size_t n = 0;
    rsd_status status = RSD_OK;
    for (const struct preset_rule *rule = preset->rules; rule->expression && !status; rule++) {
        status =
            expression_open(&expressions[n],
                            (struct slice){rule->expression, strlen(rule->expression)}, true, true);
        n += !status;
    }
    *fit = (struct preset_fit){.preset = preset, .nrules = n};
    for (size_t i = 0; i < names->n && !status; i++) {
        bool matches = false;
        for (size_t k = 0; k < n && !matches && !status; k++) {
            status = expression_match(&expressions[k], NULL, names->list[i].bytes, &matches);
            fit->cuts = fit->cuts || (matches && preset->rules[k].axis != NO_AXIS);
        }
        fit->nmatched += matches;
    }
    while (n > 0)
        expression_drop(&expressions[--n]);
    return status;
}

/* Whether a preset is a better choice: it matches more names, or the same with fewer rules. */
static bool fits_better(const struct preset_fit *a, const struct preset_fit *b)
{
    return a->cuts && (!b->preset || a->nmatched > b->nmatched ||
                       (a->nmatched == b->nmatched && a->nrules < b->nrules));
}

/* Finds the preset for tensor parallelism that has rules for the most names; NULL: none has rules for more than half. */
static rsd_status find_best_preset(const struct name_list *names, const struct preset **preset)
{
    struct preset_fit best = {0};
    for (size_t i = 0; i < NPRESETS; i++) {
        struct preset_fit fit;
        if (!presets[i].tensor_parallel)
            continue;
        TRY(count_matches(&presets[i], names, &fit));
        if (fits_better(&fit, &best))
            best = fit;
    }
    *preset = 2 * best.nmatched > names->n ? best.preset : NULL;
    return RSD_OK;
}

rsd_status preset_list_fitting(const struct name_list *names, const rsd_mesh *mesh,
                               struct text *text)
{
    const struct preset *best;
    int32_t naxes = mesh ? rsd_mesh_naxes(mesh) : 0;
    TRY(find_best_preset(names, &best));
    if (best)
        text_add(text, "%s, ", best->name);
    if (best && naxes != 1)
        text_add(text, "%s%s, ", fsdp_prefix, best->name);
    text_add(text, "fsdp, %sreplicate", !naxes || naxes == 2 ? "hsdp, " : "");
    return RSD_OK;
}
