/* source.c - one box that can be read: where its bytes are, how they lie, and whether they are what was written.
 *
 * In every format, a stored box is a run of bytes with strides, in a file or in a stream that must be decompressed
 * up to them. Any region of the box can be read, packed row by row. Rows that are apart in the file are read one
 * by one. A box whose rows run in another order (a transposed tensor) is read whole and kept, if it is not too
 * large.
 *
 * The CRC-32 of a record is linear, so the sums of several threads add up. It is compared when every byte of the
 * record was read once. Bytes of other records are counted as unchecked.
 */
#include "transfer.h"

#include "crc.h"

#include <stdio.h>
#include <string.h>

enum { SHORT_RUN = 4096, WINDOW_NBYTES = 1 << 16 };
enum { READ_NBYTES = 8192 }; /* that are read in the time that a read takes */

/* ---- opening ---- */

/* Returns whether the box is all of its record. */
static bool covers_record(const struct source *source)
{
    return source->array.base == 0 &&
           (uint64_t)box_volume(source->ndim, source->len) * source->element_nbytes ==
               source->array.nbytes;
}

/* Returns whether the box is a view of its record, with short rows that are apart. */
static bool is_scattered(const struct source *source)
{
    int64_t packed[RSD_MAX_DIMS];
    if (source->checkable || source->array.stream || source->array.memory ||
        box_is_empty(source->ndim, source->len))
        return false;
    box_packed_strides(source->ndim, source->len, source->element_nbytes, packed);
    struct loops loops =
        box_loops(source->ndim, source->len, element_of_bytes(source->element_nbytes),
                  source->array.strides, packed);
    return loops.n > 0 && loops.run < SHORT_RUN;
}

rsd_status source_fail_in(const struct source *source, rsd_status status)
{
    const rsd_checkpoint *checkpoint = source->checkpoint;
    const struct catalog *catalog = &checkpoint->catalog;
    size_t extent = catalog->tensors[source->tensor].first_extent + source->box;
    char *error = status == RSD_EFORMAT ? text_copy(rsd_error()) : NULL;
    if (error) {
        rsd_status cause =
            format_check_file(checkpoint, source->file, extent_end(&catalog->extents[extent]));
        if (!cause)
            error_set("%s", error);
        mem_free(error);
        TRY(cause);
    }
    return store_fail_in(source->checkpoint->store, source->file,
                         fail_in(status, "%.300s: ", source->name));
}

rsd_status source_fail_damaged(const struct source *source, uint32_t crc, uint32_t expected)
{
    uint64_t begin = source->array.offset, end = begin + source->array.nbytes;
    return fail(RSD_EFORMAT, "bytes %llu to %llu are damaged: CRC-32 is %08x, expected %08x",
                (unsigned long long)begin, (unsigned long long)end, crc, expected);
}

/* What is around the bytes of an item is not read again; a stream is released when it is closed. */
static void release_frame(const struct source *source, const struct extent *extent)
{
    const struct stored_array *array = &source->array;
    uint64_t end = extent->offset + extent->nbytes, last = array->offset + array->nbytes;
    struct store *store = source->checkpoint->store;
    if (array->stream || array->offset < extent->offset || last > end)
        return;
    store_release(store, source->file, extent->offset, array->offset - extent->offset);
    store_release(store, source->file, last, end - last);
}

rsd_status source_open(struct source *source, rsd_checkpoint *checkpoint, size_t index, size_t box)
{
    const struct catalog *catalog = &checkpoint->catalog;
    const struct stored_tensor *tensor = &catalog->tensors[index];
    *source = (struct source){.checkpoint = checkpoint,
                              .tensor = index,
                              .box = box,
                              .file = catalog->extents[tensor->first_extent + box].file,
                              .name = tensor->name,
                              .dtype = tensor->dtype,
                              .element_nbytes = rsd_dtype_nbytes(tensor->dtype),
                              .ndim = tensor->ndim};
    copy_i64s(source->lo, tensor_box_lo(catalog, tensor, box), tensor->ndim);
    copy_i64s(source->len, tensor_box_len(catalog, tensor, box), tensor->ndim);
    rsd_status status = format_locate(checkpoint, index, box, &source->array);
    if (status)
        return source_fail_in(source, status);
    source->checkable = source->array.has_crc && covers_record(source);
    source->scattered = is_scattered(source);
    release_frame(source, &catalog->extents[tensor->first_extent + box]);
    pthread_mutex_init(&source->lock, NULL);
    pthread_mutex_init(&source->keeping, NULL);
    return RSD_OK;
}

