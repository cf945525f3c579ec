/* inflate.c - zstd streams, read and written from one end to the other.
 *
 * An item may have been compressed more than once; layer 0 is the one on disk. A stream can only be read
 * forwards, and only as many bytes are produced as are asked for: so a small item that claims to be large
 * costs nothing until someone wants it, and then what is wanted was checked against the metadata.
 */
#include "store.h"

#include <string.h>

#if RSD_HAVE_ZSTD

#include <zstd.h>

enum { IN_NBYTES = 1 << 17, WINDOW_LOG = 24 };

struct layer {
    ZSTD_DStream *stream;
    char *in;
    size_t at, n; /* of what is in it */
};

struct inflate {
    struct files *files;
    uint32_t file;
    uint64_t at, end; /* in the file */
    int nlayers;
    struct layer layers[8];
};

rsd_status inflate_open(struct files *files, uint32_t file, uint64_t offset, uint64_t nbytes,
                        int nlayers, struct inflate **out)
{
    struct inflate *inflate = mem_new(1, sizeof *inflate);
    if (!inflate)
        return RSD_ENOMEM;
    *inflate = (struct inflate){files, file, offset, offset + nbytes, nlayers, {{0}}};
    for (int i = 0; i < nlayers; i++) {
        struct layer *layer = &inflate->layers[i];
        layer->stream = ZSTD_createDStream();
        layer->in = mem_new(IN_NBYTES, 1);
        if (!layer->stream || !layer->in) {
            inflate_close(inflate);
            return fail(RSD_ENOMEM, "no memory for a zstd stream");
        }
        ZSTD_DCtx_setParameter(layer->stream, ZSTD_d_windowLogMax, WINDOW_LOG);
    }
    *out = inflate;
    return RSD_OK;
}

void inflate_close(struct inflate *inflate)
{
    if (!inflate)
        return;
    for (int i = 0; i < inflate->nlayers; i++) {
        ZSTD_freeDStream(inflate->layers[i].stream);
        mem_free(inflate->layers[i].in);
    }
    mem_free(inflate);
}

static rsd_status produce(struct inflate *inflate, int i, char *out, size_t capacity, size_t *n);

/* What a layer reads: the file, or what the layer below produces. */
static rsd_status refill(struct inflate *inflate, int i)
{
    struct layer *layer = &inflate->layers[i];
    layer->at = layer->n = 0;
    if (i > 0)
        return produce(inflate, i - 1, layer->in, IN_NBYTES, &layer->n);
    uint64_t left = inflate->end - inflate->at;
    size_t n = left < IN_NBYTES ? (size_t)left : IN_NBYTES;
    TRY(file_read(inflate->files, inflate->file, inflate->at, layer->in, n));
    inflate->at += n;
    layer->n = n;
    return RSD_OK;
}

/* Produces at least one byte, or none at the end. */
static rsd_status produce(struct inflate *inflate, int i, char *out, size_t capacity, size_t *n)
{
    struct layer *layer = &inflate->layers[i];
    ZSTD_outBuffer to = {out, capacity, 0};
    while (to.pos == 0) {
        if (layer->at == layer->n)
            TRY(refill(inflate, i));
        bool ended = layer->n == 0;
        ZSTD_inBuffer from = {layer->in, layer->n, layer->at};
        size_t result = ZSTD_decompressStream(layer->stream, &to, &from);
        layer->at = from.pos;
        if (ZSTD_isError(result))
            return fail(RSD_EFORMAT, "a zstd stream: %s", ZSTD_getErrorName(result));
        if (ended)
            break;
    }
    *n = to.pos;
    return RSD_OK;
}

rsd_status inflate_some(struct inflate *inflate, void *out, size_t *n)
{
    size_t all = 0, got = 1;
    while (all < *n && got > 0) {
        TRY(produce(inflate, inflate->nlayers - 1, (char *)out + all, *n - all, &got));
        all += got;
    }
    *n = all;
    return RSD_OK;
}

