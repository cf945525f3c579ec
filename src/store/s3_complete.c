/* s3_complete.c - the ends of uploads: they become objects, or are removed. */
#include "s3.h"

#include <stdio.h>

/* Adds a text as XML has it. */
static void add_escaped(struct text *text, const char *from)
{
    for (; *from; from++)
        switch (*from) {
        case '&':
            text_add(text, "&amp;");
            break;
        case '<':
            text_add(text, "&lt;");
            break;
        case '>':
            text_add(text, "&gt;");
            break;
        default:
            text_add(text, "%c", *from);
        }
}

/* ---- completing ---- */

/* Makes the document that completes an upload. EIO: a part is missing, or the lengths do not add up. */
static rsd_status list_parts(const struct s3_upload *upload, char **body)
{
    struct text text = {0};
    bool checksums = true;
    uint64_t sum = 0;
    for (size_t i = 0; i < upload->nparts; i++) {
        const struct s3_part *part = upload->parts[i];
        if (!part || !part->uploaded)
            return fail(RSD_EIO, "part %zu is missing", i + 1);
        checksums = checksums && part->has_sha256;
        sum += part->nbytes;
    }
    if (sum != upload->end)
        return fail(RSD_EIO, "its parts have %llu bytes, expected %llu", (unsigned long long)sum,
                    (unsigned long long)upload->end);
    text_add(&text, "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for (size_t i = 0; i < upload->nparts; i++) {
        const struct s3_part *part = upload->parts[i];
        char base64[BASE64_NCHARS];
        base64_write(part->sha256, sizeof part->sha256, base64);
        text_add(&text, "<Part><ETag>");
        add_escaped(&text, part->etag);
        text_add(&text, "</ETag>");
        if (checksums)
            text_add(&text, "<ChecksumSHA256>%s</ChecksumSHA256>", base64);
        text_add(&text, "<PartNumber>%zu</PartNumber></Part>", part->number);
    }
    text_add(&text, "</CompleteMultipartUpload>");
    return text_take(&text, body);
}

/* The checksum of an object is that of the checksums of its parts, and how many they are. */
static rsd_status check_composite(const struct s3_upload *upload, const char *stated)
{
    struct bytes all = {0};
    unsigned char digest[SHA256_NBYTES];
    char expected[BASE64_NCHARS + 24];
    bool known = true;
    for (size_t i = 0; i < upload->nparts; i++) {
        bytes_put(&all, upload->parts[i]->sha256, SHA256_NBYTES);
        known = known && upload->parts[i]->has_sha256;
    }
    rsd_status status = all.failed ? fail(RSD_ENOMEM, "out of memory") : RSD_OK;
    if (!status && known) {
        sha256_of(all.data, all.n, digest);
        base64_write(digest, sizeof digest, expected);
        size_t n = strlen(expected);
        snprintf(expected + n, sizeof expected - n, "-%zu", upload->nparts);
        if (strcmp(expected, stated) != 0 && strchr(stated, '-'))
            status = fail(RSD_EIO, "the service's checksum of the object is %.60s, expected %s",
                          stated, expected);
    }
    bytes_drop(&all);
    return status;
}

/* HEAD of the object that an upload becomes. ENOENT: it does not exist. */
static rsd_status head_object(const struct s3_upload *upload, struct http_answer *answer)
{
    struct remote_store *remote = upload->output->remote;
    return remote_head(remote, upload->key + strlen(remote->prefix), answer);
}

rsd_status s3_find_completed(struct s3_upload *upload)
{
    struct http_answer answer;
    TRY(head_object(upload, &answer));
    if (strcmp(answer.run, upload->output->run) != 0)
        return fail(RSD_ENOENT, "the object is of another run");
    upload->completed = upload->ended = true;
    upload->end = answer.length;
    return RSD_OK;
}

/* Checks that an object exists with the length of its upload, and is of this run. */
static rsd_status check_object(struct s3_upload *upload)
{
    struct http_answer answer;
    TRY(head_object(upload, &answer));
    if (answer.length != upload->end)
        return fail(RSD_EIO, "the object has %llu bytes, expected %llu",
                    (unsigned long long)answer.length, (unsigned long long)upload->end);
    if (answer.run[0] && strcmp(answer.run, upload->output->run) != 0 && !upload->foreign)
        return fail(RSD_EIO, "the object is of another run");
    upload->completed = true;
    return RSD_OK;
}

