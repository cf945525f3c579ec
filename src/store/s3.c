/* s3.c - the files of a bucket of S3: their URLs, and listings.
 *
 *     s3://BUCKET/a/b      the object a/b, or else all objects that begin with a/b/
 */
#include "s3.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_PAGES = 10000, MAX_ENTRIES = 1000000, MAX_PAGE_NBYTES = 16 << 20, PAGE_ATTEMPTS = 3 };
enum { MAX_NAMES_NBYTES = 256 << 20 }; /* of all entries */
enum { MAX_PAGES_NBYTES = 1 << 30, MAX_EMPTY_PAGES = 100 };

/* ---- requests ---- */

static bool is_bucket_name(const char *name, size_t n)
{
    bool fine = n >= 1 && n <= 255;
    for (size_t i = 0; i < n && fine; i++)
        fine = (name[i] >= 'a' && name[i] <= 'z') || (name[i] >= 'A' && name[i] <= 'Z') ||
               (name[i] >= '0' && name[i] <= '9') || strchr(".-_", name[i]);
    return fine;
}

/* Makes the start of a URL: with the bucket in the host, or without it where it is in the path. */
static rsd_status set_s3_base(const rsd_storage *storage, const char *bucket, bool in_path,
                              char **base)
{
    struct text text = {0};
    const char *endpoint = storage->endpoint;
    if (endpoint && !in_path) {
        const char *host = strstr(endpoint, "://") + 3;
        text_add(&text, "%.*s%s.%s", (int)(host - endpoint), endpoint, bucket, host);
    } else if (endpoint)
        text_add(&text, "%s", endpoint);
    else
        text_add(&text, "https://%s%ss3.%s.amazonaws.com", in_path ? "" : bucket,
                 in_path ? "" : ".", storage->region);
    return text_take(&text, base);
}

rsd_status s3_set_request(struct remote_store *store, const char *key, struct http_request *request)
{
    const rsd_storage *storage = store->storage;
    bool in_path = storage->path_style == 1 ||
                   (storage->path_style == 0 && (storage->endpoint || strchr(store->bucket, '.')));
    struct text path = {0};
    request->storage = store->storage;
    request->sign = true;
    TRY(set_s3_base(storage, store->bucket, in_path, &request->base));
    text_add(&path, "/");
    if (in_path)
        text_add(&path, "%s%s", store->bucket, *key ? "/" : "");
    url_add_encoded(&path, key, strlen(key), true);
    return text_take(&path, &request->path);
}

rsd_status s3_key(const struct remote_store *store, const char *name, char **key)
{
    struct text text = {0};
    text_add(&text, "%s%s", store->prefix, name);
    return text_take(&text, key);
}

static rsd_status set_file_request(struct remote_store *store, const char *name,
                                   struct http_request *request)
{
    char *key;
    TRY(s3_key(store, name, &key));
    rsd_status status = s3_set_request(store, key, request);
    rsd_free(key);
    return status;
}

/* ---- what was listed ---- */

bool s3_is_listed(const struct s3_listed *listed, const char *name, size_t kind)
{
    size_t kinds;
    return string_map_find(&listed->names, slice_of(name), &kinds) && (kinds & kind);
}

rsd_status s3_add_listed(struct s3_listed *listed, const char *name, size_t kind)
{
    size_t kinds = 0;
    if (listed->names.n >= MAX_ENTRIES)
        return fail(RSD_ELIMIT, "more than %d objects", MAX_ENTRIES);
    listed->names_nbytes += strlen(name);
    if (listed->names_nbytes > MAX_NAMES_NBYTES)
        return fail(RSD_ELIMIT, "the names of its objects have more than %d bytes",
                    MAX_NAMES_NBYTES);
    listed->nnew++;
    string_map_find(&listed->names, slice_of(name), &kinds);
    return string_map_add(&listed->names, slice_of(name), kinds | kind);
}

rsd_status s3_check_listed(struct s3_listed *listed)
{
    listed->nempty = listed->nnew ? 0 : listed->nempty + 1;
    listed->nnew = 0;
    if (listed->nempty > MAX_EMPTY_PAGES)
        return fail(RSD_EIO,
                    "the service repeats a page of the listing, or has nothing in %d pages",
                    MAX_EMPTY_PAGES);
    if (++listed->npages >= MAX_PAGES)
        return fail(RSD_ELIMIT, "the listing has more than %d pages", MAX_PAGES);
    if (listed->pages_nbytes > MAX_PAGES_NBYTES)
        return fail(RSD_ELIMIT, "the listing has more than %d bytes", MAX_PAGES_NBYTES);
    return RSD_OK;
}

void s3_listed_drop(struct s3_listed *listed)
{
    string_map_drop(&listed->names);
}

/* ---- listings ---- */

