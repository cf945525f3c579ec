/* s3_upload.c - files of an output, as multipart uploads to S3.
 *
 * A part is kept in memory until all of its bytes are written, in whatever order, and is uploaded then. An
 * upload is invisible until it is completed. The bytes of a part follow from what is written and from nothing
 * else, so a resumed run adopts the parts that exist.
 *
 *     known length      parts of equal length, at least 8 MiB, at most 9,500 of them
 *     unknown length    a thousand parts of 8 MiB, a thousand of 16 MiB, and so on
 *
 * Each part is sent with its SHA-256, which the service checks; what it answers is compared. Two parts are hashed
 * at once, in little more time than one: a part that is full waits for another one, if there is memory.
 */
#include "s3.h"

#include <stdio.h>
#include <stdlib.h>

enum { PART_NBYTES = STORAGE_BLOCK_NBYTES, MAX_PARTS = 9500, PARTS_PER_LENGTH = 1000 };

static struct s3_upload *upload_of(struct store *store, uint32_t file)
{
    return remote_store_of(store)->output->files[file];
}

/* ---- places of parts ---- */

static uint64_t equal_part_nbytes(uint64_t nbytes)
{
    uint64_t each = (nbytes + MAX_PARTS - 1) / MAX_PARTS, unit = 1 << 20;
    each = (each + unit - 1) / unit * unit;
    return each > PART_NBYTES ? each : PART_NBYTES;
}

/* Finds where a part begins, and its length. */
static void find_part_place(const struct s3_upload *upload, size_t index, uint64_t *begin,
                            uint64_t *nbytes)
{
    if (upload->nbytes > 0) {
        *nbytes = equal_part_nbytes(upload->nbytes);
        *begin = index * *nbytes;
        if (*nbytes > upload->nbytes - *begin)
            *nbytes = upload->nbytes - *begin;
        return;
    }
    *begin = 0;
    *nbytes = PART_NBYTES;
    for (; index >= PARTS_PER_LENGTH; index -= PARTS_PER_LENGTH, *nbytes *= 2)
        *begin += PARTS_PER_LENGTH * *nbytes;
    *begin += index * *nbytes;
}

static size_t find_part_index(const struct s3_upload *upload, uint64_t offset)
{
    if (upload->nbytes > 0)
        return (size_t)(offset / equal_part_nbytes(upload->nbytes));
    size_t index = 0;
    uint64_t nbytes = PART_NBYTES;
    for (; offset >= PARTS_PER_LENGTH * nbytes; nbytes *= 2, index += PARTS_PER_LENGTH)
        offset -= PARTS_PER_LENGTH * nbytes;
    return index + (size_t)(offset / nbytes);
}

static size_t count_parts(const struct s3_upload *upload, uint64_t nbytes)
{
    return nbytes == 0 ? 1 : find_part_index(upload, nbytes - 1) + 1;
}

/* The part of an index, which is made if need be; the output is locked. */
static rsd_status need_part(struct s3_upload *upload, size_t index, struct s3_part **out)
{
    /* A list of pointers. NOLINTNEXTLINE(bugprone-sizeof-expression) */
    TRY(GROW(upload->parts, upload->parts_capacity, index + 1));
    for (; upload->nparts <= index; upload->nparts++)
        upload->parts[upload->nparts] = NULL;
    if (!upload->parts[index]) {
        struct s3_part *part = mem_new(1, sizeof *part);
        if (!part)
            return RSD_ENOMEM;
        part->upload = upload;
        part->number = index + 1;
        find_part_place(upload, index, &part->begin, &part->nbytes);
        upload->parts[index] = part;
    }
    *out = upload->parts[index];
    return RSD_OK;
}

/* ---- which bytes of a part are written ---- */

