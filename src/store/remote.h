/* remote.h - files behind URLs: requests, signatures, and what S3 and plain HTTP have in common. Private to
 * store.
 */
#ifndef REMOTE_H
#define REMOTE_H

#include "store.h"

#include <pthread.h>
#include <stdatomic.h>

/* ---- sha256.c ---- */

enum { SHA256_NBYTES = 32, SHA256_NHEX = 65 };
void sha256_of(const void *data, size_t n, unsigned char digest[SHA256_NBYTES]);
/* Two messages at once, in little more time than one. Their pointers are not NULL. */
void sha256_of_pair(const void *const data[2], const size_t n[2], unsigned char *const digests[2]);
void sha256_hmac(const void *key, size_t nkey, const void *data, size_t n,
                 unsigned char mac[SHA256_NBYTES]);
/* For tests: 0 is plain C, 1 the fastest on this machine. */
void sha256_at_level(int level, const void *data, size_t n, unsigned char digest[SHA256_NBYTES]);

/* ---- remote_text.c: URLs, hex, base64, and XML of S3 ---- */

/* Adds text with everything but letters, digits and -._~ as %XX; with `slashes`, / stays. */
void url_add_encoded(struct text *text, const char *from, size_t n, bool slashes);
/* Replaces %XX, and + by a space, in place, as in a form. Returns false for an invalid one, or one that is a zero byte. */
bool url_decode(char *text);
/* Adds NAME=VALUE to a query, with an & unless it is the first. */
void url_add_parameter(struct text *query, const char *name, const char *value);

/* Replaces a text that is owned by a copy of another. */
rsd_status remote_set_text(char **out, const char *text);
/* Copies a text that fits; else `out` becomes "". */
void remote_fit_text(char *out, size_t out_nbytes, const char *text);
void hex_write(const unsigned char *bytes, size_t n, char *hex);
enum { BASE64_NCHARS = 48 }; /* of a SHA-256, with the final zero */
void base64_write(const unsigned char *bytes, size_t n, char *chars);
bool base64_read(const char *chars, unsigned char *bytes, size_t n); /* false: not n bytes */
int64_t time_read_http(const char *text); /* "Mon, 16 Nov 2026 14:08:04 GMT"; 0: not a time */
int64_t time_read_iso(const char *text);  /* "2026-11-16T14:08:04Z"; 0: not a time */

/* Elements of a document, in order. There are no attributes, comments or entities of its own in what S3
 * sends: a document with a declaration (<!) is refused, so entities cannot grow. */
struct xml_reader {
    const char *at, *end;
    int depth;
    char name[64];    /* of the element that was entered or left */
    bool entered;     /* else it was left */
    struct text text; /* of the element that was left, decoded */
};
enum xml_step { XML_NEXT, XML_END, XML_BROKEN };
enum xml_step xml_read_next(struct xml_reader *reader);
void xml_reader_drop(struct xml_reader *reader);

/* Copies the text of the first element of this name; false: it has none, or one that does not fit. */
bool xml_find_text(const void *document, size_t n, const char *name, char *out, size_t out_nbytes);

/* ---- curl_library.c: libcurl, which is opened at run time ---- */

struct curl_message {
    int kind;
    void *easy;
    union {
        void *whatever;
        int code;
    } data;
};

struct curl_library {
    int (*global_init)(long flags);
    void *(*easy_init)(void);
    int (*easy_setopt)(void *easy, int option, ...);
    int (*easy_getinfo)(void *easy, int info, ...);
    int (*easy_perform)(void *easy);
    void (*easy_reset)(void *easy);
    void (*easy_cleanup)(void *easy);
    const char *(*easy_strerror)(int code);
    void *(*slist_append)(void *list, const char *line);
    void (*slist_free_all)(void *list);
    void *(*multi_init)(void);
    int (*multi_setopt)(void *multi, int option, ...);
    int (*multi_add_handle)(void *multi, void *easy);
    int (*multi_remove_handle)(void *multi, void *easy);
    int (*multi_perform)(void *multi, int *nrunning);
    int (*multi_poll)(void *multi, void *extra, unsigned nextra, int milliseconds, int *nready);
    int (*multi_wakeup)(void *multi);
    struct curl_message *(*multi_info_read)(void *multi, int *nleft);
    int (*multi_cleanup)(void *multi);
};

