/* rules_model.c - finds the model in what trainers write.
 *
 *     {"model": {...}, "optimizer": {...}}              the part below a key
 *     {"app": {"model": {...}, "optim": {...}}}         below two
 *     {"layers.0.w": ..., "optimizer": {...}}           what is not below a key
 *     {"layers.0.w": ...}                               everything
 *
 * Keys are those of the paths of tensors. What a key has below it is told by its name: a model, a copy of its
 * averages, or the state of a trainer. If that leaves a choice, the model is not chosen: a wrong prefix would
 * make readers ignore the tensors. The names of wrappers (torch.compile, DistributedDataParallel, Lightning)
 * are removed.
 */
#include "rules.h"

#include "json.h"

#include <ctype.h>
#include <stdio.h>

enum { MOST_KEYS = 64, MOST_LEVELS = 3, MOST_CHOICES = 3 };

/* What is below a key. */
enum key_role { ROLE_UNKNOWN, ROLE_MODEL, ROLE_AVERAGE, ROLE_STATE };

/* A key of one level of the state dict, with tensors below it. */
struct state_key {
    char *name;
    enum key_role role;
    size_t ntensors;
};

/* The keys of one level, and the tensors that are directly there. */
struct state_level {
    struct state_key keys[MOST_KEYS];
    size_t nkeys;
    size_t ntensors; /* that may be the model's */
    bool overflow;   /* there are more keys */
};

/* ---- names ---- */

static bool contains_word(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strstr(text, *words))
            return true;
    return false;
}