/* Adds bytes [lo, hi) to those of a part that were written. Spans are kept sorted and apart. */
static rsd_status add_span(struct s3_part *part, uint64_t lo, uint64_t hi)
{
    size_t at = 0, end;
    TRY(GROW(part->spans, part->spans_capacity, part->nspans + 1));
    while (at < part->nspans && part->spans[at].hi < lo)
        at++;
    for (end = at; end < part->nspans && part->spans[end].lo <= hi; end++) {
        lo = part->spans[end].lo < lo ? part->spans[end].lo : lo;
        hi = part->spans[end].hi > hi ? part->spans[end].hi : hi;
    }
    memmove(part->spans + at + 1, part->spans + end, (part->nspans - end) * sizeof *part->spans);
    part->nspans = part->nspans - (end - at) + 1;
    part->spans[at] = (struct s3_span){lo, hi};
    return RSD_OK;
}

static bool is_part_full(const struct s3_part *part)
{
    return part->nspans == 1 && part->spans[0].lo == 0 && part->spans[0].hi == part->nbytes;
}

/* ---- uploading ---- */

static void drop_part_data(struct s3_part *part)
{
    storage_free_buffer(part->upload->output->remote->storage, STORAGE_WRITES, part->data,
                        (size_t)part->reserved);
    part->data = NULL;
    http_request_drop(&part->request);
}

/* Keeps the first error of an upload; the output is locked. */
static void note_upload_error(struct s3_upload *upload, rsd_status status, const char *message)
{
    if (upload->status)
        return;
    upload->status =
        status == RSD_ENOENT ? RSD_EIO : status; /* it is not an input that is missing */
    snprintf(upload->error, sizeof upload->error, "%s", message);
}

/* Fails if a part of the upload has failed; the output is locked. */
static rsd_status fail_as_upload(const struct s3_upload *upload)
{
    return upload->status ? fail(upload->status, "%s", upload->error) : RSD_OK;
}

/* Called by the engine: keeps what the service answered, or the error, and frees the bytes of the part. */
static void finish_part(struct http_request *request)
{
    struct s3_part *part = request->context;
    struct s3_output *output = part->upload->output;
    char expected[BASE64_NCHARS];
    base64_write(part->sha256, sizeof part->sha256, expected);
    const struct http_answer *answer = &request->answer;
    pthread_mutex_lock(&output->lock);
    if (request->status) {
        char message[600];
        snprintf(message, sizeof message, "bytes %llu to %llu: %s", (unsigned long long)part->begin,
                 (unsigned long long)(part->begin + part->nbytes), request->error);
        note_upload_error(part->upload, request->status, message);
    } else if (answer->checksum[0] && strcmp(answer->checksum, expected) != 0)
        note_upload_error(part->upload, RSD_EIO, "the service received other bytes than were sent");
    else if (!answer->etag[0])
        note_upload_error(part->upload, RSD_EIO, "the service answers a part without an ETag");
    else {
        memcpy(part->etag, answer->etag, sizeof part->etag);
        part->uploaded = true;
    }
    part->upload->nactive--;
    atomic_fetch_sub(&output->nactive, 1);
    drop_part_data(part);
    pthread_cond_broadcast(&output->changed);
    pthread_mutex_unlock(&output->lock);
}

void s3_set_body(struct http_request *request, const void *data, size_t n)
{
    unsigned char digest[SHA256_NBYTES];
    sha256_of(data, n, digest);
    hex_write(digest, sizeof digest, request->body_sha256);
    request->body = n ? data : "";
    request->body_nbytes = n;
}

/* Fills in the request that uploads a part, with its SHA-256. */
static rsd_status prepare_part(struct s3_part *part)
{
    struct http_request *request = &part->request;
    struct text query = {0};
    char base64[BASE64_NCHARS];
    *request = (struct http_request){.method = "PUT", .limit = 1 << 16};
    text_add(&query, "partNumber=%zu", part->number);
    url_add_parameter(&query, "uploadId", part->upload->id);
    TRY(text_take(&query, &request->query));
    TRY(s3_set_request(part->upload->output->remote, part->upload->key, request));
    hex_write(part->sha256, sizeof part->sha256, request->body_sha256);
    base64_write(part->sha256, sizeof part->sha256, base64);
    http_set_header(request, "x-amz-checksum-sha256", "%s", base64);
    request->body = part->data ? part->data : "";
    request->body_nbytes = (size_t)part->nbytes;
    request->done = finish_part;
    request->context = part;
    return RSD_OK;
}

