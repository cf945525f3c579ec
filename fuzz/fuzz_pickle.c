/* fuzz_pickle.c - any bytes as a pickle: what loads becomes JSON and a pickle again, and that pickle gives
 * the same JSON. */
#include "format.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* A tensor may be looked at, whatever it says. */
static void try_view(const struct nodes *nodes, cell root)
{
    struct view view;
    if (view_is_tensor(nodes, root) && !view_take(nodes, root, &view))
        view_check(&view, view.storage_count * rsd_dtype_nbytes(view.dtype));
}

static void try_again(const char *json, const struct bytes *pickle)
{
    struct nodes nodes;
    cell root;
    uint64_t used;
    char *again;
    if (pickle_load_memory(pickle->data, pickle->n, &nodes, &root, &used) || used != pickle->n ||
        value_to_json(&nodes, root, &again))
        abort();
    if (again && strcmp(json, again) != 0)
        abort();
    rsd_free(again);
    nodes_drop(&nodes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct nodes nodes;
    struct bytes pickle = {0};
    cell root;
    uint64_t used;
    char *json = NULL;
    bool plain = false;
    if (pickle_load_memory(data, n, &nodes, &root, &used))
        return 0;
    if (used > n || value_to_json(&nodes, root, &json) ||
        value_to_pickle(&nodes, root, &pickle, &plain))
        abort();
    try_view(&nodes, root);
    if (json && plain)
        try_again(json, &pickle);
    rsd_free(json);
    bytes_drop(&pickle);
    nodes_drop(&nodes);
    return 0;
}
