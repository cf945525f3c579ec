/* source.c - one stored box as bytes that can be read: where they are, how they lie, and whether they
 * are what was written.
 *
 * Whatever the format, a box comes down to a run of bytes in a file (or in a stream that has to be
 * decompressed up to them) and strides. Any region of the box can be read, packed row by row. Rows that
 * are apart in the file are read one by one; a box whose rows run another way (a transposed tensor) is
 * read whole and kept, if it is not too large.
 *
 * The CRC-32 of a record is linear, so parts that are read by several threads add up. It is checked when
 * every byte of the record was read once; what was read of other records is counted as unchecked.
 */
#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

enum { SHORT_RUN = 4096 };

/* ---- finding the bytes ---- */

static rsd_status check_stored(const struct source *source, rsd_dtype dtype,
                               const struct torch_view *view)
{
    char stored[SHAPE_TEXT_NCHARS], said[SHAPE_TEXT_NCHARS];
    if (view->dtype != dtype)
        return fail(RSD_EFORMAT, "stored as %s, the metadata says %s", rsd_dtype_name(view->dtype),
                    rsd_dtype_name(dtype));
    bool same = view->ndim == source->ndim;
    for (int32_t d = 0; d < source->ndim && same; d++)
        same = view->shape[d] == source->len[d];
    if (!same)
        return fail(RSD_EFORMAT, "stored with shape %s, the metadata says %s",
                    shape_text(view->ndim, view->shape, stored),
                    shape_text(source->ndim, source->len, said));
    return RSD_OK;
}

static void use_view(struct source *source, const struct stored_view *stored)
{
    int64_t element_nbytes = (int64_t)source->element_nbytes;
    source->data = stored->data;
    source->nbytes = stored->nbytes;
    source->crc = stored->crc;
    source->has_crc = stored->has_crc;
    source->swap = stored->big_endian;
    source->base = stored->view.offset * element_nbytes;
    for (int32_t d = 0; d < source->ndim; d++) /* that of a single index may be any number */
        source->strides[d] = source->len[d] > 1 ? stored->view.strides[d] * element_nbytes : 0;
}

static void use_dense(struct source *source, uint64_t data)
{
    int64_t stride = (int64_t)source->element_nbytes;
    source->data = data;
    source->nbytes = (uint64_t)(box_volume(source->ndim, source->len) * stride);
    for (int32_t d = source->ndim - 1; d >= 0; d--) {
        source->strides[d] = stride;
        stride *= max_i64(source->len[d], 1);
    }
}

static rsd_status find_in_file(struct source *source, const char *name, rsd_dtype dtype)
{
    struct stored_view stored;
    unsigned char start[9]; /* of a blob: the length of its header, and the header's first brace */
    const struct extent *extent = &source->extent;
    TRY(file_read(source->files, extent->file, extent->offset, start, sizeof start));
    if (memcmp(start, "PK\3\4", 4) == 0) {
        TRY(torch_item_locate(source->files, extent, &stored));
        TRY(check_stored(source, dtype, &stored.view));
        use_view(source, &stored);
        return RSD_OK;
    }
    if (start[8] != '{')
        return fail(RSD_EFORMAT, "byte %llu: neither what torch.save writes nor safetensors",
                    (unsigned long long)extent->offset);
    struct torch_view view = {0};
    uint64_t begin;
    TRY(safetensors_find_tensor(source->files, extent->file, extent->offset, name, &view.dtype,
                                &view.ndim, view.shape, &begin));
    TRY(check_stored(source, dtype, &view));
    use_dense(source, begin);
    return RSD_OK;
}

static void close_stream(struct source *source)
{
    zstd_reader_close(source->zstd);
    mem_free(source->rest);
    source->zstd = NULL;
    source->rest = NULL;
}

static rsd_status open_stream(struct source *source, rsd_dtype dtype)
{
    const struct extent *extent = &source->extent;
    struct stored_view stored;
    close_stream(source);
    source->range = (struct file_range){source->files, extent->file, extent->offset};
    TRY(zstd_reader_open(file_range_read, &source->range, extent->nbytes, extent->nzstd,
                         &source->zstd));
    TRY(torch_item_locate_stream(source->zstd, &stored, &source->rest, &source->nrest));
    TRY(check_stored(source, dtype, &stored.view));
    use_view(source, &stored);
    source->data = 0;
    source->stream_at = 0;
    source->rest_at = 0;
    source->stream_crc = 0;
    return RSD_OK;
}