void source_in_memory(struct source *source, rsd_dtype dtype, int32_t ndim, const int64_t *lo,
                      const int64_t *len, const char *memory, const int64_t *strides)
{
    *source = (struct source){
        .memory = memory, .dtype = dtype, .element_nbytes = rsd_dtype_nbytes(dtype), .ndim = ndim};
    copy_i64s(source->lo, lo, ndim);
    copy_i64s(source->len, len, ndim);
    copy_i64s(source->array.strides, strides, ndim);
    pthread_mutex_init(&source->lock, NULL);
    pthread_mutex_init(&source->keeping, NULL);
}

static void release_extent(const struct source *source)
{
    const struct catalog *catalog = &source->checkpoint->catalog;
    const struct extent *extent =
        &catalog->extents[catalog->tensors[source->tensor].first_extent + source->box];
    store_release(source->checkpoint->store, extent->file, extent->offset, extent->nbytes);
}

void source_close(struct source *source)
{
    if (source->checkpoint && source->array.stream)
        release_extent(source);
    stored_stream_close(source->stream);
    mem_free(source->kept);
    pthread_mutex_destroy(&source->lock);
    pthread_mutex_destroy(&source->keeping);
    source->stream = NULL;
    source->kept = NULL;
}

/* ---- reading bytes of the record ---- */

static void close_stream(struct source *source)
{
    stored_stream_close(source->stream);
    source->stream = NULL;
}

/* Reads the CRC-32 behind the last byte. */
static rsd_status end_stream(struct source *source)
{
    rsd_status status = RSD_OK;
    bool has_crc = false;
    if (source->checkable)
        status = source->stream->end(source->stream, &has_crc, &source->array.crc);
    source->ended = source->checkable && !status;
    if (!status && has_crc) {
        source->crc_sum = source->stream_crc;
        source->crc_nbytes = source->stream_at;
    }
    close_stream(source);
    return status;
}

static rsd_status read_next(struct source *source, char *out, size_t n)
{
    TRY(source->stream->read(source->stream, out, n));
    source->stream_at += n;
    if (source->checkable && !source->stream->checks_itself)
        source->stream_crc = crc_update(CRC_ZIP, source->stream_crc, out, n);
    return RSD_OK;
}

/* A stream can only be read forwards. To go back, it is opened again. */
static rsd_status read_stream(struct source *source, uint64_t at, char *out, size_t n,
                              struct io_stats *stats)
{
    char skipped[1 << 14];
    const rsd_checkpoint *checkpoint = source->checkpoint;
    if (!source->stream || at < source->stream_at) {
        stats->nbytes_decoded_again += source->stream_at;
        close_stream(source);
        TRY(format_open_stream(checkpoint, source->tensor, source->box, &source->stream));
        source->stream_at = source->stream_crc = 0;
    }
    while (source->stream_at < at) {
        uint64_t left = at - source->stream_at;
        TRY(read_next(source, skipped, left < sizeof skipped ? (size_t)left : sizeof skipped));
    }
    TRY(read_next(source, out, n));
    return source->stream_at == source->array.nbytes ? end_stream(source) : RSD_OK;
}

/* Adds bytes of the record, which begin at `at`, to its CRC-32. */
static void add_to_crc(struct source *source, uint64_t at, const char *bytes, size_t n)
{
    uint64_t part =
        crc_shift(CRC_ZIP, crc_update(CRC_ZIP, 0, bytes, n), source->array.nbytes - at - n);
    pthread_mutex_lock(&source->lock);
    source->crc_sum ^= part;
    source->crc_nbytes += n;
    pthread_mutex_unlock(&source->lock);
}