static bool is_one_of(const char *text, const char *const *words)
{
    for (; *words; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

/* Returns what a key at the top of a checkpoint is, by the names that training programs use. */
static enum key_role role_of_key(const char *key)
{
    static const char *const models[] = {"model",       "module",     "state_dict",
                                         "model_state", "model_dict", "model_state_dict",
                                         "weights",     NULL};
    static const char *const averages[] = {
        "ema",           "model_ema",      "ema_model",
        "ema_params",    "ema_weights",    "ema_state_dict",
        "ema_state",     "state_dict_ema", "model_ema_state_dict",
        "shadow_params", "swa_model",      NULL};
    static const char *const states[] = {
        "opt",         "opt_state",     "rng",        "rng_state",
        "rng_states",  "random_states", "scaler",     "grad_scaler",
        "loss_scaler", "amp",           "dataloader", "data_loader",
        "train_state", "callbacks",     "loops",      "hyper_parameters",
        "extra_state", "trainer",       NULL};
    static const char *const state_words[] = {"optim", "sched", "rng_state", NULL};
    char text[64];
    size_t n = 0;
    for (; key && n < sizeof text - 1 && key[n]; n++)
        text[n] = (char)tolower((unsigned char)key[n]);
    text[n] = '\0';
    if (is_one_of(text, models))
        return ROLE_MODEL;
    if (is_one_of(text, averages))
        return ROLE_AVERAGE;
    return is_one_of(text, states) || contains_word(text, state_words) ? ROLE_STATE : ROLE_UNKNOWN;
}

/* ---- paths ---- */

/* The first keys of a path. */
struct path_keys {
    char *keys[MOST_LEVELS + 1];
    size_t n; /* of all keys */
};

static void drop_keys(struct path_keys *path)
{
    for (size_t i = 0; i < sizeof path->keys / sizeof *path->keys; i++)
        mem_free(path->keys[i]);
    *path = (struct path_keys){0};
}

/* Reads one key of a path, a string or a number. Keys beyond the array are counted only. */
static rsd_status take_path_key(struct json *j, struct path_keys *path)
{
    struct slice text = {"", 0};
    int64_t integer = 0;
    char digits[24];
    if (json_peek(j) == '"') {
        TRY(json_string(j, &text));
    } else {
        double value;
        bool whole;
        TRY(json_number(j, &value, &integer, &whole));
        text = (struct slice){digits,
                              (size_t)snprintf(digits, sizeof digits, "%lld", (long long)integer)};
    }
    if (path->n < sizeof path->keys / sizeof *path->keys) {
        char *copy = slice_copy(text);
        if (!copy)
            return RSD_ENOMEM;
        path->keys[path->n] = copy;
    }
    path->n++;
    return RSD_OK;
}

/* Reads the keys of a path. Without a path, the name is the only key, but for optimizer state. */
static rsd_status read_path(const char *text, const char *name, struct path_keys *path)
{
    struct json j;
    bool more = true;
    *path = (struct path_keys){0};
    const char *dot = strchr(name, '.');
    if (!text) {
        bool state = strncmp(name, "optim", 5) == 0 && dot &&
                     (strncmp(dot, ".state.", 7) == 0 || strncmp(dot, ".param_groups.", 14) == 0);
        path->n = state ? 2 : 1;
        path->keys[0] = text_copy(name);
        if (path->keys[0] && state)
            path->keys[0][dot - name] = '\0';
        return path->keys[0] ? RSD_OK : RSD_ENOMEM;
    }
    json_start(&j, text, strlen(text));
    rsd_status status = json_enter(&j, '[');
    while (!status && !(status = json_next_item(&j, &more)) && more)
        status = take_path_key(&j, path);
    json_drop(&j);
    if (status)
        drop_keys(path);
    return status;
}

/* Whether a path goes through the keys of the part. */
static bool is_below(const struct path_keys *path, const struct model_part *part)
{
    for (size_t i = 0; i < part->nkeys; i++)
        if (path->n <= i + 1 || strcmp(path->keys[i], part->keys[i]) != 0)
            return false;
    return true;
}

/* ---- levels ---- */

/* Counts a tensor below a key of this level. */
static rsd_status count_key(struct state_level *level, const char *name)
{
    for (size_t i = 0; i < level->nkeys; i++)
        if (strcmp(level->keys[i].name, name) == 0) {
            level->keys[i].ntensors++;
            return RSD_OK;
        }
    if (level->nkeys == MOST_KEYS) {
        level->overflow = true;
        return RSD_OK;
    }
    struct state_key *key = &level->keys[level->nkeys];
    *key = (struct state_key){text_copy(name), role_of_key(name), 1};
    level->nkeys += key->name != NULL;
    return key->name ? RSD_OK : RSD_ENOMEM;
}

/* Whether a tensor beside keys is a counter or the like, not a weight. */
static bool is_beside(const struct stored_tensor *tensor, const char *key)
{
    return tensor->ndim == 0 || role_of_key(key) == ROLE_STATE;
}

/* Lists the keys below a part of the checkpoint, with their tensors, and counts the tensors in the part itself. */
static rsd_status read_level(const rsd_checkpoint *checkpoint, const struct model_part *part,
                             struct state_level *level)
{
    const struct catalog *catalog = &checkpoint->catalog;
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < catalog->ntensors && !status; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        struct path_keys path;
        status = read_path(tensor->path, tensor->name, &path);
        if (!status && is_below(&path, part)) {
            if (path.n > part->nkeys + 1)
                status = count_key(level, path.keys[part->nkeys]);
            else
                level->ntensors += !is_beside(tensor, path.keys[part->nkeys]);
        }
        drop_keys(&path);
    }
    return status;
}

static void drop_level(struct state_level *level)
{
    for (size_t i = 0; i < level->nkeys; i++)
        mem_free(level->keys[i].name);
    level->nkeys = 0;
}

static size_t count_role(const struct state_level *level, enum key_role role,
                         const struct state_key **last)
{
    size_t n = 0;
    for (size_t i = 0; i < level->nkeys; i++)
        if (level->keys[i].role == role) {
            *last = &level->keys[i];
            n++;
        }
    return n;
}

/* ---- choosing ---- */

/* Adds a prefix of names, as it is or as an expression. */
static void add_choice(struct text *text, const struct model_part *part, const char *key,
                       bool expression)
{
    for (size_t k = 0; k <= part->nkeys; k++) {
        const char *at = k < part->nkeys ? part->keys[k] : key;
        for (; *at; at++)
            text_add(text, "%s%c", expression && strchr(".[]()*+?{}|^$\\", *at) ? "\\" : "", *at);
        text_add(text, expression ? "\\." : ".");
    }
}

/* Returns EINVAL. The error lists the options that choose each part that may be the model. */
static rsd_status fail_choice(const struct model_part *part, const struct state_level *level)
{
    struct text text = {0};
    char *message;
    size_t n = 0;
    text_add(&text, "cannot tell which part is the model. Choose with");
    for (size_t i = 0; i < level->nkeys && n < MOST_CHOICES; i++) {
        if (level->keys[i].role == ROLE_STATE)
            continue;
        text_add(&text, "%s --only '^", n++ ? ", or" : "");
        add_choice(&text, part, level->keys[i].name, true);
        text_add(&text, "' --strip-prefix ");
        add_choice(&text, part, level->keys[i].name, false);
    }
    text_add(&text, "%s --all", n ? ", or" : "");
    TRY(text_take(&text, &message));
    rsd_status status = fail(RSD_EINVAL, "%s", message);
    rsd_free(message);
    return status;
}

/* Goes down to a key of the level. */
static rsd_status push_part_key(struct model_part *part, const struct state_key *key)
{
    part->keys[part->nkeys] = text_copy(key->name);
    if (!part->keys[part->nkeys])
        return RSD_ENOMEM;
    part->nkeys++;
    return RSD_OK;
}

/* Chooses on one level. *down: the model is below the key that was added. */
static rsd_status choose_on_level(struct model_part *part, const struct state_level *level,
                                  bool *down)
{
    const struct state_key *model = NULL, *unknown = NULL, *other = NULL;
    size_t nmodels = count_role(level, ROLE_MODEL, &model),
           nunknown = count_role(level, ROLE_UNKNOWN, &unknown);
    size_t nothers =
        count_role(level, ROLE_STATE, &other) + count_role(level, ROLE_AVERAGE, &other);
    *down = false;
    part->direct = nothers > 0;
    if (level->nkeys == 0 || level->overflow)
        return RSD_OK; /* all tensors are here */
    if (nmodels + nunknown == 0)
        return level->ntensors ? RSD_OK : fail_choice(part, level);
    if (level->ntensors)
        /* Weights beside a dict of more of them: all are the model, unless a trainer wrote the dict. */
        return nothers || nmodels ? fail_choice(part, level) : RSD_OK;
    if (nmodels + nunknown > 1 || part->nkeys == MOST_LEVELS)
        return fail_choice(part, level);
    *down = true;
    part->sure = part->sure || nmodels == 1 || nothers > 0;
    return push_part_key(part, nmodels ? model : unknown);
}

/* Finds the part that is the model, one level after the other. EINVAL: it cannot be told. */
static rsd_status choose_part(const rsd_checkpoint *checkpoint, struct model_part *part)
{
    bool down = true;
    rsd_status status = RSD_OK;
    struct state_level first = {0};
    while (down && !status) {
        struct state_level level = {0};
        status = read_level(checkpoint, part, &level);
        if (!status)
            status = choose_on_level(part, &level, &down);
        if (first.nkeys == 0 && !status)
            first = level; /* for a message */
        else
            drop_level(&level);
    }
    if (!status && part->nkeys && !part->sure) {
        part->nkeys = 0;
        status = fail_choice(part, &first);
    }
    drop_level(&first);
    return status;
}

/* ---- wrappers ---- */

/* How the names of the part begin. */
struct name_starts {
    char prefix[64]; /* the first part of all names, with its dot; "": there are several */
    bool models;     /* what follows is the name of a model or of a head beside it, for some */
};

static void add_name_start(struct name_starts *starts, const char *name, bool first)
{
    static const char *const heads[] = {"model.", "lm_head.", "transformer.", NULL};
    size_t n = strcspn(name, ".") + 1;
    if (first && name[n - 1] && n < sizeof starts->prefix)
        memcpy(starts->prefix, name, n);
    if (strncmp(name, starts->prefix, strlen(starts->prefix)) != 0)
        starts->prefix[0] = '\0';
    for (const char *const *head = heads; *head && name[n - 1]; head++)
        starts->models = starts->models || strncmp(name + n, *head, strlen(*head)) == 0;
}

/* Finds how the names of the model's tensors begin. */
static rsd_status find_name_starts(const rsd_checkpoint *checkpoint, const struct model_part *part,
                                   struct name_starts *starts)
{
    const struct catalog *catalog = &checkpoint->catalog;
    bool first = true;
    *starts = (struct name_starts){0};
    for (size_t i = 0; i < catalog->ntensors; i++) {
        const struct stored_tensor *tensor = &catalog->tensors[i];
        bool keep;
        char *name;
        TRY(model_part_has(part, tensor->path, tensor->name, &keep));
        if (!keep)
            continue;
        TRY(model_part_name(part, tensor->name, &name));
        add_name_start(starts, name, first);
        first = false;
        mem_free(name);
    }
    return RSD_OK;
}

/* DistributedDataParallel adds "module." to all names. Lightning saves a module that has the model as an
 * attribute, whose name is in front of all names; but so may be a name of the model itself. */
static rsd_status find_wrapper_prefix(const rsd_checkpoint *checkpoint, struct model_part *part)
{
    struct name_starts starts;
    bool lightning =
        part->nkeys == 1 && strcmp(part->keys[0], "state_dict") == 0 &&
        catalog_find_value(&checkpoint->catalog, "pytorch-lightning_version") != SIZE_MAX;
    TRY(find_name_starts(checkpoint, part, &starts));
    if (strcmp(starts.prefix, "module.") == 0 || (lightning && starts.models)) {
        memcpy(part->strip, starts.prefix, sizeof starts.prefix);
        return RSD_OK;
    }
    if (!lightning || !starts.prefix[0])
        return RSD_OK;
    return fail(RSD_EINVAL,
                "cannot tell whether '%s' belongs to the names of the model or to the Lightning "
                "module around it. Choose with --only '^state_dict\\.' --strip-prefix "
                "state_dict.%s, or --only '^state_dict\\.' --strip-prefix state_dict.",
                starts.prefix, starts.prefix);
}

/* ---- the part ---- */

rsd_status model_part_find(struct model_part *part, const rsd_checkpoint *checkpoint, bool chosen)
{
    *part = (struct model_part){.known = true};
    rsd_status status = choose_part(checkpoint, part);
    if (!status)
        status = find_wrapper_prefix(checkpoint, part);
    if (status)
        model_part_drop(part);
    return status == RSD_EINVAL && chosen ? RSD_OK : status; /* the rules decide */
}

rsd_status model_part_has(const struct model_part *part, const char *path, const char *name,
                          bool *has)
{
    struct path_keys keys;
    TRY(read_path(path, name, &keys));
    *has = is_below(&keys, part) && (!part->direct || keys.n == part->nkeys + 1);
    if (*has && part->direct)
        *has = role_of_key(keys.keys[part->nkeys]) != ROLE_STATE;
    drop_keys(&keys);
    return RSD_OK;
}

rsd_status model_part_name(const struct model_part *part, const char *name, char **out)
{
    for (size_t i = 0; i < part->nkeys; i++) {
        size_t n = strlen(part->keys[i]);
        if (strncmp(name, part->keys[i], n) == 0 && name[n] == '.' && name[n + 1])
            name += n + 1;
    }
    char *copy = text_copy(name);
    if (!copy)
        return RSD_ENOMEM;
    torch_strip_wrappers(copy);
    size_t n = strlen(part->strip);
    if (n && strncmp(copy, part->strip, n) == 0 && copy[n])
        memmove(copy, copy + n, strlen(copy + n) + 1);
    *out = copy;
    return RSD_OK;
}

void model_part_drop(struct model_part *part)
{
    for (size_t i = 0; i < part->nkeys; i++)
        mem_free(part->keys[i]);
    *part = (struct model_part){0};
}
