/* checkpoint.c - opens a path: finds out what it is, and answers what is in it.
 *
 *     a file      by its first bytes: an archive or a pickle of torch.save, a safetensors file, an index
 *     a folder    by the files in it, in this order:
 *                 .metadata; a safetensors index; safetensors files; __N.metadata; a torch.save index;
 *                 one torch.save file
 *
 * A folder with none of these, but with a folder that has, is an error that names it: people point at the
 * folder above often enough.
 */
#include "format.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *rsd_format_name(rsd_format format)
{
    switch (format) {
    case RSD_FORMAT_DCP:
        return "dcp";
    case RSD_FORMAT_SAFETENSORS:
        return "safetensors";
    case RSD_FORMAT_TORCH_SAVE:
        return "torch.save";
    }
    return NULL;
}

/* ---- lists of names ---- */

rsd_status name_list_add(struct name_list *names, struct slice name)
{
    TRY(GROW(names->list, names->capacity, names->n + 1));
    char *copy = mem_new(name.nbytes + 1, 1);
    if (!copy)
        return RSD_ENOMEM;
    memcpy(copy, name.bytes, name.nbytes);
    names->list[names->n++] = (struct slice){copy, name.nbytes};
    return RSD_OK;
}

void name_list_drop(struct name_list *names)
{
    for (size_t i = 0; i < names->n; i++)
        mem_free(without_const(names->list[i].bytes));
    mem_free(names->list);
    *names = (struct name_list){0};
}

/* ---- what is in a folder ---- */

/* The kinds of files that say what a folder is, best first. */
enum sign { METADATA, SAFE_INDEX, SAFE_FILE, RANK_METADATA, TORCH_INDEX, TORCH_FILE, NSIGNS };

static const rsd_format format_of[NSIGNS] = {RSD_FORMAT_DCP,         RSD_FORMAT_SAFETENSORS,
                                             RSD_FORMAT_SAFETENSORS, RSD_FORMAT_DCP,
                                             RSD_FORMAT_TORCH_SAVE,  RSD_FORMAT_TORCH_SAVE};

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

/* __12.metadata */
static bool is_rank_metadata(const char *name)
{
    if (strncmp(name, "__", 2) != 0)
        return false;
    size_t digits = strspn(name + 2, "0123456789");
    return digits > 0 && strcmp(name + 2 + digits, ".metadata") == 0;
}

static enum sign sign_of(const char *name)
{
    if (strcmp(name, ".metadata") == 0)
        return METADATA;
    if (ends_with(name, ".safetensors.index.json"))
        return SAFE_INDEX;
    if (ends_with(name, ".safetensors"))
        return SAFE_FILE;
    if (is_rank_metadata(name))
        return RANK_METADATA;
    if (ends_with(name, ".bin.index.json"))
        return TORCH_INDEX;
    if (ends_with(name, ".pt") || ends_with(name, ".pth") || ends_with(name, ".bin"))
        return TORCH_FILE;
    return NSIGNS;
}

/* Numbers in names count as numbers, so that __10 comes after __9. */
static int by_name(const void *a, const void *b)
{
    return strverscmp(((const struct slice *)a)->bytes, ((const struct slice *)b)->bytes);
}

static rsd_status list_folder(int fd, struct name_list signs[NSIGNS], struct name_list *folders)
{
    int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = copy < 0 ? NULL : fdopendir(copy);
    if (!folder) {
        int error = errno;
        if (copy >= 0)
            close(copy);
        return fail(RSD_EIO, "%s", strerror(error));
    }
    rsd_status status = RSD_OK;
    for (struct dirent *entry; !status && (entry = readdir(folder));) {
        struct slice name = {entry->d_name, strlen(entry->d_name)};
        enum sign sign = sign_of(entry->d_name);
        if (strcmp(entry->d_name, JOURNAL_NAME) == 0)
            status = fail(RSD_EFORMAT, "an output that is not finished: its run can be resumed");
        else if (sign != NSIGNS)
            status = name_list_add(&signs[sign], name);
        else if (folders && entry->d_name[0] != '.')
            status = name_list_add(folders, name);
    }
    closedir(folder);
    for (int sign = 0; sign < NSIGNS; sign++)
        if (signs[sign].n > 1)
            qsort(signs[sign].list, signs[sign].n, sizeof *signs[sign].list, by_name);
    return status;
}

