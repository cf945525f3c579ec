/* torch_save_write.c - writes torch.save files: whole tensors by name, in one dict.
 *
 *     | data.pkl and small records | header, bytes, descriptor of each storage | small records, directory |
 *
 * Sizes are known before the bytes are, so everything has its place. The directory has the CRC-32 of every
 * storage and is written last: it takes them from the descriptors, which may be another rank's, or those of a
 * run that was stopped. torch.load reads the files with weights_only=True.
 */
#include "rows.h"
#include "torch_archive.h"

#include "crc.h"

#include <stdio.h>
#include <string.h>

enum { SMALL_NRECORDS = 6, DESCRIPTOR_CRC = 4 };

/* ---- the pickle ---- */

static void put_saved_text(struct bytes *out, const char *text)
{
    pickle_write_text(out, (struct slice){text, strlen(text)});
}

static void put_saved_tuple(struct bytes *out, int32_t n, const int64_t *values)
{
    pickle_write_op(out, "(");
    for (int32_t i = 0; i < n; i++)
        pickle_write_int(out, values[i]);
    pickle_write_op(out, "t");
}

/* Writes the call that makes a tensor of a whole storage, whose key is a number. */
static void put_saved_tensor(struct bytes *out, const struct catalog *catalog,
                             const struct stored_tensor *tensor, size_t key)
{
    const int64_t *shape = tensor_shape(catalog, tensor);
    int64_t strides[RSD_MAX_DIMS], stride = 1, volume = box_volume(tensor->ndim, shape);
    const char *storage = dtype_to_storage(tensor->dtype);
    char digits[24];
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= max_i64(shape[d], 1);
    }
    snprintf(digits, sizeof digits, "%zu", key);
    pickle_write_global(out, "torch._utils", storage ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    pickle_write_op(out, "((");
    put_saved_text(out, "storage");
    pickle_write_global(out, storage ? "torch" : "torch.storage",
                        storage ? storage : "UntypedStorage");
    put_saved_text(out, digits);
    put_saved_text(out, "cpu");
    pickle_write_int(out, storage ? volume : volume * (int64_t)rsd_dtype_nbytes(tensor->dtype));
    pickle_write_op(out, "tQ");
    pickle_write_int(out, 0);
    put_saved_tuple(out, tensor->ndim, shape);
    put_saved_tuple(out, tensor->ndim, strides);
    pickle_write_op(out, "\x89");
    pickle_write_global(out, "collections", "OrderedDict");
    pickle_write_op(out, ")R");
    if (!storage)
        pickle_write_global(out, "torch", dtype_to_torch(tensor->dtype));
    pickle_write_op(out, "tR");
}

static bool is_in_file(const struct catalog *catalog, size_t tensor, size_t file)
{
    const struct stored_tensor *one = &catalog->tensors[tensor];
    return one->nboxes > 0 && catalog->extents[one->first_extent].file == file;
}

static void put_saved_dict(struct bytes *out, const struct catalog *catalog, size_t file)
{
    bytes_put(out, "\x80\x02}(", 4);
    for (size_t t = 0; t < catalog->ntensors; t++)
        if (is_in_file(catalog, t, file)) {
            put_saved_text(out, catalog->tensors[t].name);
            put_saved_tensor(out, catalog, &catalog->tensors[t], t);
        }
    bytes_put(out, "u.", 2);
}

/* ---- places ---- */

static void name_storage(size_t tensor, char name[ARCHIVE_NAME_NCHARS])
{
    snprintf(name, ARCHIVE_NAME_NCHARS, "archive/data/%zu", tensor);
}

static rsd_status torch_save_frame(const struct manifest *manifest, size_t index, size_t box,
                                   struct bytes *head, struct bytes *tail)
{
    const struct catalog *catalog = &manifest->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    size_t extent = tensor->first_extent + box;
    uint64_t nbytes = box_nbytes(catalog, tensor, box);
    struct archive_entry entry;
    struct archive_writer archive = {
        .out = head, .base = catalog->extents[extent].offset, .entries = &entry};
    char name[ARCHIVE_NAME_NCHARS];
    name_storage(index, name);
    archive_add_header(&archive, name, nbytes);
    archive.out = tail;
    archive_add_descriptor(&archive, crc32_from_raw(manifest->items[extent].crc, nbytes));
    return head->failed || tail->failed ? RSD_ENOMEM : RSD_OK;
}

/* Makes the records behind the storages of a file, which begin at `at`. `crcs` are those of all tensors; NULL:
 * they are not known yet, and the length alone is wanted. */
static rsd_status make_end(const struct manifest *manifest, size_t file, uint64_t at,
                           const uint32_t *crcs, struct bytes *out)
{
    const struct catalog *catalog = &manifest->catalog;
    struct bytes skipped = {0}, pickle = {0};
    struct archive_entry *entries =
        mem_new(manifest->files[file].nitems + SMALL_NRECORDS, sizeof *entries);
    struct archive_writer archive = {.out = &skipped, .entries = entries};
    if (!entries)
        return RSD_ENOMEM;
    put_saved_dict(&pickle, catalog, file);
    archive_add_first(&archive, &pickle); /* as they are in the header of the file */
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        char name[ARCHIVE_NAME_NCHARS];
        if (!is_in_file(catalog, t, file))
            continue;
        skipped.n = 0;
        archive.base = catalog->extents[tensor->first_extent].offset;
        name_storage(t, name);
        archive_add_header(&archive, name, (uint64_t)tensor_nbytes(catalog, tensor));
        archive_add_descriptor(&archive, crcs ? crcs[t] : 0);
    }
    archive.out = out;
    archive.base = at;
    archive_add_last(&archive, "00000000000000000000");
    rsd_status status = skipped.failed || pickle.failed || out->failed ? RSD_ENOMEM : RSD_OK;
    bytes_drop(&skipped);
    bytes_drop(&pickle);
    mem_free(entries);
    return status;
}

