/* cmd_extract.c - `reshard extract`: writes one tensor, or a slice of it, as a .npy file or as raw bytes. */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char extract_help[] =
    "usage: reshard extract [options] CHECKPOINT TENSOR OUT\n"
    "\n"
    "Write one tensor to a .npy file, or its raw bytes to any other file; - is standard output.\n"
    "Only the files and bytes of the slice are read.\n"
    "\n"
    "  reshard extract ckpt/ model.embed.weight embed.npy --slice '[0:10, :]'\n"
    "\n"
    "  --slice '[A:B, ...]'  Select one range or index per dim; : selects all. Default: all\n"
    "  --cast DTYPE          Convert to DTYPE. NumPy has no bf16: use --cast f32\n"
    "  --raw                 Write raw bytes in row-major order, also to a .npy file\n"
    "  --force               Replace an existing file\n" INPUT_HELP(
        "        ") "  -h, --help            Print this help\n";

struct extraction {
    const char *path, *tensor, *out, *slice;
    rsd_dtype cast;
    bool raw, force;
};

enum { SLICE = 256, CAST, RAW, FORCE };

static const struct option extract_options[] = {
    {"slice", required_argument, NULL, SLICE},
    {"cast", required_argument, NULL, CAST},
    {"raw", no_argument, NULL, RAW},
    {"force", no_argument, NULL, FORCE},
    INPUT_OPTIONS,
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int read_extract_options(int argc, char **argv, struct extraction *request)
{
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, ":h", extract_options, NULL)) != -1;)
        switch (option) {
        case 'h':
            return cli_show_help(extract_help);
        case SLICE:
            request->slice = optarg;
            break;
        case CAST:
            if (rsd_dtype_parse(optarg, &request->cast))
                return cli_fail("extract", EXIT_USAGE, "--cast %s is not a dtype", optarg);
            break;
        case RAW:
            request->raw = true;
            break;
        case FORCE:
            request->force = true;
            break;
        default:
            if (input_take_option(option))
                break;
            return cli_fail_option("extract", option, argv);
        }
    if (argc - optind != 3)
        return cli_fail("extract", EXIT_USAGE,
                        "CHECKPOINT, TENSOR and OUT are needed; see reshard extract --help");
    request->path = argv[optind];
    request->tensor = argv[optind + 1];
    request->out = argv[optind + 2];
    return GO_ON;
}

/* ---- the slice ---- */

static bool parse_slice_range(const char **at, int64_t extent, int64_t *lo, int64_t *len)
{
    char *end;
    long long first = 0, last = extent;
    *at += strspn(*at, " ");
    if (**at != ':') {
        first = strtoll(*at, &end, 10);
        if (end == *at)
            return false;
        *at = end;
    }
    *at += strspn(*at, " ");
    if (**at == ':') {
        ++*at;
        *at += strspn(*at, " ");
        if (**at && **at != ',' && **at != ']') {
            last = strtoll(*at, &end, 10);
            if (end == *at)
                return false;
            *at = end;
        }
    } else if (first >= extent) {
        return false;
    } else {
        last = first + 1;
    }
    *at += strspn(*at, " ");
    *lo = first;
    *len = last - first;
    return first >= 0 && last >= first && last <= extent;
}

static bool parse_slice(const char *text, const rsd_tensor_info *tensor, rsd_box *box)
{
    const char *at = text + (*text == '[');
    box->ndim = tensor->ndim;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        if (d > 0 && *at++ != ',')
            return false;
        if (!parse_slice_range(&at, tensor->shape[d], &box->lo[d], &box->len[d]))
            return false;
    }
    return *at == (*text == '[' ? ']' : '\0');
}

/* ---- the file ---- */

static const char *npy_dtype(rsd_dtype dtype)
{
    switch (dtype) {
    case RSD_F64:
        return "<f8";
    case RSD_F32:
        return "<f4";
    case RSD_F16:
        return "<f2";
    case RSD_I64:
        return "<i8";
    case RSD_I32:
        return "<i4";
    case RSD_I16:
        return "<i2";
    case RSD_I8:
        return "|i1";
    case RSD_U64:
        return "<u8";
    case RSD_U32:
        return "<u4";
    case RSD_U16:
        return "<u2";
    case RSD_U8:
        return "|u1";
    case RSD_BOOL:
        return "|b1";
    case RSD_C64:
        return "<c8";
    case RSD_C128:
        return "<c16";
    default:
        return NULL;
    }
}