/* Sends a part that is hashed. A failure is that of its upload. */
static void send_part(struct s3_part *part)
{
    struct s3_output *output = part->upload->output;
    part->has_sha256 = true;
    rsd_status status = prepare_part(part);
    atomic_fetch_add(&output->nactive, 1);
    if (!status)
        status = http_start(&part->request);
    if (!status)
        return;
    pthread_mutex_lock(&output->lock);
    note_upload_error(part->upload, status, rsd_error());
    part->upload->nactive--;
    atomic_fetch_sub(&output->nactive, 1);
    drop_part_data(part);
    pthread_cond_broadcast(&output->changed);
    pthread_mutex_unlock(&output->lock);
}

/* Hashes and sends a part, and with it one that waits; either may be NULL. */
static void hash_and_send(struct s3_part *part, struct s3_part *other)
{
    struct s3_part *parts[2] = {part ? part : other, part ? other : NULL};
    const void *data[2] = {"", ""};
    size_t nbytes[2] = {0};
    for (int i = 0; i < 2 && parts[i]; i++) {
        data[i] = parts[i]->data ? parts[i]->data : "";
        nbytes[i] = (size_t)parts[i]->nbytes;
    }
    if (parts[1])
        sha256_of_pair(data, nbytes, (unsigned char *[]){parts[0]->sha256, parts[1]->sha256});
    else if (parts[0])
        sha256_of(data[0], nbytes[0], parts[0]->sha256);
    for (int i = 0; i < 2 && parts[i]; i++)
        send_part(parts[i]);
}

/* Marks a part as one that is uploaded, when all of its bytes are known; the output is locked. */
static void claim_part(struct s3_part *part)
{
    part->started = true;
    part->upload->nactive++;
}

static struct s3_part *take_full_part(struct s3_output *output)
{
    pthread_mutex_lock(&output->lock);
    struct s3_part *part = output->full;
    output->full = NULL;
    pthread_mutex_unlock(&output->lock);
    return part;
}

/* Uploads a part that was claimed, or lets it wait for another one. */
static void start_part(struct s3_part *part, bool may_wait)
{
    struct s3_output *output = part->upload->output;
    bool fits =
        may_wait && storage_can_reserve(output->remote->storage, STORAGE_WRITES, part->nbytes);
    pthread_mutex_lock(&output->lock);
    struct s3_part *other = output->full;
    bool waits = !other && fits;
    output->full = waits ? part : NULL;
    pthread_mutex_unlock(&output->lock);
    if (!waits)
        hash_and_send(part, other);
}

/* Begins a multipart upload, and notes its identifier in the journal. */
static rsd_status begin_upload(struct s3_upload *upload)
{
    struct http_request request = {
        .method = "POST", .limit = 1 << 16, .body = "", .query = text_copy("uploads=")};
    char id[MAX_UPLOAD_ID] = "";
    rsd_status status =
        request.query ? s3_set_request(upload->output->remote, upload->key, &request) : RSD_ENOMEM;
    http_set_header(&request, "x-amz-checksum-algorithm", "SHA256");
    http_set_header(&request, "x-amz-meta-reshard-run", "%s", upload->output->run);
    if (!status)
        status = http_run(&request);
    if (!status &&
        !xml_find_text(request.document.data, request.document.n, "UploadId", id, sizeof id))
        status = fail(RSD_EIO, "the service begins an upload without an identifier");
    http_request_drop(&request);
    for (const char *at = id; *at && !status; at++)
        if (*at <= ' ' || *at > '~')
            status = fail(RSD_EIO, "the service begins an upload with an invalid identifier");
    TRY(status == RSD_ENOENT ? RSD_EIO : status);
    upload->id = text_copy(id);
    return upload->id ? s3_journal_note_upload(upload) : RSD_ENOMEM;
}