/* Requests a document. *answered: on failure, the service sent one that is cut off or another. */
static rsd_status request_document(struct remote_store *store, const char *key, const char *query,
                                   const char *root, struct http_request *request, bool *answered)
{
    *request =
        (struct http_request){.method = "GET", .limit = MAX_PAGE_NBYTES, .query = text_copy(query)};
    *answered = false;
    if (!request->query)
        return RSD_ENOMEM;
    TRY(s3_set_request(store, key, request));
    TRY(http_run(request));
    *answered = true;
    budget_add_file(request->document.n); /* a listing is input as files are, and read once */
    budget_add_input(request->document.n);
    return s3_parse_document(&request->document, root, NULL, NULL);
}

rsd_status s3_load_document(struct remote_store *store, const char *key, struct text *query,
                            const char *root, struct s3_listed *listed, s3_take_element *take,
                            void *context)
{
    struct http_request request;
    char *chars, encoding[8] = "";
    bool answered;
    TRY(text_take(query, &chars));
    rsd_status status = request_document(store, key, chars, root, &request, &answered);
    for (int attempt = 1; status && answered && attempt < PAGE_ATTEMPTS; attempt++) {
        http_request_drop(&request);
        status = request_document(store, key, chars, root, &request, &answered);
    }
    rsd_free(chars);
    if (listed)
        listed->pages_nbytes += request.document.n;
    if (!status) { /* it is whole: only now is anything of it used */
        xml_find_text(request.document.data, request.document.n, "EncodingType", encoding,
                      sizeof encoding);
        status = take(context, "EncodingType", false, encoding);
    }
    if (!status)
        status = s3_parse_document(&request.document, root, take, context);
    http_request_drop(&request);
    return status;
}

rsd_status s3_parse_document(const struct bytes *document, const char *root, s3_take_element *take,
                             void *context)
{
    struct xml_reader reader = {.at = (const char *)document->data,
                                .end = (const char *)document->data + document->n};
    rsd_status status = RSD_OK;
    enum xml_step step = document->n ? XML_NEXT : XML_BROKEN;
    bool first = true;
    while (!status && step == XML_NEXT && (step = xml_read_next(&reader)) == XML_NEXT) {
        if (first && (!reader.entered || strncmp(reader.name, root, strlen(root)) != 0))
            status = fail(RSD_EIO, "the service sent <%s> instead of <%s>", reader.name, root);
        else if (take)
            status = take(context, reader.name, reader.entered,
                          reader.text.chars ? reader.text.chars : "");
        first = false;
    }
    if (!status && (step == XML_BROKEN || first))
        status = fail(RSD_EIO, "the service sent a document that is cut off or not XML");
    xml_reader_drop(&reader);
    return status;
}

/* A page of a listing while it is read. */
struct s3_page {
    struct remote_store *store;
    const char *directory;
    const char *prefix; /* of all keys */
    struct store_listing *out;
    bool truncated, encoded;
    char *token;
    char *key, *etag; /* of the element at hand */
    unsigned long long nbytes;
    struct s3_listed listed;
};

/* The name of a key below the prefix; NULL: it is not one that is listed. */
static const char *name_below(const struct s3_page *page, char *key)
{
    size_t n = strlen(page->prefix);
    if ((page->encoded && !url_decode(key)) || strncmp(key, page->prefix, n) != 0)
        return NULL;
    size_t m = strlen(key + n);
    if (m > 0 && key[n + m - 1] == '/')
        key[n + --m] = '\0';
    return m > 0 && !strchr(key + n, '/') ? key + n : NULL;
}

/* Adds the object or prefix that was read to the listing. */
static rsd_status add_object(struct s3_page *page, bool directory)
{
    const char *name = page->key ? name_below(page, page->key) : NULL;
    size_t kind = directory ? 2 : 1;
    if (!name || s3_is_listed(&page->listed, name, kind))
        return RSD_OK;
    TRY(store_listing_add(page->out, page->directory, name, directory));
    const struct store_entry *entry = &page->out->entries[page->out->n - 1];
    TRY(s3_add_listed(&page->listed, entry->base, kind));
    if (directory || !page->etag)
        return RSD_OK;
    const char *full = entry->name;
    return remote_note_file(page->store, full, page->nbytes, page->etag);
}

/* Takes an element of a ListBucketResult, when it begins and when it ends. */
static rsd_status take_list_element(void *context, const char *name, bool entered, const char *text)
{
    struct s3_page *page = context;
    bool object = strcmp(name, "Contents") == 0, prefixes = strcmp(name, "CommonPrefixes") == 0;
    if (entered && (object || prefixes)) {
        mem_free(page->key);
        mem_free(page->etag);
        page->key = page->etag = NULL;
        page->nbytes = 0;
    }
    if (entered)
        return RSD_OK;
    if (object || prefixes)
        return add_object(page, prefixes);
    if (strcmp(name, "Key") == 0 || strcmp(name, "Prefix") == 0)
        return remote_set_text(&page->key, text);
    if (strcmp(name, "EncodingType") == 0)
        page->encoded = strcmp(text, "url") == 0;
    if (strcmp(name, "ETag") == 0)
        return strlen(text) < MAX_ETAG ? remote_set_text(&page->etag, text) : RSD_OK;
    if (strcmp(name, "Size") == 0) {
        char *end;
        page->nbytes = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || page->nbytes > INT64_MAX)
            return fail(RSD_EIO, "the service lists an object of invalid size");
    } else if (strcmp(name, "IsTruncated") == 0)
        page->truncated = strcmp(text, "true") == 0;
    else if (strcmp(name, "NextContinuationToken") == 0)
        return remote_set_text(&page->token, text);
    return RSD_OK;
}

