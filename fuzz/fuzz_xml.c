/* fuzz_xml.c - any bytes as a document of S3: elements are entered and left in pairs, and texts end. */
#include "remote.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char *copy = malloc(n ? n : 1), found[64];
    if (!copy)
        return 0;
    memcpy(copy, data, n);
    struct xml_reader reader = {.at = copy, .end = copy + n};
    enum xml_step step;
    while ((step = xml_read_next(&reader)) == XML_NEXT)
        if (!reader.name[0] ||
            (reader.text.chars && strlen(reader.text.chars) != reader.text.length))
            abort();
    if (step == XML_END && reader.depth != 0)
        abort();
    xml_reader_drop(&reader);
    if (xml_find_text(copy, n, "Key", found, sizeof found))
        url_decode(found);
    free(copy);
    return 0;
}
