/* rules.h - a set of rules, and its parts: expressions, presets, and the parameters of optimizer state. */
#ifndef RULES_H
#define RULES_H

#include "checkpoint.h"

/* ---- rules_match.c: expressions that select names, and substitutions that change them ---- */

struct expression {
    char *text; /* NULL: none */
    regex_t regex;
    bool whole; /* must match the whole name */
    bool posix; /* false: the caller's function matches it */
};

/* EINVAL: not a POSIX extended expression, or one that glibc would read differently than it was meant. */
rsd_status expression_open(struct expression *expression, struct slice text, bool whole,
                           bool posix);
rsd_status expression_match(const struct expression *expression, const rsd_rules_options *options,
                            const char *name, bool *matches);
void expression_drop(struct expression *expression);

/* Splits s/OLD/NEW/ or s/OLD/NEW/g. Both texts are owned by the caller. */
rsd_status substitution_split(const char *text, char **old, char **replacement, bool *everywhere);

/* Replaces the first match in *name, or all; \1 and & work as in sed. The old text of *name is freed. */
rsd_status substitution_apply(const struct expression *expression, const char *replacement,
                              bool everywhere, char **name);

/* ---- rules.c ---- */

enum rule_source { FROM_CALLER, FROM_FILE, FROM_PRESET };

/* What a preset does not cut: the attention heads that a dim of a parameter consists of, or an expert that is a tensor
 * of its own. */
enum rule_whole { NO_HEADS, QUERY_HEADS, KV_HEADS, EXPERT };

struct rule {
    rsd_rule kind;
    enum rule_source source;
    struct expression expression;
    char *value;  /* placements, a prefix, a replacement or a key */
    char *origin; /* of placements: names the rule in messages */
    rsd_dtype dtype;
    bool everywhere;       /* RENAME: replace all matches */
    bool used;             /* PLACE: decided the layout of a tensor */
    enum rule_whole whole; /* PLACE of a preset: what it must not cut, */
    int32_t axis; /* over this axis; -1: over none. EXPERT: placements are for the others */
};

struct parameter_index {
    struct named_tensor *list; /* sorted by the ends of the names */
    size_t n;
};

/* The model in what a trainer wrote. */
struct model_part {
    bool known;     /* it was looked for and found */
    bool direct;    /* keys beside the model's tensors have something else */
    bool sure;      /* the last key names a model, or others beside it do not */
    char *keys[3];  /* of the state dict, one below the other */
    size_t nkeys;   /* 0: the model is not below a key */
    char strip[64]; /* a prefix that a wrapper adds to all names; "": none */
};

struct rsd_rules {
    rsd_rules_options options;
    rsd_mesh *mesh;
    const struct preset *preset;
    bool with_fsdp;           /* the preset also shards over axes that are not for tensors */
    struct head_counts heads; /* of the caller or the config */
    bool has_heads;           /* they are the caller's */
    bool replicate_kv;        /* ranks may share a KV head */
    struct rule *list;        /* by source; in the order in which they were added */
    size_t n, capacity;

    const rsd_checkpoint *checkpoint; /* of the last check; NULL: none yet */
    int64_t nexperts;                 /* that are tensors of their own in the checkpoint */
    struct parameter_index parameters;
    const char *part;        /* the only part of the state dict that is kept; NULL: all of it */
    struct model_part model; /* likewise, for MODEL */
    char *name;              /* of the last tensor that was mapped */
};

/* The error of a tensor that no rule matches. */
#define RULES_NO_MATCH "no rule matches; choose with place, rules, preset or default"

/* As rsd_rules_map, but errors do not name the tensor. */
rsd_status rules_map_tensor(rsd_rules *rules, const rsd_tensor_info *tensor,
                            rsd_tensor_target *target);

/* Prepares rsd_rules_map for a checkpoint. */
rsd_status rules_use_checkpoint(rsd_rules *rules, const rsd_checkpoint *checkpoint);

/* Opens the files of the ranks of the mesh of the rules, as rsd_open_options.from says. */
rsd_status rules_open_joined(rsd_checkpoint *checkpoint, const struct store_listing *listing,
                             const rsd_open_options *options);

/* Adds a PLACE rule behind all others of its source. The label says in messages where it is from. */
rsd_status rules_add_place(rsd_rules *rules, enum rule_source source, const char *label,
                           struct slice expression, const char *placements);

/* Reads a file of text of the user, with a NUL behind it. ENOENT: it does not exist. ELIMIT: it is too long. EINVAL: it
 * has a NUL. */
rsd_status rules_read_file(const char *path, struct bytes *out);

/* ---- rules_model.c: the model in what trainers write ---- */

/* Finds the model. EINVAL: it cannot be told which part it is, and the rules do not choose tensors themselves;
 * the error names the options that choose. */
rsd_status model_part_find(struct model_part *part, const rsd_checkpoint *checkpoint, bool chosen);

/* Says whether a tensor is in the part. */
rsd_status model_part_has(const struct model_part *part, const char *path, const char *name,
                          bool *has);

/* Makes the name that a tensor has in the model. The caller frees it. */
rsd_status model_part_name(const struct model_part *part, const char *name, char **out);
void model_part_drop(struct model_part *part);

/* ---- rules_presets.c ---- */

/* Finds NAME or fsdp+NAME. EINVAL: there is none; the outputs stay as they are. */
rsd_status preset_find(const char *name, const struct preset **preset, bool *with_fsdp);
const char *preset_name(const struct preset *preset);

/* Adds the rules of a preset, with placements for the mesh of the rules. EINVAL: the mesh does not fit. */
rsd_status preset_add_rules(const struct preset *preset, rsd_rules *rules);

/* Adds the presets that fit these names, as rsd_rules_presets lists them. Without a mesh (NULL), any could be set. */
rsd_status preset_list_fitting(const struct name_list *names, const rsd_mesh *mesh,
                               struct text *text);

/* ---- rules_heads.c: attention heads are not cut ---- */

/* Take the numbers of heads from a config.json, or from N or N,K, which comes before a config. */
rsd_status heads_read_config(rsd_rules *rules, const char *path);
rsd_status heads_parse_counts(rsd_rules *rules, const char *text);

/* Makes the layout of a tensor whose rule has heads. *layout stays NULL if the placements do not cut a head. */
rsd_status heads_make_layout(const rsd_rules *rules, const struct rule *rule,
                             const rsd_tensor_info *tensor, rsd_layout **layout);

/* Replaces segments such as S(1;=3) by their lengths in a tensor. The caller frees the text. */
rsd_status heads_expand_segments(const char *placements, const rsd_tensor_info *tensor,
                                 char **expanded);

/* ---- rules_experts.c: experts that are tensors of their own ---- */

int64_t experts_count(const rsd_checkpoint *checkpoint);

/* Makes the mesh of the ranks that have an expert, for the placements of its rule. */
rsd_status experts_make_mesh(const rsd_rules *rules, const struct rule *rule, const char *name,
                             rsd_mesh **mesh);

/* ---- rules_state.c: optimizer state follows its parameter ---- */

/* Returns whether a name is that of optimizer state, and if so the part of it that names the parameter. */
bool state_name_split(const char *state, struct slice *parameter);

rsd_status parameter_index_open(struct parameter_index *index, const rsd_checkpoint *checkpoint);

/* Whether the name is that of optimizer state, and exactly one tensor can be its parameter. */
bool parameter_index_find(const struct parameter_index *index, const char *state,
                          int64_t *parameter);
void parameter_index_drop(struct parameter_index *index);

#endif