rsd_status inflate_read(struct inflate *inflate, void *out, size_t n)
{
    size_t got = n;
    TRY(inflate_some(inflate, out, &got));
    return got == n ? RSD_OK : fail(RSD_EFORMAT, "a zstd stream ends too early");
}

/* ---- writing ---- */

struct deflate {
    ZSTD_CStream *stream;
    deflate_write *write;
    void *context;
    char *out;
    size_t capacity;
};

rsd_status deflate_open(int level, uint64_t nbytes, deflate_write *write, void *context,
                        struct deflate **out)
{
    struct deflate *deflate = mem_new(1, sizeof *deflate);
    if (!deflate)
        return RSD_ENOMEM;
    *deflate = (struct deflate){ZSTD_createCStream(), write, context, NULL, ZSTD_CStreamOutSize()};
    deflate->out = mem_new(deflate->capacity, 1);
    if (!deflate->stream || !deflate->out) {
        deflate_close(deflate);
        return fail(RSD_ENOMEM, "no memory for a zstd stream");
    }
    ZSTD_CCtx_setParameter(deflate->stream, ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(deflate->stream, ZSTD_c_contentSizeFlag, 0); /* as torch's streams */
    ZSTD_CCtx_setPledgedSrcSize(deflate->stream, nbytes); /* tables no larger than that needs */
    *out = deflate;
    return RSD_OK;
}

void deflate_close(struct deflate *deflate)
{
    if (!deflate)
        return;
    ZSTD_freeCStream(deflate->stream);
    mem_free(deflate->out);
    mem_free(deflate);
}

static rsd_status push(struct deflate *deflate, const void *data, size_t n, ZSTD_EndDirective end)
{
    ZSTD_inBuffer from = {data, n, 0};
    for (;;) {
        ZSTD_outBuffer to = {deflate->out, deflate->capacity, 0};
        size_t left = ZSTD_compressStream2(deflate->stream, &to, &from, end);
        if (ZSTD_isError(left))
            return fail(RSD_ENOMEM, "a zstd stream: %s", ZSTD_getErrorName(left));
        if (to.pos > 0)
            TRY(deflate->write(deflate->context, deflate->out, to.pos));
        if (end == ZSTD_e_continue ? from.pos == from.size : left == 0)
            return RSD_OK;
    }
}

rsd_status deflate_put(struct deflate *deflate, const void *data, size_t n)
{
    return push(deflate, data, n, ZSTD_e_continue);
}

rsd_status deflate_end(struct deflate *deflate)
{
    return push(deflate, NULL, 0, ZSTD_e_end);
}

int deflate_default_level(void)
{
    return 3;
}

#else

static rsd_status not_built_in(void)
{
    return fail(RSD_EUNSUPPORTED, "compressed by zstd, which this build of the library lacks: "
                                  "install libzstd-dev and build again");
}

rsd_status inflate_open(struct files *files, uint32_t file, uint64_t offset, uint64_t nbytes,
                        int nlayers, struct inflate **out)
{
    (void)files, (void)file, (void)offset, (void)nbytes, (void)nlayers, (void)out;
    return not_built_in();
}

void inflate_close(struct inflate *inflate)
{
    (void)inflate;
}

rsd_status inflate_some(struct inflate *inflate, void *out, size_t *n)
{
    (void)inflate, (void)out, (void)n;
    return not_built_in();
}

rsd_status inflate_read(struct inflate *inflate, void *out, size_t n)
{
    (void)inflate, (void)out, (void)n;
    return not_built_in();
}

rsd_status deflate_open(int level, uint64_t nbytes, deflate_write *write, void *context,
                        struct deflate **out)
{
    (void)level, (void)nbytes, (void)write, (void)context, (void)out;
    return not_built_in();
}

void deflate_close(struct deflate *deflate)
{
    (void)deflate;
}

rsd_status deflate_put(struct deflate *deflate, const void *data, size_t n)
{
    (void)deflate, (void)data, (void)n;
    return not_built_in();
}

rsd_status deflate_end(struct deflate *deflate)
{
    (void)deflate;
    return not_built_in();
}

int deflate_default_level(void)
{
    return 3;
}

#endif