/* EUNSUPPORTED: libcurl is not installed, or too old. */
rsd_status curl_library_open(const struct curl_library **library);

/* The numbers of libcurl's interface that are used. */
enum curl_number {
    CURL_ERRORBUFFER = 10010,
    CURL_WRITEDATA = 10001,
    CURL_URL = 10002,
    CURL_PROXY = 10004,
    CURL_POSTFIELDS = 10015,
    CURL_USERAGENT = 10018,
    CURL_HTTPHEADER = 10023,
    CURL_HEADERDATA = 10029,
    CURL_XFERINFODATA = 10057,
    CURL_CUSTOMREQUEST = 10036,
    CURL_CAINFO = 10065,
    CURL_PRIVATE = 10103,
    CURL_NOPROXY = 10177,
    CURL_WRITEFUNCTION = 20011,
    CURL_HEADERFUNCTION = 20079,
    CURL_XFERINFOFUNCTION = 20219,
    CURL_POSTFIELDSIZE_LARGE = 30120,
    CURL_LOW_SPEED_LIMIT = 19,
    CURL_LOW_SPEED_TIME = 20,
    CURL_NOPROGRESS = 43,
    CURL_NOBODY = 44,
    CURL_FOLLOWLOCATION = 52,
    CURL_MAXREDIRS = 68,
    CURL_HTTP_VERSION = 84,
    CURL_BUFFERSIZE = 98,
    CURL_NOSIGNAL = 99,
    CURL_TIMEOUT_MS = 155,
    CURL_CONNECTTIMEOUT_MS = 156,
    CURL_PROTOCOLS = 181,
    CURL_REDIR_PROTOCOLS = 182,
    CURL_TCP_KEEPALIVE = 213,
    CURL_PATH_AS_IS = 234,
    CURL_UPLOAD_BUFFERSIZE = 280,
    CURL_MULTI_MAXCONNECTS = 6,
    CURL_INFO_PRIVATE = 0x100015,
    CURL_INFO_RESPONSE_CODE = 0x200002,
    CURL_VERSION_1_1 = 2,
    CURL_PROTOCOL_HTTP = 1,
    CURL_PROTOCOL_HTTPS = 2,
    CURL_DONE = 1
};

/* ---- http.c: one request and its answer ---- */

enum { MAX_HEADERS = 10, MAX_ETAG = 200 };

struct http_header {
    const char *name; /* in small letters; a literal */
    char *value;
};

struct http_answer {
    long code; /* 200 and so on; 0: none */
    bool has_length, has_range, encoded;
    uint64_t length, first, last, total; /* Content-Length, Content-Range */
    char etag[MAX_ETAG];
    char checksum[100]; /* x-amz-checksum-sha256 */
    char region[40];    /* x-amz-bucket-region */
    char run[40];       /* x-amz-meta-reshard-run */
    int64_t date;       /* of the server; 0: unknown */
    double retry_after; /* seconds */
};

/* A request. The caller sets what is above `answer`, and keeps `body` and `out` until it is finished. */
struct http_request {
    rsd_storage *storage;
    const char *method;
    char *base, *path, *query; /* "https://host:port", "/a%20b", "x=1&y=" sorted; owned */
    struct http_header headers[MAX_HEADERS];
    size_t nheaders;
    bool failed;    /* no memory for one of the above */
    bool sign;      /* with the credentials for S3 */
    bool plain;     /* of an http(s):// path: bearer token, redirects */
    bool slow;      /* the service may think for minutes */
    bool for_range; /* out_nbytes from offset on, else the whole file */
    const void *body;
    size_t body_nbytes;
    char body_sha256[SHA256_NHEX]; /* "": of no bytes */
    char *out;                     /* of out_nbytes; NULL: the body goes to `document` */
    size_t out_nbytes;
    uint64_t offset, total;                     /* total: of the file; 0: not checked */
    const char *etag;                           /* expected; NULL: any */
    size_t limit;                               /* of `document` */
    void (*done)(struct http_request *request); /* from the thread of the engine; NULL: http_wait */
    void *context;

