/* torch_archive.h - the archive that torch.save writes, record by record. Private to format. */
#ifndef TORCH_ARCHIVE_H
#define TORCH_ARCHIVE_H

#include "torch_item.h"

enum { ARCHIVE_NAME_NCHARS = 40 };

struct archive_entry {
    char name[ARCHIVE_NAME_NCHARS];
    uint64_t header, nbytes;
    uint32_t crc;
};

/* Starts with `out`, the offset of `out` in the archive, and entries for all records, seven besides storages. */
struct archive_writer {
    struct bytes *out;
    uint64_t base;
    struct archive_entry *entries;
    size_t n;
    uint64_t id; /* of all CRCs */
};

/* Adds what is before a record of nbytes, so that the record is aligned; adds what is behind it. The lengths do
 * not depend on the CRC. */
void archive_add_header(struct archive_writer *archive, const char *name, uint64_t nbytes);
void archive_add_descriptor(struct archive_writer *archive, uint32_t crc);

/* Adds a whole record. */
void archive_add_record(struct archive_writer *archive, const char *name, const void *data,
                        size_t n);

/* Add the records before all storages, and those behind them with the directory. names_id is the part of the
 * serialization id that torch makes from the names of the records. */
void archive_add_first(struct archive_writer *archive, const struct bytes *pickle);
void archive_add_last(struct archive_writer *archive, const char *names_id);

void archive_fold_id(struct archive_writer *archive, uint64_t value);

#endif
