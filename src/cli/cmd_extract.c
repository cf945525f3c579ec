/* cmd_extract.c - `reshard extract`: writes tensors, or slices of them, as files of NumPy or as raw bytes. */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct extraction {
    const char *path, *out, *slice;
    char **names; /* of tensors on the command line */
    int nnames;
    rsd_dtype cast;
    bool raw, force;
    struct name_filter only;

    rsd_checkpoint *checkpoint;
    struct tensor_slice *slices;
    size_t n;
    bool many; /* OUT is an archive or a directory */
    bool npz;
};

static const char extract_help[] =
    "usage: reshard extract [options] CHECKPOINT TENSOR... OUT\n"
    "       reshard extract [options] CHECKPOINT OUT --only REGEX\n"
    "\n"
    "Write one tensor to a .npy file, or its raw bytes to any other file; - is standard output.\n"
    "Write several tensors to one .npz file, or to a directory with one .npy file each.\n"
    "Only the files and bytes of the slice are read.\n"
    "\n"
    "  reshard extract ckpt/ model.embed.weight embed.npy --slice '[0:10, :]'\n"
    "  reshard extract ckpt/ norms.npz --only 'norm[.]weight$'\n"
    "\n";

static int take_written_dtype(const struct given_option *given)
{
    return rsd_dtype_parse(given->value, options_field(given))
               ? cli_fail(given->verb, EXIT_USAGE, "--cast %s is not a dtype", given->value)
               : GO_ON;
}

static const struct cli_option extract_options[] = {
    OPTION("only", "REGEX", "Select tensors whose name contains a match. May be repeated",
           name_filter_add_only, offsetof(struct extraction, only), 0),
    OPTION("slice", "'[A:B, ...]'",
           "Select a range or an index of each dim, as in NumPy: '[:, -1]',\n"
           "'[..., 10:]'. Default: all",
           options_set_text, offsetof(struct extraction, slice), 0),
    OPTION("cast", "DTYPE",
           "Convert to DTYPE; of several tensors, the floating-point ones.\n"
           "NumPy has no bf16: use --cast f32",
           take_written_dtype, offsetof(struct extraction, cast), 0),
    OPTION("raw", NULL, "Write raw bytes in row-major order, also to a .npy file", options_set_flag,
           offsetof(struct extraction, raw), 0),
    OPTION("force", NULL, "Replace existing files", options_set_flag,
           offsetof(struct extraction, force), 0),
    OPTION("overwrite", NULL, NULL, options_set_flag, offsetof(struct extraction, force), 0),
    OPTION_TABLE(input_option_rows),
    {0},
};

static const struct cli_verb extract_verb = {
    .name = "extract", .help = extract_help, .help_column = 24, .options = extract_options};

/* Takes CHECKPOINT, the names of tensors and OUT. Returns GO_ON or an exit code. */
static int take_arguments(struct extraction *request, int argc, char **argv)
{
    bool by_name = !request->only.rules;
    if (by_name ? argc < 3 : argc != 2)
        return cli_fail("extract", EXIT_USAGE, "%s are needed; see reshard extract --help",
                        by_name ? "CHECKPOINT, TENSOR and OUT" : "with --only, CHECKPOINT and OUT");
    request->path = argv[0];
    request->names = argv + 1;
    request->nnames = argc - 2;
    request->out = argv[argc - 1];
    request->npz = cli_has_suffix(request->out, ".npz");
    request->many = request->npz || request->nnames != 1;
    if (request->many && request->raw && request->npz)
        return cli_fail("extract", EXIT_USAGE, "--raw excludes an OUT that ends in .npz");
    if (request->many && strcmp(request->out, "-") == 0)
        return cli_fail("extract", EXIT_USAGE, "standard output takes one tensor only");
    if (request->many && !request->npz &&
        (cli_has_suffix(request->out, ".npy") || cli_has_suffix(request->out, ".bin")))
        return cli_fail("extract", EXIT_USAGE,
                        "%s would be a directory for several tensors; end OUT in .npz for one file",
                        request->out);
    return GO_ON;
}

/* ---- what is selected ---- */

static bool is_plain_float(rsd_dtype dtype)
{
    return dtype == RSD_F64 || dtype == RSD_F32 || dtype == RSD_F16 || dtype == RSD_BF16;
}

/* Returns the dtype that a tensor is written in. */
static rsd_dtype choose_written_dtype(const struct extraction *request, rsd_dtype stored)
{
    bool casts = request->cast && (!request->many || is_plain_float(stored));
    return casts ? request->cast : stored;
}

static bool writes_npy(const struct extraction *request)
{
    return !request->raw && (request->many || cli_has_suffix(request->out, ".npy"));
}