/* ---- the functions of the store ---- */

rsd_status s3_create(struct store *store, uint32_t file, uint64_t kept, uint64_t nbytes)
{
    struct s3_upload *upload = upload_of(store, file);
    if (kept > 0)
        return fail(RSD_EUNSUPPORTED, "an object cannot be appended to");
    TRY(s3_prepare_upload(upload->output, file));
    if (upload->id && nbytes > 0 && upload->nbytes == nbytes)
        return RSD_OK; /* of the run that is resumed: its parts stay */
    if (upload->id) {
        s3_abort_upload(upload);
        s3_forget_parts(upload);
    }
    upload->nbytes = nbytes;
    upload->completed = false;
    return begin_upload(upload);
}

/* Allocates a part in memory. Several threads may want it at once. */
static rsd_status need_part_data(struct s3_part *part)
{
    if (part->data || part->started)
        return RSD_OK;
    struct s3_output *output = part->upload->output;
    rsd_storage *storage = output->remote->storage;
    uint64_t nbytes = part->nbytes;
    pthread_mutex_unlock(&output->lock);
    if (!storage_can_reserve(storage, STORAGE_WRITES, nbytes))
        hash_and_send(NULL, take_full_part(output));
    storage_reserve_wait(storage, STORAGE_WRITES, nbytes, &output->nactive);
    char *data = storage_new_buffer(storage, STORAGE_WRITES, (size_t)nbytes);
    pthread_mutex_lock(&output->lock);
    if (data && !part->data && !part->started) {
        part->data = data;
        part->reserved = nbytes;
        return RSD_OK;
    }
    storage_free_buffer(storage, STORAGE_WRITES, data, (size_t)nbytes);
    return data ? RSD_OK : RSD_ENOMEM;
}

/* Writes into one part. Returns how many bytes belong to it. */
static rsd_status write_part(struct s3_upload *upload, uint64_t offset, const char *data, size_t n,
                             size_t *taken)
{
    struct s3_output *output = upload->output;
    struct s3_part *part = NULL;
    bool start = false;
    pthread_mutex_lock(&output->lock);
    rsd_status status = fail_as_upload(upload);
    if (!status)
        status = need_part(upload, find_part_index(upload, offset), &part);
    if (!status)
        status = need_part_data(part);
    if (!status) {
        uint64_t at = offset - part->begin, left = part->nbytes - at;
        *taken = n < left ? n : (size_t)left;
        if (part->data && !part->started) { /* else it was uploaded by the run that is resumed */
            part->nwriters++;
            pthread_mutex_unlock(&output->lock);
            memcpy(part->data + at, data, *taken);
            pthread_mutex_lock(&output->lock);
            part->nwriters--;
            status = add_span(part, at, at + *taken);
        }
        start = !status && !part->started && part->nwriters == 0 && is_part_full(part);
        if (start)
            claim_part(part);
    }
    pthread_mutex_unlock(&output->lock);
    if (start && part)
        start_part(part, true);
    return status;
}

rsd_status s3_write(struct store *store, uint32_t file, uint64_t offset, const void *data, size_t n)
{
    struct s3_upload *upload = upload_of(store, file);
    const char *bytes = data;
    while (n > 0) {
        size_t taken = 0;
        if (upload->nbytes > 0 && (offset >= upload->nbytes || n > upload->nbytes - offset))
            return fail(RSD_EIO, "byte %llu is written beyond the end", (unsigned long long)offset);
        TRY(write_part(upload, offset, bytes, n, &taken));
        bytes += taken;
        offset += taken;
        n -= taken;
    }
    return RSD_OK;
}

