/* http.c - one request of HTTP: how it is sent, and whether its answer is what was asked for.
 *
 * Every byte of an answer is hostile. Bodies have limits; a body for a buffer must fill it exactly; a range
 * must be the one that was requested, of a file of the same length and ETag. Only http and https are spoken,
 * redirects are followed for plain URLs alone, and their hosts receive no credentials.
 */
#include "remote.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

enum { ERROR_NBYTES = 1 << 16, MAX_REFRESHES = 2, CLOCK_SLACK = 240 };
/* libcurl allocates two buffers for each request that is active. Larger ones are not faster. */
#define BUFFER_NBYTES (128L << 10)

/* Limits of an answer: bytes of its headers and of what is behind its body, how many times the bytes that were
 * requested it may be long, and bytes in a second. */
enum { HEADERS_NBYTES = 1 << 19, FLOOD_TIMES = 8, SLOWEST_NBYTES = 1024 };

void http_set_header(struct http_request *request, const char *name, const char *format, ...)
{
    char value[4096];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(value, sizeof value, format, args);
    va_end(args);
    char *copy = n >= 0 && (size_t)n < sizeof value ? mem_copy(value, (size_t)n + 1, 1) : NULL;
    if (!copy || request->nheaders == MAX_HEADERS) {
        mem_free(copy);
        request->failed = true;
        return;
    }
    request->headers[request->nheaders++] = (struct http_header){name, copy};
}

void http_request_drop(struct http_request *request)
{
    for (size_t i = 0; i < request->nheaders; i++)
        mem_free(request->headers[i].value);
    mem_free(request->base);
    mem_free(request->path);
    mem_free(request->query);
    bytes_drop(&request->document);
    request->base = request->path = request->query = NULL;
    request->nheaders = 0;
}

/* ---- the answer's headers ---- */

/* Reads a decimal number below 2^63. *end is behind it. */
static bool read_number(const char *text, uint64_t *number, const char **end)
{
    char *stop;
    if (*text < '0' || *text > '9')
        return false;
    unsigned long long value = strtoull(text, &stop, 10);
    if (value > INT64_MAX)
        return false;
    *number = value;
    *end = stop;
    return true;
}

/* "bytes 0-99/1000", or "bytes * /0" for a range that the file does not have. */
static void read_content_range(struct http_answer *answer, const char *value)
{
    const char *at = value + 6;
    if (strncasecmp(value, "bytes ", 6) != 0)
        return;
    if (strncmp(at, "*/", 2) == 0) {
        read_number(at + 2, &answer->total, &at);
        return;
    }
    answer->has_range = read_number(at, &answer->first, &at) && *at++ == '-' &&
                        read_number(at, &answer->last, &at) && *at++ == '/' &&
                        read_number(at, &answer->total, &at) && *at == '\0';
}

/* Keeps the headers that requests need. */
static void read_answer_header(struct http_answer *answer, const char *name, const char *value)
{
    const char *end;
    uint64_t number;
    if (strcasecmp(name, "content-length") == 0)
        answer->has_length = read_number(value, &answer->length, &end);
    else if (strcasecmp(name, "content-range") == 0)
        read_content_range(answer, value);
    else if (strcasecmp(name, "content-encoding") == 0)
        answer->encoded = *value && strcasecmp(value, "identity") != 0;
    else if (strcasecmp(name, "etag") == 0)
        remote_fit_text(answer->etag, sizeof answer->etag, value);
    else if (strcasecmp(name, "x-amz-checksum-sha256") == 0)
        remote_fit_text(answer->checksum, sizeof answer->checksum, value);
    else if (strcasecmp(name, "x-amz-bucket-region") == 0)
        remote_fit_text(answer->region, sizeof answer->region, value);
    else if (strcasecmp(name, "x-amz-meta-reshard-run") == 0)
        remote_fit_text(answer->run, sizeof answer->run, value);
    else if (strcasecmp(name, "date") == 0)
        answer->date = time_read_http(value);
    else if (strcasecmp(name, "retry-after") == 0 && read_number(value, &number, &end))
        answer->retry_after = number < 60 ? (double)number : 60;
}

