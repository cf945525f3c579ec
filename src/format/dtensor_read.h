/* dtensor_read.h - the reader of per-rank files, and the names of its optimizer state. Private to format. */
#ifndef DTENSOR_READ_H
#define DTENSOR_READ_H

#include "rank_parts.h"

/* What the model says of the parameters that an optimizer numbers. */
struct optimizer_names {
    uint64_t *places; /* by tensor of the model: where the lowest rank has it */
    size_t nplaces, places_capacity;
    size_t *parameters; /* tensors of the model that may have a number, in order */
    size_t nparameters;
    struct slice *names; /* by number; owned by the catalog */
    size_t nnames;
    bool known, numbered; /* names were looked for; none were found */
};

struct dtensor_reader {
    struct store *store;
    struct rank_parts parts;
    struct optimizer_names names;
    struct mesh_cache mesh; /* of the current file */
    int64_t nranks, fsdp_version, rank;
    bool take_rank_0, in_model, module_prefix, first_file, optimizer_skipped;
};

/* Notes where a tensor of the model is, if it is the last of ntensors and new. */
rsd_status optimizer_names_add(struct optimizer_names *names, size_t ntensors,
                               const struct rank_tensor *tensor);

/* Finds the tensors that may be parameters, after the last tensor of the model. */
rsd_status optimizer_names_finish(struct optimizer_names *names, const struct rank_parts *parts);
void optimizer_names_drop(struct optimizer_names *names);

/* Visits the optimizer file of a rank. The first file decides on the names. */
rsd_status optimizer_visit_file(struct torch_visit *visit);

/* Says whether a value is the list of the numbers of a parameter group, and the names are known. */
bool optimizer_has_names(const struct dtensor_reader *reader, struct slice value);

/* Adds such a list, with names in place of numbers. */
rsd_status optimizer_add_names(const struct dtensor_reader *reader, struct torch_visit *visit,
                               pickle_node numbers);

#endif
