/* local.h - directories of this machine. Private to store. */
#ifndef LOCAL_H
#define LOCAL_H

#include "store.h"

#include <pthread.h>
#include <stdatomic.h>

struct stat;

/* ---- local_file.c ---- */

extern const struct store_ops local_store;

enum { LOCAL_NSLOTS = 4 };

/* An open descriptor. A file has several, because the kernel reads ahead for each of them: one for each
 * run of reads in which the next begins where the last ended. */
struct local_slot {
    int fd; /* -1: not open */
    int nusers;
    uint64_t next; /* where the last read or write ended */
    uint64_t used_at;
};

struct local_file {
    bool known;    /* its size and version below were read */
    bool repeated; /* a file that was known before is the same one, under another name */
    uint64_t nbytes;
    int64_t version; /* time of the last change of its bytes, in nanoseconds */
    int64_t changed; /* time of the last change of any kind, which no user can set back */
    _Atomic uint64_t unflushed; /* bytes that were written since the last flush began */
    struct local_slot slots[LOCAL_NSLOTS];
};

/* A slot that has an open descriptor. */
struct open_slot {
    uint32_t file;
    int slot;
};

struct local_directory {
    struct store base;
    int fd;
    bool named;           /* file 0 is the one that the user named, which may be a link */
    pthread_mutex_t lock; /* for what follows, and for slots and sizes of files */
    pthread_cond_t unpinned;
    struct local_file *files;
    size_t files_capacity;
    struct name_list identities; /* what tells each file that is read from others */
    struct string_map known_identities;
    struct open_slot *open; /* so that one of many files is found without a look at all */
    size_t nopen, open_capacity;
    size_t max_open;
    uint64_t clock;
};

struct local_directory *local_directory_of(struct store *store);

/* Opens a file for n bytes from an offset on, and keeps it open until local_unpin_slot. */
rsd_status local_pin_slot(struct store *store, uint32_t index, uint64_t offset, uint64_t n,
                          struct local_slot **slot);
void local_unpin_slot(struct store *store, struct local_slot *slot);

/* Fails with the text of an error number, or of errno. */
rsd_status local_fail_open(int error);

/* After a call that failed because too many files are open: closes one. Returns false, with the same errno, if
 * the call failed for another reason or none can be closed. */
bool local_close_idle(struct store *store);
rsd_status local_fail_errno(void);

/* Fails unless the file is a regular file with one name. */
rsd_status local_check_own(const struct stat *found);

/* Makes a store of an open directory; the path is for messages. The store owns fd, also on failure. */
rsd_status local_adopt_directory(int fd, const char *path, size_t n, struct store **out);

/* ---- local_write.c: functions of store_ops ---- */

rsd_status local_create(struct store *store, uint32_t index, uint64_t kept, uint64_t nbytes);
rsd_status local_reserve(struct store *store, uint32_t index, uint64_t offset, uint64_t nbytes);
rsd_status local_write(struct store *store, uint32_t index, uint64_t offset, const void *data,
                       size_t n);
rsd_status local_clone(struct store *store, uint32_t index, uint64_t offset, struct store *from,
                       uint32_t from_index, uint64_t from_offset, uint64_t n);
rsd_status local_sync(struct store *store, uint32_t index);
rsd_status local_sync_names(struct store *store);
rsd_status local_put(struct store *store, const char *name, const void *data, size_t n);
rsd_status local_rename(struct store *store, const char *from, const char *to);
rsd_status local_remove(struct store *store, const char *name);

/* ---- local_link.c ---- */

/* Opens a name of a directory, and follows a link only if it does not lead out. Returns -1 and sets errno
 * on failure: EXDEV for a link that leads out. */
int local_open_inside(int directory_fd, const char *name, int flags);

/* ---- local_entries.c ---- */

bool local_exists(int directory_fd, const char *name);

/* Says whether a name in a directory is that of an open file or directory. A link is not. */
bool local_is_at(int fd, int directory_fd, const char *name);

/* Opens a directory that is not a link. Returns -1 on failure. */
int local_open_real(int directory_fd, const char *name);

/* Calls a function for each entry of a directory. */
typedef rsd_status local_visit_entry(void *context, int directory_fd, const char *name);
rsd_status local_visit(int directory_fd, local_visit_entry *visit, void *context);
rsd_status local_note_entry(void *context, int directory_fd, const char *name); /* sets a bool */
rsd_status local_remove_entries(int directory_fd, const char *kept); /* kept may be NULL */

/* Opens a file that this library makes, and locks it. Fails if it is a link, or anything but a regular file
 * with one name. The flags may have O_CREAT. */
rsd_status local_open_mark(int directory_fd, const char *name, int flags, int lock,
                           const char *path, int *out);

/* ---- local_output.c ---- */

#define COMPLETE_NAME  "reshard-complete"
#define REPLACED_NAME  "reshard-replaced"
#define RETIRED_NAME   "reshard-retired"
#define STAGING_SUFFIX ".reshard-part"
#define OLD_SUFFIX     ".reshard-old"

struct local_output {
    struct store_output base;
    struct output_options options;
    int parent_fd;  /* of the directory that the output will be in; -1: not open */
    int staging_fd; /* likewise */
    char *staging;  /* path of the staging directory */
    size_t nparent; /* bytes of the path in front of the output's name */
    bool moved; /* the staging directory may be in place, or be the old checkpoint: it is kept */
};

/* Returns a, the separator and b in one text, or NULL as mem_new. */
char *local_join(const char *a, const char *separator, const char *b);
rsd_status local_fail_at(const char *path); /* with the text of errno */
rsd_status local_fail_foreign(const char *path);

/* Return the names of the output and of its staging directory in their parent. */
const char *local_output_name(const struct local_output *output);
const char *local_staging_name(const struct local_output *output);

/* Lists the files of the checkpoint in a directory that is open, wherever it is now. */
rsd_status local_list_owned(const struct local_output *output, int directory_fd,
                            struct name_list *owned);

rsd_status local_open_output(const char *path, const struct output_options *options,
                             struct store_output **output);
rsd_status local_check_output(const char *path, const struct output_options *options);
rsd_status local_commit(struct store_output *output);
void local_close_output(struct store_output *output, bool keep);

/* ---- local_recover.c ---- */

/* Marks an old checkpoint as replaced, takes the mark from the new one, and then removes the old one, which
 * has the name `name` now. The lock on the mark tells another process that this one is alive. */
rsd_status local_retire_old(const struct local_output *output, int old_fd, int new_fd,
                            const char *name);

/* Opens a directory that this library has made for an output. *fd is -1 if nothing is there. EEXIST: it is a link, not
 * a directory, or of another user in a directory that is open to all. ours: its owner is not checked, which a
 * server may take for another user than the one of this process. */
rsd_status local_open_made(const struct local_output *output, const char *name, bool ours, int *fd);

/* Finishes what a killed run left between two renames. */
rsd_status local_recover(const struct local_output *output);

#endif