    struct http_answer answer;
    struct bytes document;
    size_t nreceived, nheader_bytes;
    rsd_status status;
    char error[400];

    struct http_engine *engine;
    /* Of the engine. */
    int nattempts, nrefreshes;
    double not_before;
    int64_t signed_at; /* seconds since 1970 */
    _Atomic bool cancelled;
    bool finished, overflowed, flooded;
    void *easy, *header_list;
    char curl_error[256];
    struct http_request *next;
};

void http_set_header(struct http_request *request, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void http_request_drop(struct http_request *request);

/* Prepares an easy handle for an attempt: clears the answer, signs, sets all options. */
rsd_status http_prepare(struct http_request *request, const struct curl_library *curl);

/* What an attempt came to. HTTP_AGAIN: worth another attempt, perhaps after `delay` seconds. The error is set
 * for all but HTTP_DONE. */
enum http_outcome { HTTP_DONE, HTTP_AGAIN, HTTP_FAILED };
enum http_outcome http_judge(struct http_request *request, const struct curl_library *curl,
                             int curl_code, double *delay);

/* ---- http_engine.c: many requests at once, on threads of their own ---- */

enum { HTTP_NENGINES = 2 };

rsd_status http_start(struct http_request *request);
/* Waits for a request without `done`. On failure sets the error text. */
rsd_status http_wait(struct http_request *request);
rsd_status http_run(struct http_request *request); /* both */
/* Makes a request end soon, with ECANCELLED. */
void http_cancel(struct http_request *request);

struct http_engine;
void http_engine_stop(struct http_engine *engine); /* accepts NULL */

/* ---- sigv4.c ---- */

struct signing_key {
    const char *access_key, *secret_key, *session_token; /* NULL: none */
    const char *region;
};
/* Adds the headers of a signature, for a time in seconds since 1970, to those of the request. */
void sigv4_sign(struct http_request *request, const struct signing_key *key, int64_t now,
                struct text *header_lines);

/* ---- storage.c ---- */

enum credentials_source {
    CREDENTIALS_FIXED,
    CREDENTIALS_LOADED,    /* by the caller's function */
    CREDENTIALS_CONTAINER, /* of a metadata service */
    CREDENTIALS_INSTANCE
};

/* The length of most requests, without a small limit on memory, and how many buffers are kept to be used again. */
enum { STORAGE_BLOCK_NBYTES = 8 << 20, STORAGE_MAX_KEPT = 64 };

struct rsd_storage {
    _Atomic int nusers;
    char *endpoint, *region, *bearer_token, *ca_file, *proxies[2],
        *no_proxy; /* proxies: http, https */
    bool anonymous;
    int path_style, max_requests, max_attempts;
    double timeout;
    uint64_t max_nbytes;
    size_t block_nbytes; /* the most that one request reads: several fit within max_nbytes */

    pthread_mutex_t credentials_lock; /* for what follows */
    enum credentials_source source;
    rsd_load_credentials *load;
    void *load_context;
    char *access_key, *secret_key, *session_token;
    char *metadata_url, *metadata_token, *metadata_token_file;
    int64_t expires; /* 0: never */
    bool loaded;

    _Atomic int64_t clock_offset; /* seconds that the service's clock is ahead */
    _Atomic int64_t nrequests, nretries, nbytes_received, nbytes_sent;

    pthread_mutex_t lock; /* for what follows */
    pthread_cond_t freed;
    uint64_t nbytes_used[2];      /* by enum storage_use */
    char *kept[STORAGE_MAX_KEPT]; /* buffers of block_nbytes that are free */
    size_t nkept;
    struct http_engine *engines[HTTP_NENGINES]; /* NULL: not needed yet */
};

/* Takes a reference; makes a storage without credentials for NULL. */
rsd_status storage_use(rsd_storage *given, rsd_storage **storage);

/* Adds header lines: signature, token. Loads credentials when needed. */
rsd_status storage_sign(struct http_request *request, struct text *header_lines);
/* Makes the next signature load credentials. Returns false if they are fixed. */
bool storage_expire_credentials(rsd_storage *storage);

/* Counts memory; each use has half of the limit. Without `force`, returns false if the limit would be exceeded
 * and something is in use. */
enum storage_use { STORAGE_READS, STORAGE_WRITES };
bool storage_reserve(rsd_storage *storage, enum storage_use use, uint64_t nbytes, bool force);
/* The same, but waits until there is memory, or *nactive is 0: then nobody would free any. */
void storage_reserve_wait(rsd_storage *storage, enum storage_use use, uint64_t nbytes,
                          _Atomic int *nactive);
/* Whether so many bytes could be reserved. */
bool storage_can_reserve(rsd_storage *storage, enum storage_use use, uint64_t nbytes);

/* Returns a buffer for bytes that were reserved. Buffers are used again, so their bytes are not zeros; pages of a new
 * one would cost more than the copy into it. NULL: out of memory, and the bytes are reserved no more. */
char *storage_new_buffer(rsd_storage *storage, enum storage_use use, size_t nbytes);
/* Frees a buffer, and what was reserved for it. Accepts NULL. */
void storage_free_buffer(rsd_storage *storage, enum storage_use use, char *buffer, size_t nbytes);
/* Frees the buffers that are kept. */
void storage_trim(rsd_storage *storage);

/* Replaces a text that becomes part of a request; NULL changes nothing. EINVAL: it has a control character. */
rsd_status storage_set_option(const char *name, const char *value, char **out);

/* Sets options that the caller left open from "NAME=value" texts and the files that they name. */
rsd_status credentials_find(rsd_storage *storage, const rsd_storage_options *options);
/* Asks the metadata service; the lock is taken. */
rsd_status credentials_load_metadata(rsd_storage *storage);

/* ---- remote_store.c: what is read through requests ---- */

struct remote_store;

/* Sets the URL of a request for a file of the store, which S3 and plain HTTP do differently. */
typedef rsd_status remote_set_request(struct remote_store *store, const char *name,
                                      struct http_request *request);

struct remote_block;
struct remote_file {
    bool known;
    uint64_t nbytes;
    int64_t version;
    char *etag;                  /* NULL: none */
    struct remote_block *blocks; /* by offset */
    size_t nblocks;
};

/* What a listing told of a file that may be added later. */
struct remote_known {
    char *name, *etag;
    uint64_t nbytes;
};

struct s3_output;

struct remote_store {
    struct store base;
    remote_set_request *set_request;
    rsd_storage *storage;
    char *bucket; /* of http: "https://host:port" */
    char *prefix; /* what is before the name of a file: "" or with a slash at its end */
    char *only_path, *only_query; /* http: of the one file that the user named */
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct remote_file *files;
    size_t files_capacity;
    struct remote_known *known;
    size_t nknown, known_capacity;
    struct string_map known_names;
    struct remote_block *waiting, **waiting_end; /* not requested yet */
    int nactive;                                 /* blocks being requested */
    struct s3_output *output;                    /* that the files are of; else NULL */
};

static inline struct remote_store *remote_store_of(struct store *store)
{
    return (struct remote_store *)(void *)store;
}

rsd_status remote_open(const struct store_ops *ops, remote_set_request *set_request,
                       rsd_storage *storage, const char *path, struct remote_store **store);
void remote_close(struct store *store);
rsd_status remote_add(struct store *store);
rsd_status remote_stat(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version);
rsd_status remote_read(struct store *store, uint32_t file, uint64_t offset, void *out, size_t n);
void remote_prefetch(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
void remote_start_prefetch(struct store *store);
void remote_release(struct store *store, uint32_t file, uint64_t offset, uint64_t n);
/* Keeps what a listing told of a file. */
rsd_status remote_note_file(struct remote_store *store, const char *name, uint64_t nbytes,
                            const char *etag);
/* HEAD of a name. ENOENT: it does not exist. */
rsd_status remote_head(struct remote_store *store, const char *name, struct http_answer *answer);

/* ---- the rows ---- */

extern const struct store_ops s3_store, http_store, https_store;

#endif
