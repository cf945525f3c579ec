/* fuzz_zip.c - any bytes as an archive: every record that is found lies inside, and no two records overlap. */
#include "zip.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static rsd_status read_input(void *context, uint64_t at, void *out, size_t n)
{
    const struct slice *input = context;
    if (at > input->nbytes || n > input->nbytes - at)
        return fail(RSD_EFORMAT, "beyond the end");
    memcpy(out, input->bytes + at, n);
    return RSD_OK;
}

static void check_records(struct zip *zip, uint64_t n)
{
    uint64_t end = 0;
    for (size_t i = 0; i < zip->nrecords; i++) {
        struct zip_record *record = &zip->records[i];
        if (zip_locate(zip, record))
            continue;
        if (record->data < record->header || record->data > n ||
            record->nbytes > n - record->data || record->header < end)
            abort();
        end = record->data + record->nbytes;
    }
}

static void try_pickle(struct zip *zip)
{
    struct zip_record *record;
    struct pickle_tree tree;
    pickle_node root;
    if (zip_find(zip, "data.pkl", &record) || !record || zip_read_pickle(zip, record, &tree, &root))
        return;
    pickle_tree_drop(&tree);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct slice input = {(const char *)data, n};
    struct zip zip;
    if (zip_open(&zip, read_input, &input, n))
        return 0;
    try_pickle(&zip);
    check_records(&zip, n);
    zip_close(&zip);
    return 0;
}
