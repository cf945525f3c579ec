/* draft.c - a checkpoint that is going to be written: what will be in which file, and where.
 *
 * Sizes are known before anything is written (but for compressed items), so offsets are too: threads then
 * write where they like, in any order, and processes that draft the same need not talk to each other.
 *
 *     DCP            | value | value | head bytes tail | head bytes tail | ...
 *     safetensors    | header | bytes | bytes | ...
 */
#include "checkpoint.h"

#include <string.h>

rsd_status draft_add_file(struct draft *draft, const char *name)
{
    TRY(GROW(draft->files, draft->room_files, draft->nfiles + 1));
    char *copy = mem_copy(name, strlen(name) + 1, 1);
    if (!copy)
        return RSD_ENOMEM;
    draft->files[draft->nfiles++] = (struct out_file){.name = copy};
    return RSD_OK;
}

rsd_status draft_add_boxes(struct draft *draft, const struct deal *deal, size_t tensor,
                           size_t *next)
{
    int32_t ndim = draft->contents.tensors[draft->contents.ntensors - 1].ndim;
    for (; *next < deal->n && deal->list[*next].tensor == tensor; ++*next) {
        const struct dealt *dealt = &deal->list[*next];
        const int64_t *lo = deal->coordinates + dealt->coordinates;
        struct extent extent = {.file = (uint32_t)dealt->rank,
                                .kind = draft->format == RSD_FORMAT_DCP ? ITEM_SAVED : ITEM_PLAIN,
                                .nzstd = draft->compress != 0,
                                .detail = dealt->order};
        TRY(contents_add_box(&draft->contents, lo, lo + ndim, extent));
        TRY(GROW(draft->ats, draft->room_ats, draft->nats + (size_t)ndim));
        copy_i64s(draft->ats + draft->nats, lo + 2 * ndim, ndim);
        draft->nats += (size_t)ndim;
    }
    return RSD_OK;
}

/* ---- names ---- */

static rsd_status check_written_name(const struct draft *draft, const char *name)
{
    if (!is_utf8(name, strlen(name)))
        return fail(RSD_EINVAL, "%s: a name has to be UTF-8", name);
    if (draft->format == RSD_FORMAT_SAFETENSORS && strcmp(name, "__metadata__") == 0)
        return fail(RSD_EINVAL, "safetensors cannot have a tensor called %s", name);
    return RSD_OK;
}

rsd_status draft_check(struct draft *draft)
{
    struct contents *contents = &draft->contents;
    for (size_t i = 0; i < contents->ntensors; i++)
        TRY(check_written_name(draft, contents->tensors[i].name));
    for (size_t i = 0; i < contents->nvalues; i++)
        TRY(check_written_name(draft, contents->values[i].name));
    rsd_status status = contents_finish(contents); /* finds names that are there twice */
    return status == RSD_EFORMAT ? RSD_EINVAL : status;
}

/* ---- places ---- */

static rsd_status place_values(struct draft *draft)
{
    for (size_t i = 0; i < draft->contents.nvalues; i++) {
        struct extent *extent = &draft->contents.values[i].extent;
        const struct out_value *value = &draft->values[i];
        struct out_file *file = &draft->files[extent->file];
        extent->nzstd = draft->compress != 0;
        extent->offset = file->nbytes;
        extent->nbytes = value->from ? value->from->extent.nbytes : value->item.n;
        file->nbytes += extent->nbytes;
        file->nvalues++;
    }
    return RSD_OK;
}

static rsd_status place_items(struct draft *draft)
{
    struct contents *contents = &draft->contents;
    for (size_t t = 0; t < contents->ntensors; t++) {
        const struct tensor *tensor = &contents->tensors[t];
        for (size_t box = 0; box < tensor->nboxes; box++) {
            size_t i = tensor->first_extent + box;
            struct extent *extent = &contents->extents[i];
            struct out_file *file = &draft->files[extent->file];
            TRY(item_nbytes(tensor->dtype, tensor->ndim, tensor_box_len(contents, tensor, box),
                            NULL, &draft->items[i].head, &extent->nbytes));
            extent->offset = file->nbytes;
            file->nbytes += extent->nbytes;
            file->nitems++;
        }
    }
    return RSD_OK;
}

rsd_status draft_place(struct draft *draft)
{
    draft->items = mem_new(draft->contents.nextents, sizeof *draft->items);
    if (!draft->items)
        return RSD_ENOMEM;
    if (draft->format == RSD_FORMAT_SAFETENSORS)
        return safetensors_place(draft);
    TRY(place_values(draft));
    return place_items(draft);
}

/* ---- the rest ---- */

/* Of an item that is copied only the name and the length: it is told apart by the file it comes from. */
static void hash_values(const struct draft *draft, struct hash *hash)
{
    for (size_t i = 0; i < draft->contents.nvalues; i++) {
        const struct value *value = &draft->contents.values[i];
        hash_string(hash, value->name);
        hash_string(hash, value->path ? value->path : "");
        hash_bytes(hash, draft->values[i].item.data, draft->values[i].item.n);
    }
}

void draft_hash(const struct draft *draft, struct hash *hash)
{
    const struct contents *contents = &draft->contents;
    hash_start(hash, "draft 2");
    hash_i64(hash, draft->format);
    hash_i64(hash, draft->compress);
    for (size_t i = 0; i < draft->nfiles; i++) {
        hash_string(hash, draft->files[i].name);
        hash_i64(hash, (int64_t)draft->files[i].nbytes);
    }
    for (size_t i = 0; i < contents->ntensors; i++) {
        const struct tensor *tensor = &contents->tensors[i];
        hash_string(hash, tensor->name);
        hash_string(hash, tensor->path ? tensor->path : "");
        hash_i64(hash, tensor->dtype);
        hash_i64(hash, tensor->ndim);
        hash_i64s(hash, tensor_shape(contents, tensor), (size_t)tensor->ndim);
        hash_i64s(hash, contents->coordinates + tensor->boxes,
                  2 * (size_t)tensor->ndim * tensor->nboxes);
        for (size_t box = 0; box < tensor->nboxes; box++)
            hash_i64(hash, contents->extents[tensor->first_extent + box].file);
    }
    hash_values(draft, hash);
}

void draft_drop(struct draft *draft)
{
    for (size_t i = 0; i < draft->nfiles; i++) {
        mem_free(draft->files[i].name);
        bytes_drop(&draft->files[i].header);
    }
    for (size_t i = 0; draft->values && i < draft->contents.nvalues; i++)
        bytes_drop(&draft->values[i].item);
    mem_free(draft->values);
    mem_free(draft->items);
    mem_free(draft->ats);
    mem_free(draft->places);
    mem_free(draft->files);
    contents_drop(&draft->contents);
    *draft = (struct draft){0};
}
