/* zstd_stream.c - zstd streams, read and written from start to end.
 *
 * Data may have been compressed more than once; layer 0 is the outermost. A stream is read forwards only,
 * and the reader produces no more bytes than are requested. So data that claims to be large costs nothing
 * until a caller requests it, and the caller has checked that length.
 */
#include "zstd_stream.h"

#include <string.h>

#if RSD_HAVE_ZSTD

#include <zstd.h>
#include <zstd_errors.h>

enum { INPUT_NBYTES = 1 << 17, MAX_LAYERS = 8, MAX_WINDOW_LOG = 24 };

/* What layers but the last may produce: so many bytes, and so many for each compressed byte. */
enum { START_INNER_NBYTES = 1 << 20, MAX_INNER_GROWTH = 16 };

/* Of a decoder without its window, about. */
enum { DECODER_NBYTES = 160 << 10 };

struct zstd_layer {
    ZSTD_DStream *stream;
    char *input;
    size_t at, n;           /* of the bytes in the input buffer */
    size_t created, nbytes; /* its memory: when it was created, and since its first frame */
};

struct zstd_reader {
    read_at *read;
    void *context;
    uint64_t at, nbytes; /* of the compressed data */
    uint64_t inner_left; /* bytes that layers but the last may still produce */
    int nlayers;
    struct zstd_layer layers[MAX_LAYERS];
};

/* The windows of all layers together have at most 32 MiB, and each at most 16 MiB. */
static int max_window_log(int nlayers)
{
    return nlayers <= 2 ? MAX_WINDOW_LOG : nlayers <= 4 ? MAX_WINDOW_LOG - 1 : MAX_WINDOW_LOG - 2;
}

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* A buffer takes memory as far as it is filled: the window with what is produced, the input with what is read. */
uint64_t zstd_reader_memory(const struct zstd_reader *reader, uint64_t nbytes)
{
    uint64_t sum = 0;
    for (int i = 0; i < reader->nlayers; i++) {
        uint64_t all = reader->layers[i].nbytes;
        if (i + 1 == reader->nlayers)
            all = min_u64(all, DECODER_NBYTES + nbytes);
        sum += all + min_u64(INPUT_NBYTES, reader->nbytes);
    }
    return sum;
}

/* Returns the window that the header of a frame asks for, at most what is allowed. */
static uint64_t frame_window(const unsigned char *start, size_t n)
{
    const uint64_t most = (uint64_t)1 << MAX_WINDOW_LOG;
    if (n < ZSTD_START_NBYTES || memcmp(start, "\x28\xb5\x2f\xfd", 4) != 0)
        return most; /* it may follow a frame that is skipped */
    unsigned flags = start[4], log = 10 + (start[5] >> 3);
    if (!(flags & 0x20)) {
        uint64_t window = log > MAX_WINDOW_LOG ? most : (uint64_t)1 << log;
        return min_u64(most, window + window / 8 * (start[5] & 7));
    }
    static const unsigned char dictionary[] = {0, 1, 2, 4};
    const unsigned char *field = start + 5 + dictionary[flags & 3];
    uint64_t content = little_endian(field, 1 << (flags >> 6)); /* as long as the window */
    return min_u64(most, content + (flags >> 6 == 1 ? 256 : 0));
}

uint64_t zstd_memory_from_start(const void *start, size_t n, uint64_t nbytes)
{
    return DECODER_NBYTES + INPUT_NBYTES + min_u64(frame_window(start, n) + INPUT_NBYTES, nbytes);
}

size_t zstd_writer_memory(int level)
{
    /* As zstd has it for long streams, in MiB. It is less for short ones. */
    static const unsigned char needs[] = {0,  2,  3,  5,  6,  8,  10, 12, 16, 20,
                                          24, 32, 36, 40, 44, 48, 80, 88, 92, 96};
    int last = (int)sizeof needs - 1;
    return (size_t)needs[level < 0 ? 0 : level < last ? level : last] << 20;
}

