/* s3_uploads.c - uploads that nobody ended: those of killed runs stay in the bucket until they are removed. */
#include "s3.h"

/* A page of uploads, and all that were found. */
struct upload_page {
    struct s3_listed listed; /* by their ids */
    struct name_list keys, ids, begun;
    char key[2048], id[MAX_UPLOAD_ID], time[64]; /* of the element at hand */
    char key_marker[4096], id_marker[MAX_UPLOAD_ID];
    bool truncated, encoded;
};

static rsd_status add_upload_found(struct upload_page *page)
{
    if (!page->key[0] || !page->id[0] || (page->encoded && !url_decode(page->key)))
        return fail(RSD_EIO, "the service lists an invalid upload");
    if (s3_is_listed(&page->listed, page->id, 1))
        return RSD_OK;
    TRY(name_list_add(&page->keys, (struct slice){page->key, strlen(page->key)}));
    TRY(name_list_add(&page->ids, (struct slice){page->id, strlen(page->id)}));
    TRY(s3_add_listed(&page->listed, page->ids.list[page->ids.n - 1].bytes, 1));
    page->listed.names_nbytes += strlen(page->key);
    return name_list_add(&page->begun, (struct slice){page->time, strlen(page->time)});
}

/* Takes an element of a ListMultipartUploadsResult, when it begins and when it ends. */
static rsd_status take_upload_element(void *context, const char *name, bool entered,
                                      const char *text)
{
    struct upload_page *page = context;
    if (entered) {
        if (strcmp(name, "Upload") == 0)
            page->key[0] = page->id[0] = page->time[0] = '\0';
        return RSD_OK;
    }
    if (strcmp(name, "Upload") == 0)
        return add_upload_found(page);
    if (strcmp(name, "EncodingType") == 0)
        page->encoded = strcmp(text, "url") == 0;
    else if (strcmp(name, "IsTruncated") == 0)
        page->truncated = strcmp(text, "true") == 0;
    else if (strcmp(name, "Key") == 0)
        remote_fit_text(page->key, sizeof page->key, text);
    else if (strcmp(name, "UploadId") == 0)
        remote_fit_text(page->id, sizeof page->id, text);
    else if (strcmp(name, "Initiated") == 0)
        remote_fit_text(page->time, sizeof page->time, text);
    else if (strcmp(name, "NextKeyMarker") == 0)
        remote_fit_text(page->key_marker, sizeof page->key_marker, text);
    else if (strcmp(name, "NextUploadIdMarker") == 0)
        remote_fit_text(page->id_marker, sizeof page->id_marker, text);
    return RSD_OK;
}

/* Loads one page of the list of unfinished uploads, and sets the markers of the next. */
static rsd_status load_upload_page(struct remote_store *store, const char *prefix,
                                   struct upload_page *page)
{
    struct text query = {0};
    if (page->encoded && !url_decode(page->key_marker))
        return fail(RSD_EIO, "the service lists an invalid upload");
    url_add_parameter(&query, "encoding-type", "url");
    if (page->key_marker[0])
        url_add_parameter(&query, "key-marker", page->key_marker);
    url_add_parameter(&query, "prefix", prefix);
    if (page->id_marker[0])
        url_add_parameter(&query, "upload-id-marker", page->id_marker);
    url_add_parameter(&query, "uploads", "");
    page->truncated = false;
    return s3_load_document(store, "", &query, "ListMultipartUploads", &page->listed,
                            take_upload_element, page);
}

/* Loads the list of unfinished uploads of keys that begin with a prefix. */
static rsd_status load_uploads(struct remote_store *store, const char *prefix,
                               struct upload_page *page)
{
    for (;;) {
        TRY(load_upload_page(store, prefix, page));
        if (!page->truncated)
            return RSD_OK;
        TRY(s3_check_listed(&page->listed));
    }
}

static void drop_upload_page(struct upload_page *page)
{
    s3_listed_drop(&page->listed);
    name_list_drop(&page->keys);
    name_list_drop(&page->ids);
    name_list_drop(&page->begun);
    mem_free(page);
}

/* Whether a key is that of a file of an output. */
static bool is_output_key(const struct s3_output *output, const char *key)
{
    for (size_t i = 0; i < output->remote->base.names.n; i++)
        if (output->files[i]->key && strcmp(output->files[i]->key, key) == 0)
            return true;
    return false;
}

rsd_status s3_remove_lost_uploads(const struct s3_output *output)
{
    struct remote_store *store = output->remote;
    struct upload_page *page = mem_new(1, sizeof *page);
    if (!page)
        return RSD_ENOMEM;
    rsd_status status =
        load_uploads(store, output->only_key ? output->only_key : store->prefix, page);
    for (size_t i = 0; i < page->keys.n && !status; i++)
        if (is_output_key(output, page->keys.list[i].bytes))
            status = s3_remove_upload(store, page->keys.list[i].bytes, page->ids.list[i].bytes);
    drop_upload_page(page);
    return status;
}

/* Calls on_upload for one unfinished upload, and removes it if that is wanted. */
static rsd_status tell_upload(struct remote_store *store, const struct upload_page *page, size_t i,
                              bool remove, rsd_on_upload *on_upload, void *context)
{
    struct text path = {0};
    char *chars;
    const char *key = page->keys.list[i].bytes, *id = page->ids.list[i].bytes;
    text_add(&path, "s3://%s/%s", store->bucket, key);
    TRY(text_take(&path, &chars));
    rsd_status status = RSD_OK;
    if (on_upload)
        status = on_upload(context, chars, page->begun.list[i].bytes, id);
    if (!status && remove) {
        status = s3_remove_upload(store, key, id);
        status = status ? fail_in(status, "%s: ", chars) : RSD_OK;
    }
    rsd_free(chars);
    return status;
}

rsd_status rsd_storage_uploads(rsd_storage *storage, const char *path, int32_t remove,
                               rsd_on_upload *on_upload, void *context, int64_t *nuploads)
{
    struct remote_store *store;
    struct upload_page *page = mem_new(1, sizeof *page);
    if (!page)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    if (strncmp(path, "s3://", 5) != 0)
        status = fail(RSD_EINVAL, "'%s' does not begin with s3://", path);
    else
        status = s3_open_prefix(path, strlen(path), storage, &store);
    if (!status) {
        status = load_uploads(store, store->prefix, page);
        if (status)
            status = fail_in(status, "%s: ", path);
        for (size_t i = 0; i < page->keys.n && !status; i++)
            status = tell_upload(store, page, i, remove != 0, on_upload, context);
        store_close(&store->base);
    }
    if (!status && nuploads)
        *nuploads = (int64_t)page->keys.n;
    drop_upload_page(page);
    return status;
}