static rsd_status find_bytes(struct source *source, const rsd_checkpoint *checkpoint,
                             const char *name)
{
    const struct extent *extent = &source->extent;
    char text[BOX_TEXT_NCHARS];
    if (extent->kind == ITEM_NONE)
        return fail(RSD_EFORMAT, "nothing says where the bytes of %s are",
                    box_text(source->ndim, source->lo, source->len, text));
    TRY(catalog_check_transforms(&checkpoint->catalog, extent));
    if (extent->kind == ITEM_VIEW) {
        use_view(source, &checkpoint->catalog.views[extent->detail]);
        return RSD_OK;
    }
    if (extent->kind == ITEM_PLAIN) {
        use_dense(source, extent->offset);
        return RSD_OK;
    }
    TRY(file_check(source->files, extent->file, extent->offset, extent->nbytes));
    if (!extent->nzstd)
        return find_in_file(source, name, source->dtype);
    source->compressed = true;
    TRY(open_stream(source, source->dtype));
    close_stream(source); /* many may wait, each with its window; one is read at a time */
    return RSD_OK;
}

/* A record is checked if the box is all of it, and all of the box is wanted. */
static bool covers_record(const struct source *source)
{
    return source->base == 0 &&
           (uint64_t)box_volume(source->ndim, source->len) * source->element_nbytes ==
               source->nbytes;
}

rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t index, size_t box)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    *source = (struct source){.files = &checkpoint->files,
                              .extent = catalog->extents[tensor->first_extent + box],
                              .dtype = tensor->dtype,
                              .element_nbytes = rsd_dtype_nbytes(tensor->dtype),
                              .ndim = tensor->ndim};
    copy_i64s(source->lo, tensor_box_lo(catalog, tensor, box), tensor->ndim);
    copy_i64s(source->len, tensor_box_len(catalog, tensor, box), tensor->ndim);
    pthread_mutex_init(&source->lock, NULL);
    pthread_mutex_init(&source->keeping, NULL);
    rsd_status status = find_bytes(source, checkpoint, tensor->name);
    if (!status)
        source->checkable = source->has_crc && covers_record(source);
    if (status) {
        source_close(source);
        return file_error_about(&checkpoint->files, source->extent.file, tensor->name, status);
    }
    return RSD_OK;
}

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides)
{
    *source = (struct source){
        .memory = memory, .dtype = dtype, .element_nbytes = rsd_dtype_nbytes(dtype), .ndim = ndim};
    copy_i64s(source->lo, lo, ndim);
    copy_i64s(source->len, len, ndim);
    copy_i64s(source->strides, strides, ndim);
    pthread_mutex_init(&source->lock, NULL);
    pthread_mutex_init(&source->keeping, NULL);
}

void source_close(struct source *source)
{
    zstd_reader_close(source->zstd);
    mem_free(source->rest);
    mem_free(source->kept);
    pthread_mutex_destroy(&source->lock);
    pthread_mutex_destroy(&source->keeping);
    source->zstd = NULL;
    source->rest = NULL;
    source->kept = NULL;
}

/* ---- reading bytes of the record ---- */

static rsd_status take_stream(struct source *source, char *out, size_t n)
{
    size_t ready = source->nrest - source->rest_at;
    size_t first = ready < n ? ready : n;
    if (first)
        memcpy(out, source->rest + source->rest_at, first);
    source->rest_at += first;
    if (first < n)
        TRY(zstd_reader_read(source->zstd, out + first, n - first));
    source->stream_at += n;
    return RSD_OK;
}

/* All is read: the CRC-32 stands behind the bytes. */
static rsd_status end_stream(struct source *source)
{
    unsigned char after[8] = {0};
    rsd_status status = RSD_OK;
    uint64_t nbytes = source->stream_at;
    if (source->checkable) {
        status = take_stream(source, (char *)after, sizeof after);
        if (!status && memcmp(after, "PK\7\x08", 4) != 0)
            status = fail(RSD_EFORMAT, "no descriptor behind the bytes");
    }
    if (source->checkable && !status) {
        source->crc = (uint32_t)after[4] | (uint32_t)after[5] << 8 | (uint32_t)after[6] << 16 |
                      (uint32_t)after[7] << 24;
        source->crc_sum = source->stream_crc;
        source->seen = source->crc ? nbytes : 0; /* 0: it was not computed */
    }
    source->stream_at = nbytes;
    close_stream(source);
    return status;
}