rsd_status zstd_reader_open(read_at *read, void *context, uint64_t nbytes, int nlayers,
                            struct zstd_reader **out)
{
    struct zstd_reader *reader = mem_new(1, sizeof *reader);
    if (!reader)
        return RSD_ENOMEM;
    *reader = (struct zstd_reader){
        .read = read, .context = context, .nbytes = nbytes, .nlayers = nlayers};
    reader->inner_left = nbytes < UINT64_MAX / (2 * MAX_INNER_GROWTH)
                             ? START_INNER_NBYTES + nbytes * MAX_INNER_GROWTH
                             : UINT64_MAX;
    for (int i = 0; i < nlayers; i++) {
        struct zstd_layer *layer = &reader->layers[i];
        layer->stream = ZSTD_createDStream();
        layer->input = mem_new(INPUT_NBYTES, 1);
        if (!layer->stream || !layer->input) {
            zstd_reader_close(reader);
            return fail(RSD_ENOMEM, "no memory for a zstd stream");
        }
        ZSTD_DCtx_setParameter(layer->stream, ZSTD_d_windowLogMax, max_window_log(nlayers));
        layer->created = layer->nbytes = ZSTD_sizeof_DStream(layer->stream);
    }
    *out = reader;
    return RSD_OK;
}

void zstd_reader_close(struct zstd_reader *reader)
{
    if (!reader)
        return;
    for (int i = 0; i < reader->nlayers; i++) {
        ZSTD_freeDStream(reader->layers[i].stream);
        mem_free(reader->layers[i].input);
    }
    mem_free(reader);
}

static rsd_status produce_bytes(struct zstd_reader *reader, int i, char *out, size_t capacity,
                                size_t *n);

/* Fills the input of a layer: from the caller's data, or from the layer outside it. */
static rsd_status refill_layer(struct zstd_reader *reader, int i)
{
    struct zstd_layer *layer = &reader->layers[i];
    layer->at = layer->n = 0;
    if (i > 0) {
        TRY(produce_bytes(reader, i - 1, layer->input, INPUT_NBYTES, &layer->n));
        if (layer->n > reader->inner_left)
            return fail(RSD_EFORMAT,
                        "zstd stream: %d layers of compression grow more than %d times",
                        reader->nlayers, (int)MAX_INNER_GROWTH);
        reader->inner_left -= layer->n;
        return RSD_OK;
    }
    uint64_t left = reader->nbytes - reader->at;
    size_t n = left < INPUT_NBYTES ? (size_t)left : INPUT_NBYTES;
    TRY(reader->read(reader->context, reader->at, layer->input, n));
    reader->at += n;
    layer->n = n;
    return RSD_OK;
}

/* Notes the memory of a stream at its first frame. Later frames need no more. */
static rsd_status note_memory(struct zstd_layer *layer)
{
    size_t nbytes = ZSTD_sizeof_DStream(layer->stream);
    if (nbytes <= layer->nbytes)
        return RSD_OK;
    if (layer->nbytes > layer->created)
        return fail(RSD_ELIMIT, "zstd stream: a frame has a larger window than those before it");
    layer->nbytes = nbytes;
    return RSD_OK;
}

static rsd_status fail_zstd(size_t result)
{
    ZSTD_ErrorCode code = ZSTD_getErrorCode(result);
    rsd_status status = code == ZSTD_error_memory_allocation ? RSD_ENOMEM : RSD_EFORMAT;
    return fail(status, "zstd stream: %s", ZSTD_getErrorName(result));
}

/* Produces at least one byte of a layer's output, or none at its end. */
static rsd_status produce_bytes(struct zstd_reader *reader, int i, char *out, size_t capacity,
                                size_t *n)
{
    struct zstd_layer *layer = &reader->layers[i];
    ZSTD_outBuffer to = {out, capacity, 0};
    while (to.pos == 0) {
        if (layer->at == layer->n)
            TRY(refill_layer(reader, i));
        bool ended = layer->n == 0;
        ZSTD_inBuffer from = {layer->input, layer->n, layer->at};
        size_t result = ZSTD_decompressStream(layer->stream, &to, &from);
        layer->at = from.pos;
        if (ZSTD_isError(result))
            return fail_zstd(result);
        TRY(note_memory(layer));
        if (ended)
            break;
    }
    *n = to.pos;
    return RSD_OK;
}

rsd_status zstd_reader_read_some(struct zstd_reader *reader, void *out, size_t *n)
{
    size_t all = 0, some = 1;
    while (all < *n && some > 0) {
        TRY(produce_bytes(reader, reader->nlayers - 1, (char *)out + all, *n - all, &some));
        all += some;
    }
    *n = all;
    return RSD_OK;
}

rsd_status zstd_reader_read(struct zstd_reader *reader, void *out, size_t n)
{
    size_t some = n;
    TRY(zstd_reader_read_some(reader, out, &some));
    return some == n ? RSD_OK : fail(RSD_EFORMAT, "zstd stream ends early");
}