static size_t count_slice_elements(const struct tensor_slice *slice)
{
    size_t n = 1;
    for (int32_t d = 0; d < slice->box.ndim; d++)
        n *= (size_t)slice->box.len[d]; /* fits, as the bytes of the whole tensor do */
    return n;
}

/* Adds the slice of one tensor, and checks that NumPy has its dtype. */
static int add_slice(struct extraction *request, int64_t index)
{
    rsd_tensor_info tensor = input_tensor(request->checkpoint, index);
    struct tensor_slice *slice = &request->slices[request->n++];
    const char *problem = slice_parse(request->slice ? request->slice : "", &tensor, slice);
    if (problem)
        return cli_fail("extract", EXIT_USAGE, "--slice '%s' of %s %s: %s", request->slice,
                        tensor.name, cli_tensor_text(tensor.dtype, tensor.ndim, tensor.shape),
                        problem);
    if (tensor.nbytes && !count_slice_elements(slice))
        cli_note("extract", "--slice '%s' selects nothing of %s %s", request->slice, tensor.name,
                 cli_tensor_text(tensor.dtype, tensor.ndim, tensor.shape));
    slice->dtype = choose_written_dtype(request, tensor.dtype);
    if (writes_npy(request) && !npy_dtype(slice->dtype))
        return cli_fail("extract", EXIT_CANNOT,
                        "%s: NumPy has no %s: convert with --cast f32, or write bytes with --raw",
                        tensor.name, rsd_dtype_name(slice->dtype));
    return EXIT_YES;
}

/* Finds the tensors of the command line, or of --only. */
static int select_slices(struct extraction *request)
{
    const rsd_checkpoint *checkpoint = request->checkpoint;
    size_t most = (size_t)(request->nnames + rsd_checkpoint_ntensors(checkpoint));
    int64_t *tensors = cli_need_memory(calloc(most + 1, sizeof *tensors));
    int64_t n = request->only.rules ? name_filter_list(&request->only, checkpoint, tensors)
                                    : request->nnames;
    request->slices = cli_need_memory(calloc((size_t)n + 1, sizeof *request->slices));
    int code = request->only.rules && !n ? name_filter_fail(&request->only, "extract") : EXIT_YES;
    for (int i = 0; i < request->nnames && !code; i++)
        if (rsd_checkpoint_find(checkpoint, request->names[i], &tensors[i]))
            code = cli_fail("extract", EXIT_CANNOT, "%s: %s", request->path, rsd_error());
    for (int64_t i = 0; i < n && !code; i++)
        code = add_slice(request, tensors[i]);
    free(tensors);
    return code;
}

static bool needs_slice_extent(const void *context, const rsd_tensor_info *tensor,
                               const rsd_extent *extent)
{
    const struct extraction *request = context;
    for (size_t i = 0; i < request->n; i++)
        if (request->slices[i].name == tensor->name &&
            rsd_box_overlaps(&request->slices[i].box, &extent->box))
            return true;
    return false;
}

/* ---- writing ---- */

static int fail_written(const char *path)
{
    return cli_fail("extract", EXIT_IO, "%s: %s", path, out_file_error());
}

/* Reads a slice. The caller frees its bytes, also after a failure. */
static int read_slice(const struct extraction *request, const struct tensor_slice *slice,
                      struct npy_array *array)
{
    size_t nbytes = rsd_dtype_nbytes(slice->dtype) * count_slice_elements(slice);
    void *bytes = cli_need_memory(malloc(nbytes + 1));
    *array = (struct npy_array){
        .dtype = slice->dtype, .ndim = slice->ndim, .bytes = bytes, .nbytes = nbytes};
    memcpy(array->shape, slice->shape, sizeof array->shape);
    rsd_status status =
        rsd_read(request->checkpoint, slice->name, &slice->box, slice->dtype, bytes, nbytes);
    return cli_fail_status("extract", status);
}

static bool write_npy_or_bytes(const struct extraction *request, FILE *out,
                               const struct npy_array *array)
{
    return writes_npy(request) ? npy_write(out, array)
                               : fwrite(array->bytes, 1, array->nbytes, out) == array->nbytes;
}

/* Opens a file of a directory; directory_fd is -1 for that of the path. */
static bool open_slice_file(const struct extraction *request, int directory_fd, const char *path,
                            struct out_file *file)
{
    if (directory_fd < 0)
        return out_file_open(file, path, request->force);
    int fd = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return out_file_open_in(file, fd, strrchr(path, '/') + 1, request->force);
}

