/* sigv4.c - signatures of requests to S3 (AWS Signature Version 4, in a header).
 *
 *     signature = HMAC(key of the day, region and service,
 *                      "AWS4-HMAC-SHA256" + time + scope + SHA-256(canonical request))
 *
 * Signed are the method, the path, the query, the host, the hash of the body, and every x-amz-... header.
 */
#include "remote.h"

#include <stdio.h>
#include <stdlib.h>

#define EMPTY_SHA256 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

/* A header that is signed. */
struct signed_header {
    const char *name, *value;
};

static int compare_headers(const void *a, const void *b)
{
    const struct signed_header *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* Derives the key of a day, a region and the service from the secret key. */
static void derive_key(const struct signing_key *key, const char *day,
                       unsigned char derived[SHA256_NBYTES])
{
    unsigned char mac[SHA256_NBYTES];
    struct text first = {0};
    text_add(&first, "AWS4%s", key->secret_key);
    sha256_hmac(first.chars ? first.chars : "", first.length, day, strlen(day), mac);
    text_drop(&first);
    sha256_hmac(mac, sizeof mac, key->region, strlen(key->region), derived);
    sha256_hmac(derived, SHA256_NBYTES, "s3", 2, mac);
    sha256_hmac(mac, sizeof mac, "aws4_request", 12, derived);
}

/* The headers that are signed, sorted. Returns how many. */
static size_t list_signed(const struct http_request *request, const struct signing_key *key,
                          const char *hash, const char *time, struct signed_header *list)
{
    size_t n = 0;
    list[n++] = (struct signed_header){"host", strstr(request->base, "://") + 3};
    list[n++] = (struct signed_header){"x-amz-content-sha256", hash};
    list[n++] = (struct signed_header){"x-amz-date", time};
    if (key->session_token)
        list[n++] = (struct signed_header){"x-amz-security-token", key->session_token};
    for (size_t i = 0; i < request->nheaders; i++)
        if (strncmp(request->headers[i].name, "x-amz-", 6) == 0)
            list[n++] = (struct signed_header){request->headers[i].name, request->headers[i].value};
    qsort(list, n, sizeof *list, compare_headers);
    return n;
}

void sigv4_sign(struct http_request *request, const struct signing_key *key, int64_t now,
                struct text *lines)
{
    struct signed_header list[MAX_HEADERS + 4];
    struct text names = {0}, canonical = {0}, scope = {0}, whole = {0};
    unsigned char digest[SHA256_NBYTES], derived[SHA256_NBYTES];
    char time[32], day[16], hex[SHA256_NHEX];
    time_t seconds = (time_t)now;
    struct tm fields;
    gmtime_r(&seconds, &fields);
    strftime(time, sizeof time, "%Y%m%dT%H%M%SZ", &fields);
    strftime(day, sizeof day, "%Y%m%d", &fields);
    const char *hash = request->body_sha256[0] ? request->body_sha256 : EMPTY_SHA256;
    size_t n = list_signed(request, key, hash, time, list);

    text_add(&canonical, "%s\n%s\n%s\n", request->method, request->path,
             request->query ? request->query : "");
    for (size_t i = 0; i < n; i++) {
        text_add(&canonical, "%s:%s\n", list[i].name, list[i].value);
        text_add(&names, "%s%s", i ? ";" : "", list[i].name);
    }
    text_add(&canonical, "\n%s\n%s", names.chars ? names.chars : "", hash);
    sha256_of(canonical.chars ? canonical.chars : "", canonical.length, digest);
    hex_write(digest, sizeof digest, hex);

    text_add(&scope, "%s/%s/s3/aws4_request", day, key->region);
    const char *scope_text = scope.chars ? scope.chars : "";
    text_add(&whole, "AWS4-HMAC-SHA256\n%s\n%s\n%s", time, scope_text, hex);
    derive_key(key, day, derived);
    sha256_hmac(derived, sizeof derived, whole.chars ? whole.chars : "", whole.length, digest);
    hex_write(digest, sizeof digest, hex);

    text_add(lines, "x-amz-content-sha256: %s\nx-amz-date: %s\n", hash, time);
    if (key->session_token)
        text_add(lines, "x-amz-security-token: %s\n", key->session_token);
    text_add(lines,
             "authorization: AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s\n",
             key->access_key, scope_text, names.chars ? names.chars : "", hex);
    if (names.failed || canonical.failed || scope.failed || whole.failed)
        lines->failed = true;
    text_drop(&names);
    text_drop(&canonical);
    text_drop(&scope);
    text_drop(&whole);
}