/* Called by libcurl for each line, also behind a body. A status line begins a new answer: the one before was a redirect. */
static size_t take_header_line(char *line, size_t one, size_t n, void *context)
{
    struct http_request *request = context;
    char text[4096];
    (void)one;
    request->nheader_bytes += n;
    request->flooded = request->nheader_bytes > HEADERS_NBYTES;
    if (request->flooded || n >= sizeof text)
        return request->flooded ? 0 : n; /* none of those that are read are so long */
    memcpy(text, line, n);
    size_t end = n;
    while (end > 0 && strchr("\r\n \t", text[end - 1]) && text[end - 1])
        end--;
    text[end] = '\0';
    if (strncmp(text, "HTTP/", 5) == 0) {
        const char *code = strchr(text, ' ');
        request->answer = (struct http_answer){.code = code ? strtol(code, NULL, 10) : 0};
        return n;
    }
    char *value = strchr(text, ':');
    if (value) {
        *value++ = '\0';
        value += strspn(value, " \t");
        read_answer_header(&request->answer, text, value);
    }
    return n;
}

/* ---- the answer's body ---- */

static bool is_success(const struct http_request *request)
{
    return request->answer.code >= 200 && request->answer.code < 300;
}

/* A server that does not know ranges sends the whole file, which is only of use if that was wanted. Others send the
 * range with the wrong status. */
static bool is_whole_file_unwanted(const struct http_request *request)
{
    return request->for_range && request->answer.code == 200 && !request->answer.has_range &&
           (request->offset != 0 || !request->answer.has_length ||
            request->answer.length != request->out_nbytes);
}

/* libcurl calls it with bytes of the answer. Returning fewer than n ends the transfer. */
static size_t take_body(char *data, size_t one, size_t n, void *context)
{
    struct http_request *request = context;
    (void)one;
    if (is_success(request) && request->out) {
        if (is_whole_file_unwanted(request) || n > request->out_nbytes - request->nreceived) {
            request->overflowed = true;
            return 0;
        }
        memcpy(request->out + request->nreceived, data, n);
        request->nreceived += n;
        return n;
    }
    size_t limit = is_success(request) ? request->limit : ERROR_NBYTES;
    if (n > limit - request->document.n) {
        request->overflowed = is_success(request);
        return is_success(request) ? 0 : n; /* the beginning of an error is enough */
    }
    bytes_put(&request->document, data, n);
    request->nreceived += n;
    return request->document.failed ? 0 : n;
}

/* libcurl calls it often with the bytes that came, those that no one takes too: the bodies of redirects, and what is
 * between the parts of a body and behind it. Returning other than 0 ends the transfer. */
static int stop_flood(void *context, int64_t total, int64_t ncame, int64_t total_sent,
                      int64_t nsent)
{
    struct http_request *request = context;
    (void)total, (void)total_sent, (void)nsent;
    uint64_t wanted = request->out ? request->out_nbytes : request->limit;
    if (ncame > 0 && (uint64_t)ncame / FLOOD_TIMES > wanted + ERROR_NBYTES)
        request->flooded = true;
    return request->flooded;
}

/* ---- sending ---- */

/* Replaces the list of headers by these lines. */
static rsd_status add_header_lines(struct http_request *request, const struct curl_library *curl,
                                   struct text *lines)
{
    char *chars = NULL, *save = NULL;
    TRY(text_take(lines, &chars));
    curl->slist_free_all(request->header_list);
    request->header_list = NULL;
    rsd_status status = RSD_OK;
    for (char *line = strtok_r(chars, "\n", &save); line && !status;
         line = strtok_r(NULL, "\n", &save)) {
        void *longer = curl->slist_append(request->header_list, line);
        status = longer ? RSD_OK : fail(RSD_ENOMEM, "out of memory");
        request->header_list = longer ? longer : request->header_list;
    }
    rsd_free(chars);
    return status;
}

/* Sets all headers of a request, with its signature. */
static rsd_status set_headers(struct http_request *request, const struct curl_library *curl)
{
    struct text lines = {0};
    rsd_status status = RSD_OK;
    for (size_t i = 0; i < request->nheaders; i++) {
        const struct http_header *header = &request->headers[i];
        if (strpbrk(header->value, "\r\n")) {
            text_drop(&lines);
            return fail(RSD_EINVAL, "a header has a line break in it");
        }
        text_add(&lines, "%s: %s\n", header->name, header->value);
    }
    text_add(&lines, "accept-encoding: identity\nexpect:\n");
    if (request->body)
        text_add(&lines, "content-type: application/octet-stream\n");
    status = storage_sign(request, &lines);
    if (!status)
        status = add_header_lines(request, curl, &lines);
    text_drop(&lines);
    if (!status)
        curl->easy_setopt(request->easy, CURL_HTTPHEADER, request->header_list);
    return status;
}

