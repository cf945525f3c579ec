/* fuzz_json.c - any bytes as JSON: parsing and skipping accept the same texts, and strings that are written again are
 * the same. */
#include "json.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void string_comes_back(struct slice string)
{
    struct text text = {0};
    struct json j;
    struct slice again;
    json_add_string(&text, string.bytes, string.nbytes);
    json_start(&j, text.chars, text.length);
    if (text.failed || json_string(&j, &again) || json_end(&j) || again.nbytes != string.nbytes ||
        (again.nbytes && memcmp(again.bytes, string.bytes, again.nbytes) != 0))
        abort();
    json_drop(&j);
    text_drop(&text);
}

/* Parses a value part by part. */
static rsd_status walk(struct json *j)
{
    struct slice string;
    uint64_t number;
    bool more = true;
    char first = json_peek(j);
    if (first == '"') {
        TRY(json_string(j, &string));
        string_comes_back(string);
        return RSD_OK;
    }
    if (first != '{' && first != '[') {
        struct json whole = *j;
        if (!json_u64(&whole, &number) && number == 0 && first != '0')
            abort();
        return json_skip(j);
    }
    TRY(json_enter(j, first));
    while (more) {
        TRY(first == '{' ? json_next_key(j, &string, &more) : json_next_item(j, &more));
        if (more)
            TRY(walk(j));
    }
    return RSD_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct json j;
    json_start(&j, (const char *)data, n);
    rsd_status skipped = json_skip(&j);
    size_t end = j.at;
    json_drop(&j);
    json_start(&j, (const char *)data, n);
    rsd_status walked = walk(&j);
    if (skipped != walked || (!walked && j.at != end) || j.at > n)
        abort();
    json_end(&j);
    json_drop(&j);
    return 0;
}
