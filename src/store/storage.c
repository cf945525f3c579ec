/* storage.c - the object behind rsd_storage: options, credentials, limits and counters. */
#include "remote.h"

#include <stdio.h>
#include <strings.h>

enum { REFRESH_SECONDS = 300 }; /* before credentials expire */
enum { LEAST_BLOCK_NBYTES = 1 << 20, BLOCKS_IN_MEMORY = 16 };

/* ---- making ---- */

rsd_status storage_set_option(const char *name, const char *value, char **out)
{
    if (!value)
        return RSD_OK;
    for (const char *at = value; *at; at++)
        if ((unsigned char)*at < ' ' || *at == 0x7f)
            return fail(RSD_EINVAL, "%s has a control character in it", name);
    return remote_set_text(out, value);
}

/* A region is a part of the host that requests go to. */
static rsd_status check_region_name(const char *region)
{
    static const char fine[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    size_t n = strspn(region, fine);
    return region[n] ? fail(RSD_EINVAL, "region '%s' has the character '%c'", region, region[n])
                     : RSD_OK;
}

/* "https://host:port", with nothing behind it and no default port: it is also what is signed. */
static rsd_status clean_endpoint(char *endpoint)
{
    bool secure = strncasecmp(endpoint, "https://", 8) == 0;
    if (!secure && strncasecmp(endpoint, "http://", 7) != 0)
        return fail(RSD_EINVAL, "endpoint '%s' must begin with https:// or http://", endpoint);
    char *host = endpoint + (secure ? 8 : 7);
    size_t n = strcspn(host, "/?#@\\ ");
    if (n == 0 || (host[n] && strcmp(host + n, "/") != 0))
        return fail(RSD_EINVAL, "endpoint '%s' must be a host and perhaps a port", endpoint);
    host[n] = '\0';
    const char *port = secure ? ":443" : ":80";
    size_t m = strlen(port);
    if (n > m && strcmp(host + n - m, port) == 0)
        host[n - m] = '\0';
    for (char *at = endpoint; *at; at++)
        if (*at >= 'A' && *at <= 'Z')
            *at = (char)(*at | 0x20);
    return RSD_OK;
}

/* Copies and checks the options, with defaults. What they leave open is found in the environment, if they allow
 * it. */
static rsd_status copy_options(rsd_storage *storage, const rsd_storage_options *options)
{
    storage->anonymous = options->anonymous != 0;
    storage->path_style = options->path_style;
    storage->max_requests = options->max_requests ? options->max_requests : 32;
    storage->max_attempts = options->max_attempts ? options->max_attempts : 8;
    storage->max_nbytes = options->max_nbytes ? (uint64_t)options->max_nbytes : DEFAULT_MAX_NBYTES;
    uint64_t block_nbytes = storage->max_nbytes / BLOCKS_IN_MEMORY;
    storage->block_nbytes = block_nbytes > STORAGE_BLOCK_NBYTES ? STORAGE_BLOCK_NBYTES
                            : block_nbytes < LEAST_BLOCK_NBYTES ? LEAST_BLOCK_NBYTES
                                                                : (size_t)block_nbytes;
    storage->timeout = options->timeout > 0 ? options->timeout : 30;
    if (options->max_requests < 0 || options->max_requests > 1000)
        return fail(RSD_EINVAL, "max_requests %d out of range (0 to 1000)", options->max_requests);
    if (options->path_style < 0 || options->path_style > 2)
        return fail(RSD_EINVAL, "path_style %d out of range (0 to 2)", options->path_style);
    if (options->max_attempts < 0 || options->max_nbytes < 0)
        return fail(RSD_EINVAL, "max_attempts %d and max_nbytes %lld must not be negative",
                    options->max_attempts, (long long)options->max_nbytes);
    if ((options->access_key != NULL) != (options->secret_key != NULL))
        return fail(RSD_EINVAL, "access_key and secret_key must be set together");
    storage->load = options->load;
    storage->load_context = options->load_context;
    TRY(storage_set_option("endpoint", options->endpoint, &storage->endpoint));
    TRY(storage_set_option("region", options->region, &storage->region));
    TRY(storage_set_option("access_key", options->access_key, &storage->access_key));
    TRY(storage_set_option("secret_key", options->secret_key, &storage->secret_key));
    TRY(storage_set_option("session_token", options->session_token, &storage->session_token));
    TRY(storage_set_option("bearer_token", options->bearer_token, &storage->bearer_token));
    TRY(storage_set_option("ca_file", options->ca_file, &storage->ca_file));
    TRY(storage_set_option("proxy", options->proxy, &storage->proxies[0]));
    TRY(storage_set_option("proxy", options->proxy, &storage->proxies[1]));
    if (options->load)
        storage->source = CREDENTIALS_LOADED;
    if (options->environment)
        TRY(credentials_find(storage, options));
    if (storage->endpoint)
        TRY(clean_endpoint(storage->endpoint));
    return storage->region ? check_region_name(storage->region)
                           : storage_set_option("region", "us-east-1", &storage->region);
}

static void drop_storage(rsd_storage *storage)
{
    for (int i = 0; i < HTTP_NENGINES; i++)
        http_engine_stop(storage->engines[i]);
    storage_trim(storage);
    char *owned[] = {storage->endpoint,           storage->region,
                     storage->bearer_token,       storage->ca_file,
                     storage->proxies[0],         storage->proxies[1],
                     storage->no_proxy,           storage->access_key,
                     storage->secret_key,         storage->session_token,
                     storage->metadata_url,       storage->metadata_token,
                     storage->metadata_token_file};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
    pthread_mutex_destroy(&storage->lock);
    pthread_mutex_destroy(&storage->credentials_lock);
    pthread_cond_destroy(&storage->freed);
    mem_free(storage);
}

rsd_status rsd_storage_new(const rsd_storage_options *given, rsd_storage **out)
{
    rsd_storage_options options;
    TRY(options_copy("rsd_storage_options", given, &options, sizeof options));
    rsd_storage *storage = mem_new(1, sizeof *storage);
    if (!storage)
        return RSD_ENOMEM;
    atomic_init(&storage->nusers, 1);
    pthread_mutex_init(&storage->lock, NULL);
    pthread_mutex_init(&storage->credentials_lock, NULL);
    pthread_cond_init(&storage->freed, NULL);
    rsd_status status = copy_options(storage, &options);
    if (status)
        drop_storage(storage);
    else
        *out = storage;
    return status;
}

void rsd_storage_free(rsd_storage *storage)
{
    if (storage && atomic_fetch_sub(&storage->nusers, 1) == 1)
        drop_storage(storage);
}

rsd_status storage_use(rsd_storage *given, rsd_storage **storage)
{
    if (!given)
        return rsd_storage_new(NULL, storage);
    atomic_fetch_add(&given->nusers, 1);
    *storage = given;
    return RSD_OK;
}

rsd_status rsd_storage_traffic(const rsd_storage *storage, rsd_traffic *traffic)
{
    TRY(report_check("rsd_traffic", traffic));
    rsd_traffic result = {.nrequests = atomic_load(&storage->nrequests),
                          .nretries = atomic_load(&storage->nretries),
                          .nbytes_received = atomic_load(&storage->nbytes_received),
                          .nbytes_sent = atomic_load(&storage->nbytes_sent)};
    report_copy(traffic, &result, sizeof result);
    return RSD_OK;
}

/* ---- credentials ---- */

/* Lets the function of the caller load new credentials. */
static rsd_status call_loader(rsd_storage *storage)
{
    rsd_credentials found = {.struct_nbytes = sizeof found};
    TRY(storage->load(storage->load_context, &found));
    mem_free(storage->session_token);
    storage->session_token = NULL;
    TRY(storage_set_option("access_key", found.access_key, &storage->access_key));
    TRY(storage_set_option("secret_key", found.secret_key, &storage->secret_key));
    TRY(storage_set_option("session_token", found.session_token, &storage->session_token));
    storage->expires = found.expires;
    return RSD_OK;
}

/* Loads credentials at first, and when they will expire soon. Requires the lock. */
static rsd_status load_credentials(rsd_storage *storage, int64_t now)
{
    bool stale = !storage->loaded || (storage->expires && now > storage->expires - REFRESH_SECONDS);
    if (storage->source == CREDENTIALS_FIXED || !stale)
        return RSD_OK;
    TRY(storage->source == CREDENTIALS_LOADED ? call_loader(storage)
                                              : credentials_load_metadata(storage));
    storage->loaded = true;
    return RSD_OK;
}

bool storage_expire_credentials(rsd_storage *storage)
{
    pthread_mutex_lock(&storage->credentials_lock);
    bool can = storage->source != CREDENTIALS_FIXED;
    storage->loaded = false;
    pthread_mutex_unlock(&storage->credentials_lock);
    return can;
}

/* Signs a request with credentials that have not expired. Without credentials it is sent unsigned. */
static rsd_status sign_locked(struct http_request *request, struct text *lines)
{
    rsd_storage *storage = request->storage;
    int64_t now = (int64_t)time(NULL) + atomic_load(&storage->clock_offset);
    TRY(load_credentials(storage, now));
    request->signed_at = now;
    if (!storage->access_key || !storage->secret_key)
        return RSD_OK;
    struct signing_key key = {storage->access_key, storage->secret_key, storage->session_token,
                              storage->region};
    sigv4_sign(request, &key, now, lines);
    return RSD_OK;
}

rsd_status storage_sign(struct http_request *request, struct text *lines)
{
    rsd_storage *storage = request->storage;
    if (request->plain && storage->bearer_token)
        text_add(lines, "authorization: Bearer %s\n", storage->bearer_token);
    if (!request->sign || storage->anonymous)
        return RSD_OK;
    pthread_mutex_lock(&storage->credentials_lock);
    rsd_status status = sign_locked(request, lines);
    pthread_mutex_unlock(&storage->credentials_lock);
    return status;
}

/* ---- memory ---- */

/* The lock is taken. */
static bool fits_limit(const rsd_storage *storage, enum storage_use use, uint64_t nbytes)
{
    uint64_t used = storage->nbytes_used[use], most = storage->max_nbytes / 2;
    return used == 0 || (used <= most && nbytes <= most - used);
}

bool storage_reserve(rsd_storage *storage, enum storage_use use, uint64_t nbytes, bool force)
{
    pthread_mutex_lock(&storage->lock);
    bool fits = force || fits_limit(storage, use, nbytes);
    if (fits)
        storage->nbytes_used[use] += nbytes;
    pthread_mutex_unlock(&storage->lock);
    return fits;
}

void storage_reserve_wait(rsd_storage *storage, enum storage_use use, uint64_t nbytes,
                          _Atomic int *nactive)
{
    pthread_mutex_lock(&storage->lock);
    while (!fits_limit(storage, use, nbytes) && atomic_load(nactive) > 0)
        pthread_cond_wait(&storage->freed, &storage->lock);
    storage->nbytes_used[use] += nbytes;
    pthread_mutex_unlock(&storage->lock);
}

bool storage_can_reserve(rsd_storage *storage, enum storage_use use, uint64_t nbytes)
{
    pthread_mutex_lock(&storage->lock);
    bool fits = fits_limit(storage, use, nbytes);
    pthread_mutex_unlock(&storage->lock);
    return fits;
}

/* Frees buffers that are kept until they fit within the limit, beside what is reserved. The lock is taken. */
static void trim_kept(rsd_storage *storage, uint64_t limit)
{
    uint64_t used = storage->nbytes_used[STORAGE_READS] + storage->nbytes_used[STORAGE_WRITES];
    while (storage->nkept > 0 && used + storage->nkept * storage->block_nbytes > limit)
        mem_free_buffer(storage->kept[--storage->nkept], storage->block_nbytes);
}

/* Ends a reservation of memory. The lock is taken. */
static void release_reserved(rsd_storage *storage, enum storage_use use, uint64_t nbytes)
{
    storage->nbytes_used[use] -= nbytes;
    pthread_cond_broadcast(&storage->freed);
}

char *storage_new_buffer(rsd_storage *storage, enum storage_use use, size_t nbytes)
{
    char *buffer = NULL;
    pthread_mutex_lock(&storage->lock);
    if (nbytes == storage->block_nbytes && storage->nkept > 0)
        buffer = storage->kept[--storage->nkept];
    trim_kept(storage, storage->max_nbytes);
    pthread_mutex_unlock(&storage->lock);
    if (!buffer && !(buffer = mem_new_buffer(nbytes))) {
        pthread_mutex_lock(&storage->lock);
        release_reserved(storage, use, nbytes);
        pthread_mutex_unlock(&storage->lock);
    }
    return buffer;
}

void storage_free_buffer(rsd_storage *storage, enum storage_use use, char *buffer, size_t nbytes)
{
    if (!buffer)
        return;
    pthread_mutex_lock(&storage->lock);
    bool kept = nbytes == storage->block_nbytes && storage->nkept < STORAGE_MAX_KEPT;
    if (kept)
        storage->kept[storage->nkept++] = buffer;
    release_reserved(storage, use, nbytes);
    pthread_mutex_unlock(&storage->lock);
    if (!kept)
        mem_free_buffer(buffer, nbytes);
}

void storage_trim(rsd_storage *storage)
{
    pthread_mutex_lock(&storage->lock);
    trim_kept(storage, 0);
    pthread_mutex_unlock(&storage->lock);
}

/* ---- single files ---- */

rsd_status rsd_storage_list(rsd_storage *storage, const char *path, rsd_on_file *on_file,
                            void *context)
{
    struct store *store;
    struct store_listing listing;
    const char *file;
    TRY(store_open(path, storage, &store, &file));
    rsd_status status = store_list(store, "", &listing);
    if (status)
        status = fail_in(status, "%s: ", path);
    for (size_t i = 0; !status && i < listing.n && !file; i++)
        if (!listing.entries[i].directory)
            status = on_file(context, listing.entries[i].base);
    if (!status && file)
        status = fail(RSD_EINVAL, "%s is not a directory", path);
    store_listing_drop(&listing);
    store_close(store);
    return status;
}

rsd_status rsd_storage_load(rsd_storage *storage, const char *path, int64_t max_nbytes, char **data,
                            int64_t *nbytes)
{
    struct store *store;
    const char *name;
    char *bytes = NULL;
    uint32_t file;
    uint64_t length = 0;
    size_t n = 0;
    TRY(store_open(path, storage, &store, &name));
    if (!name) {
        store_close(store);
        return fail(RSD_ENOENT, "%s is not a file", path);
    }
    rsd_status status = store_add_file(store, (struct slice){name, strlen(name)}, &file);
    if (!status)
        status = store_stat(store, file, &length, NULL);
    if (!status && data)
        status = store_load(store, file, max_nbytes > 0 ? (uint64_t)max_nbytes : 0, &bytes, &n);
    if (status)
        status = fail_in(status, "%s: ", path);
    store_close(store);
    if (!status && data)
        *data = bytes;
    if (!status)
        *nbytes = (int64_t)length;
    return status;
}
