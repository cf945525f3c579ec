/* rank_files.c - files of which each has one rank's part, known by the numbers in their names. */
#include "rows.h"

#include <string.h>

/* More ranks than any job has; a name alone must not make us allocate for them. */
enum { MAX_RANKS = 1 << 20 };

/* Reads a number below 2^31. Returns false without one. */
static bool take_decimal(const char **text, int64_t *number)
{
    int64_t value = 0;
    const char *at = *text;
    for (; *at >= '0' && *at <= '9'; at++) {
        value = 10 * value + (*at - '0');
        if (value > INT32_MAX)
            return false;
    }
    bool found = at != *text;
    *text = at;
    *number = value;
    return found;
}

bool name_has_form(const char *name, const char *pattern, int64_t *numbers)
{
    for (; *pattern; pattern++) {
        if (*pattern == '#') {
            if (!take_decimal(&name, numbers++))
                return false;
        } else if (*pattern == '*') {
            for (; *name; name++)
                if (name_has_form(name, pattern + 1, numbers))
                    return true;
            return name_has_form(name, pattern + 1, numbers);
        } else if (*name++ != *pattern) {
            return false;
        }
    }
    return *name == '\0';
}

rsd_status format_add_file(struct store *store, const char *directory, struct slice name,
                           uint32_t *file)
{
    struct bytes path = {0};
    if (!*directory)
        return store_add_file(store, name, file);
    bytes_put_text(&path, directory);
    bytes_put_text(&path, "/");
    bytes_put(&path, name.bytes, name.nbytes);
    struct slice full = {(const char *)path.data, path.n};
    rsd_status status = path.failed ? RSD_ENOMEM : store_add_file(store, full, file);
    bytes_drop(&path);
    return status;
}

rsd_status rank_files_add(struct rank_files *ranks, struct store *store,
                          const struct store_listing *listing, const char *pattern, int64_t nranks)
{
    if (nranks < 1 || nranks > MAX_RANKS)
        return fail(RSD_EFORMAT, "number of ranks is %lld; expected 1 to %d", (long long)nranks,
                    (int)MAX_RANKS);
    ranks->files = mem_new((size_t)nranks, sizeof *ranks->files);
    if (!ranks->files)
        return RSD_ENOMEM;
    ranks->nranks = nranks;
    for (int64_t i = 0; i < nranks; i++)
        ranks->files[i] = UINT32_MAX;
    for (size_t i = 0; i < listing->n; i++) {
        const struct store_entry *entry = &listing->entries[i];
        int64_t numbers[2] = {0};
        if (entry->directory || !name_has_form(entry->base, pattern, numbers) ||
            numbers[0] != nranks)
            continue;
        if (numbers[1] >= nranks)
            return fail(RSD_EFORMAT, "%s: rank %lld of %lld does not exist", entry->name,
                        (long long)numbers[1], (long long)nranks);
        if (ranks->files[numbers[1]] != UINT32_MAX)
            return fail(RSD_EFORMAT, "%s: rank %lld has two files", entry->name,
                        (long long)numbers[1]);
        TRY(store_add_file(store, slice_of(entry->name), &ranks->files[numbers[1]]));
    }
    return RSD_OK;
}

void rank_files_drop(struct rank_files *ranks)
{
    mem_free(ranks->files);
    *ranks = (struct rank_files){0};
}
