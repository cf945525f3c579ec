/* fuzz_notation.c - any text as a layout, a problem or a mesh: a text that can be parsed has one canonical form, which
 * is parsed to the same object. */
#include "reshard.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_layout(rsd_layout *layout)
{
    char *text, *again;
    rsd_layout *other;
    if (rsd_layout_print(layout, &text))
        return; /* explicit boxes of high ranks have no text */
    if (rsd_layout_parse(text, &other) || !rsd_layout_equal(layout, other) ||
        rsd_layout_print(other, &again) || strcmp(text, again) != 0)
        abort();
    rsd_free(text);
    rsd_free(again);
    rsd_layout_free(other);
    int64_t narrays = rsd_layout_narrays(layout);
    for (int64_t i = 0; i < narrays && i < 64; i++) {
        rsd_array array;
        if (rsd_layout_array(layout, i, &array))
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char text[4096];
    rsd_layout *layout, *src, *dst;
    rsd_mesh *mesh;
    if (n >= sizeof text)
        return 0;
    memcpy(text, data, n);
    text[n] = '\0';
    if (!rsd_layout_parse(text, &layout)) {
        check_layout(layout);
        rsd_layout_free(layout);
    }
    if (!rsd_problem_parse(text, &src, &dst)) {
        check_layout(src);
        check_layout(dst);
        rsd_layout_free(src);
        rsd_layout_free(dst);
    }
    if (!rsd_mesh_parse(text, &mesh))
        rsd_mesh_free(mesh);
    return 0;
}
