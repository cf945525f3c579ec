/* s3.h - buckets of S3, and outputs in them. Private to store. */
#ifndef S3_H
#define S3_H

#include "remote.h"

#define S3_JOURNAL "reshard-journal"

/* ---- s3.c ---- */

rsd_status s3_open(const char *path, rsd_storage *storage, struct store **out, const char **file);

/* Opens what is below a path of n bytes. */
rsd_status s3_open_prefix(const char *path, size_t n, rsd_storage *storage,
                          struct remote_store **out);

/* Sets the URL of a request for a key ("": the bucket). The query, if it has one, is encoded and sorted. */
rsd_status s3_set_request(struct remote_store *store, const char *key,
                          struct http_request *request);
rsd_status s3_key(const struct remote_store *store, const char *name,
                  char **key); /* for rsd_free */

/* What the pages of a listing had so far. Initialize with {0}. A service may send pages forever, so a listing is limited
 * by what is new in them. */
struct s3_listed {
    struct string_map names; /* their memory is the caller's; the numbers are the kinds, as bits */
    uint64_t names_nbytes, pages_nbytes;
    size_t nnew; /* names of the page at hand */
    int npages, nempty;
};

/* Returns whether a name of a kind, 1 or 2, was listed. */
bool s3_is_listed(const struct s3_listed *listed, const char *name, size_t kind);

/* Adds a name that was not listed. It must stay where it is. */
rsd_status s3_add_listed(struct s3_listed *listed, const char *name, size_t kind);

/* Fails if another page must not be requested, because the listing is too long or does not end. */
rsd_status s3_check_listed(struct s3_listed *listed);
void s3_listed_drop(struct s3_listed *listed);

/* Called for each element that is entered or left, with its text when it is left. EncodingType comes first. */
typedef rsd_status s3_take_element(void *context, const char *name, bool entered, const char *text);

/* Reads a document whose root begins with this name: services differ in the rest. It is checked whole before
 * anything is taken. The query is dropped. The document counts as a page of `listed`, if that is not NULL. */
rsd_status s3_load_document(struct remote_store *store, const char *key, struct text *query,
                            const char *root, struct s3_listed *listed, s3_take_element *take,
                            void *context);
rsd_status s3_parse_document(const struct bytes *document, const char *root, s3_take_element *take,
                             void *context);

rsd_status s3_list(struct store *store, const char *directory, struct store_listing *out);

/* ---- outputs: s3_upload.c sends parts, s3_complete.c and s3_uploads.c end uploads ---- */

enum { MAX_UPLOAD_ID = 1100 };

struct s3_span {
    uint64_t lo, hi; /* in the part */
};

struct s3_part {
    struct s3_upload *upload;
    size_t number; /* from 1 on */
    uint64_t begin, nbytes, reserved;
    char *data;            /* NULL: not written yet, or uploaded */
    struct s3_span *spans; /* what is written, sorted */
    size_t nspans, spans_capacity;
    int nwriters;
    bool started, uploaded;
    bool has_sha256;
    unsigned char sha256[SHA256_NBYTES];
    char etag[MAX_ETAG];
    struct http_request request;
};

struct s3_upload {
    struct s3_output *output;
    char *key, *id;        /* key: NULL: not prepared; id: NULL: not begun */
    uint64_t nbytes;       /* 0: not known before the end */
    uint64_t end;          /* when it has ended: its length */
    bool ended, completed; /* all parts are there; they are an object */
    bool foreign;          /* begun by another process of this run */
    struct s3_part **parts;
    size_t nparts, parts_capacity;
    int nactive;
    rsd_status status; /* of the first part that failed */
    char error[600];
};

/* An upload of an earlier run, or of another process. */
struct earlier_upload {
    char *key, *id;
    uint64_t nbytes, end;
    bool ended;
};

/* A small file that is put when the output is committed. */
struct pending_put {
    char *name, *data;
    size_t n;
};

