/* megatron_files.c - the files of Megatron's checkpoints before torch_dist, and which rank wrote each.
 *
 *     latest_checkpointed_iteration.txt            a number, or `release`
 *     iter_0000005/mp_rank_TT/model_optim_rng.pt           tensor-parallel rank
 *     iter_0000005/mp_rank_TT_PPP/model_optim_rng.pt       and pipeline stage, if there are several
 *     iter_0000005/mp_rank_TT_PPP_EEE/model_optim_rng.pt   and expert-parallel rank, if there are several
 *
 * mp_rank_TT_NNN has a stage or an expert-parallel rank; args in the file says which.
 */
#include "megatron.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the directory ---- */

static rsd_status fail_tag(const struct store *store, uint32_t file, const char *text)
{
    return store_fail_in(store, file,
                         fail(RSD_EFORMAT, "'%.100s' is neither a number nor release", text));
}

/* Reads the name of the directory of the last iteration. The caller frees it. */
static rsd_status read_iteration(struct store *store, uint32_t file, char **directory)
{
    enum { MAX_TAG_NBYTES = 4096 };
    char *text, name[64] = "release";
    size_t n;
    int64_t number;
    rsd_status status = store_load(store, file, MAX_TAG_NBYTES, &text, &n);
    if (status)
        return store_fail_in(store, file, status);
    while (n > 0 && strchr(" \t\r\n", text[n - 1]))
        text[--n] = '\0';
    if (name_has_form(text, "#", &number))
        snprintf(name, sizeof name, "iter_%07lld", (long long)number);
    else if (strcmp(text, "release") != 0)
        status = fail_tag(store, file, text);
    mem_free(text);
    if (status)
        return status;
    *directory = text_copy(name);
    return *directory ? RSD_OK : RSD_ENOMEM;
}

rsd_status megatron_find_directory(struct store *store, char **directory)
{
    for (uint32_t i = 0; i < store->names.n; i++)
        if (strcmp(store_file_name(store, i), MEGATRON_TAG) == 0)
            return read_iteration(store, i, directory);
    *directory = mem_copy("", 1, 1);
    return *directory ? RSD_OK : RSD_ENOMEM;
}

/* ---- files ---- */

/* Reads the numbers of a directory. Returns how many there are; 0: it is not that of a rank. */
static int32_t parse_rank_directory(const char *name, int32_t numbers[3])
{
    static const char *const forms[] = {"mp_rank_#", "mp_rank_#_#", "mp_rank_#_#_#"};
    for (int32_t i = 0; i < 3; i++) {
        int64_t found[3] = {0};
        if (!name_has_form(name, forms[i], found))
            continue;
        for (int32_t k = 0; k <= i; k++)
            numbers[k] = (int32_t)found[k];
        return i + 1;
    }
    return 0;
}

bool megatron_is_rank_directory(const char *name)
{
    int32_t numbers[3];
    return parse_rank_directory(name, numbers) > 0;
}

/* Adds the file in the directory of one rank. ENOENT: it has none. */
static rsd_status add_rank_file(struct store *store, struct megatron_files *files,
                                const struct store_entry *entry, const int32_t numbers[3])
{
    static const char *const names[] = {"model_optim_rng.pt", "model_rng.pt"};
    struct store_listing listing;
    const struct store_entry *found = NULL;
    rsd_status status = store_list(store, entry->name, &listing);
    if (status)
        return fail_in(status, "%s/%s: ", store->path, entry->name);
    for (size_t i = 0; i < listing.n; i++) {
        const char *base = listing.entries[i].base;
        for (size_t k = 0; k < 2; k++)
            if (!listing.entries[i].directory && !found && strcmp(base, names[k]) == 0)
                found = &listing.entries[i];
        if (strcmp(base, "distrib_optim.pt") == 0 || strcmp(base, "optim.pt") == 0)
            files->distributed_optimizer = true;
    }
    if (!found)
        status = fail(RSD_ENOENT, "%s/%s: model_optim_rng.pt is missing", store->path, entry->name);
    if (!status)
        status = GROW(files->list, files->capacity, files->n + 1);
    if (!status) {
        struct megatron_file *file = &files->list[files->n++];
        *file = (struct megatron_file){.numbers = {numbers[0], numbers[1], numbers[2]}};
        status = store_add_file(store, slice_of(found->name), &file->index);
    }
    store_listing_drop(&listing);
    return status;
}

