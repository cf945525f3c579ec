/* names_heads.c - finds out how many attention heads a model has: as the caller, Megatron's arguments or a config of
 * Hugging Face says. */
#include "names.h"

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

/* Reads the numbers of heads in a config.json. Numbers that are known already stay. */
static rsd_status parse_head_counts(const char *text, size_t n, struct head_counts *heads)
{
    struct json json;
    struct slice key;
    bool more, whole;
    json_start(&json, text, n);
    rsd_status status = json_enter(&json, '{');
    while (!status && !(status = json_next_key(&json, &key, &more)) && more) {
        int64_t *count = slice_is(key, "num_attention_heads")   ? &heads->all
                         : slice_is(key, "num_key_value_heads") ? &heads->keys
                                                                : NULL;
        char first = json_peek(&json);
        double value;
        int64_t number;
        if (!count || *count > 0 || first < '0' || first > '9') {
            status = json_skip(&json);
            continue;
        }
        status = json_number(&json, &value, &number, &whole);
        *count = !status && whole && number <= INT32_MAX ? number : 0;
    }
    json_drop(&json);
    return status;
}

/* Reads config.json in a directory of the checkpoint, if it is there. */
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
        status = parse_head_counts(text, n, heads);
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
