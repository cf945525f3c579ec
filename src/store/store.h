/* store.h - named bytes in a place; output becomes visible in one step. */
#ifndef STORE_H
#define STORE_H

#include "base.h"

#include <pthread.h>
#include <sys/stat.h>

/* ---- file.c ---- */

enum { FILE_SLOTS = 4 };
struct file_slot {
    int fd; /* -1: not open now */
    int users;
    uint64_t used_at;
    _Atomic uint64_t unflushed;
};

struct one_file {
    char *name; /* in the folder */
    bool writable;
    bool known; /* it was seen, with this size and time of change */
    uint64_t nbytes;
    int64_t changed; /* nanoseconds */
    struct file_slot slots[FILE_SLOTS];
};

/* The files of one folder that a checkpoint is made of. Threads may read at once. */
struct files {
    char *folder;
    int folder_fd;
    pthread_mutex_t lock;
    struct one_file *list;
    size_t n, capacity;
    bool unsynced; /* nobody will wait for the disk, so it need not begin at once */
    int nopen;
    uint64_t clock;
};

/* EFORMAT for a name that is absolute, has empty parts, "." or "..", or no name at all. */
rsd_status check_name(struct slice name);

rsd_status files_open(struct files *files, const char *folder);
void files_close(struct files *files);
rsd_status files_add(struct files *files, struct slice name,
                     uint32_t *index);                            /* does not open it */
rsd_status file_there(const struct files *files, uint32_t index); /* without opening it */
rsd_status file_nbytes(struct files *files, uint32_t index, uint64_t *nbytes);
rsd_status file_check(struct files *files, uint32_t index, uint64_t at,
                      uint64_t n); /* EFORMAT unless it has these bytes */
rsd_status file_read(struct files *files, uint32_t index, uint64_t at, void *out, size_t n);

/* The bytes of a file from an offset on, as a read_at. */
struct file_range {
    struct files *files;
    uint32_t file;
    uint64_t offset;
};
rsd_status file_range_read(void *range, uint64_t at, void *out, size_t n);

/* The whole file, with a zero behind it; ELIMIT if it is longer than `most`. */
rsd_status file_load(struct files *files, uint32_t index, uint64_t most, char **bytes, size_t *n);

/* Makes a file of the list anew, but for the first bytes that are kept, with room for so many. */
rsd_status file_create(struct files *files, uint32_t index, uint64_t kept, uint64_t nbytes);
rsd_status file_write(struct files *files, uint32_t index, uint64_t at, const void *data, size_t n);
rsd_status file_sync(struct files *files, uint32_t index);
rsd_status folder_sync(const struct files *files);

/* Puts the path of a file in front of the last error, or the path and a name, unless the path is there. */
rsd_status file_error(const struct files *files, uint32_t index, rsd_status status);
rsd_status file_error_about(const struct files *files, uint32_t index, const char *name,
                            rsd_status status);

/* ---- publish.c: the folder in which an output is built, and how it gets into place ---- */

enum part_mode { PART_NEW, PART_RESUME, PART_REPLACE, PART_SHARED, PART_JOIN };

struct part {
    char *path;   /* what is built */
    char *folder; /* path.reshard-part */
    int journal_fd;
    bool one_file;  /* the path is a file, not a folder */
    bool overwrite; /* what is at the path may be replaced */
    bool resumed;   /* the journal has something in it */
    bool moved;     /* the folder may not be what it was: it is left alone */
};

rsd_status part_open(struct part *part, const char *path, enum part_mode mode, bool overwrite,
                     bool one_file);
rsd_status part_check(const char *path, bool overwrite, bool one_file); /* could it be opened? */
rsd_status part_publish(struct part *part); /* everything in it is on disk */
rsd_status part_join(struct part *part, const char *path,
                     int32_t rank);  /* what rank 0 opened; rank: whose journal; -1: none */
void part_close(struct part *part);  /* keeps what is there */
void part_remove(struct part *part); /* closes, and removes what is there */

#endif