/* A stream goes forwards only; to go back is to begin again. */
static rsd_status read_stream(struct source *source, uint64_t at, char *out, size_t n,
                              struct io_stats *stats)
{
    char skipped[1 << 14];
    if (!source->zstd || at < source->stream_at) {
        stats->again += source->stream_at;
        TRY(open_stream(source, source->dtype));
    }
    while (source->stream_at < at) {
        uint64_t left = at - source->stream_at;
        size_t some = left < sizeof skipped ? (size_t)left : sizeof skipped;
        TRY(take_stream(source, skipped, some));
        source->stream_crc = crc_update(CRC_ZIP, source->stream_crc, skipped, some);
    }
    TRY(take_stream(source, out, n));
    if (source->checkable)
        source->stream_crc = crc_update(CRC_ZIP, source->stream_crc, out, n);
    return source->stream_at == source->nbytes ? end_stream(source) : RSD_OK;
}

static rsd_status read_bytes(struct source *source, uint64_t at, char *out, size_t n,
                             struct io_stats *stats)
{
    stats->nbytes_read += n;
    if (source->compressed)
        return read_stream(source, at, out, n, stats);
    TRY(file_read(source->files, source->extent.file, source->data + at, out, n));
    if (!source->checkable)
        return RSD_OK;
    uint64_t part = crc_shift(CRC_ZIP, crc_update(CRC_ZIP, 0, out, n), source->nbytes - at - n);
    pthread_mutex_lock(&source->lock);
    source->crc_sum ^= part;
    source->seen += n;
    pthread_mutex_unlock(&source->lock);
    return RSD_OK;
}

rsd_status source_check(struct source *source, struct io_stats *stats)
{
    if (!source->checkable || source->seen != source->nbytes) {
        stats->nbytes_unchecked +=
            source->wanted < source->nbytes ? source->wanted : source->nbytes;
        return RSD_OK;
    }
    uint32_t crc = crc32_from_raw(source->crc_sum, source->nbytes);
    if (crc != source->crc)
        return fail(RSD_EFORMAT,
                    "bytes %llu to %llu have CRC-32 %08x, should have %08x: they are damaged",
                    (unsigned long long)source->data,
                    (unsigned long long)(source->data + source->nbytes), crc, source->crc);
    return RSD_OK;
}

/* ---- reading regions ---- */

static void swap_elements(struct source *source, char *data, size_t nbytes)
{
    bool pairs = source->dtype == RSD_C64 || source->dtype == RSD_C128 || source->dtype == RSD_C32;
    size_t width = pairs ? source->element_nbytes / 2 : source->element_nbytes;
    for (size_t at = 0; at + width <= nbytes; at += width)
        for (size_t i = 0; i < width / 2; i++) {
            char one = data[at + i];
            data[at + i] = data[at + width - 1 - i];
            data[at + width - 1 - i] = one;
        }
}

/* The whole record in memory, for boxes whose rows are too short to be read one by one. */
static rsd_status keep_record(struct source *source, struct io_stats *stats)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&source->keeping); /* who comes later waits, and finds it */
    if (!source->kept) {
        char *record = mem_new((size_t)source->nbytes + 1, 1);
        status = record ? read_bytes(source, 0, record, (size_t)source->nbytes, stats) : RSD_ENOMEM;
        if (status)
            mem_free(record);
        else
            source->kept = record;
    }
    pthread_mutex_unlock(&source->keeping);
    return status;
}

bool source_runs_across(const struct source *source)
{
    int64_t stride = (int64_t)source->element_nbytes;
    bool rows = true;
    for (int32_t d = source->ndim - 1; d >= 0; d--) {
        rows = rows && (source->len[d] == 1 || source->strides[d] >= stride);
        stride = source->len[d] == 1 ? stride : source->strides[d] * source->len[d];
    }
    return !rows && !source->memory;
}

/* Where a region begins in the record, and how it is gone through. */
static uint64_t region_loops(const struct source *source, const int64_t *lo, const int64_t *len,
                             struct loops *loops)
{
    int64_t at = source->base, packed = (int64_t)source->element_nbytes;
    *loops = (struct loops){0};
    for (int32_t d = source->ndim - 1; d >= 0; d--) {
        at += (lo[d] - source->lo[d]) * source->strides[d];
        loops_add(loops, len[d], source->strides[d], packed);
        packed *= len[d];
    }
    loops_finish(loops, source->element_nbytes);
    return (uint64_t)at;
}

