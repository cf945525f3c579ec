/* http_store.c - files behind plain URLs, which are read only.
 *
 *     https://HOST/a/model.safetensors     a file: it ends as one, or it has a query
 *     https://HOST/a                       a directory, of which only files with well-known names are found
 */
#include "remote.h"

#include <stdio.h>

/* The files by which a directory is known. */
static const char *const entry_names[] = {".metadata",
                                          "model.safetensors.index.json",
                                          "model.safetensors",
                                          "diffusion_pytorch_model.safetensors.index.json",
                                          "diffusion_pytorch_model.safetensors",
                                          "pytorch_model.bin.index.json",
                                          "pytorch_model.bin"};
enum { NENTRIES = sizeof entry_names / sizeof *entry_names };

static const char *const file_ends[] = {".safetensors", ".pt",    ".pth", ".bin",  ".ckpt",
                                        ".json",        ".model", ".txt", ".jinja"};

static rsd_status copy_text(const char *from, size_t n, char **to)
{
    *to = slice_copy((struct slice){from, n});
    return *to ? RSD_OK : RSD_ENOMEM;
}

/* Sets the URL of a file. A URL that names one file is sent as the user wrote it. */
static rsd_status set_url_request(struct remote_store *store, const char *name,
                                  struct http_request *request)
{
    struct text path = {0};
    request->storage = store->storage;
    request->plain = true;
    TRY(remote_set_text(&request->base, store->bucket));
    if (store->only_path) { /* the user wrote it as it is sent */
        TRY(remote_set_text(&request->path, store->only_path));
        return remote_set_text(&request->query, store->only_query);
    }
    text_add(&path, "%s", store->prefix);
    url_add_encoded(&path, name, strlen(name), true);
    return text_take(&path, &request->path);
}

static bool ends_like_file(const char *path, size_t n)
{
    for (size_t i = 0; i < sizeof file_ends / sizeof *file_ends; i++) {
        size_t m = strlen(file_ends[i]);
        if (n > m && memcmp(path + n - m, file_ends[i], m) == 0)
            return true;
    }
    return false;
}

/* Checks the characters and the host of a URL. */
static rsd_status check_url(const char *url, const char *host, size_t nhost)
{
    for (const char *at = url; *at; at++)
        if (*at <= ' ' || *at > '~' || *at == '#' || *at == '\\')
            return fail(RSD_EINVAL, "'%s' is not a URL: character %zu must be encoded as %%%02X",
                        url, (size_t)(at - url) + 1, (unsigned)(unsigned char)*at);
    if (nhost == 0)
        return fail(RSD_EINVAL, "'%s' has no host", url);
    if (memchr(host, '@', nhost))
        return fail(RSD_EINVAL, "credentials in a URL are not taken; use a bearer token");
    return RSD_OK;
}

/* Opens the directory of a URL. If the URL names a file, sets *file. */
static rsd_status open_url(const char *url, rsd_storage *storage, struct store **out,
                           const char **file)
{
    const char *host = strstr(url, "://") + 3;
    size_t nhost = strcspn(host, "/?");
    const char *path = host + nhost, *query = strchr(path, '?');
    size_t npath = query ? (size_t)(query - path) : strlen(path);
    struct remote_store *store;
    TRY(check_url(url, host, nhost));
    bool is_file = query || ends_like_file(path, npath);
    size_t ndirectory = npath;
    while (is_file && ndirectory > 0 && path[ndirectory - 1] != '/')
        ndirectory--;
    if (is_file && (ndirectory == 0 || ndirectory == npath))
        return fail(RSD_EINVAL, "'%s' does not name a file", url);
    while (ndirectory > 0 && path[ndirectory - 1] == '/')
        ndirectory--;
    char *shown = NULL;
    TRY(copy_text(url, (size_t)(path - url) + ndirectory, &shown));
    const struct store_ops *ops = strncmp(url, "https:", 6) == 0 ? &https_store : &http_store;
    rsd_status status = remote_open(ops, set_url_request, storage, shown, &store);
    mem_free(shown);
    TRY(status);
    struct text prefix = {0};
    text_add(&prefix, "%.*s/", (int)ndirectory, path);
    status = text_take(&prefix, &store->prefix);
    if (!status)
        status = copy_text(url, (size_t)(path - url), &store->bucket);
    if (!status && is_file)
        status = copy_text(path, npath, &store->only_path);
    if (!status && is_file)
        status = remote_set_text(&store->only_query, query ? query + 1 : "");
    if (status) {
        store_close(&store->base);
        return status;
    }
    const char *name = path + npath;
    while (is_file && name[-1] != '/')
        name--;
    *file = is_file ? name : NULL;
    *out = &store->base;
    return RSD_OK;
}

/* Asks for all well-known names at once. */
static rsd_status list_entries(struct store *base, const char *directory, struct store_listing *out)
{
    struct remote_store *store = remote_store_of(base);
    struct http_request requests[NENTRIES];
    rsd_status status = RSD_OK, answers[NENTRIES];
    if (*directory)
        return RSD_OK;
    for (size_t i = 0; i < NENTRIES; i++) {
        requests[i] = (struct http_request){.method = "HEAD"};
        answers[i] = set_url_request(store, entry_names[i], &requests[i]);
        if (!answers[i])
            answers[i] = http_start(&requests[i]);
        status = status ? status : answers[i];
    }
    for (size_t i = 0; i < NENTRIES; i++) {
        const struct http_answer *answer = &requests[i].answer;
        if (!answers[i])
            answers[i] = http_wait(&requests[i]);
        bool missing = answer->code == 404 || answer->code == 403 || answer->code == 410;
        if (!status && !answers[i] && answer->has_length) {
            status = store_listing_add(out, "", entry_names[i], false);
            if (!status)
                status = remote_note_file(store, entry_names[i], answer->length, answer->etag);
        } else if (!status && answers[i] && !missing)
            status = fail_in(answers[i], "%s: ", entry_names[i]);
        http_request_drop(&requests[i]);
    }
    if (!status && out->n == 0)
        status =
            fail(RSD_ENOENT, "a server does not list its files, and neither .metadata nor "
                             "model.safetensors.index.json nor another well-known file is there");
    return status;
}

#define URL_STORE(name)                                                                            \
    {                                                                                              \
        .scheme = (name), .open = open_url, .close = remote_close, .add = remote_add,              \
        .list = list_entries, .stat = remote_stat, .read = remote_read,                            \
        .prefetch = remote_prefetch, .start_prefetch = remote_start_prefetch,                      \
        .release = remote_release                                                                  \
    }
const struct store_ops http_store = URL_STORE("http"), https_store = URL_STORE("https");