static void write_npy_header(FILE *out, const char *dtype, const rsd_box *box)
{
    char shape[RSD_MAX_DIMS * 22 + 4] = "", header[RSD_MAX_DIMS * 22 + 128];
    size_t at = 0;
    for (int32_t d = 0; d < box->ndim; d++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%lld, ", (long long)box->len[d]);
    size_t n =
        (size_t)snprintf(header, sizeof header,
                         "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", dtype, shape);
    size_t padded = (10 + n + 1 + 63) / 64 * 64 - 10;
    fwrite("\x93NUMPY\x01\x00", 1, 8, out);
    fputc((int)(padded & 255), out);
    fputc((int)(padded >> 8), out);
    fprintf(out, "%s%*s\n", header, (int)(padded - n - 1), "");
}

static int write_array(const struct extraction *request, rsd_dtype dtype, const rsd_box *box,
                       const void *bytes, size_t nbytes)
{
    bool to_stdout = strcmp(request->out, "-") == 0;
    size_t length = strlen(request->out);
    bool npy = !request->raw && length > 4 && strcmp(request->out + length - 4, ".npy") == 0;
    if (npy && !npy_dtype(dtype))
        return cli_fail("extract", EXIT_CANNOT,
                        "NumPy has no %s: convert with --cast f32, or write bytes with --raw",
                        rsd_dtype_name(dtype));
    struct out_file file = {.stream = stdout};
    struct stat found;
    if (!to_stdout && !request->force && lstat(request->out, &found) == 0)
        return cli_fail("extract", EXIT_CANNOT, "%s already exists; use --force to replace it",
                        request->out);
    bool fine = to_stdout || out_file_open(&file, request->out, request->force);
    if (fine && npy)
        write_npy_header(file.stream, npy_dtype(dtype), box);
    fine = fine && fwrite(bytes, 1, nbytes, file.stream) == nbytes;
    if (!to_stdout)
        fine = out_file_close(&file, fine);
    return fine ? EXIT_YES : cli_fail("extract", EXIT_IO, "%s: %s", request->out, strerror(errno));
}

/* ---- the tensor ---- */

/* A slice of a tensor. */
struct tensor_slice {
    const char *name;
    rsd_box box;
};

static bool needs_slice_extent(const void *context, const rsd_tensor_info *tensor,
                               const rsd_extent *extent)
{
    const struct tensor_slice *slice = context;
    const rsd_box *a = &slice->box, *b = &extent->box;
    if (strcmp(tensor->name, slice->name) != 0)
        return false;
    for (int32_t d = 0; d < a->ndim; d++)
        if (a->lo[d] >= b->lo[d] + b->len[d] || b->lo[d] >= a->lo[d] + a->len[d] || !a->len[d] ||
            !b->len[d])
            return false;
    return true;
}

static int load_and_write(const struct extraction *request, rsd_checkpoint *checkpoint,
                          const rsd_tensor_info *tensor, const rsd_box *box)
{
    rsd_dtype dtype = request->cast ? request->cast : tensor->dtype;
    size_t nbytes = rsd_dtype_nbytes(dtype);
    for (int32_t d = 0; d < box->ndim; d++)
        nbytes *= (size_t)box->len[d]; /* fits, as the bytes of the whole tensor do */
    void *bytes = cli_need_memory(malloc(nbytes + 1));
    rsd_status status = rsd_read(checkpoint, tensor->name, box, dtype, bytes, nbytes);
    int code = status ? cli_fail_status("extract", status)
                      : write_array(request, dtype, box, bytes, nbytes);
    free(bytes);
    return code;
}

static int extract_tensor(const struct extraction *request, rsd_checkpoint *checkpoint)
{
    int64_t index;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    struct tensor_slice slice = {.name = request->tensor};
    if (rsd_checkpoint_find(checkpoint, request->tensor, &index) ||
        rsd_checkpoint_tensor(checkpoint, index, &tensor))
        return cli_fail("extract", EXIT_CANNOT, "%s: %s", request->path, rsd_error());
    slice.box.ndim = tensor.ndim;
    memcpy(slice.box.len, tensor.shape, sizeof slice.box.len);
    if (request->slice && !parse_slice(request->slice, &tensor, &slice.box))
        return cli_fail("extract", EXIT_USAGE, "--slice '%s' is not a slice of %s", request->slice,
                        cli_tensor_text(tensor.dtype, tensor.ndim, tensor.shape));
    int code = input_check_files("extract", request->path, checkpoint, needs_slice_extent, &slice);
    return code ? code : load_and_write(request, checkpoint, &tensor, &slice.box);
}

int command_extract(int argc, char **argv)
{
    struct extraction request = {.path = "", .tensor = "", .out = ""};
    rsd_checkpoint *checkpoint;
    int code = read_extract_options(argc, argv, &request);
    if (code != GO_ON)
        return code;
    code = input_open("extract", request.path, false, &checkpoint);
    if (code)
        return code;
    code = extract_tensor(&request, checkpoint);
    rsd_checkpoint_close(checkpoint);
    return code;
}