static rsd_status read_rows(struct source *source, uint64_t at, const struct loops *loops,
                            char *out, struct io_stats *stats)
{
    int64_t index[MAX_LOOPS] = {0};
    int32_t i;
    do {
        TRY(read_bytes(source, at, out, loops->run, stats));
        out += loops->run; /* the region is packed: rows follow each other */
        for (i = loops->n - 1; i >= 0; i--) {
            at += (uint64_t)loops->src_stride[i];
            if (++index[i] < loops->count[i])
                break;
            at -= (uint64_t)(loops->count[i] * loops->src_stride[i]);
            index[i] = 0;
        }
    } while (i >= 0);
    return RSD_OK;
}

/* Spreads n elements, one packed stride apart. */
static void scatter(char *out, int64_t stride, const char *in, int64_t n, size_t element_nbytes)
{
    switch (element_nbytes) {
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * stride, in + 2 * i, 2);
        break;
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * stride, in + 4 * i, 4);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(out + i * stride, in + (size_t)i * element_nbytes, element_nbytes);
    }
}

/* Reads along the dim in which the record runs on, and spreads what was read. */
static rsd_status read_across(struct source *source, const int64_t *lo, const int64_t *len,
                              int32_t along, char *out, struct io_stats *stats)
{
    int64_t packed[RSD_MAX_DIMS], index[RSD_MAX_DIMS] = {0},
                                  stride = (int64_t)source->element_nbytes;
    int64_t at = source->base;
    size_t n = (size_t)len[along] * source->element_nbytes;
    char *run = mem_new(n, 1);
    if (!run)
        return RSD_ENOMEM;
    for (int32_t d = source->ndim - 1; d >= 0; d--) {
        packed[d] = stride;
        stride *= len[d];
        at += (lo[d] - source->lo[d]) * source->strides[d];
    }
    rsd_status status = RSD_OK;
    for (int32_t d = 0; d >= 0 && !status;) {
        status = read_bytes(source, (uint64_t)at, run, n, stats);
        if (!status)
            scatter(out, packed[along], run, len[along], source->element_nbytes);
        for (d = source->ndim - 1; d >= 0; d--) {
            if (d == along)
                continue;
            at += source->strides[d];
            out += packed[d];
            if (++index[d] < len[d])
                break;
            at -= len[d] * source->strides[d];
            out -= len[d] * packed[d];
            index[d] = 0;
        }
    }
    mem_free(run);
    return status;
}

/* The dim along which elements follow each other in the record; -1: the last one, or none. */
static int32_t dim_along(const struct source *source, const int64_t *len)
{
    for (int32_t d = 0; d + 1 < source->ndim; d++)
        if (source->strides[d] == (int64_t)source->element_nbytes && len[d] > 1)
            return d;
    return -1;
}

static rsd_status read_kept(struct source *source, uint64_t at, const struct loops *loops,
                            char *out, struct io_stats *stats)
{
    struct copier copier = copier_best();
    TRY(keep_record(source, stats));
    copy_loops(&copier, false, loops, source->kept + at, out);
    return RSD_OK;
}

static rsd_status read_region(struct source *source, const int64_t *lo, const int64_t *len,
                              char *out, uint64_t keep_most, struct io_stats *stats)
{
    struct loops loops;
    uint64_t at = region_loops(source, lo, len, &loops);
    bool across = loops.n > 0 && loops.run < SHORT_RUN && source_runs_across(source);
    if (across && source->nbytes <= keep_most)
        return read_kept(source, at, &loops, out, stats);
    if (across && source->compressed) /* it would be decoded again for every row */
        return fail(
            RSD_ELIMIT,
            "a compressed box of %llu bytes whose rows run across: as much memory is needed "
            "for each thread, five times over",
            (unsigned long long)source->nbytes);
    int32_t along = across ? dim_along(source, len) : -1;
    if (along >= 0)
        return read_across(source, lo, len, along, out, stats);
    return read_rows(source, at, &loops, out, stats);
}

rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t keep_most, struct io_stats *stats)
{
    TRY(read_region(source, lo, len, out, keep_most, stats));
    if (source->swap)
        swap_elements(source, out, (size_t)box_volume(source->ndim, len) * source->element_nbytes);
    return RSD_OK;
}
