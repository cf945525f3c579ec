/* store.h - named bytes in a place; output becomes visible in one step.
 *
 * A store is a directory, or what stands for one. Its files have numbers, in the order in which they were
 * added. An error of a store names the byte and the cause. The caller that works on a file adds the path,
 * once, with store_fail_in.
 */
#ifndef STORE_H
#define STORE_H

#include "base.h"

/* ---- stores.c ---- */

/* Names that the list owns, each with a zero behind it. Starts as {0}. */
struct name_list {
    struct slice *list;
    size_t n, capacity;
};
rsd_status name_list_add(struct name_list *names, struct slice name);
void name_list_drop(struct name_list *names);

struct store {
    const struct store_ops *ops;
    char *path;                /* of the directory, for messages */
    struct name_list names;    /* of the files, by number */
    struct string_map numbers; /* of the files, by name */
    bool *counted; /* by file: the budget of the call that opens the checkpoint knows its length */
    size_t counted_capacity;
    bool writable;     /* its files are written; sizes are not checked against an earlier one */
    bool unsynced;     /* no caller waits until the bytes are on disk */
    bool one_writer;   /* the file system lets one thread at a time write to a file */
    bool follow_links; /* links may lead out of the directory */
    bool
        links_checked; /* also that of the file which the path names; otherwise it may lead anywhere */
};

/* A file or a directory, by its name relative to the store. */
struct store_entry {
    char *name;
    const char *base; /* the part of the name behind its last slash */
    bool directory;
};

/* What a directory has in it, sorted by name. Numbers in names count as numbers. */
struct store_listing {
    struct store_entry *entries;
    size_t n, capacity;
};

/* Bytes of a file, and where they go. */
struct store_run {
    uint64_t offset;
    char *out;
    size_t n;
};

struct output_options;
struct store_output;

/* One row per kind of store; the scheme of the path selects it. Functions may run in several threads at
 * once, but for open, close and add. */
