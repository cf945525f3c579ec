/* zstd_stream.h - zstd streams, read and written from start to end. */
#ifndef ZSTD_STREAM_H
#define ZSTD_STREAM_H

#include "base.h"

/* Decompresses nbytes that `read` supplies. nlayers, 1 to 8, says how often they were compressed. The
 * context must outlive the reader. */
struct zstd_reader;
rsd_status zstd_reader_open(read_at *read, void *context, uint64_t nbytes, int nlayers,
                            struct zstd_reader **out);
void zstd_reader_close(struct zstd_reader *reader); /* accepts NULL */

/* Returns the memory of a reader that has produced its first bytes, if it produces nbytes in all. It does not grow
 * later: a frame with a larger window than the one before it is ELIMIT. */
uint64_t zstd_reader_memory(const struct zstd_reader *reader, uint64_t nbytes);

/* Returns the same of a reader of one layer that is not open yet, from the first bytes of its data. */
enum { ZSTD_START_NBYTES = 18 };
uint64_t zstd_memory_from_start(const void *start, size_t n, uint64_t nbytes);

/* Returns about the memory of a stream that is written. */
size_t zstd_writer_memory(int level);

/* Produces the next n bytes. EFORMAT: the stream ends before. */
rsd_status zstd_reader_read(struct zstd_reader *reader, void *out, size_t n);

/* Produces up to *n bytes, fewer only at the end of the stream, and sets *n to their number. */
rsd_status zstd_reader_read_some(struct zstd_reader *reader, void *out, size_t *n);

/* Compresses nbytes in all, and passes on what becomes of them. */
struct zstd_writer;
typedef rsd_status zstd_write(void *context, const void *data, size_t n);
rsd_status zstd_writer_open(int level, uint64_t nbytes, zstd_write *write, void *context,
                            struct zstd_writer **out);
void zstd_writer_close(struct zstd_writer *writer); /* accepts NULL */
rsd_status zstd_writer_put(struct zstd_writer *writer, const void *data, size_t n);
rsd_status zstd_writer_end(struct zstd_writer *writer);

#endif