/* Bytes that nobody wrote are zeros. */
static void clear_gaps(const struct s3_part *part)
{
    uint64_t at = 0;
    for (size_t i = 0; i <= part->nspans; i++) {
        uint64_t lo = i < part->nspans ? part->spans[i].lo : part->nbytes;
        if (lo > at)
            memset(part->data + at, 0, (size_t)(lo - at));
        at = i < part->nspans ? part->spans[i].hi : at;
    }
}

/* Uploads what is left of a part. */
static rsd_status flush_part(struct s3_upload *upload, size_t index, uint64_t nbytes)
{
    struct s3_output *output = upload->output;
    struct s3_part *part = NULL;
    pthread_mutex_lock(&output->lock);
    rsd_status status = need_part(upload, index, &part);
    bool start = !status && !part->started;
    if (start && part->begin + part->nbytes > nbytes)
        part->nbytes = nbytes - part->begin; /* the last part of a file of unknown length */
    if (start && part->nbytes > 0)
        status = need_part_data(part);
    start = start && !status;
    if (start) {
        if (part->nbytes > 0)
            clear_gaps(part);
        claim_part(part);
    }
    pthread_mutex_unlock(&output->lock);
    if (start)
        start_part(part, false);
    return status;
}

rsd_status s3_end_file(struct store *store, uint32_t file, uint64_t nbytes)
{
    struct s3_upload *upload = upload_of(store, file);
    struct s3_output *output = upload->output;
    for (size_t i = 0; i < count_parts(upload, nbytes); i++)
        TRY(flush_part(upload, i, nbytes));
    hash_and_send(NULL, take_full_part(output)); /* it may be of this file */
    pthread_mutex_lock(&output->lock);
    while (upload->nactive > 0)
        pthread_cond_wait(&output->changed, &output->lock);
    rsd_status status = fail_as_upload(upload);
    if (!status)
        upload->ended = true;
    upload->end = nbytes;
    pthread_mutex_unlock(&output->lock);
    if (!status && output->options.mode == OUTPUT_IN_PLACE)
        status = s3_complete_upload(upload);
    return status ? status : s3_journal_note_upload(upload);
}

/* Bytes are not kept on this machine, so it only reports an upload that failed. */
rsd_status s3_sync(struct store *store, uint32_t file)
{
    struct s3_upload *upload = upload_of(store, file);
    struct s3_output *output = upload->output;
    pthread_mutex_lock(&output->lock);
    rsd_status status = fail_as_upload(upload);
    pthread_mutex_unlock(&output->lock);
    return status;
}

bool s3_has(struct store *store, uint32_t file, uint64_t offset, uint64_t n)
{
    const struct s3_upload *upload = upload_of(store, file);
    if (s3_prepare_upload(upload->output, file))
        return false;
    if (upload->completed)
        return true;
    if (upload->nbytes == 0 || offset > upload->nbytes || n > upload->nbytes - offset)
        return false;
    size_t last = n > 0 ? find_part_index(upload, offset + n - 1) : 0;
    for (size_t i = n > 0 ? find_part_index(upload, offset) : 1; i <= last; i++)
        if (i >= upload->nparts || !upload->parts[i] || !upload->parts[i]->uploaded)
            return false;
    return true;
}

rsd_status s3_stat_output(struct store *store, uint32_t file, uint64_t *nbytes, int64_t *version)
{
    const struct s3_upload *upload = upload_of(store, file);
    TRY(s3_prepare_upload(upload->output, file));
    if (!upload->completed && !upload->id)
        return fail(RSD_ENOENT, "no upload of it is known");
    *version = 0;
    *nbytes = upload->completed ? upload->end : s3_uploaded_nbytes(upload);
    return RSD_OK;
}