/* Adds the files of all ranks, or the metadata of a distributed checkpoint instead. */
static rsd_status add_rank_files(struct store *store, struct megatron_files *files,
                                 const struct store_listing *listing)
{
    for (size_t i = 0; i < listing->n; i++) {
        int32_t numbers[3] = {0};
        const char *name = listing->entries[i].name;
        int32_t n = parse_rank_directory(listing->entries[i].base, numbers);
        if (strcmp(listing->entries[i].base, ".metadata") == 0)
            return store_add_file(store, slice_of(name), &files->metadata);
        if (n == 0 || !listing->entries[i].directory)
            continue;
        if (files->n > 0 && n != files->nnumbers)
            return fail(RSD_EFORMAT,
                        "%s/%s: name has %d numbers, and those of other ranks have %d; move files "
                        "of other runs away",
                        store->path, listing->entries[i].name, n, files->nnumbers);
        files->nnumbers = n;
        TRY(add_rank_file(store, files, &listing->entries[i], numbers));
    }
    return RSD_OK;
}

rsd_status megatron_find_files(struct store *store, struct megatron_files *files)
{
    struct store_listing listing;
    rsd_status status = store_list(store, files->directory, &listing);
    files->metadata = UINT32_MAX;
    if (status)
        return fail_in(status, "%s/%s: ", store->path, files->directory);
    status = add_rank_files(store, files, &listing);
    store_listing_drop(&listing);
    if (!status && files->n == 0 && files->metadata == UINT32_MAX)
        status = fail(RSD_EFORMAT, "%s%s%s: found no mp_rank_00", store->path,
                      *files->directory ? "/" : "", files->directory);
    return status;
}

void megatron_files_drop(struct megatron_files *files)
{
    mem_free(files->directory);
    mem_free(files->list);
    *files = (struct megatron_files){0};
}

/* ---- ranks ---- */

static int compare_files(const void *a, const void *b)
{
    const struct megatron_file *x = a, *y = b;
    if (x->stage != y->stage)
        return x->stage < y->stage ? -1 : 1;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return (x->tensor > y->tensor) - (x->tensor < y->tensor);
}

/* Names the directory of a rank that is missing. */
static rsd_status fail_rank(const struct store *store, const struct megatron_files *files,
                            const int64_t *numbers)
{
    char text[96];
    size_t n = (size_t)snprintf(text, sizeof text, "mp_rank_%02lld", (long long)numbers[0]);
    for (int32_t i = 1; i < 3 && i < files->nnumbers; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "_%03lld", (long long)numbers[i]);
    return fail(RSD_ENOENT, "%s%s%s: %s is missing", store->path, *files->directory ? "/" : "",
                files->directory, text);
}

/* Checks that args knows of the rank of each file. */
static rsd_status check_rank_counts(const struct store *store, const struct megatron_files *files,
                                    const int64_t stated[3], const int64_t counts[3])
{
    static const char *const names[] = {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"};
    for (int d = 0; d < 3; d++)
        if (stated[d] > 0 && counts[d] > stated[d])
            return fail(RSD_EFORMAT,
                        "%s%s%s: directories are there for %lld ranks; args says that %s is %lld; "
                        "move files of other runs away",
                        store->path, *files->directory ? "/" : "", files->directory,
                        (long long)counts[d], names[d], (long long)stated[d]);
    return RSD_OK;
}

rsd_status megatron_assign_ranks(const struct store *store, struct megatron_files *files,
                                 const struct megatron_args *args)
{
    bool staged = files->nnumbers == 3 || (files->nnumbers == 2 && args->nexpert <= 1) ||
                  (files->nnumbers == 2 && args->nstages > 1);
    const int64_t stated[3] = {args->ntensor, args->nstages, args->nexpert};
    int64_t counts[3] = {stated[0], stated[1], stated[2]}; /* at least what files show */
    for (size_t i = 0; i < files->n; i++) {
        struct megatron_file *file = &files->list[i];
        file->tensor = file->numbers[0];
        file->stage = staged ? file->numbers[1] : 0;
        file->expert = files->nnumbers == 3 ? file->numbers[2] : staged ? 0 : file->numbers[1];
        counts[0] = max_i64(counts[0], (int64_t)file->tensor + 1);
        counts[1] = max_i64(counts[1], (int64_t)file->stage + 1);
        counts[2] = max_i64(counts[2], (int64_t)file->expert + 1);
    }
    TRY(check_rank_counts(store, files, stated, counts));
    if (files->n > 1)
        qsort(files->list, files->n, sizeof *files->list, compare_files);
    for (int d = 0; d < 3; d++)
        counts[d] = max_i64(counts[d], 1);
    size_t at = 0;
    for (int64_t stage = 0; stage < counts[1]; stage++)
        for (int64_t expert = 0; expert < counts[2]; expert++)
            for (int64_t tensor = 0; tensor < counts[0]; tensor++, at++) {
                const struct megatron_file *file = &files->list[at];
                const int64_t numbers[] = {tensor, staged ? stage : expert, expert};
                if (at >= files->n || file->stage != stage || file->expert != expert ||
                    file->tensor != tensor)
                    return fail_rank(store, files, numbers);
            }
    if (at < files->n)
        return fail(RSD_EFORMAT,
                    "%s/%s: another directory is of the same rank; move one of them away",
                    store->path, store_file_name(store, files->list[at].index));
    return RSD_OK;
}