/* Requests the completion of an upload, and checks the checksum of the answer. */
static rsd_status run_completion(struct s3_upload *upload, const char *body)
{
    struct http_request request = {.method = "POST", .limit = 1 << 20, .slow = true};
    struct text query = {0};
    char stated[100];
    url_add_parameter(&query, "uploadId", upload->id);
    TRY(text_take(&query, &request.query));
    s3_set_body(&request, body, strlen(body));
    rsd_status status = s3_set_request(upload->output->remote, upload->key, &request);
    if (!status)
        status = http_run(&request);
    if (!status) /* an error may come with the status 200, after the service has worked for a while */
        status = s3_parse_document(&request.document, "CompleteMultipartUploadResult", NULL, NULL);
    if (!status && xml_find_text(request.document.data, request.document.n, "ChecksumSHA256",
                                 stated, sizeof stated))
        status = check_composite(upload, stated);
    http_request_drop(&request);
    return status;
}

rsd_status s3_complete_upload(struct s3_upload *upload)
{
    char *body;
    if (upload->completed)
        return RSD_OK;
    TRY(list_parts(upload, &body));
    rsd_status status = RSD_OK;
    for (int attempt = 0; attempt < 3; attempt++) {
        status = run_completion(upload, body);
        /* If an answer was lost, the upload is gone and the object is there. */
        if (!status || status == RSD_ENOENT || status == RSD_ECANCELLED)
            break;
    }
    rsd_free(body);
    if (!status || status == RSD_ENOENT)
        status = check_object(upload);
    return status == RSD_ENOENT ? RSD_EIO : status;
}

void s3_abort_upload(const struct s3_upload *upload)
{
    if (upload->id && !upload->completed)
        s3_remove_upload(upload->output->remote, upload->key, upload->id);
}

/* Removes what a request names. It may be gone already. */
static rsd_status run_removal(struct remote_store *remote, const char *key,
                              struct http_request *request)
{
    request->method = "DELETE";
    request->limit = 1 << 16;
    rsd_status status = s3_set_request(remote, key, request);
    if (!status)
        status = http_run(request);
    http_request_drop(request);
    return status == RSD_ENOENT ? RSD_OK : status;
}

rsd_status s3_remove_upload(struct remote_store *remote, const char *key, const char *id)
{
    struct http_request request = {0};
    struct text query = {0};
    url_add_parameter(&query, "uploadId", id);
    TRY(text_take(&query, &request.query));
    return run_removal(remote, key, &request);
}

rsd_status s3_remove_object(struct remote_store *remote, const char *key)
{
    struct http_request request = {0};
    return run_removal(remote, key, &request);
}

/* ---- small objects ---- */

rsd_status s3_put_object(struct remote_store *remote, const char *key, const void *data, size_t n,
                         const char *run, bool only_new)
{
    struct http_request request = {.method = "PUT", .limit = 1 << 16};
    rsd_status status = s3_set_request(remote, key, &request);
    s3_set_body(&request, data, n);
    if (run)
        http_set_header(&request, "x-amz-meta-reshard-run", "%s", run);
    if (only_new)
        http_set_header(&request, "if-none-match", "*");
    if (!status)
        status = http_run(&request);
    long code = request.answer.code;
    http_request_drop(&request);
    if (only_new && (code == 412 || code == 409))
        return RSD_EEXIST;
    return status == RSD_ENOENT ? RSD_EIO : status;
}

rsd_status s3_load_object(struct remote_store *remote, const char *key, size_t limit,
                          struct bytes *out, char run[40])
{
    struct http_request request = {.method = "GET", .limit = limit};
    rsd_status status = s3_set_request(remote, key, &request);
    if (!status)
        status = http_run(&request);
    if (!status) {
        *out = request.document;
        request.document = (struct bytes){0};
        memcpy(run, request.answer.run, 40);
    }
    http_request_drop(&request);
    return status;
}