static rsd_status place_file(struct manifest *manifest, size_t index)
{
    struct manifest_file *file = &manifest->files[index];
    struct catalog *catalog = &manifest->catalog;
    struct bytes pickle = {0}, end = {0};
    struct archive_entry entries[SMALL_NRECORDS];
    struct archive_writer archive = {.out = &file->header, .entries = entries};
    put_saved_dict(&pickle, catalog, index);
    archive_add_first(&archive, &pickle);
    rsd_status status = pickle.failed || file->header.failed ? RSD_ENOMEM : RSD_OK;
    bytes_drop(&pickle);
    file->nbytes = file->header.n;
    for (size_t t = 0; t < catalog->ntensors && !status; t++) {
        size_t extent = catalog->tensors[t].first_extent;
        if (!is_in_file(catalog, t, index))
            continue;
        catalog->extents[extent].offset = file->nbytes;
        status = manifest_item_nbytes(manifest, t, 0, &manifest->items[extent].head,
                                      &catalog->extents[extent].nbytes);
        file->nbytes += catalog->extents[extent].nbytes;
        file->nitems++;
    }
    if (!status)
        status = make_end(manifest, index, file->nbytes, NULL, &end);
    file->nbytes += end.n;
    bytes_drop(&end);
    return status;
}

static rsd_status torch_save_place(struct manifest *manifest)
{
    if (manifest->files_of != FILES_OF_TENSORS)
        return fail(RSD_EINVAL, "torch.save output has whole tensors only; leave out the mesh");
    for (size_t i = 0; i < manifest->nfiles; i++)
        TRY(place_file(manifest, i));
    return RSD_OK;
}

/* ---- the end ---- */

/* Reads the CRC-32 of each storage of a file from its descriptor. */
static rsd_status read_crcs(const struct manifest *manifest, struct store *store, uint32_t file,
                            uint32_t *crcs)
{
    const struct catalog *catalog = &manifest->catalog;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        const struct extent *extent = &catalog->extents[tensor->first_extent];
        unsigned char bytes[4];
        if (!is_in_file(catalog, t, file) || tensor_nbytes(catalog, tensor) == 0)
            continue;
        uint64_t at = extent->offset + manifest->items[tensor->first_extent].head +
                      (uint64_t)tensor_nbytes(catalog, tensor) + DESCRIPTOR_CRC;
        TRY(store_read(store, file, at, bytes, sizeof bytes));
        crcs[t] = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                  (uint32_t)bytes[3] << 24;
    }
    return RSD_OK;
}

static rsd_status write_end(const struct manifest *manifest, struct store *store, uint32_t file,
                            uint32_t *crcs)
{
    const struct catalog *catalog = &manifest->catalog;
    struct bytes end = {0};
    uint64_t at = manifest->files[file].header.n;
    for (size_t t = 0; t < catalog->ntensors; t++)
        if (is_in_file(catalog, t, file))
            at += catalog->extents[catalog->tensors[t].first_extent].nbytes;
    TRY(read_crcs(manifest, store, file, crcs));
    rsd_status status = make_end(manifest, file, at, crcs, &end);
    if (!status)
        status = store_write(store, file, at, end.data, end.n);
    if (!status)
        status = store_sync(store, file);
    bytes_drop(&end);
    return status;
}

static rsd_status torch_save_finish(const struct manifest *manifest, struct store *store)
{
    uint32_t *crcs = mem_new(manifest->catalog.ntensors, sizeof *crcs);
    rsd_status status = crcs ? RSD_OK : RSD_ENOMEM;
    for (uint32_t file = 0; file < manifest->nfiles && !status; file++) {
        status = write_end(manifest, store, file, crcs);
        if (status)
            status = store_fail_in(store, file, status);
    }
    mem_free(crcs);
    TRY(status);
    return manifest->nfiles > 1 ? index_write(manifest, store, torch_save_writer.marker) : RSD_OK;
}

/* ---- the writer ---- */

static rsd_status torch_save_check(const rsd_convert_options *options, bool one_file)
{
    (void)one_file;
    if (options->compress)
        return fail(RSD_EINVAL, "torch.save output cannot be compressed");
    return options->every_replica ? fail(RSD_EINVAL, "torch.save output has whole tensors only")
                                  : RSD_OK;
}

static void torch_save_name_file(const struct manifest *manifest, size_t file, size_t nfiles,
                                 char name[FILE_NAME_NCHARS])
{
    if (nfiles == 1)
        snprintf(name, FILE_NAME_NCHARS, "%s_model.bin", manifest->adapter ? "adapter" : "pytorch");
    else
        snprintf(name, FILE_NAME_NCHARS, "pytorch_model-%05zu-of-%05zu.bin", file + 1, nfiles);
}

static const char *const suffixes[] = {".pt", ".pth", ".bin", NULL};

const struct format_writer torch_save_writer = {.marker = "pytorch_model.bin.index.json",
                                                .suffix_until_complete = "",
                                                .file_suffixes = suffixes,
                                                .fills_files = true,
                                                .check = torch_save_check,
                                                .name_file = torch_save_name_file,
                                                .place = torch_save_place,
                                                .frame = torch_save_frame,
                                                .finish = torch_save_finish};