/* Writes one slice to a file of its own; "-" is standard output. */
static int write_slice_file(const struct extraction *request, const struct tensor_slice *slice,
                            int directory_fd, const char *path)
{
    struct npy_array array;
    struct out_file file = {.stream = stdout};
    int code = read_slice(request, slice, &array);
    bool to_stdout = strcmp(path, "-") == 0;
    if (!code) {
        bool fine = to_stdout || open_slice_file(request, directory_fd, path, &file);
        fine = fine && write_npy_or_bytes(request, file.stream, &array);
        if (!to_stdout)
            fine = out_file_close(&file, fine);
        code = fine ? EXIT_YES : fail_written(path);
    }
    free(array.bytes);
    return code;
}

/* Writes all slices to one .npz file. */
static int write_archive(const struct extraction *request)
{
    struct out_file file;
    struct npz npz = {0};
    bool fine = out_file_open(&file, request->out, request->force);
    int code = EXIT_YES;
    for (size_t i = 0; i < request->n && fine && !code; i++) {
        struct npy_array array;
        code = read_slice(request, &request->slices[i], &array);
        fine = !code && npz_add(&npz, file.stream, request->slices[i].name, &array);
        free(array.bytes);
    }
    if (fine && !code)
        npz_finish(&npz, file.stream);
    fine = out_file_close(&file, fine && !code);
    npz_drop(&npz);
    return code ? code : fine ? EXIT_YES : fail_written(request->out);
}

/* Returns the file of a tensor. Names cannot lead out of the directory. */
static char *make_file_name(const struct extraction *request, const char *name)
{
    char *file = cli_need_memory(malloc(3 * strlen(name) + 1)), *end = file;
    for (const char *c = name; *c; c++)
        if (*c == '/' || *c == '%' || (unsigned char)*c < 0x20 || (*c == '.' && c == name))
            end += sprintf(end, "%%%02X", (unsigned char)*c);
        else
            *end++ = *c;
    *end = '\0';
    char *path = cli_text("%s/%s%s", request->out, file, request->raw ? ".bin" : ".npy");
    free(file);
    return path;
}

/* Writes each slice to a file of its own, in one directory, whatever comes to its path meanwhile. */
static int write_directory(const struct extraction *request)
{
    int code = EXIT_YES;
    if (mkdir(request->out, 0777) != 0 && !(errno == EEXIST && request->force))
        return fail_written(request->out);
    int fd = out_file_open_directory(request->out);
    if (fd < 0)
        return fail_written(request->out);
    for (size_t i = 0; i < request->n && !code; i++)
        code = write_slice_file(request, &request->slices[i], fd,
                                make_file_name(request, request->slices[i].name));
    close(fd);
    return code;
}

/* Fails if the file system has less space than the files are known to need. */
static int check_extract_space(const struct extraction *request)
{
    uint64_t nbytes = 0;
    for (size_t i = 0; i < request->n; i++) {
        const struct tensor_slice *slice = &request->slices[i];
        uint64_t one = (uint64_t)rsd_dtype_nbytes(slice->dtype) * count_slice_elements(slice);
        nbytes = nbytes > UINT64_MAX - one ? UINT64_MAX : nbytes + one;
    }
    uint64_t space = (uint64_t)out_file_space(request->out);
    return nbytes <= space
               ? EXIT_YES
               : cli_fail("extract", EXIT_CANNOT, "%s needs %s, but its file system has %s free",
                          request->out,
                          cli_size_text((int64_t)(nbytes > INT64_MAX ? INT64_MAX : nbytes)),
                          cli_size_text((int64_t)space));
}

static int write_slices(const struct extraction *request)
{
    struct stat found;
    bool to_stdout = strcmp(request->out, "-") == 0;
    if (!to_stdout && !request->force && lstat(request->out, &found) == 0)
        return cli_fail("extract", EXIT_CANNOT, "%s already exists; use --force to replace it",
                        request->out);
    if (!to_stdout && check_extract_space(request))
        return EXIT_CANNOT;
    if (!request->many)
        return write_slice_file(request, &request->slices[0], -1, request->out);
    return request->npz ? write_archive(request) : write_directory(request);
}

int command_extract(int argc, char **argv)
{
    struct extraction request = {0};
    int code = options_read(&extract_verb, argc, argv, &request);
    if (code == GO_ON)
        code = take_arguments(&request, argc - optind, argv + optind);
    if (code == GO_ON) {
        code = input_open("extract", request.path, false, &request.checkpoint);
        if (!code)
            code = select_slices(&request);
        if (!code)
            code = input_check_files("extract", request.path, request.checkpoint,
                                     needs_slice_extent, &request);
        if (!code)
            code = write_slices(&request);
        rsd_checkpoint_close(request.checkpoint);
    }
    free(request.slices);
    name_filter_drop(&request.only);
    return code;
}