/* ---- writing ---- */

struct zstd_writer {
    ZSTD_CStream *stream;
    zstd_write *write;
    void *context;
    char *output;
    size_t capacity;
};

rsd_status zstd_writer_open(int level, uint64_t nbytes, zstd_write *write, void *context,
                            struct zstd_writer **out)
{
    struct zstd_writer *writer = mem_new(1, sizeof *writer);
    if (!writer)
        return RSD_ENOMEM;
    *writer =
        (struct zstd_writer){ZSTD_createCStream(), write, context, NULL, ZSTD_CStreamOutSize()};
    writer->output = mem_new(writer->capacity, 1);
    if (!writer->stream || !writer->output) {
        zstd_writer_close(writer);
        return fail(RSD_ENOMEM, "no memory for a zstd stream");
    }
    ZSTD_CCtx_setParameter(writer->stream, ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(writer->stream, ZSTD_c_contentSizeFlag, 0); /* as in torch's streams */
    ZSTD_CCtx_setPledgedSrcSize(writer->stream, nbytes); /* limits the size of zstd's tables */
    *out = writer;
    return RSD_OK;
}

void zstd_writer_close(struct zstd_writer *writer)
{
    if (!writer)
        return;
    ZSTD_freeCStream(writer->stream);
    mem_free(writer->output);
    mem_free(writer);
}

/* Compresses n bytes, and writes what comes out. With ZSTD_e_end, ends the stream. */
static rsd_status compress_bytes(struct zstd_writer *writer, const void *data, size_t n,
                                 ZSTD_EndDirective end)
{
    ZSTD_inBuffer from = {data, n, 0};
    for (;;) {
        ZSTD_outBuffer to = {writer->output, writer->capacity, 0};
        size_t left = ZSTD_compressStream2(writer->stream, &to, &from, end);
        if (ZSTD_isError(left))
            return fail(RSD_ENOMEM, "zstd stream: %s", ZSTD_getErrorName(left));
        if (to.pos > 0)
            TRY(writer->write(writer->context, writer->output, to.pos));
        if (end == ZSTD_e_continue ? from.pos == from.size : left == 0)
            return RSD_OK;
    }
}

rsd_status zstd_writer_put(struct zstd_writer *writer, const void *data, size_t n)
{
    return compress_bytes(writer, data, n, ZSTD_e_continue);
}

rsd_status zstd_writer_end(struct zstd_writer *writer)
{
    return compress_bytes(writer, NULL, 0, ZSTD_e_end);
}

#else

static rsd_status fail_without_zstd(void)
{
    return fail(RSD_EUNSUPPORTED,
                "item is compressed by zstd, which this build of the library lacks; "
                "install libzstd-dev and build again");
}

uint64_t zstd_reader_memory(const struct zstd_reader *reader, uint64_t nbytes)
{
    (void)reader, (void)nbytes;
    return 0;
}

uint64_t zstd_memory_from_start(const void *start, size_t n, uint64_t nbytes)
{
    (void)start, (void)n, (void)nbytes;
    return 0;
}

size_t zstd_writer_memory(int level)
{
    (void)level;
    return 0;
}

rsd_status zstd_reader_open(read_at *read, void *context, uint64_t nbytes, int nlayers,
                            struct zstd_reader **out)
{
    (void)read, (void)context, (void)nbytes, (void)nlayers, (void)out;
    return fail_without_zstd();
}

void zstd_reader_close(struct zstd_reader *reader)
{
    (void)reader;
}

rsd_status zstd_reader_read_some(struct zstd_reader *reader, void *out, size_t *n)
{
    (void)reader, (void)out, (void)n;
    return fail_without_zstd();
}

rsd_status zstd_reader_read(struct zstd_reader *reader, void *out, size_t n)
{
    (void)reader, (void)out, (void)n;
    return fail_without_zstd();
}

rsd_status zstd_writer_open(int level, uint64_t nbytes, zstd_write *write, void *context,
                            struct zstd_writer **out)
{
    (void)level, (void)nbytes, (void)write, (void)context, (void)out;
    return fail_without_zstd();
}

void zstd_writer_close(struct zstd_writer *writer)
{
    (void)writer;
}

rsd_status zstd_writer_put(struct zstd_writer *writer, const void *data, size_t n)
{
    (void)writer, (void)data, (void)n;
    return fail_without_zstd();
}

rsd_status zstd_writer_end(struct zstd_writer *writer)
{
    (void)writer;
    return fail_without_zstd();
}

#endif