struct s3_output {
    struct store_output base; /* its journal is in memory */
    struct output_options options;
    struct remote_store *remote; /* the store of the base */
    char run[40];                /* tells the objects of this run from others */
    char *only_key;              /* of an output that is one file; else NULL */
    char *journal_key;
    pthread_mutex_t lock; /* for parts */
    pthread_cond_t changed;
    _Atomic int nactive;      /* parts being sent */
    struct s3_part *full;     /* waits for another part, to be hashed with it; may be NULL */
    struct s3_upload **files; /* by number */
    size_t files_capacity;
    pthread_mutex_t journal_lock; /* for noted_at and nnotes */
    double noted_at;
    size_t nnotes;
    struct earlier_upload *earlier;
    size_t nearlier, earlier_capacity;
    struct name_list owned; /* files of the checkpoint that is replaced */
    struct pending_put *puts;
    size_t nputs, puts_capacity;
    bool committed;
};

rsd_status s3_create(struct store *store, uint32_t file, uint64_t kept, uint64_t nbytes);
rsd_status s3_write(struct store *store, uint32_t file, uint64_t offset, const void *data,
                    size_t n);
rsd_status s3_end_file(struct store *store, uint32_t file, uint64_t nbytes);
rsd_status s3_sync(struct store *store, uint32_t file);
bool s3_has(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
rsd_status s3_stat_output(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version);
void s3_forget_parts(struct s3_upload *upload);
uint64_t s3_uploaded_nbytes(const struct s3_upload *upload); /* of the parts that the service has */

/* Learns which parts of an upload of an earlier run are there. ENOENT: the service does not know it. */
rsd_status s3_adopt_upload(struct s3_upload *upload);
/* Whether the run has completed the file already. ENOENT: it has not. */
rsd_status s3_find_completed(struct s3_upload *upload);
rsd_status s3_complete_upload(struct s3_upload *upload);
void s3_abort_upload(const struct s3_upload *upload);
rsd_status s3_remove_upload(struct remote_store *remote, const char *key, const char *id);
/* Removes unfinished uploads of the files of an output that are not known by their identifiers: the answer to the
 * request that began them was lost. The output has no others any more. */
rsd_status s3_remove_lost_uploads(const struct s3_output *output);

/* The hash and the bytes of a body, which must stay. */
void s3_set_body(struct http_request *request, const void *data, size_t n);

/* Small objects. EEXIST: one is there, and only_new is set. */
rsd_status s3_put_object(struct remote_store *remote, const char *key, const void *data, size_t n,
                         const char *run, bool only_new);
rsd_status s3_load_object(struct remote_store *remote, const char *key, size_t limit,
                          struct bytes *out, char run[40]);
rsd_status s3_remove_object(struct remote_store *remote, const char *key);

/* ---- s3_output.c, which has the row of the table ---- */

/* Sets the key of a file, and learns what an earlier run has uploaded of it, unless that was done before. */
rsd_status s3_prepare_upload(struct s3_output *output, uint32_t file);

/* ---- s3_journal.c ---- */

/* Puts the journal into the bucket. With only_new, EEXIST: another process has put one. */
rsd_status s3_journal_put(struct s3_output *output, bool only_new);
/* The same for the first few notes and with `force`; else if the last put was NOTE_SECONDS ago. */
rsd_status s3_journal_put_if_due(struct s3_output *output, bool force);
rsd_status s3_journal_append(struct s3_output *output, struct text *line);
/* Notes that an upload has begun, or has ended. In place there is no journal. */
rsd_status s3_journal_note_upload(const struct s3_upload *upload);

/* Reads a journal of the bucket. ENOENT: it does not exist. own: it is the journal that this run continues. */
rsd_status s3_journal_load(struct s3_output *output, const char *key, bool own);
/* Reads the journals of other processes, or removes them, or both. */
rsd_status s3_journal_visit_others(struct s3_output *output, bool load, bool remove);
struct earlier_upload *s3_journal_find(struct s3_output *output, const char *key); /* NULL: none */

#endif