uint64_t s3_uploaded_nbytes(const struct s3_upload *upload)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < upload->nparts; i++)
        if (upload->parts[i] && upload->parts[i]->uploaded)
            sum += upload->parts[i]->nbytes;
    return sum;
}

void s3_forget_parts(struct s3_upload *upload)
{
    for (size_t i = 0; i < upload->nparts; i++) {
        if (!upload->parts[i])
            continue;
        if (upload->output->full == upload->parts[i])
            upload->output->full = NULL;
        drop_part_data(upload->parts[i]);
        mem_free(upload->parts[i]->spans);
        mem_free(upload->parts[i]);
    }
    mem_free(upload->parts);
    mem_free(upload->id);
    upload->parts = NULL;
    upload->id = NULL;
    upload->nparts = upload->parts_capacity = 0;
}

/* ---- parts of an earlier run ---- */

struct s3_part_page {
    struct s3_upload *upload;
    unsigned long long number, nbytes;
    char etag[MAX_ETAG], checksum[BASE64_NCHARS];
    bool truncated;
    char marker[32];
};

/* Takes over a part that an earlier run uploaded, if it has the length that this run needs. */
static rsd_status adopt_part(struct s3_part_page *page)
{
    struct s3_part *part;
    if (page->number < 1 || page->number > 10000 || !page->etag[0])
        return fail(RSD_EIO, "the service lists an invalid part");
    if (page->upload->nbytes > 0 && page->number > count_parts(page->upload, page->upload->nbytes))
        return RSD_OK;
    TRY(need_part(page->upload, (size_t)page->number - 1, &part));
    bool sized = page->upload->nbytes > 0;
    if ((sized && part->nbytes != page->nbytes) || page->nbytes > part->nbytes)
        return RSD_OK; /* it is uploaded anew */
    part->nbytes = page->nbytes;
    memcpy(part->etag, page->etag, sizeof part->etag);
    part->has_sha256 = base64_read(page->checksum, part->sha256, sizeof part->sha256);
    part->uploaded = part->started = true;
    return RSD_OK;
}

/* Takes an element of a ListPartsResult, when it begins and when it ends. */
static rsd_status take_part_element(void *context, const char *name, bool entered, const char *text)
{
    struct s3_part_page *page = context;
    if (entered && strcmp(name, "Part") == 0) {
        page->number = page->nbytes = 0;
        page->etag[0] = page->checksum[0] = '\0';
    }
    if (entered)
        return RSD_OK;
    if (strcmp(name, "Part") == 0)
        return adopt_part(page);
    if (strcmp(name, "PartNumber") == 0)
        page->number = strtoull(text, NULL, 10);
    else if (strcmp(name, "Size") == 0)
        page->nbytes = strtoull(text, NULL, 10);
    else if (strcmp(name, "ETag") == 0)
        remote_fit_text(page->etag, sizeof page->etag, text);
    else if (strcmp(name, "ChecksumSHA256") == 0)
        remote_fit_text(page->checksum, sizeof page->checksum, text);
    else if (strcmp(name, "IsTruncated") == 0)
        page->truncated = strcmp(text, "true") == 0;
    else if (strcmp(name, "NextPartNumberMarker") == 0)
        remote_fit_text(page->marker, sizeof page->marker, text);
    return RSD_OK;
}

rsd_status s3_adopt_upload(struct s3_upload *upload)
{
    struct s3_part_page page = {.upload = upload, .truncated = true};
    rsd_status status = RSD_OK;
    for (int n = 0; n < 20 && page.truncated && !status; n++) {
        struct text query = {0};
        if (page.marker[0])
            url_add_parameter(&query, "part-number-marker", page.marker);
        url_add_parameter(&query, "uploadId", upload->id);
        page.truncated = false;
        status = s3_load_document(upload->output->remote, upload->key, &query, "ListParts", NULL,
                                  take_part_element, &page);
    }
    if (!status && page.truncated)
        status = fail(RSD_EIO, "the service lists parts without end");
    return status;
}