/* Reads runs of the record, and adds them to its CRC-32. Their offsets count from the start of the record. */
static rsd_status read_runs(struct source *source, struct store_run *runs, size_t nruns,
                            struct io_stats *stats)
{
    const struct stored_array *array = &source->array;
    struct store *store = source->memory ? NULL : source->checkpoint->store;
    for (size_t i = 0; i < nruns; i++) {
        stats->nbytes_read += runs[i].n;
        if (array->stream)
            TRY(read_stream(source, runs[i].offset, runs[i].out, runs[i].n, stats));
        else if (array->memory)
            memcpy(runs[i].out, array->memory + runs[i].offset, runs[i].n);
        runs[i].offset += array->offset;
    }
    if (array->stream || array->memory)
        return RSD_OK;
    TRY(store_read_runs(store, source->file, runs, nruns));
    for (size_t i = 0; i < nruns; i++) {
        store_release(store, source->file, runs[i].offset, runs[i].n);
        if (source->checkable)
            add_to_crc(source, runs[i].offset - array->offset, runs[i].out, runs[i].n);
    }
    return RSD_OK;
}

static rsd_status read_bytes(struct source *source, uint64_t at, char *out, size_t n,
                             struct io_stats *stats)
{
    return read_runs(source, &(struct store_run){at, out, n}, 1, stats);
}

rsd_status source_compare_crc(const struct source *source, struct io_stats *stats)
{
    if (source->checked)
        return RSD_OK;
    if (!source->checkable || source->crc_nbytes != source->array.nbytes) {
        stats->nbytes_unchecked +=
            source->wanted < source->array.nbytes ? source->wanted : source->array.nbytes;
        return RSD_OK;
    }
    uint32_t crc = crc32_from_raw(source->crc_sum, source->array.nbytes);
    return crc == source->array.crc ? RSD_OK : source_fail_damaged(source, crc, source->array.crc);
}

rsd_status source_check(const struct source *source, struct io_stats *stats)
{
    rsd_status status = source_compare_crc(source, stats);
    return status ? source_fail_in(source, status) : RSD_OK;
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

/* Reads the whole record into memory, for boxes whose rows are too short to be read one by one. It is used until
 * release_record. */
static rsd_status keep_record(struct source *source, struct io_stats *stats)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&source->keeping); /* a later thread waits, and finds it */
    if (!source->kept) {
        char *record = mem_new((size_t)source->array.nbytes + 1, 1);
        status = record ? read_bytes(source, 0, record, (size_t)source->array.nbytes, stats)
                        : RSD_ENOMEM;
        if (status)
            mem_free(record);
        else
            source->kept = record;
    }
    source->nkeepers += !status;
    pthread_mutex_unlock(&source->keeping);
    return status;
}

/* The last thread that copies bytes which are wanted drops the record, so that a tensor of many boxes has few of
 * them in memory at a time. */
static void release_record(struct source *source, uint64_t ncopied)
{
    pthread_mutex_lock(&source->keeping);
    source->ncopied += ncopied;
    if (--source->nkeepers == 0 && source->ncopied >= source->wanted) {
        mem_free(source->kept);
        source->kept = NULL;
    }
    pthread_mutex_unlock(&source->keeping);
}

bool source_runs_across(const struct source *source)
{
    int64_t stride = (int64_t)source->element_nbytes;
    bool rows = true;
    if (box_is_empty(source->ndim, source->len)) /* its other extents may be any number */
        return false;
    for (int32_t d = source->ndim - 1; d >= 0; d--) {
        rows = rows && (source->len[d] == 1 || source->array.strides[d] >= stride);
        stride = source->len[d] == 1 ? stride : source->array.strides[d] * source->len[d];
    }
    return !rows && !source->memory;
}

/* Returns where a region begins in the record, and the loops over it. */
static uint64_t region_loops(const struct source *source, const int64_t *lo, const int64_t *len,
                             struct loops *loops)
{
    int64_t packed[RSD_MAX_DIMS];
    box_packed_strides(source->ndim, len, source->element_nbytes, packed);
    *loops = box_loops(source->ndim, len, element_of_bytes(source->element_nbytes),
                       source->array.strides, packed);
    return (uint64_t)(source->array.base +
                      box_offset(source->ndim, lo, source->lo, source->array.strides));
}

