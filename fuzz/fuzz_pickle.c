/* fuzz_pickle.c - any bytes as a pickle: a pickle that can be read is written as JSON and as a pickle again, and that
 * pickle has the same JSON. */
#include "torch_item.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Reads the root as a tensor, which must not fail in any other way than with a status. */
static void try_view(const struct pickle_tree *tree, pickle_node root)
{
    struct torch_view view;
    if (torch_view_is_tensor(tree, root) && !torch_view_read(tree, root, &view))
        torch_view_check(&view, view.storage_count * rsd_dtype_nbytes(view.dtype));
}

static void try_again(const char *json, const struct bytes *pickle)
{
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    char *again;
    if (pickle_read_memory(pickle->data, pickle->n, &tree, &root, &used) || used != pickle->n ||
        pickle_to_json(&tree, root, &again))
        abort();
    if (again && strcmp(json, again) != 0)
        abort();
    rsd_free(again);
    pickle_tree_drop(&tree);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct pickle_tree tree;
    struct bytes pickle = {0};
    pickle_node root;
    uint64_t used;
    char *json = NULL;
    bool plain = false;
    if (pickle_read_memory(data, n, &tree, &root, &used))
        return 0;
    if (used > n || pickle_to_json(&tree, root, &json) ||
        pickle_to_plain_pickle(&tree, root, &pickle, &plain))
        abort();
    try_view(&tree, root);
    if (json && plain)
        try_again(json, &pickle);
    rsd_free(json);
    bytes_drop(&pickle);
    pickle_tree_drop(&tree);
    return 0;
}
