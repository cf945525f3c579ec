/* test_remote.c - what requests to S3 are made of: hashes, signatures, URLs, times, and XML. */
#include "random.h"
#include "remote.h"
#include "tap.h"

#include <stdlib.h>

static void check_sha256(const char *text, const char *expected)
{
    for (int level = 0; level < 2; level++) {
        unsigned char digest[SHA256_NBYTES];
        char hex[SHA256_NHEX];
        sha256_at_level(level, text, strlen(text), digest);
        hex_write(digest, sizeof digest, hex);
        CHECK(strcmp(hex, expected) == 0, "level %d of '%s': %s", level, text, hex);
    }
}

static void test_hashes(void)
{
    CASE("SHA-256 of known texts, and the same at both levels");
    check_sha256("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    check_sha256("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    check_sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    struct random r = {1};
    static unsigned char data[300];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)random_below(&r, 256);
    for (size_t n = 0; n < sizeof data; n++) {
        unsigned char plain[SHA256_NBYTES], fast[SHA256_NBYTES];
        sha256_at_level(0, data, n, plain);
        sha256_at_level(1, data, n, fast);
        CHECK(memcmp(plain, fast, sizeof plain) == 0, "%zu bytes", n);
    }
    CASE("SHA-256 of two messages at once is that of each");
    for (int i = 0; i < 2000; i++) {
        size_t n[2] = {(size_t)random_below(&r, 300), (size_t)random_below(&r, 300)};
        const void *const messages[2] = {data + (300 - n[0]), data};
        unsigned char expected[2][SHA256_NBYTES], found[2][SHA256_NBYTES];
        for (int k = 0; k < 2; k++)
            sha256_at_level(0, messages[k], n[k], expected[k]);
        sha256_of_pair(messages, n, (unsigned char *const[]){found[0], found[1]});
        CHECK(memcmp(expected, found, sizeof expected) == 0, "%zu and %zu bytes", n[0], n[1]);
    }
    CASE("HMAC of RFC 4231");
    unsigned char key[131], mac[SHA256_NBYTES];
    char hex[SHA256_NHEX];
    memset(key, 0x0b, 20);
    sha256_hmac(key, 20, "Hi There", 8, mac);
    hex_write(mac, sizeof mac, hex);
    CHECK(strcmp(hex, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7") == 0,
          "%s", hex);
    memset(key, 0xaa, sizeof key);
    sha256_hmac(key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First", 54, mac);
    hex_write(mac, sizeof mac, hex);
    CHECK(strcmp(hex, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54") == 0,
          "%s", hex);
}

/* tests/s3 compares whole signatures with those of botocore. */
static void test_signature(void)
{
    CASE("a signature names what it signs");
    char base[] = "https://examplebucket.s3.amazonaws.com", path[] = "/test.txt";
    struct http_request request = {.method = "GET", .base = base, .path = path};
    struct signing_key key = {"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
                              NULL, "us-east-1"};
    struct text lines = {0};
    sigv4_sign(&request, &key, time_read_iso("2013-05-24T00:00:00Z"), &lines);
    CHECK(strstr(lines.chars, "SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature=") !=
              NULL,
          "%s", lines.chars);
    CHECK(strstr(lines.chars, "x-amz-date: 20130524T000000Z\n") != NULL, "%s", lines.chars);
    CHECK(strstr(lines.chars,
                 "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request") != NULL,
          "%s", lines.chars);
    text_drop(&lines);
}

static void test_texts(void)
{
    CASE("URLs, base64 and times");
    struct text text = {0};
    url_add_encoded(&text, "a/b c+\xc3\xbc~", 9, true);
    CHECK(strcmp(text.chars, "a/b%20c%2B%C3%BC~") == 0, "%s", text.chars);
    CHECK(url_decode(text.chars) && strcmp(text.chars, "a/b c+\xc3\xbc~") == 0, "%s", text.chars);
    text_drop(&text);
    char zero[] = "a%00b", half[] = "a%4", plus[] = "a+b";
    CHECK(!url_decode(zero) && !url_decode(half), "invalid escapes are taken");
    CHECK(url_decode(plus) && strcmp(plus, "a b") == 0, "%s", plus);
    unsigned char bytes[SHA256_NBYTES], again[SHA256_NBYTES];
    char base64[BASE64_NCHARS];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 7);
    base64_write(bytes, sizeof bytes, base64);
    CHECK(base64_read(base64, again, sizeof again) && memcmp(bytes, again, sizeof bytes) == 0, "%s",
          base64);
    CHECK(!base64_read("AAA", again, sizeof again) && !base64_read("", again, sizeof again),
          "short base64 is taken");
    CHECK(time_read_http("Mon, 16 Nov 2026 14:08:04 GMT") == 1794838084, "%lld",
          (long long)time_read_http("Mon, 16 Nov 2026 14:08:04 GMT"));
    CHECK(time_read_iso("2026-11-16T14:08:04Z") == 1794838084, "an ISO time");
    CHECK(!time_read_http("yesterday") && !time_read_http("Mon, 99 Nov 2026 14:08:04 GMT") &&
              !time_read_http("Mon, 16 ovD 2026 14:08:04 GMT"),
          "invalid times are taken");
}

static bool is_broken(const char *document)
{
    struct xml_reader reader = {.at = document, .end = document + strlen(document)};
    enum xml_step step;
    while ((step = xml_read_next(&reader)) == XML_NEXT)
        ;
    xml_reader_drop(&reader);
    return step == XML_BROKEN;
}

static void test_xml(void)
{
    static const char *const broken[] = {"<a>",
                                         "<a></a",
                                         "</a>",
                                         "<!DOCTYPE x>",
                                         "<a>&b;</a>",
                                         "<a>&#0;</a>",
                                         "<a>&#x110;</a>",
                                         "<a>&#9999999999;</a>",
                                         "<>",
                                         "<a><!-- x --></a>",
                                         "<a>&amp</a>"};
    CASE("XML: elements, texts and entities");
    const char *document =
        "<?xml version='1.0'?>\n<R a='1'><K> a&amp;b&#x26;&quot; </K><E/><K>2</K></R>\n";
    char found[40] = "";
    CHECK(xml_find_text(document, strlen(document), "K", found, sizeof found) &&
              strcmp(found, " a&b&\" ") == 0,
          "'%s'", found);
    CHECK(xml_find_text(document, strlen(document), "E", found, sizeof found) && !*found, "'%s'",
          found);
    CHECK(!xml_find_text(document, strlen(document), "X", found, sizeof found), "an element X");
    CHECK(!xml_find_text(document, strlen(document), "K", found, 1), "text that does not fit");
    CHECK(!is_broken(document), "a right document is broken");
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        CHECK(is_broken(broken[i]), "%s is taken", broken[i]);
    CASE("XML: a document that is nested deep, or long, costs no stack");
    enum { N = 1 << 20 };
    char *deep = malloc(3 * N + 1);
    for (size_t i = 0; deep && i < N; i++)
        memcpy(deep + 3 * i, "<a>", 4);
    CHECK(deep && is_broken(deep), "deep");
    for (size_t i = 0; deep && i < N; i++)
        memcpy(deep + 3 * i, "<?>", 4);
    CHECK(deep && !is_broken(deep), "long");
    free(deep);
}

static void test_buffers(void)
{
    enum { BLOCK = 1 << 20, SMALL = 4096 };
    rsd_storage_options options = RSD_INIT(rsd_storage_options);
    rsd_storage *storage = NULL;
    CASE("a small limit on memory makes requests smaller");
    for (int64_t max_nbytes = 1 << 20; max_nbytes <= 1 << 30; max_nbytes *= 2) {
        options.max_nbytes = max_nbytes;
        rsd_storage_new(&options, &storage);
        size_t expected = max_nbytes <= 16 << 20    ? BLOCK
                          : max_nbytes >= 128 << 20 ? STORAGE_BLOCK_NBYTES
                                                    : (size_t)max_nbytes / 16;
        CHECK(storage->block_nbytes == expected, "%zu bytes for a limit of %lld",
              storage->block_nbytes, (long long)max_nbytes);
        rsd_storage_free(storage);
    }
    options.max_nbytes = 3 * (int64_t)BLOCK;
    rsd_storage_new(&options, &storage);
    CASE("buffers are kept until they do not fit within the limit");
    char *buffers[2];
    for (int i = 0; i < 2; i++) {
        storage_reserve(storage, STORAGE_READS, BLOCK, true);
        buffers[i] = storage_new_buffer(storage, STORAGE_READS, BLOCK);
    }
    for (int i = 0; i < 2; i++)
        storage_free_buffer(storage, STORAGE_READS, buffers[i], BLOCK);
    CHECK(storage->nkept == 2, "%zu are kept", storage->nkept);
    storage_reserve(storage, STORAGE_READS, SMALL, true);
    char *small = storage_new_buffer(storage, STORAGE_READS, SMALL);
    CHECK(storage->nkept == 2, "%zu are kept beside a small one", storage->nkept);
    storage_reserve(storage, STORAGE_WRITES, BLOCK, true);
    char *block = storage_new_buffer(storage, STORAGE_WRITES, BLOCK);
    CHECK(block == buffers[1] && storage->nkept == 1, "%zu are kept", storage->nkept);
    storage_reserve(storage, STORAGE_READS, BLOCK + SMALL, true);
    char *large = storage_new_buffer(storage, STORAGE_READS, BLOCK + SMALL);
    CHECK(storage->nkept == 0, "%zu are kept beyond the limit", storage->nkept);
    CASE("what was reserved for a buffer is free again when the buffer is");
    storage_free_buffer(storage, STORAGE_READS, small, SMALL);
    storage_free_buffer(storage, STORAGE_WRITES, block, BLOCK);
    storage_free_buffer(storage, STORAGE_READS, large, BLOCK + SMALL);
    for (int use = 0; use < 2; use++)
        CHECK(storage->nbytes_used[use] == 0, "%llu bytes are reserved",
              (unsigned long long)storage->nbytes_used[use]);
    rsd_storage_free(storage);
}

int main(void)
{
    test_hashes();
    test_signature();
    test_texts();
    test_xml();
    test_buffers();
    return tap_end();
}