bool source_find_run(const struct source *source, const int64_t *lo, const int64_t *len,
                     uint64_t *at, uint64_t *n)
{
    struct loops loops;
    if (source->memory || source->array.stream)
        return false;
    *at = region_loops(source, lo, len, &loops);
    *n = loops.run;
    return loops.n == 0;
}

void source_prefetch(struct source *source, const int64_t *lo, const int64_t *len)
{
    struct store *store = source->checkpoint->store;
    struct loops loops;
    int64_t index[MAX_LOOPS] = {0}, to = 0, from = (int64_t)region_loops(source, lo, len, &loops);
    if (source->array.stream || source_runs_across(source)) /* read whole, or by columns */
        return;
    do
        store_prefetch(store, source->file, source->array.offset + (uint64_t)from, loops.run);
    while (loops_next(&loops, index, &from, &to));
}

/* Reads the rows of a region that are apart in the record, and packs them. */
static rsd_status read_rows(struct source *source, uint64_t at, const struct loops *loops,
                            char *out, struct io_stats *stats)
{
    enum { MAX_RUNS = 64 }; /* so that their bytes are in the cache when the CRC-32 is computed */
    struct store_run runs[MAX_RUNS];
    int64_t index[MAX_LOOPS] = {0}, from = (int64_t)at, to = 0;
    size_t n = 0;
    bool more;
    do {
        runs[n++] = (struct store_run){(uint64_t)from, out + to, loops->run};
        more = loops_next(loops, index, &from, &to);
        if (n == MAX_RUNS || !more) {
            TRY(read_runs(source, runs, n, stats));
            n = 0;
        }
    } while (more);
    return RSD_OK;
}

/* The first of the inner loops that lie in a window of the record together, and how many turns of it do. */
struct row_window {
    int32_t first;
    int64_t turns, span; /* bytes from the first to the last */
};

/* Returns the largest window that is read faster than its rows one by one. */
static struct row_window find_window(const struct loops *loops)
{
    struct row_window window = {loops->n, 1, (int64_t)loops->run};
    int64_t nrows = 1;
    for (int32_t i = loops->n - 1; i >= 0; i--) {
        const struct loop *loop = &loops->loop[i];
        int64_t stride = loop->src_stride, turns = loop->count;
        if (stride < 0 || stride > READ_NBYTES * nrows || window.turns != 1)
            break;
        if (stride > 0)
            turns = min_i64(turns, (WINDOW_NBYTES - window.span) / stride + 1);
        if (turns < 2)
            break;
        window.first = i;
        window.span += (turns - 1) * stride;
        nrows *= turns;
        window.turns = turns == loop->count ? 1 : turns;
    }
    return window;
}

/* Reads the rows of a view of its record, in which they are close to each other: all that lies between the rows of
 * a window is read too. */
static rsd_status read_row_windows(struct source *source, uint64_t at, const struct loops *loops,
                                   char *out, struct io_stats *stats)
{
    struct row_window window = find_window(loops);
    struct loops outer = *loops, inner = {.run = loops->run,
                                          .element = loops->element,
                                          .n = loops->n - window.first};
    struct copier copier = copier_best();
    int64_t index[MAX_LOOPS] = {0}, from = (int64_t)at, to = 0;
    bool split = window.turns > 1; /* the first of the inner loops is done in several windows */
    char *bytes = mem_new((size_t)window.span, 1);
    rsd_status status = bytes ? RSD_OK : RSD_ENOMEM;
    outer.n = window.first;
    for (int32_t i = 0; i < inner.n; i++)
        inner.loop[i] = loops->loop[window.first + i];
    const struct loop whole = inner.n ? inner.loop[0] : (struct loop){1, 0, 0};
    int64_t step = split ? window.turns : whole.count;
    do
        for (int64_t turn = 0; turn < whole.count && !status; turn += step) {
            int64_t turns = min_i64(step, whole.count - turn);
            uint64_t begin = (uint64_t)(from + turn * whole.src_stride);
            inner.loop[0].count = turns;
            status = read_bytes(source, begin, bytes,
                                (size_t)(window.span - (step - turns) * whole.src_stride), stats);
            if (!status)
                copy_loops(&copier, false, &inner, bytes, out + to + turn * whole.dst_stride);
        }
    while (!status && loops_next(&outer, index, &from, &to));
    mem_free(bytes);
    return status;
}

