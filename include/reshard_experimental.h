/* reshard_experimental.h - the experimental tier: calls that may change in any version. Not included by reshard.h.
 *
 * It has the stash, and rsd_dcp_write_items. Conventions, such as "One thread", are those of reshard.h. */
#ifndef RESHARD_EXPERIMENTAL_H
#define RESHARD_EXPERIMENTAL_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The stash: buffers that are the same on all ranks, kept in slices --------------------------------------------
 *
 * Under tensor parallelism every rank keeps the same activations from forward to backward. A stash keeps 1/m of the
 * bytes of each on every one of m ranks, and gathers them when they are needed:
 *
 *     rsd_stash_new(&transport, NULL, &stash);
 *     ...                                                forward
 *     rsd_stash_put(stash, activation, nbytes, &id);     the activation may be freed now
 *     ...                                                backward
 *     rsd_stash_prefetch(stash, id, out);                optional: starts to gather
 *     rsd_stash_get(stash, id, out);                     out has the bytes of the activation
 *     rsd_stash_drop(stash, id);
 *
 * All ranks of the transport make the same calls in the same order, with buffers of the same number of bytes. Each
 * comment says whether a call is Collective or Local. If a collective call fails on one rank, it fails on all with the
 * same status, and the error names that rank; EMISMATCH names a rank that gets another buffer than rank 0. The stash
 * can be used again. After ETIMEOUT, EPEER or a failure of the transport it can only be freed.
 *
 * A stash uses tags 16 to 31 of its transport: execs can share the transport, a second stash cannot. docs/stash.md says
 * what it costs.
 */

/* A stash. One thread. */
typedef struct rsd_stash rsd_stash;

typedef struct rsd_stash_options {
    size_t struct_nbytes; /* use RSD_INIT */
    int32_t check;        /* 1: every put compares digests of the buffers, and so is Collective */
    int64_t max_nbytes;   /* for the messages of one gather in progress; 0: 16.8 MB */
    double timeout;       /* seconds without progress; 0: 300 */
} rsd_stash_options;

/* Collective. Creates a stash without buffers. options may be NULL. All ranks pass the same, except for timeout (else
 * EMISMATCH). The functions of the transport are used until the stash is freed. */
rsd_status rsd_stash_new(const rsd_transport *transport, const rsd_stash_options *options,
                         rsd_stash **stash);

/* Local; Collective if a prefetch is in progress: waits for it. Frees a stash and its buffers. Accepts NULL. */
void rsd_stash_free(rsd_stash *stash);

/* Local; Collective with options.check. Copies this rank's slice of nbytes bytes, so that data may be changed or freed.
 * Slices of two ranks differ by at most one byte. If ranks differ: EMISMATCH with options.check; without it, a get
 * returns bytes of several ranks. A put that fails uses up an id, so that ids stay equal on all ranks. */
rsd_status rsd_stash_put(rsd_stash *stash, const void *data, size_t nbytes, int64_t *id);

/* Collective. Writes all bytes of a buffer to out. After rsd_stash_prefetch it waits for that; out is then the same
 * pointer, or NULL. EINVAL: no such buffer. */
rsd_status rsd_stash_get(rsd_stash *stash, int64_t id, void *out);

/* Collective. Starts a get; out is in use until rsd_stash_get or rsd_stash_drop. Waits for an earlier prefetch that is
 * in progress, and for all ranks if it is the first get of a buffer of this size. The get progresses in calls on the
 * stash. EINVAL: no such buffer, or it was prefetched already. */
rsd_status rsd_stash_prefetch(rsd_stash *stash, int64_t id, void *out);

/* Local; after rsd_stash_prefetch without rsd_stash_get Collective: waits for it. Frees a buffer. */
rsd_status rsd_stash_drop(rsd_stash *stash, int64_t id);

typedef struct rsd_stash_usage {
    size_t struct_nbytes;      /* use RSD_INIT */
    int64_t nbuffers;          /* in the stash now */
    int64_t nbytes_kept;       /* in slices of this rank, now */
    int64_t nbytes_total;      /* of the same buffers */
    int64_t nbytes_kept_most;  /* at any time so far */
    int64_t nbytes_total_most; /* at any time so far */
    int64_t nbytes_received;   /* from other ranks */
} rsd_stash_usage;

/* Local. Returns how many buffers and bytes a stash keeps. */
rsd_status rsd_stash_stats(const rsd_stash *stash, rsd_stash_usage *usage);

/* ---- Items of a DCP checkpoint, for programs that plan the checkpoint and write its metadata -----------------------
 *
 *     rsd_dcp_write_items("step-1000/__0_0.distcp", nitems, items, NULL, places, NULL);
 */

/* A tensor or a run of bytes that becomes one item, as torch.save writes it. */
typedef struct rsd_item {
    size_t struct_nbytes; /* use RSD_INIT */
    const char *name;     /* for messages; NULL: none */
    rsd_dtype dtype;      /* 0: bytes, which are written as they are */
    int32_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* in elements; NULL: dense. The order of dims is kept, as in torch */
    const void *data;
    uint64_t nbytes; /* of bytes; ignored for a tensor */
} rsd_item;

typedef struct rsd_items_options {
    size_t struct_nbytes; /* use RSD_INIT */
    uint64_t offset;      /* where to start: the file keeps what is before it; 0: a new file */
    int32_t compress;     /* 0: no; else the level of zstd, for each item; one thread compresses */
    int32_t sync;         /* 1: wait until the file is on disk */
    const rsd_io *io;     /* without a transport */

    /* 1: a tensor is only its elements, row-major, as in safetensors. The name of the file gets the suffix .part, as
     * that of every safetensors file that is not complete: the caller renames it. */
    int32_t plain;
} rsd_items_options;

/* Writes items to one data file, one behind the other. Item i is at byte places[2 * i] of the file, in
 * places[2 * i + 1] bytes. options and report may be NULL. On failure the contents of the file are unspecified. */
rsd_status rsd_dcp_write_items(const char *path, int64_t nitems, const rsd_item *items,
                               const rsd_items_options *options, uint64_t *places,
                               rsd_report *report);

/* One name in a directory. Any status but RSD_OK ends the listing, and the call returns it. */
typedef rsd_status rsd_on_name(void *context, const char *name);

/* Lists the names in a directory, or the objects below s3://BUCKET/PREFIX, which need not exist. storage is for URLs and
 * may be NULL. */
rsd_status rsd_dcp_list_files(const char *path, struct rsd_storage *storage, rsd_on_name *on_name,
                              void *context);

/* Removes files of a directory, or objects. Files that do not exist are ignored. EINVAL: a name leads out of the
 * directory. After a failure, the files before that one are removed. */
rsd_status rsd_dcp_remove_files(const char *path, struct rsd_storage *storage, int64_t nnames,
                                const char *const *names);

#ifdef __cplusplus
}
#endif

#endif
