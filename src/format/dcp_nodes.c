/* dcp_nodes.c - parts of the pickle of DCP metadata, each checked before it is used. */
#include "dcp_nodes.h"

#include "torch_item.h"

rsd_status metadata_check(bool holds, const char *what)
{
    return holds ? RSD_OK : fail(RSD_EFORMAT, "%s", what);
}

pickle_node metadata_state(const struct pickle_tree *tree, pickle_node c, enum known known)
{
    if (pickle_kind(tree, c) != NODE_OBJECT ||
        pickle_known(tree, pickle_part(tree, c, NODE_WHAT)) != known)
        return PICKLE_ABSENT;
    return pickle_part(tree, c, NODE_STATE);
}

/* The state is (dtype, layout, requires_grad, memory format, pinned [, strides]). */
rsd_status metadata_take_dtype(const struct pickle_tree *tree, pickle_node properties,
                               rsd_dtype *dtype)
{
    pickle_node state = metadata_state(tree, properties, KNOWN_TENSOR_PROPERTIES);
    char text[GLOBAL_TEXT_NCHARS];
    TRY(metadata_check(pickle_kind(tree, state) == NODE_TUPLE && pickle_count(tree, state) >= 5,
                       "properties of the tensor are invalid"));
    pickle_node name = pickle_item(tree, state, 0);
    *dtype = (rsd_dtype)0;
    if (pickle_known(tree, name) == KNOWN_TORCH_NAME)
        *dtype = dtype_from_torch(pickle_text(tree, pickle_part(tree, name, NODE_ARGS)));
    return *dtype ? RSD_OK
                  : fail(RSD_EUNSUPPORTED, "dtype %s is not supported",
                         pickle_global_text(tree, name, text));
}

rsd_status metadata_take_transforms(const struct pickle_tree *tree, pickle_node list,
                                    struct extent *extent, struct slice *unknown,
                                    struct text *names)
{
    struct pickle_walk walk = pickle_walk(tree, list);
    pickle_node item;
    while (pickle_walk_next(&walk, &item)) {
        struct slice name = pickle_text(tree, item);
        TRY(metadata_check(pickle_kind(tree, item) == NODE_STRING,
                           "name of a transform is not a string"));
        if (!budget_take_text(name.nbytes))
            return budget_fail();
        text_add(names, names->length ? ", " : "[");
        json_add_string(names, name.bytes, name.nbytes);
        bool known = slice_is(name, "stream.zstd/1") || slice_is(name, "stream.zstd");
        if (!known && !unknown->bytes)
            *unknown = name;
        if (known)
            TRY(metadata_check(extent->nzstd++ < 8, "item was compressed more than 8 times"));
    }
    text_add(names, names->length ? "]" : "[]");
    return names->failed ? fail(RSD_ENOMEM, "no memory for the names of transforms") : RSD_OK;
}

rsd_status metadata_fail_without(const struct pickle_tree *tree, pickle_node root)
{
    char text[GLOBAL_TEXT_NCHARS];
    pickle_node what = pickle_is_built(tree, root) ? pickle_part(tree, root, NODE_WHAT) : root;
    if (pickle_kind(tree, what) != NODE_GLOBAL)
        return metadata_check(false,
                              "state_dict_metadata is missing; the pickle is not metadata of DCP");
    return fail(RSD_EFORMAT, "pickle is not metadata of DCP: it calls %s, which is refused",
                pickle_global_text(tree, what, text));
}