static void drop_signs(struct name_list signs[NSIGNS])
{
    for (int sign = 0; sign < NSIGNS; sign++)
        name_list_drop(&signs[sign]);
}

static enum sign best_sign(const struct name_list signs[NSIGNS], rsd_format wanted)
{
    for (int sign = 0; sign < NSIGNS; sign++)
        if (signs[sign].n > 0 && (!wanted || format_of[sign] == wanted))
            return (enum sign)sign;
    return NSIGNS;
}

/* ---- opening ---- */

/* Opens all the files that an index names, or just these. */
static rsd_status open_names(rsd_checkpoint *checkpoint, enum sign sign,
                             const struct name_list *names)
{
    struct name_list listed = {0};
    rsd_status status = RSD_OK;
    if (sign == SAFE_INDEX || sign == TORCH_INDEX) {
        uint32_t index;
        if (names->n > 1)
            return fail(RSD_EFORMAT, "%s: there are %zu indices", checkpoint->files.folder,
                        names->n);
        status = files_add(&checkpoint->files, names->list[0], &index);
        if (!status)
            status = index_read_files(&checkpoint->files, index, &listed);
        names = &listed;
    }
    checkpoint->format = format_of[sign];
    if (!status && checkpoint->format == RSD_FORMAT_DCP)
        status = dcp_read(checkpoint, names->list, names->n);
    else if (!status && checkpoint->format == RSD_FORMAT_SAFETENSORS)
        status = safetensors_open(checkpoint, names->list, names->n);
    else if (!status)
        status = torch_save_open(checkpoint, names->list, names->n);
    name_list_drop(&listed);
    return status;
}

/* Says which folder below this one is a checkpoint, if one is. */
static rsd_status nothing_here(const rsd_checkpoint *checkpoint, const struct name_list *folders)
{
    const char *path = checkpoint->files.folder;
    for (size_t i = 0; i < folders->n; i++) {
        struct name_list signs[NSIGNS] = {{0}};
        int fd = openat(checkpoint->files.folder_fd, folders->list[i].bytes,
                        O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            continue;
        bool found = list_folder(fd, signs, NULL) == RSD_OK && best_sign(signs, 0) != NSIGNS;
        drop_signs(signs);
        close(fd);
        if (found)
            return fail(RSD_EFORMAT, "%s: no checkpoint, but there is one in %s/%s", path, path,
                        folders->list[i].bytes);
    }
    return fail(RSD_EFORMAT,
                "%s: no checkpoint: there is no .metadata, no .safetensors and no torch.save file",
                path);
}

/* What one file of the folder says is in it. */
static rsd_status open_metadata(rsd_checkpoint *checkpoint, const char *name)
{
    struct slice one = {name, strlen(name)};
    struct name_list names = {.list = &one, .n = 1};
    rsd_status status = check_name(one);
    if (status)
        return fail(RSD_EINVAL, "%s is no name of a file in %s", name, checkpoint->files.folder);
    return open_names(checkpoint, METADATA, &names);
}

static rsd_status open_folder(rsd_checkpoint *checkpoint, const char *path,
                              const rsd_open_options *options)
{
    struct name_list signs[NSIGNS] = {{0}}, folders = {0};
    TRY(files_open(&checkpoint->files, path));
    if (options->metadata)
        return open_metadata(checkpoint, options->metadata);
    rsd_status status = list_folder(checkpoint->files.folder_fd, signs, &folders);
    if (status)
        status = fail_in(status, "%s: ", path);
    enum sign sign = best_sign(signs, options->format);
    if (!status && sign == NSIGNS)
        status = nothing_here(checkpoint, &folders);
    else if (!status && sign == TORCH_FILE && signs[sign].n > 1)
        status =
            fail(RSD_EFORMAT, "%s: there are %zu torch.save files and no index: name one of them",
                 path, signs[sign].n);
    else if (!status)
        status = open_names(checkpoint, sign, &signs[sign]);
    drop_signs(signs);
    name_list_drop(&folders);
    return status;
}

/* Splits a path at its last slash. The folder of a plain name is "". */
static rsd_status split_path(const char *path, char **folder, const char **name)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    *name = path + n;
    *folder = mem_new(n + 1, 1);
    if (!*folder)
        return RSD_ENOMEM;
    memcpy(*folder, path, n);
    if (n > 1)
        (*folder)[n - 1] = '\0';
    return RSD_OK;
}