struct store_ops {
    bool random_write;  /* files may be written by several processes, and read back */
    const char *scheme; /* "s3" for paths that begin with s3://; NULL: of the local store */
    rsd_status (*open)(const char *path, rsd_storage *storage, struct store **store,
                       const char **file);
    void (*close)(struct store *store);
    rsd_status (*add)(struct store *store); /* prepares one more file */
    rsd_status (*list)(struct store *store, const char *directory, struct store_listing *out);
    rsd_status (*stat)(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version);
    /* Whether a file, whose size was asked for, is another name of one before it. NULL: names are not links. */
    bool (*repeats)(struct store *store, uint32_t file);
    rsd_status (*read)(struct store *store, uint32_t file, uint64_t offset, void *out, size_t n);
    /* NULL: runs are read one by one. */
    rsd_status (*read_runs)(struct store *store, uint32_t file, const struct store_run *runs,
                            size_t nruns);
    /* NULL: the store does not read ahead. */
    void (*prefetch)(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
    void (*start_prefetch)(struct store *store);
    void (*release)(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
    rsd_status (*create)(struct store *store, uint32_t file, uint64_t kept, uint64_t nbytes);
    /* NULL: the store need not reserve space */
    rsd_status (*reserve)(struct store *store, uint32_t file, uint64_t offset, uint64_t nbytes);
    rsd_status (*write)(struct store *store, uint32_t file, uint64_t offset, const void *data,
                        size_t n);
    /* Lets a file share bytes of a file of another store of this kind. EUNSUPPORTED: they cannot. */
    rsd_status (*clone)(struct store *store, uint32_t file, uint64_t offset, struct store *from,
                        uint32_t from_file, uint64_t from_offset, uint64_t n);
    rsd_status (*end_file)(struct store *store, uint32_t file, uint64_t nbytes);
    bool (*has)(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
    rsd_status (*sync)(struct store *store, uint32_t file);
    rsd_status (*sync_names)(struct store *store);
    rsd_status (*put)(struct store *store, const char *name, const void *data, size_t n);
    rsd_status (*rename)(struct store *store, const char *from, const char *to);
    rsd_status (*remove)(struct store *store, const char *name);
    rsd_status (*open_output)(const char *path, const struct output_options *options,
                              struct store_output **output);
    rsd_status (*check_output)(const char *path, const struct output_options *options);
    rsd_status (*sync_journal)(struct store_output *output);
    rsd_status (*commit)(struct store_output *output);
    void (*close_output)(struct store_output *output, bool keep);
};

/* Opens the directory at a path. If a file is there, opens the directory that the file is in, and *file is
 * its name there, a part of `path`; else *file is NULL. ENOENT: nothing is there. storage: for URLs; may be
 * NULL. */
rsd_status store_open(const char *path, rsd_storage *storage, struct store **store,
                      const char **file);
void store_close(struct store *store); /* accepts NULL */

/* Lists a directory of the store; "" is the store itself. The caller drops the listing. What the store
 * learned of sizes it keeps, so that store_stat need not ask again. */
rsd_status store_list(struct store *store, const char *directory, struct store_listing *out);
rsd_status store_listing_add(struct store_listing *listing, const char *directory, const char *name,
                             bool is_directory);
void store_listing_drop(struct store_listing *listing);

/* Returns EFORMAT for a name that is absolute, or has empty parts, "." or "..", or is empty. */
rsd_status store_check_name(struct slice name);

/* Adds a file without opening it. It need not exist yet. A name that the store has keeps its number. */
rsd_status store_add_file(struct store *store, struct slice name, uint32_t *file);
static inline const char *store_file_name(const struct store *store, uint32_t file)
{
    return store->names.list[file].bytes;
}

/* The size of a file, and a number that is another one when the file has changed. ENOENT: it does not
 * exist. version may be NULL. */
rsd_status store_stat(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version);

/* The bytes that a file adds to those of the store. 0: it is a link to a file that was asked for before, or
 * another name of it. */
rsd_status store_stat_own(struct store *store, uint32_t file, uint64_t *nbytes);

/* Reads n bytes, all of them. EFORMAT: the file has fewer. EIO: it changed since it was first opened. */
rsd_status store_read(struct store *store, uint32_t file, uint64_t offset, void *out, size_t n);

/* The same for at least one run. Several short runs are read faster than by one call each. */
rsd_status store_read_runs(struct store *store, uint32_t file, const struct store_run *runs,
                           size_t nruns);

/* For reading ahead from a remote store; others ignore them. store_prefetch announces bytes that will be read soon.
 * store_start_prefetch ends a list of announcements, and requests are sent. store_release announces that bytes will
 * not be read again. */
void store_prefetch(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
void store_start_prefetch(struct store *store);
void store_release(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
static inline bool store_can_prefetch(const struct store *store)
{
    return store->ops->prefetch != NULL;
}

/* Returns EFORMAT unless a file has these bytes; unless nbytes has them. */
rsd_status store_check_range(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
rsd_status store_check_bounds(uint64_t offset, uint64_t n, uint64_t nbytes);

/* Reads a whole file, and puts a zero behind it. ELIMIT: it is longer than `limit`. */
rsd_status store_load(struct store *store, uint32_t file, uint64_t limit, char **bytes, size_t *n);

/* The bytes of a file from an offset on, as a read_at. */
struct store_range {
    struct store *store;
    uint32_t file;
    uint64_t offset;
};
rsd_status store_range_read(void *range, uint64_t offset, void *out, size_t n);

/* Creates a file, which will have nbytes. If `kept` is not 0 the file must exist, and keeps its first bytes. */
rsd_status store_create(struct store *store, uint32_t file, uint64_t kept, uint64_t nbytes);

/* Reserves space for bytes that are about to be written, so that a full disk is noticed before that, and the
 * bytes lie in one piece. EIO: too little space is left. */
rsd_status store_reserve(struct store *store, uint32_t file, uint64_t offset, uint64_t nbytes);
rsd_status store_write(struct store *store, uint32_t file, uint64_t offset, const void *data,
                       size_t n);
/* Lets a file share the bytes of another one: offsets and n are multiples of 4096. EUNSUPPORTED: the file
 * system cannot. */
rsd_status store_clone(struct store *store, uint32_t file, uint64_t offset, struct store *from,
                       uint32_t from_file, uint64_t from_offset, uint64_t n);
rsd_status store_sync(struct store *store, uint32_t file);

/* Says that a file of so many bytes is written, and syncs it unless the store is `unsynced`. */
rsd_status store_end_file(struct store *store, uint32_t file, uint64_t nbytes);

/* Whether an earlier run has written bytes of a file, for stores that know. */
bool store_has(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
rsd_status store_sync_names(struct store *store);

/* These take a file by its name, and name it in an error. store_put writes a whole file, which appears in
 * one step and is on disk then. */
rsd_status store_put(struct store *store, const char *name, const void *data, size_t n);
rsd_status store_rename(struct store *store, const char *from, const char *to);
rsd_status store_remove(struct store *store, const char *name); /* ENOENT: it does not exist */

/* Puts the path of a file in front of the last error. */
rsd_status store_fail_in(const struct store *store, uint32_t file, rsd_status status);

/* ---- outputs ---- */

/* What an earlier run left of the same output, and how this process takes part. */
enum output_mode {
    OUTPUT_NEW,     /* EEXIST if a run left something */
    OUTPUT_RESUME,  /* continues from what it left */
    OUTPUT_REPLACE, /* removes what it left */
    OUTPUT_JOIN,    /* another process has opened the output, and commits it */
    OUTPUT_IN_PLACE /* writes files of the directory at the path; nothing is committed */
};

/* Lists the files that belong to a checkpoint at a path. Fails without a checkpoint. */
typedef rsd_status store_list_owned(const char *path, rsd_storage *storage,
                                    struct name_list *owned);

struct output_options {
    enum output_mode mode;
    bool overwrite; /* a checkpoint at the path may be replaced */
    bool one_file;  /* the output is a file, not a directory */
    /* The name of a file for the caller, which is beside those of the output until it is committed. It is
     * locked, except to join. NULL: none, to join or in place. The text must outlive the output. */
    const char *journal;
    store_list_owned *list_owned;
    rsd_storage *storage; /* for URLs; may be NULL */
    uint64_t nbytes;      /* that a new output is known to need; 0: not known */
    bool may_share;       /* files may share extents with others and then need less */
};

/* An output that is being written. It appears at its path in one step, when it is committed. */
struct store_output {
    const struct store_ops *ops;
    char *path;
    struct store *store; /* where its files are written */
    int journal_fd;      /* -1: none */
    bool resumed;        /* the journal has something in it */
};

rsd_status store_open_output(const char *path, const struct output_options *options,
                             struct store_output **output);

/* Says whether an output could be opened, and changes nothing. */
rsd_status store_check_output(const char *path, const struct output_options *options);

/* Writes the journal to where a later run finds it. */
rsd_status store_sync_journal(struct store_output *output);

/* Puts the output at its path. Every file must be on disk. */
rsd_status store_commit(struct store_output *output);

/* Closes an output. Without `keep`, removes what was written and not committed. Accepts NULL. */
void store_close_output(struct store_output *output, bool keep);

#endif
