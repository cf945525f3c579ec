/* reshard_storage.h - part 8 of reshard.h, which includes it: checkpoints in object storage.
 *
 *     rsd_storage_options options = RSD_INIT(rsd_storage_options);
 *     options.environment = (const char *const *)environ;         AWS_... variables, profiles, roles
 *     rsd_storage_new(&options, &storage);
 *     open_options.storage = storage;
 *     rsd_checkpoint_open("s3://bucket/step-1000", &open_options, &checkpoint);
 */
#ifndef RESHARD_STORAGE_H
#define RESHARD_STORAGE_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 8. Object storage -----------------------------------------------------------------------
 *
 * Wherever a path of a checkpoint is taken, these are taken too:
 *
 *     s3://BUCKET/PREFIX     any service that speaks the protocol of Amazon S3, for reading and writing
 *     https://HOST/PATH      (and http://) for reading: a file, a directory with an index of safetensors or
 *                            torch.save files, or a DCP directory with its .metadata
 *
 * libcurl does the transfers. It is opened when the first path needs it: EUNSUPPORTED if it is not installed.
 * A storage has the credentials, the limits and the connections. Several checkpoints may use it at once. It
 * starts at most two threads. Without a storage, requests are not signed and the service is Amazon's.
 *
 * Only bytes that are needed are requested, ahead of their use, up to the limits on requests and memory.
 * Requests that fail for a passing reason (status 429 or 5xx, broken connections, short answers) are
 * repeated after a random, growing delay. An error names the bucket, the key and the bytes.
 */
typedef struct rsd_storage rsd_storage; /* shared */

/* Credentials of an S3 service. The text must stay valid until the next call of the function that sets it. */
typedef struct rsd_credentials {
    size_t struct_nbytes; /* use RSD_INIT */
    const char *access_key, *secret_key;
    const char *session_token; /* NULL: none */
    int64_t expires;           /* seconds since 1970; 0: never */
} rsd_credentials;

/* Sets the current credentials. Called before the first request, shortly before credentials expire, and when
 * the service calls them expired; one call at a time, from any thread. */
typedef rsd_status rsd_load_credentials(void *context, rsd_credentials *credentials);

typedef struct rsd_storage_options {
    size_t struct_nbytes; /* use RSD_INIT */

    /* "NAME=value" texts, then NULL: what the fields below leave open is taken from AWS_ACCESS_KEY_ID and the
     * other AWS_... variables, from the shared credentials and config files, and from the metadata services of
     * containers and instances; proxies from HTTPS_PROXY, HTTP_PROXY and NO_PROXY. NULL: from nowhere. */
    const char *const *environment;

    const char *endpoint; /* "https://host:port" of the S3 service; NULL: Amazon's */
    const char *region;   /* NULL: us-east-1 */
    const char *profile;  /* in the shared files; NULL: AWS_PROFILE, or "default" */
    const char *access_key, *secret_key, *session_token;
    rsd_load_credentials *load; /* instead of the three above */
    void *load_context;
    const char *bearer_token; /* sent to the host of an http(s):// path, and to no other */
    const char *ca_file;      /* certificates to trust, in PEM; NULL: those of the system */
    const char *proxy;        /* URL; NULL: none */
    int32_t anonymous;        /* 1: requests are not signed */
    int32_t path_style;   /* 1: the bucket is in the path, 2: in the host name; 0: in the path if
                               * there is an endpoint, or if the bucket's name has a dot */
    int32_t max_requests; /* at a time; 0: 32 */
    int32_t max_attempts; /* per request; 0: 8 */
    int64_t max_nbytes;   /* for data read ahead and parts being uploaded; 0: 256 MB */
    double timeout;       /* seconds without data; 0: 30 */
} rsd_storage_options;

/* Creates a storage: credentials and limits for paths that are URLs. options may be NULL. EINVAL: an invalid option.
 * EIO: a file of credentials cannot be read. Opens no connection. */
rsd_status rsd_storage_new(const rsd_storage_options *options, rsd_storage **storage);

/* Frees a storage. One that is used by an open checkpoint stays until that is closed. Accepts NULL. */
void rsd_storage_free(rsd_storage *storage);

/* What went over the network. */
typedef struct rsd_traffic {
    size_t struct_nbytes; /* use RSD_INIT */
    int64_t nrequests;    /* attempts, with those that were repeated */
    int64_t nretries;
    int64_t nbytes_received, nbytes_sent; /* without headers */
} rsd_traffic;

/* Returns what went over the network so far, for all checkpoints that use the storage. */
rsd_status rsd_storage_traffic(const rsd_storage *storage, rsd_traffic *traffic);

/* Called for an upload: with its path, the time it was begun (as the service writes it) and an identifier. Any status
 * but RSD_OK ends the call with it. */
typedef rsd_status rsd_on_upload(void *context, const char *path, const char *begun,
                                 const char *identifier);

/* Finds uploads below s3://BUCKET/PREFIX that were begun and neither completed nor removed: the parts of a killed
 * run stay in the bucket, and are paid for, until they are removed. on_upload is called for each, and may be NULL.
 * With remove, they are removed then. Do not remove those of a run in progress. *nuploads: how many were found. */
rsd_status rsd_storage_uploads(rsd_storage *storage, const char *path, int32_t remove,
                               rsd_on_upload *on_upload, void *context, int64_t *nuploads);

/* Called for a file. Any status but RSD_OK ends the call with it. */
typedef rsd_status rsd_on_file(void *context, const char *name);

/* Calls on_file with the name of each file that is directly in a directory, or below s3://BUCKET/PREFIX/. Behind
 * https:// only the files by which a checkpoint is known are found. RSD_ENOENT: there is nothing at the path. */
rsd_status rsd_storage_list(rsd_storage *storage, const char *path, rsd_on_file *on_file,
                            void *context);

/* Reads a whole file, with a zero behind its last byte. *data is for rsd_free; if data is NULL, only the length is
 * returned. RSD_ENOENT: there is no file at the path. RSD_ELIMIT: it has more than max_nbytes. */
rsd_status rsd_storage_load(rsd_storage *storage, const char *path, int64_t max_nbytes, char **data,
                            int64_t *nbytes);

#ifdef __cplusplus
}
#endif

#endif
