/* torch_save_read.c - opens torch.save files: one, or those that an index names. */
#include "rows.h"
#include "torch_item.h"

#include <string.h>

/* ---- files ---- */

static rsd_status add_torch_file(struct store *store, struct catalog *catalog, uint32_t index)
{
    struct torch_file file;
    struct torch_visit visit;
    rsd_status status = torch_file_open(&file, store, index);
    if (!status) {
        torch_visit_start(&visit, &file, catalog, index);
        status = torch_visit_run(&visit, file.root);
        torch_visit_end(&visit);
        torch_file_close(&file);
    }
    return status ? store_fail_in(store, index, status) : RSD_OK;
}

/* ---- the row ---- */

static bool is_torch_index(const char *name)
{
    return has_suffix(name, ".bin.index.json");
}

static int torch_save_probe(const struct store_listing *listing, const struct store_entry *entry,
                            struct slice start)
{
    (void)listing;
    const char *name = entry->base, *bytes = start.bytes;
    bool named = has_suffix(name, ".pt") || has_suffix(name, ".pth") || has_suffix(name, ".bin");
    if (entry->directory)
        return NOT_SURE;
    if (is_torch_index(name))
        return SURE_OF_TORCH_INDEX;
    if (!bytes)
        return named ? SURE_OF_TORCH_FILE : NOT_SURE;
    bool archive = start.nbytes >= 4 && memcmp(bytes, "PK\3\4", 4) == 0;
    bool safetensors = start.nbytes > 8 && bytes[8] == '{';
    bool pickle = start.nbytes >= 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5;
    if (archive || (pickle && !safetensors))
        return SURE_OF_BYTES;
    return named ? SURE_OF_SUFFIX : NOT_SURE;
}

static rsd_status torch_save_open(struct store *store, struct catalog *catalog,
                                  const rsd_open_options *options)
{
    (void)options;
    size_t n = store->names.n;
    bool index = is_torch_index(store_file_name(store, 0));
    if (n > 1 && index)
        return fail(RSD_EFORMAT, "%s: found %zu index files; name one of them", store->path, n);
    if (n > 1)
        return fail(RSD_EFORMAT, "%s: found %zu torch.save files and no index; name one of them",
                    store->path, n);
    if (index)
        TRY(index_add_files(store, 0));
    for (uint32_t file = index ? 1 : 0; file < store->names.n; file++)
        TRY(add_torch_file(store, catalog, file));
    return RSD_OK;
}

const struct format format_torch_save = {.id = RSD_FORMAT_TORCH_SAVE,
                                         .name = "torch.save",
                                         .probe = torch_save_probe,
                                         .open = torch_save_open,
                                         .locate = catalog_locate};