static enum sign sign_of_file(const char *name, const unsigned char start[9], size_t n)
{
    enum sign sign = sign_of(name);
    if (sign != NSIGNS && sign != SAFE_FILE && sign != TORCH_FILE)
        return sign;
    if (n >= 4 && memcmp(start, "PK\3\4", 4) == 0)
        return TORCH_FILE;
    if (n >= 2 && start[0] == 0x80 && start[1] >= 2 && start[1] <= 5 &&
        !(n == 9 && start[8] == '{'))
        return TORCH_FILE;
    return n == 9 && start[8] == '{' ? SAFE_FILE : sign;
}

static rsd_status open_file(rsd_checkpoint *checkpoint, const char *path, rsd_format wanted)
{
    char *folder;
    const char *name;
    unsigned char start[9];
    TRY(split_path(path, &folder, &name));
    rsd_status status = files_open(&checkpoint->files, folder);
    mem_free(folder);
    TRY(status);
    struct slice one = {name, strlen(name)};
    struct name_list names = {.list = &one, .n = 1};
    int fd = openat(checkpoint->files.folder_fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : pread(fd, start, sizeof start, 0);
    if (n < 0)
        status = fail(RSD_EIO, "%s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    TRY(status);
    enum sign sign = sign_of_file(name, start, (size_t)n);
    if (sign != NSIGNS && wanted && format_of[sign] != wanted)
        return fail(RSD_EFORMAT, "%s: %s, not %s", path, rsd_format_name(format_of[sign]),
                    rsd_format_name(wanted) ? rsd_format_name(wanted) : "a format that is known");
    if (sign == NSIGNS)
        return fail(RSD_EFORMAT,
                    "%s: no checkpoint: neither safetensors nor what torch.save writes", path);
    return open_names(checkpoint, sign, &names);
}

rsd_status rsd_checkpoint_open(const char *path, const rsd_open_options *given,
                               rsd_checkpoint **out)
{
    rsd_open_options options;
    struct stat found;
    TRY(options_copy("rsd_open_options", given, &options, sizeof options));
    if (stat(path, &found) != 0)
        return fail(errno == ENOENT ? RSD_ENOENT : RSD_EIO, "%s: %s", path, strerror(errno));
    rsd_checkpoint *checkpoint = mem_new(1, sizeof *checkpoint);
    if (!checkpoint)
        return RSD_ENOMEM;
    rsd_status status = S_ISDIR(found.st_mode) ? open_folder(checkpoint, path, &options)
                                               : open_file(checkpoint, path, options.format);
    if (!status) {
        status = catalog_finish(&checkpoint->catalog);
        if (status == RSD_EFORMAT)
            status = fail_in(status, "%s: ", path);
    }
    if (status)
        rsd_checkpoint_close(checkpoint);
    else
        *out = checkpoint;
    return status;
}

void rsd_checkpoint_close(rsd_checkpoint *checkpoint)
{
    if (!checkpoint)
        return;
    files_close(&checkpoint->files);
    catalog_drop(&checkpoint->catalog);
    mem_free(checkpoint);
}

/* ---- asking ---- */

rsd_format rsd_checkpoint_format(const rsd_checkpoint *checkpoint)
{
    return checkpoint->format;
}

int64_t rsd_checkpoint_ntensors(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->catalog.ntensors;
}

static rsd_status tensor_at(const rsd_checkpoint *checkpoint, int64_t index,
                            const struct stored_tensor **tensor)
{
    if (index < 0 || (uint64_t)index >= checkpoint->catalog.ntensors)
        return fail(RSD_EINVAL, "tensor %lld of a checkpoint with %zu", (long long)index,
                    checkpoint->catalog.ntensors);
    *tensor = &checkpoint->catalog.tensors[index];
    return RSD_OK;
}

rsd_status rsd_checkpoint_tensor(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_tensor_info *out)
{
    const struct stored_tensor *tensor;
    TRY(report_check("rsd_tensor_info", out));
    TRY(tensor_at(checkpoint, index, &tensor));
    const int64_t *shape = tensor_shape(&checkpoint->catalog, tensor);
    rsd_tensor_info result = {.name = tensor->name,
                              .dtype = tensor->dtype,
                              .ndim = tensor->ndim,
                              .nboxes = (int64_t)tensor->nboxes,
                              .path = tensor->path};
    copy_i64s(result.shape, shape, tensor->ndim);
    result.nbytes = box_volume(tensor->ndim, shape) * (int64_t)rsd_dtype_nbytes(tensor->dtype);
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

rsd_status rsd_checkpoint_find(const rsd_checkpoint *checkpoint, const char *name, int64_t *index)
{
    size_t found = catalog_find_tensor(&checkpoint->catalog, name);
    if (found == SIZE_MAX)
        return fail(RSD_EMISMATCH, "%s: the checkpoint has no such tensor", name);
    *index = (int64_t)found;
    return RSD_OK;
}

rsd_status rsd_checkpoint_layout(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_layout **layout)
{
    const struct stored_tensor *tensor;
    const struct catalog *catalog = &checkpoint->catalog;
    TRY(tensor_at(checkpoint, index, &tensor));
    return catalog_tensor_layout(catalog, tensor, true, layout);
}

int64_t rsd_checkpoint_nfiles(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->files.n;
}

const char *rsd_checkpoint_file(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->files.n;
    return there ? checkpoint->files.list[index].name : NULL;
}

rsd_status rsd_checkpoint_box(const rsd_checkpoint *checkpoint, int64_t index, int64_t box,
                              rsd_extent *out)
{
    const struct stored_tensor *tensor;
    const struct catalog *catalog = &checkpoint->catalog;
    TRY(report_check("rsd_extent", out));
    TRY(tensor_at(checkpoint, index, &tensor));
    if (box < 0 || (uint64_t)box >= tensor->nboxes)
        return fail(RSD_EINVAL, "%s: box %lld of %zu", tensor->name, (long long)box,
                    tensor->nboxes);
    const struct extent *extent = &catalog->extents[tensor->first_extent + (size_t)box];
    rsd_extent result = {.file = extent->kind == ITEM_NONE ? -1 : (int64_t)extent->file,
                         .offset = extent->offset,
                         .nbytes = extent->nbytes};
    box_set(&result.box, tensor->ndim, tensor_box_lo(catalog, tensor, (size_t)box),
            tensor_box_len(catalog, tensor, (size_t)box));
    report_copy(out, &result, sizeof result);
    return RSD_OK;
}

int64_t rsd_checkpoint_nvalues(const rsd_checkpoint *checkpoint)
{
    return (int64_t)checkpoint->catalog.nvalues;
}

const char *rsd_checkpoint_value_name(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->catalog.nvalues;
    return there ? checkpoint->catalog.values[index].name : NULL;
}

const char *rsd_checkpoint_value_path(const rsd_checkpoint *checkpoint, int64_t index)
{
    bool there = index >= 0 && (uint64_t)index < checkpoint->catalog.nvalues;
    return there ? checkpoint->catalog.values[index].path : NULL;
}

rsd_status rsd_checkpoint_value(rsd_checkpoint *checkpoint, int64_t index, char **json)
{
    if (index < 0 || (uint64_t)index >= checkpoint->catalog.nvalues)
        return fail(RSD_EINVAL, "value %lld of a checkpoint with %zu", (long long)index,
                    checkpoint->catalog.nvalues);
    const struct stored_value *value = &checkpoint->catalog.values[index];
    if (value->extent.kind == ITEM_NONE) {
        *json = NULL;
        if (!value->json)
            return RSD_OK;
        char *copy = mem_copy(value->json, strlen(value->json) + 1, 1);
        *json = copy;
        return copy ? RSD_OK : RSD_ENOMEM;
    }
    rsd_status status = value_read_json(checkpoint, value, json);
    if (status)
        status = file_error_about(&checkpoint->files, value->extent.file, value->name, status);
    return status;
}

rsd_status rsd_checkpoint_value_item(rsd_checkpoint *checkpoint, int64_t index, void **item,
                                     size_t *nbytes)
{
    struct bytes bytes = {0};
    if (index < 0 || (uint64_t)index >= checkpoint->catalog.nvalues)
        return fail(RSD_EINVAL, "value %lld of a checkpoint with %zu", (long long)index,
                    checkpoint->catalog.nvalues);
    const struct stored_value *value = &checkpoint->catalog.values[index];
    if (value->extent.kind != ITEM_NONE) {
        rsd_status status = value_read_item(checkpoint, value, &bytes);
        if (status) {
            bytes_drop(&bytes);
            return file_error_about(&checkpoint->files, value->extent.file, value->name, status);
        }
    }
    *item = bytes.data;
    *nbytes = bytes.n;
    return RSD_OK;
}