/* Copies n packed elements to places that are one stride apart. */
static void scatter_elements(char *out, int64_t stride, const char *in, int64_t n,
                             size_t element_nbytes)
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

/* Reads along the dim that is contiguous in the record, and scatters what was read. */
static rsd_status read_across(struct source *source, const int64_t *lo, const int64_t *len,
                              int32_t along, char *out, struct io_stats *stats)
{
    int64_t packed[RSD_MAX_DIMS], index[MAX_LOOPS] = {0}, to = 0;
    int64_t from =
        source->array.base + box_offset(source->ndim, lo, source->lo, source->array.strides);
    size_t n = (size_t)len[along] * source->element_nbytes;
    struct loops others = {0}; /* over the other dims, in the order of the region */
    char *run = mem_new(n, 1);
    if (!run)
        return RSD_ENOMEM;
    box_packed_strides(source->ndim, len, source->element_nbytes, packed);
    for (int32_t d = 0; d < source->ndim; d++)
        if (d != along)
            loops_add(&others, len[d], source->array.strides[d], packed[d]);
    rsd_status status;
    do {
        status = read_bytes(source, (uint64_t)from, run, n, stats);
        if (!status)
            scatter_elements(out + to, packed[along], run, len[along], source->element_nbytes);
    } while (!status && loops_next(&others, index, &from, &to));
    mem_free(run);
    return status;
}

/* Returns the dim that is contiguous in the record; -1: the last one, or none. */
static int32_t dim_along(const struct source *source, const int64_t *len)
{
    for (int32_t d = 0; d + 1 < source->ndim; d++)
        if (source->array.strides[d] == (int64_t)source->element_nbytes && len[d] > 1)
            return d;
    return -1;
}

static rsd_status read_kept(struct source *source, uint64_t at, const struct loops *loops,
                            uint64_t nbytes, char *out, struct io_stats *stats)
{
    struct copier copier = copier_best();
    TRY(keep_record(source, stats));
    copy_loops(&copier, false, loops, source->kept + at, out);
    release_record(source, nbytes);
    return RSD_OK;
}

static uint64_t region_nbytes(const struct source *source, const int64_t *len)
{
    return (uint64_t)box_volume(source->ndim, len) * source->element_nbytes;
}

/* Reads a region of the box, packed row by row. Chooses by the order of its bytes in the file. */
static rsd_status read_region(struct source *source, const int64_t *lo, const int64_t *len,
                              char *out, uint64_t max_kept, struct io_stats *stats)
{
    struct loops loops;
    uint64_t at = region_loops(source, lo, len, &loops);
    bool across = loops.n > 0 && loops.run < SHORT_RUN && source_runs_across(source);
    if (across && source->array.nbytes <= max_kept)
        return read_kept(source, at, &loops, region_nbytes(source, len), out, stats);
    if (across && source->array.stream) /* it would be decompressed again for every row */
        return fail(
            RSD_ELIMIT,
            "compressed box of %llu bytes is stored transposed, and %llu can be kept in memory; "
            "raise the memory limit to %llu times what it is",
            (unsigned long long)source->array.nbytes, (unsigned long long)max_kept,
            (unsigned long long)(source->array.nbytes / (max_kept ? max_kept : 1) + 1));
    int32_t along = across ? dim_along(source, len) : -1;
    if (along >= 0)
        return read_across(source, lo, len, along, out, stats);
    return source->scattered ? read_row_windows(source, at, &loops, out, stats)
                             : read_rows(source, at, &loops, out, stats);
}

rsd_status source_read(struct source *source, const int64_t *lo, const int64_t *len, char *out,
                       uint64_t max_kept, struct io_stats *stats)
{
    rsd_status status = read_region(source, lo, len, out, max_kept, stats);
    if (status)
        return source_fail_in(source, status);
    uint64_t nbytes = region_nbytes(source, len);
    if (source->array.big_endian)
        swap_elements(source, out, (size_t)nbytes);
    if (source->array.stream && (source->delivered += nbytes) >= source->wanted)
        close_stream(source); /* so that a tensor of many boxes has few of them open at a time */
    return RSD_OK;
}
