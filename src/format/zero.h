/* zero.h - checkpoints of DeepSpeed. Private to format. */
#ifndef ZERO_H
#define ZERO_H

#include "flat.h"
#include "rows.h"

/* ---- zero_files.c: which files there are ---- */

/* The files of one tag, as numbers of the store. */
struct zero_files {
    char *directory; /* of the tag, in the store; "" is the store itself */
    uint32_t *model; /* by data-parallel rank; one for all ranks unless each has its own */
    uint32_t *optim; /* by data-parallel rank */
    uint32_t nmodel, noptim;
    bool model_by_rank; /* stage 3: each rank has a model file */
    uint32_t
        optimizer_state; /* of a universal checkpoint: zero/optimizer_state.pt; UINT32_MAX: none */
    bool universal;      /* the directory has zero/NAME/fp32.pt */
};

/* Finds the files, and adds them to the store. EFORMAT names a file that is missing. */
rsd_status zero_find_files(struct store *store, struct zero_files *files);
void zero_files_drop(struct zero_files *files);

/* Returns how sure a file or directory is a sign of DeepSpeed; a value of enum sureness. */
int zero_probe(const struct store_listing *listing, const struct store_entry *entry,
               struct slice start);

/* ---- zero_params.c: what the model file says ---- */

/* A parameter that flat vectors have. */
struct zero_param {
    struct slice name;
    int32_t ndim;
    size_t shape;      /* into the shapes of the list */
    uint32_t group;    /* in param_shapes */
    uint32_t vector;   /* group of the flat set */
    int64_t numel, at; /* at: where it begins in its vector */
    int64_t padding;   /* elements behind it */
    bool added;        /* to the catalog */
};

/* Parameters, and the vectors in which they are. */
struct zero_list {
    struct zero_param *params;
    size_t n, capacity;
    int64_t *shapes;
    size_t nshapes, shapes_capacity;
    struct string_map by_name;
    struct flat_set set;
    int64_t max_padding; /* elements of a vector that are not of a parameter */
    bool by_param;       /* each parameter has a vector of its own */
};

/* An entry of the state dict in the model file. */
struct zero_entry {
    struct slice name;
    pickle_node node;
};

struct zero_reader {
    struct store *store;
    struct catalog *catalog;
    const rsd_open_options *options;
    struct zero_files files;
    struct torch_file model;    /* the first model file; names point into its pickle */
    struct zero_entry *entries; /* of its state dict */
    size_t nentries, entries_capacity;
    struct string_map entries_by_name;
    struct string_map buffers; /* names */
    struct zero_list trained, frozen;
    uint32_t ngroups; /* of param_shapes */
    bool has_shapes;  /* the model file has param_shapes: ZeRO was on */
};

/* Reads the state dict and the shapes of the open model file. Frozen parameters are listed in stage 3 only. */
rsd_status zero_read_params(struct zero_reader *reader);

/* Adds a parameter. EFORMAT: it was added before. */
rsd_status zero_list_add(struct zero_list *list, struct slice name, int32_t ndim,
                         const int64_t *shape, uint32_t group);
void zero_list_drop(struct zero_list *list);

/* Returns NULL if no parameter has the name. */
struct zero_param *zero_list_find(const struct zero_list *list, struct slice name);

/* ---- zero_states.c, zero_universal.c: where the vectors are ---- */

/* Each reads where vectors are, and places the parameters in them: trainable ones of ZeRO, frozen ones of
 * stage 3, trainable ones of a universal checkpoint. */
rsd_status zero_read_partitions(struct zero_reader *reader);
rsd_status zero_read_fragments(struct zero_reader *reader);
rsd_status zero_read_universal(struct zero_reader *reader);

/* ---- zero_vectors.c ---- */

/* Each places parameters in the vectors that were read, and checks these. */
rsd_status zero_place_params(struct zero_reader *reader, uint32_t nvectors);
rsd_status zero_check_fragments(const struct zero_reader *reader);

/* Returns whether the runs, one per rank, have an element for each one of the parameters of their group. */
bool zero_is_param_state(const struct zero_list *list, const struct flat_run *runs);

/* Returns the runs in which the state of a parameter is, one per rank; NULL: no rank has it. */
const struct flat_run *zero_find_runs(const struct zero_list *list, const struct zero_param *param,
                                      uint32_t state);

/* ---- zero_read.c ---- */

/* Puts the directory of the tag in front of an error that belongs to no file of it. */
rsd_status zero_fail_in(const struct zero_reader *reader, rsd_status status);

/* Adds a tensor of the catalog that is in vectors. */
rsd_status zero_add_tensor(struct zero_reader *reader, const struct zero_list *list,
                           const struct zero_param *param, struct slice name,
                           const struct flat_run *runs);

/* ---- zero_values.c ---- */

/* Adds what is below a node, under "PREFIX.NAME" or "NAME". */
rsd_status zero_visit(struct torch_visit *visit, pickle_node node, const char *prefix,
                      struct slice name);

/* Adds the states of the optimizer, and its values. */
rsd_status zero_add_states(struct zero_reader *reader);

/* Adds what is in the model file besides the state dict. */
rsd_status zero_add_model_values(struct zero_reader *reader, struct torch_visit *visit);

#endif
