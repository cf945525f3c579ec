/* dcp_nodes.h - parts of the pickle of DCP metadata. Private to format. */
#ifndef DCP_NODES_H
#define DCP_NODES_H

#include "pickle.h"
#include "rows.h"

/* Returns EFORMAT, with the error `what`, unless the condition holds. */
rsd_status metadata_check(bool holds, const char *what);

/* Returns the state of an instance of a known class; PICKLE_ABSENT for any other value. */
pickle_node metadata_state(const struct pickle_tree *tree, pickle_node c, enum known known);

/* Takes the dtype from TensorProperties. EUNSUPPORTED: it is not a dtype of this library. */
rsd_status metadata_take_dtype(const struct pickle_tree *tree, pickle_node properties,
                               rsd_dtype *dtype);

/* Takes the list of an item's transforms. Counts those that are zstd in the extent, sets *unknown to the first other
 * one, and `names`, which starts as {0}, to the list as JSON. */
rsd_status metadata_take_transforms(const struct pickle_tree *tree, pickle_node list,
                                    struct extent *extent, struct slice *unknown,
                                    struct text *names);

/* Returns EFORMAT: the pickle is not metadata of DCP. The error names the global that it would have called. */
rsd_status metadata_fail_without(const struct pickle_tree *tree, pickle_node root);

#endif