/* Joins the parts of the URL for libcurl, which checks it. */
static rsd_status set_url(struct http_request *request, const struct curl_library *curl)
{
    struct text url = {0};
    char *chars;
    bool query = request->query && *request->query;
    text_add(&url, "%s%s%s%s", request->base, request->path, query ? "?" : "",
             query ? request->query : "");
    TRY(text_take(&url, &chars));
    int code = curl->easy_setopt(request->easy, CURL_URL, chars);
    rsd_free(chars);
    return code == 0 ? RSD_OK : fail(RSD_EINVAL, "not a URL that libcurl takes");
}

/* Sets the time-outs: of connecting, of an answer that is too slow, and of one that does not end, however fast it
 * comes. Documents and slow requests may take ten minutes, others as long as the slowest speed allows. */
static void set_limits(const struct http_request *request, const struct curl_library *curl)
{
    const rsd_storage *storage = request->storage;
    void *easy = request->easy;
    long milliseconds = (long)(storage->timeout * 1000);
    long connecting = milliseconds < 10000 ? milliseconds : 10000L;
    long in_all = request->slow ? 600000L : milliseconds + (request->limit ? 600000L : 0);
    uint64_t seconds = (request->out_nbytes + request->body_nbytes) / SLOWEST_NBYTES;
    curl->easy_setopt(easy, CURL_CONNECTTIMEOUT_MS, connecting);
    curl->easy_setopt(easy, CURL_TIMEOUT_MS, connecting + in_all + (long)seconds * 1000);
    if (!request->slow) {
        curl->easy_setopt(easy, CURL_LOW_SPEED_LIMIT, (long)SLOWEST_NBYTES);
        curl->easy_setopt(easy, CURL_LOW_SPEED_TIME, (long)(storage->timeout + 0.999));
    }
}

rsd_status http_prepare(struct http_request *request, const struct curl_library *curl)
{
    const rsd_storage *storage = request->storage;
    void *easy = request->easy;
    request->answer = (struct http_answer){0};
    request->document.n = request->nreceived = request->nheader_bytes = 0;
    request->overflowed = request->flooded = false;
    request->curl_error[0] = '\0';
    if (request->failed)
        return fail(RSD_ENOMEM, "out of memory");
    curl->easy_reset(easy);
    TRY(set_url(request, curl));
    TRY(set_headers(request, curl));
    set_limits(request, curl);
    bool secure = strncmp(request->base, "https:", 6) == 0;
    const char *proxy = storage->proxies[secure];
    curl->easy_setopt(easy, CURL_PROTOCOLS, (long)(CURL_PROTOCOL_HTTP | CURL_PROTOCOL_HTTPS));
    curl->easy_setopt(
        easy, CURL_REDIR_PROTOCOLS,
        (long)(secure ? CURL_PROTOCOL_HTTPS : CURL_PROTOCOL_HTTP | CURL_PROTOCOL_HTTPS));
    curl->easy_setopt(easy, CURL_FOLLOWLOCATION, (long)request->plain);
    curl->easy_setopt(easy, CURL_MAXREDIRS, 5L);
    curl->easy_setopt(easy, CURL_HTTP_VERSION, (long)CURL_VERSION_1_1);
    curl->easy_setopt(easy, CURL_PATH_AS_IS, 1L);
    curl->easy_setopt(easy, CURL_NOSIGNAL, 1L);
    curl->easy_setopt(easy, CURL_TCP_KEEPALIVE, 1L);
    curl->easy_setopt(easy, CURL_BUFFERSIZE, BUFFER_NBYTES);
    curl->easy_setopt(easy, CURL_UPLOAD_BUFFERSIZE, BUFFER_NBYTES);
    curl->easy_setopt(easy, CURL_USERAGENT, "reshard/" RSD_VERSION);
    /* libcurl would read the environment for a proxy that is not set. */
    curl->easy_setopt(easy, CURL_PROXY, proxy ? proxy : "");
    curl->easy_setopt(easy, CURL_NOPROXY, storage->no_proxy ? storage->no_proxy : "");
    if (storage->ca_file)
        curl->easy_setopt(easy, CURL_CAINFO, storage->ca_file);
    if (request->body) {
        curl->easy_setopt(easy, CURL_POSTFIELDS, request->body);
        curl->easy_setopt(easy, CURL_POSTFIELDSIZE_LARGE, (int64_t)request->body_nbytes);
    }
    if (strcmp(request->method, "HEAD") == 0)
        curl->easy_setopt(easy, CURL_NOBODY, 1L);
    else
        curl->easy_setopt(easy, CURL_CUSTOMREQUEST, request->method);
    curl->easy_setopt(easy, CURL_HEADERFUNCTION, take_header_line);
    curl->easy_setopt(easy, CURL_HEADERDATA, request);
    curl->easy_setopt(easy, CURL_WRITEFUNCTION, take_body);
    curl->easy_setopt(easy, CURL_WRITEDATA, request);
    curl->easy_setopt(easy, CURL_NOPROGRESS, 0L);
    curl->easy_setopt(easy, CURL_XFERINFOFUNCTION, stop_flood);
    curl->easy_setopt(easy, CURL_XFERINFODATA, request);
    curl->easy_setopt(easy, CURL_ERRORBUFFER, request->curl_error);
    curl->easy_setopt(easy, CURL_PRIVATE, request);
    return RSD_OK;
}

