/* dcp_nodes.h - parts of the pickle of DCP metadata. Private to format. */
#ifndef DCP_NODES_H
#define DCP_NODES_H

#include "pickle.h"
#include "rows.h"

rsd_status metadata_check(bool holds, const char *what);
pickle_node metadata_state(const struct pickle_tree *tree, pickle_node c, enum known known);
rsd_status metadata_take_dtype(const struct pickle_tree *tree, pickle_node properties,
                               rsd_dtype *dtype);
rsd_status metadata_take_transforms(const struct pickle_tree *tree, pickle_node list,
                                    struct extent *extent, struct slice *unknown,
                                    struct text *names);
rsd_status metadata_fail_without(const struct pickle_tree *tree, pickle_node root);

#endif
