/* torch_save_write.c - writes torch.save files: whole tensors by name, in one dict.
 *
 *     | data.pkl and small records | header, bytes, descriptor of each storage | small records, directory |
 *
 * Sizes are known before the bytes are, so everything has its place. The directory has the CRC-32 of every
 * storage and is written last: it takes them from the descriptors, which may be another rank's, or those of a
 * run that was stopped. torch.load reads the files with weights_only=True.
 */
#include "torch_saved.h"

#include "crc.h"

#include <stdio.h>
#include <string.h>

enum { SMALL_NRECORDS = 7, DESCRIPTOR_CRC = 4 };

/* ---- the pickle ---- */

/* Returns the box of a tensor that is in a file; SIZE_MAX: none. The boxes of a tensor are in the order of files. */
static size_t find_saved_box(const struct manifest *manifest, size_t tensor, size_t file)
{
    const struct catalog *catalog = &manifest->catalog;
    const struct stored_tensor *one = &catalog->tensors[tensor];
    size_t box = manifest->files_of == FILES_OF_HOLDERS ? file % (size_t)manifest->nranks : 0;
    bool there = box < one->nboxes && catalog->extents[one->first_extent + box].file == file;
    return there ? box : SIZE_MAX;
}

/* Writes the dict of a file. */
static rsd_status put_saved_dict(const struct manifest *manifest, size_t file, struct bytes *out)
{
    const struct catalog *catalog = &manifest->catalog;
    if (manifest->files_of == FILES_OF_HOLDERS)
        return dtensor_put_dict(manifest, file, out);
    bytes_put(out, "\x80\x02}(", 4);
    for (size_t t = 0; t < catalog->ntensors; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        char key[24];
        if (find_saved_box(manifest, t, file) == SIZE_MAX)
            continue;
        snprintf(key, sizeof key, "%zu", t);
        pickle_write_string(out, tensor->name);
        saved_put_tensor(out, tensor->dtype, tensor->ndim, tensor_shape(catalog, tensor), NULL, key,
                         NULL);
    }
    bytes_put(out, "u.", 2);
    return out->failed ? RSD_ENOMEM : RSD_OK;
}

/* Adds the records before the storages of a file. */
static rsd_status add_first_records(const struct manifest *manifest, size_t file,
                                    struct archive_writer *archive)
{
    struct bytes pickle = {0};
    rsd_status status = put_saved_dict(manifest, file, &pickle);
    if (!status)
        archive_add_first(archive, &pickle);
    bytes_drop(&pickle);
    if (!status && manifest->files_of == FILES_OF_HOLDERS)
        status = dtensor_add_mesh(manifest, archive);
    return status ? status : archive->out->failed ? RSD_ENOMEM : RSD_OK;
}

/* ---- places ---- */

static void name_storage(size_t tensor, char name[ARCHIVE_NAME_NCHARS])
{
    snprintf(name, ARCHIVE_NAME_NCHARS, "archive/data/%zu", tensor);
}

rsd_status saved_frame(const struct manifest *manifest, size_t index, size_t box,
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
    struct bytes skipped = {0};
    struct archive_entry *entries =
        mem_new(manifest->files[file].nitems + SMALL_NRECORDS, sizeof *entries);
    struct archive_writer archive = {.out = &skipped, .entries = entries};
    rsd_status status = entries ? add_first_records(manifest, file, &archive) : RSD_ENOMEM;
    for (size_t t = 0; t < catalog->ntensors && !status; t++) {
        const struct stored_tensor *tensor = &catalog->tensors[t];
        size_t box = find_saved_box(manifest, t, file);
        char name[ARCHIVE_NAME_NCHARS];
        if (box == SIZE_MAX)
            continue;
        skipped.n = 0;
        archive.base = catalog->extents[tensor->first_extent + box].offset;
        name_storage(t, name);
        archive_add_header(&archive, name, box_nbytes(catalog, tensor, box));
        archive_add_descriptor(&archive, crcs ? crcs[t] : 0);
    }
    archive.out = out;
    archive.base = at;
    if (!status)
        archive_add_last(&archive, "00000000000000000000");
    if (!status && (skipped.failed || out->failed))
        status = RSD_ENOMEM;
    bytes_drop(&skipped);
    mem_free(entries);
    return status;
}

