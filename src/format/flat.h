/* flat.h - flat vectors: tensors of one group one after the other, cut over ranks. Private to format.
 *
 *     group 0, cut as one vector            group 0, each tensor cut
 *     rank 0   a a a a a b                  rank 0   a a a b b
 *     rank 1   b b b . . .                  rank 1   a a . b b         . is padding
 */
#ifndef FLAT_H
#define FLAT_H

#include "torch_item.h"

/* A dense tensor of a file, as elements in row-major order. */
struct flat_run {
    uint32_t state, group, rank, file;
    rsd_dtype dtype;
    uint32_t array; /* of the catalog: its record, and its first element there */
    int64_t count;
};

/* A number of a state that belongs to all tensors of a group. */
struct flat_scalar {
    uint32_t state, group;
    char *json;
};

/* State 0 has the parameters. Each other state has a key, such as "exp_avg". Starts with a catalog. */
struct flat_set {
    struct catalog *catalog;
    uint32_t nranks;
    bool each_cut; /* each tensor is cut over all ranks; false: the vector of the group is */
    struct name_list keys;    /* of states */
    struct string_map states; /* by key */
    bool take_rank_0;         /* numbers may differ between ranks */
    struct flat_run *runs;    /* flat_set_finish sorts them by state, group and rank */
    size_t nruns, runs_capacity;
    struct flat_scalar *scalars;
    size_t nscalars, scalars_capacity;
    size_t next_scalar; /* where the search for a scalar begins */
};

/* Finds the number of a key, which is added if it is new. */
rsd_status flat_set_find_state(struct flat_set *set, struct slice key, uint32_t *state);

/* Adds a tensor of a file, whose record is added to the catalog. EUNSUPPORTED: its elements are not in row-major order without gaps. */
rsd_status flat_set_add_run(struct flat_set *set, uint32_t state, uint32_t group, uint32_t rank,
                            struct torch_file *file, pickle_node tensor);

/* Adds what a node of a file says of a state: a tensor with dims is a run; a number is a scalar, which only
 * rank 0 adds. Any other value is left out. EMISMATCH: the step is another one than that of rank 0. */
rsd_status flat_set_add_state(struct flat_set *set, struct slice key, uint32_t group, uint32_t rank,
                              struct torch_file *file, pickle_node value);

/* Reads the element of a tensor without dims as JSON, which the caller frees with rsd_free. *json is NULL if
 * it is not a finite number. */
rsd_status flat_read_scalar(struct torch_file *file, pickle_node tensor, char **json);

/* Sorts the runs. EFORMAT: a rank has a state twice. */
rsd_status flat_set_finish(struct flat_set *set);

/* Returns the runs of a state and a group, by rank; *n of them. */
const struct flat_run *flat_set_find_runs(const struct flat_set *set, uint32_t state,
                                          uint32_t group, size_t *n);

/* Adds to the last tensor of the catalog `numel` elements that begin at element `at` of the group. Requires
 * that the runs have them. */
rsd_status flat_set_add_ranges(const struct flat_set *set, const struct flat_run *runs, int64_t at,
                               int64_t numel);

void flat_set_drop(struct flat_set *set);

#endif