/* Loads one page of a listing, and sets the token of the next. */
static rsd_status load_page(struct s3_page *page)
{
    struct text query = {0};
    if (page->token)
        url_add_parameter(&query, "continuation-token", page->token);
    url_add_parameter(&query, "delimiter", "/");
    url_add_parameter(&query, "encoding-type", "url");
    url_add_parameter(&query, "list-type", "2");
    url_add_parameter(&query, "prefix", page->prefix);
    mem_free(page->token);
    page->token = NULL;
    page->truncated = false;
    rsd_status status = s3_load_document(page->store, "", &query, "ListBucketResult", &page->listed,
                                         take_list_element, page);
    if (!status && page->truncated && (!page->token || !*page->token))
        status = fail(RSD_EIO, "the listing is truncated and has no continuation token");
    return status;
}

/* Loads all pages of a listing. */
static rsd_status load_pages(struct s3_page *page)
{
    for (;;) {
        TRY(load_page(page));
        if (!page->truncated)
            return RSD_OK;
        TRY(s3_check_listed(&page->listed));
    }
}

rsd_status s3_list(struct store *base, const char *directory, struct store_listing *out)
{
    struct remote_store *store = remote_store_of(base);
    struct text prefix = {0};
    char *chars;
    text_add(&prefix, "%s%s%s", store->prefix, directory, *directory ? "/" : "");
    TRY(text_take(&prefix, &chars));
    struct s3_page page = {.store = store, .directory = directory, .prefix = chars, .out = out};
    rsd_status status = load_pages(&page);
    if (!status && out->n == 0)
        status = fail(RSD_ENOENT, "no object is below it");
    rsd_free(chars);
    s3_listed_drop(&page.listed);
    mem_free(page.token);
    mem_free(page.key);
    mem_free(page.etag);
    return status;
}

/* ---- opening ---- */

rsd_status s3_open_prefix(const char *path, size_t n, rsd_storage *storage,
                          struct remote_store **out)
{
    const char *bucket = path + strlen("s3://");
    size_t nbucket = strcspn(bucket, "/");
    while (n > 0 && path[n - 1] == '/')
        n--;
    if (!is_bucket_name(bucket, nbucket))
        return fail(RSD_EINVAL, "'%s' has no valid bucket name; expected s3://BUCKET/PREFIX", path);
    size_t begin = strlen("s3://") + nbucket + 1; /* of the prefix, if there is one */
    bool has_prefix = n > begin;
    struct text prefix = {0};
    struct remote_store *store;
    char *shown = slice_copy((struct slice){path, has_prefix ? n : begin - 1});
    rsd_status status =
        shown ? remote_open(&s3_store, set_file_request, storage, shown, &store) : RSD_ENOMEM;
    mem_free(shown);
    TRY(status);
    if (has_prefix)
        text_add(&prefix, "%.*s/", (int)(n - begin), path + begin);
    store->bucket = slice_copy((struct slice){bucket, nbucket});
    status = text_take(&prefix, &store->prefix);
    if (!status && store->bucket) {
        *out = store;
        return RSD_OK;
    }
    store_close(&store->base);
    return status ? status : RSD_ENOMEM;
}

rsd_status s3_open(const char *path, rsd_storage *storage, struct store **out, const char **file)
{
    const char *bucket = path + strlen("s3://"), *slash = strrchr(path, '/');
    struct remote_store *store;
    struct http_answer answer;
    *file = NULL;
    if (slash > bucket && slash[1]) { /* it may be an object */
        TRY(s3_open_prefix(path, (size_t)(slash - path), storage, &store));
        rsd_status status = remote_head(store, slash + 1, &answer);
        if (!status)
            status = remote_note_file(store, slash + 1, answer.length, answer.etag);
        if (!status) {
            *out = &store->base;
            *file = slash + 1;
            return RSD_OK;
        }
        /* HEAD is not told why it is refused, and an object that does not exist may be refused too. */
        bool denied = strstr(rsd_error(), "status 403") || strstr(rsd_error(), "status 400");
        store_close(&store->base);
        if (status != RSD_ENOENT && !denied)
            return fail_in(status, "%s: ", path);
    }
    TRY(s3_open_prefix(path, strlen(path), storage, &store));
    *out = &store->base;
    return RSD_OK;
}