/* ---- judging ---- */

static enum http_outcome note_failed(struct http_request *request, rsd_status status,
                                     enum http_outcome outcome, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The error has no bytes of the server in it but printable ones. */
static enum http_outcome note_failed(struct http_request *request, rsd_status status,
                                     enum http_outcome outcome, const char *format, ...)
{
    va_list args;
    request->status = status;
    va_start(args, format);
    vsnprintf(request->error, sizeof request->error, format, args);
    va_end(args);
    for (char *at = request->error; *at; at++)
        if (*at < ' ' || *at > '~')
            *at = '?';
    return outcome;
}

/* Judges a transfer that libcurl ended with an error code: whether it may be repeated. */
static enum http_outcome judge_transfer(struct http_request *request,
                                        const struct curl_library *curl, int code)
{
    const char *text = request->curl_error[0] ? request->curl_error : curl->easy_strerror(code);
    if (request->document.failed)
        return note_failed(request, RSD_ENOMEM, HTTP_FAILED, "out of memory");
    if (request->flooded)
        return note_failed(request, RSD_EIO, HTTP_FAILED,
                           "the server sends far more than was requested");
    if (request->overflowed && is_whole_file_unwanted(request))
        return note_failed(request, RSD_EIO, HTTP_FAILED,
                           "the server ignores Range and sends the whole file");
    if (request->overflowed)
        return note_failed(request, RSD_EIO, request->out ? HTTP_AGAIN : HTTP_FAILED,
                           "answer is longer than %zu bytes",
                           request->out ? request->out_nbytes : request->limit);
    switch (code) {
    case 1:  /* not http */
    case 3:  /* not a URL */
    case 47: /* too many redirects */
    case 51: /* certificate */
    case 58:
    case 59:
    case 60:
    case 66:
    case 77:
    case 82:
    case 83:
    case 90:
    case 91:
        return note_failed(request, RSD_EIO, HTTP_FAILED, "%s", text);
    default:
        return note_failed(request, RSD_EIO, HTTP_AGAIN, "%s", text);
    }
}

/* Services differ in whether they quote an ETag in a listing. */
static bool is_same_etag(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    bool a_quoted = n >= 2 && *a == '"', b_quoted = m >= 2 && *b == '"';
    a += a_quoted;
    b += b_quoted;
    n -= 2 * (size_t)a_quoted;
    m -= 2 * (size_t)b_quoted;
    return n == m && memcmp(a, b, n) == 0;
}

/* Checks that a successful answer has the bytes that were requested, of the same version of the file. */
static enum http_outcome judge_body(struct http_request *request)
{
    const struct http_answer *answer = &request->answer;
    if (answer->encoded)
        return note_failed(request, RSD_EIO, HTTP_FAILED, "the server encodes the file");
    if (request->etag && answer->etag[0] && !is_same_etag(request->etag, answer->etag))
        return note_failed(request, RSD_EIO, HTTP_FAILED,
                           "file changed while it was read: ETag is %s, was %s", answer->etag,
                           request->etag);
    if (!request->out)
        return HTTP_DONE;
    if (request->for_range && answer->code == 206 && !answer->has_range)
        return note_failed(request, RSD_EIO, HTTP_AGAIN, "the answer has no Content-Range");
    if (request->for_range && answer->has_range &&
        (answer->first != request->offset ||
         answer->last != request->offset + request->out_nbytes - 1 ||
         (request->total && answer->total != request->total)))
        return note_failed(request, RSD_EIO, HTTP_AGAIN,
                           "the server sent bytes %llu to %llu of %llu instead",
                           (unsigned long long)answer->first, (unsigned long long)answer->last + 1,
                           (unsigned long long)answer->total);
    if (request->nreceived != request->out_nbytes)
        return note_failed(request, RSD_EIO, HTTP_AGAIN, "answer ends after %zu of %zu bytes",
                           request->nreceived, request->out_nbytes);
    return HTTP_DONE;
}

static bool is_any_of(const char *code, const char *const *codes)
{
    while (*codes && strcmp(code, *codes) != 0)
        codes++;
    return *codes != NULL;
}

/* Whether an answer blames the clock of this machine. If so, corrects for it. */
static bool is_clock_wrong(struct http_request *request, const char *code)
{
    int64_t date = request->answer.date, ahead = date - request->signed_at;
    bool far =
        date != 0 && request->signed_at != 0 && (ahead > CLOCK_SLACK || -ahead > CLOCK_SLACK);
    if (!far || (*code && strcmp(code, "RequestTimeTooSkewed") != 0) ||
        request->nrefreshes >= MAX_REFRESHES)
        return false;
    request->nrefreshes++;
    atomic_fetch_add(&request->storage->clock_offset, ahead);
    return true;
}

/* Whether an answer says that credentials expired, and others can be loaded. The answer to HEAD has no body
 * that would say why. */
static bool is_refreshed(struct http_request *request, const char *code)
{
    static const char *const expired[] = {"ExpiredToken", "ExpiredTokenException",
                                          "TokenRefreshRequired", "InvalidToken", NULL};
    if (*code ? !is_any_of(code, expired) : strcmp(request->method, "HEAD") != 0)
        return false;
    if (!request->sign || request->nrefreshes >= MAX_REFRESHES)
        return false;
    request->nrefreshes++;
    return storage_expire_credentials(request->storage);
}

/* Judges an HTTP status other than success, by the status and the code in the document. */
static enum http_outcome judge_error(struct http_request *request)
{
    static const char *const passing[] = {"SlowDown",         "RequestTimeout",
                                          "InternalError",    "Throttling",
                                          "BadDigest",        "RequestTimeoutException",
                                          "ServerBusy",       "XAmzContentSHA256Mismatch",
                                          "OperationAborted", NULL};
    const struct http_answer *answer = &request->answer;
    char code[80] = "", message[160] = "";
    long number = answer->code;
    xml_find_text(request->document.data, request->document.n, "Code", code, sizeof code);
    xml_find_text(request->document.data, request->document.n, "Message", message, sizeof message);
    enum http_outcome outcome = HTTP_FAILED;
    if (number == 408 || number == 429 || number == 425 || (number >= 500 && number != 501) ||
        number < 200 || is_any_of(code, passing))
        outcome = HTTP_AGAIN;
    else if ((number == 403 || number == 400) &&
             (is_clock_wrong(request, code) || is_refreshed(request, code)))
        outcome = HTTP_AGAIN;
    rsd_status status = number == 404 ? RSD_ENOENT : RSD_EIO;
    if (number == 412 && request->etag)
        return note_failed(request, status, outcome, "file changed while it was read");
    if ((number == 301 || number == 307 || number == 400) && answer->region[0] && request->sign)
        return note_failed(request, status, outcome,
                           "HTTP status %ld: the bucket is in the region %s; set the region",
                           number, answer->region);
    return note_failed(request, status, outcome, "HTTP status %ld%s%s%s%s", number,
                       *code ? " " : "", code, *message ? ": " : "", message);
}

enum http_outcome http_judge(struct http_request *request, const struct curl_library *curl,
                             int curl_code, double *delay)
{
    enum http_outcome outcome;
    request->status = RSD_OK;
    request->error[0] = '\0';
    if (curl_code != 0)
        outcome = judge_transfer(request, curl, curl_code);
    else if (is_success(request))
        outcome = judge_body(request);
    else
        outcome = judge_error(request);
    *delay = request->answer.retry_after;
    return outcome;
}
