/* head_counts.c - finds out how many attention heads a model has: as the caller, Megatron's arguments or a config of
 * Hugging Face says. */
#include "checkpoint.h"

#include "json.h"

#include <stdlib.h>

enum { MAX_CONFIG_NBYTES = 1 << 22 };

/* Reads a value of the checkpoint as a number of heads, unless *count is known already. */
static rsd_status read_count(rsd_checkpoint *checkpoint, const char *name, int64_t *count)
{
    size_t index = catalog_find_value(&checkpoint->catalog, name);
    char *text = NULL, *end;
    if (*count > 0 || index == SIZE_MAX)
        return RSD_OK;
    TRY(rsd_checkpoint_value(checkpoint, (int64_t)index, &text));
    long long number = text ? strtoll(text, &end, 10) : 0;
    *count = number > 0 && number <= INT32_MAX && !*end ? number : 0;
    rsd_free(text);
    return RSD_OK;
}

/* Megatron states a number of groups that means nothing unless group_query_attention is true. */
static rsd_status read_megatron_heads(rsd_checkpoint *checkpoint, struct head_counts *heads)
{
    size_t index = catalog_find_value(&checkpoint->catalog, "args.group_query_attention");
    char *text = NULL;
    if (index != SIZE_MAX)
        TRY(rsd_checkpoint_value(checkpoint, (int64_t)index, &text));
    bool grouped = !text || strcmp(text, "false") != 0;
    rsd_free(text);
    TRY(read_count(checkpoint, "args.num_attention_heads", &heads->all));
    return grouped ? read_count(checkpoint, "args.num_query_groups", &heads->keys) : RSD_OK;
}

/* Reads a number of heads. Anything else is not a number of heads, such as null, and leaves *count as it is. */
static rsd_status read_json_count(struct json *json, int64_t *count)
{
    double value;
    int64_t number;
    bool whole;
    if (!is_digit(json_peek(json)))
        return json_skip(json);
    TRY(json_number(json, &value, &number, &whole));
    if (whole && number > 0 && number <= INT32_MAX)
        *count = number;
    return RSD_OK;
}

/* Reads the counts of an object, and of the model of text in it. Those of the outer object are kept. */
static rsd_status read_json_counts(struct json *json, bool outer, struct head_counts *heads)
{
    struct head_counts own = {0};
    struct slice key;
    bool more;
    TRY(json_enter(json, '{'));
    for (;;) {
        TRY(json_next_key(json, &key, &more));
        if (!more)
            break;
        if (slice_is(key, "num_attention_heads") || slice_is(key, "n_head"))
            TRY(read_json_count(json, &own.all));
        else if (slice_is(key, "num_key_value_heads"))
            TRY(read_json_count(json, &own.keys));
        else if (outer && slice_is(key, "text_config") && json_peek(json) == '{')
            TRY(read_json_counts(json, false, heads));
        else
            TRY(json_skip(json));
    }
    if (own.all || own.keys)
        *heads =
            (struct head_counts){own.all ? own.all : heads->all, own.keys ? own.keys : own.all};
    return RSD_OK;
}

rsd_status head_counts_parse(struct head_counts *heads, const char *text, size_t n)
{
    struct json json;
    *heads = (struct head_counts){0};
    json_start(&json, text, n);
    rsd_status status = read_json_counts(&json, true, heads);
    json_drop(&json);
    return status;
}

/* Reads config.json in a directory of the checkpoint, if it is there. A count that is known stays. */
static rsd_status read_model_config(struct store *store, const char *directory,
                                    struct head_counts *heads)
{
    struct store_listing listing;
    const char *name = NULL;
    rsd_status status = store_list(store, directory, &listing);
    if (status)
        return status == RSD_ENOMEM ? status : RSD_OK;
    for (size_t i = 0; i < listing.n; i++)
        if (!listing.entries[i].directory && strcmp(listing.entries[i].base, "config.json") == 0)
            name = listing.entries[i].name;
    uint32_t file;
    char *text;
    size_t n;
    if (name)
        status = store_add_file(store, (struct slice){name, strlen(name)}, &file);
    store_listing_drop(&listing);
    if (!name || status)
        return status;
    status = store_load(store, file, MAX_CONFIG_NBYTES, &text, &n);
    if (!status) {
        struct head_counts found;
        status = head_counts_parse(&found, text, n);
        *heads = (struct head_counts){found.all, heads->keys ? heads->keys : found.keys};
        mem_free(text);
    }
    return status ? store_fail_in(store, file, status) : RSD_OK;
}

rsd_status head_counts_find(struct head_counts *heads, rsd_checkpoint *checkpoint,
                            const rsd_open_options *options)
{
    *heads = (struct head_counts){options->nheads, options->nkv_heads};
    if (heads->all < 0 || heads->keys < 0 || heads->all > INT32_MAX || heads->keys > INT32_MAX)
        return fail(RSD_EINVAL, "nheads and nkv_heads must be from 0 to 2^31 - 1");
    if (!heads->all)
        TRY(read_megatron_heads(checkpoint, heads));
    if (!heads->all)
        TRY(read_model_config(checkpoint->store, "", heads));
    if (!heads->all)
        TRY(read_model_config(checkpoint->store, "huggingface", heads));
    if (!heads->keys)
        heads->keys = heads->all;
    return RSD_OK;
}