/* Places the tensors of a file behind its first records, and computes its length. */
static rsd_status place_file(struct manifest *manifest, size_t index)
{
    struct manifest_file *file = &manifest->files[index];
    struct catalog *catalog = &manifest->catalog;
    struct bytes end = {0};
    struct archive_entry entries[SMALL_NRECORDS];
    struct archive_writer archive = {.out = &file->header, .entries = entries};
    rsd_status status = add_first_records(manifest, index, &archive);
    file->nbytes = file->header.n;
    for (size_t t = 0; t < catalog->ntensors && !status; t++) {
        size_t box = find_saved_box(manifest, t, index);
        if (box == SIZE_MAX)
            continue;
        size_t extent = catalog->tensors[t].first_extent + box;
        catalog->extents[extent].offset = file->nbytes;
        status = manifest_item_nbytes(manifest, t, box, &manifest->items[extent].head,
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

rsd_status saved_place_files(struct manifest *manifest)
{
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
        size_t box = find_saved_box(manifest, t, file), extent = tensor->first_extent + box;
        unsigned char bytes[4];
        if (box == SIZE_MAX || box_nbytes(catalog, tensor, box) == 0)
            continue;
        uint64_t at = catalog->extents[extent].offset + manifest->items[extent].head +
                      box_nbytes(catalog, tensor, box) + DESCRIPTOR_CRC;
        TRY(store_read(store, file, at, bytes, sizeof bytes));
        crcs[t] = (uint32_t)little_endian(bytes, sizeof bytes);
    }
    return RSD_OK;
}

/* Writes what follows the tensors: the pickle and the directory, with all CRCs. */
static rsd_status write_end(const struct manifest *manifest, struct store *store, uint32_t file,
                            uint32_t *crcs)
{
    const struct catalog *catalog = &manifest->catalog;
    struct bytes end = {0};
    uint64_t at = manifest->files[file].header.n;
    for (size_t t = 0; t < catalog->ntensors; t++) {
        size_t box = find_saved_box(manifest, t, file);
        if (box != SIZE_MAX)
            at += catalog->extents[catalog->tensors[t].first_extent + box].nbytes;
    }
    TRY(read_crcs(manifest, store, file, crcs));
    rsd_status status = make_end(manifest, file, at, crcs, &end);
    if (!status)
        status = store_write(store, file, at, end.data, end.n);
    if (!status)
        status = store_sync(store, file);
    bytes_drop(&end);
    return status;
}

rsd_status saved_finish_files(const struct manifest *manifest, struct store *store)
{
    uint32_t *crcs = mem_new(manifest->catalog.ntensors, sizeof *crcs);
    rsd_status status = crcs ? RSD_OK : RSD_ENOMEM;
    for (uint32_t file = 0; file < manifest->nfiles && !status; file++) {
        status = write_end(manifest, store, file, crcs);
        if (status)
            status = store_fail_in(store, file, status);
    }
    mem_free(crcs);
    return status;
}

static rsd_status torch_save_finish(const struct manifest *manifest, struct store *store)
{
    TRY(saved_finish_files(manifest, store));
    return manifest->nfiles > 1 ? index_write(manifest, store, torch_save_writer.marker) : RSD_OK;
}

/* ---- the writer ---- */

static rsd_status torch_save_place(struct manifest *manifest)
{
    if (manifest->files_of != FILES_OF_TENSORS)
        return fail(RSD_EINVAL, "torch.save output has whole tensors only; leave out the mesh");
    return saved_place_files(manifest);
}

static rsd_status torch_save_check(const rsd_convert_options *options)
{
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
                                                .frame = saved_frame,
                                                .finish = torch_save_finish};
