/* s3_output.h - an output in a bucket while it is built, and its journal. Private to store. */
#ifndef S3_OUTPUT_H
#define S3_OUTPUT_H

#include "s3.h"

#define S3_JOURNAL "reshard-journal"

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
    struct store_output base;
    struct output_options options;
    struct remote_store *remote;
    struct s3_uploads uploads;
    char *journal_key;
    pthread_mutex_t journal_lock; /* for what follows */
    int fd;                       /* of the journal, in memory; also that of the base */
    double noted_at;
    size_t nnotes;
    struct earlier_upload *earlier;
    size_t nearlier, earlier_capacity;
    struct name_list owned; /* files of the checkpoint that is replaced */
    struct pending_put *puts;
    size_t nputs, puts_capacity;
    bool committed;
};

/* ---- s3_journal.c ---- */

/* Puts the journal into the bucket. With only_new, EEXIST: another process has put one. */
rsd_status s3_journal_put(struct s3_output *output, bool only_new);
/* The same for the first few notes and with `force`; else if the last put was NOTE_SECONDS ago. */
rsd_status s3_journal_put_if_due(struct s3_output *output, bool force);
rsd_status s3_journal_append(struct s3_output *output, struct text *line);
/* The note_upload of the uploads of an output. */
rsd_status s3_journal_note_upload(void *output, const struct s3_upload *upload);

/* Reads a journal of the bucket. ENOENT: it does not exist. own: it is the journal that this run continues. */
rsd_status s3_journal_load(struct s3_output *output, const char *key, bool own);
/* Reads the journals of other processes, or removes them, or both. */
rsd_status s3_journal_visit_others(struct s3_output *output, bool load, bool remove);
struct earlier_upload *s3_journal_find(struct s3_output *output, const char *key); /* NULL: none */

#endif
