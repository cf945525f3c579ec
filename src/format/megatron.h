/* megatron.h - checkpoints of Megatron. Private to format. */
#ifndef MEGATRON_H
#define MEGATRON_H

#include "rank_parts.h"

/* ---- megatron_rules.c: how tensor-parallel ranks cut a parameter ---- */

enum megatron_join {
    JOIN_UNKNOWN, /* no rule: equal on all ranks, or it cannot be read */
    JOIN_COPIES,  /* every rank has all of it */
    JOIN_PARTS,   /* a dim is cut */
    JOIN_GATED /* the same; of a gated MLP each rank has a part of the gate, then one of the other half */
};

struct megatron_rule {
    enum megatron_join join;
    int32_t dim; /* that is cut */
};

/* The rules of the caller, which come before those of the table. Starts as {0}. */
struct megatron_rules {
    struct user_rule *list;
    size_t n;
};

/* Reads the rules of the options: "RE=S(1)". EINVAL: one is invalid. */
rsd_status megatron_rules_open(struct megatron_rules *rules, const rsd_open_options *options);
void megatron_rules_close(struct megatron_rules *rules);

/* Finds the rule of a parameter: one of the caller by the whole name, or one of the table by the end. */
struct megatron_rule megatron_rules_find(const struct megatron_rules *rules, const char *name);

/* ---- megatron_values.c ---- */

/* Adds the values of a file to its catalog. ranks: each rank has such a file, so what differs between them is left
 * out. optimizer: such state was found elsewhere. */
rsd_status megatron_add_values(struct torch_visit *visit, bool ranks, bool optimizer);

/* ---- megatron_files.c: the ranks of a checkpoint ---- */

#define MEGATRON_TAG "latest_checkpointed_iteration.txt"

bool megatron_is_rank_directory(const char *name); /* mp_rank_00_001 */

/* The file of one rank. */
struct megatron_file {
    uint32_t index;                /* in the store */
    int32_t numbers[3];            /* of its directory */
    int32_t tensor, stage, expert; /* parallel ranks */
};

/* What `args` says; 0: it does not say it. */
struct megatron_args {
    int64_t ntensor, nstages, nexpert; /* parallel sizes */
    int64_t nlayers, nexperts, ffn, nexpert_tensor;
    int64_t iteration;     /* is beside args */
    bool gated, has_gated; /* has_gated: args says whether the MLP is gated */
};

struct megatron_files {
    char *directory;            /* in the store; "" is the store itself */
    struct megatron_file *list; /* sorted by stage, expert and tensor */
    size_t n, capacity;
    int32_t nnumbers;           /* in the names of directories */
    uint32_t metadata;          /* .metadata of torch_dist; UINT32_MAX: none */
    bool distributed_optimizer; /* a file has a part of one */
};

/* Finds the directory of the last iteration, or of the store itself. The caller frees it. */
rsd_status megatron_find_directory(struct store *store, char **directory);

/* Finds the files of all ranks, and adds them to the store. */
rsd_status megatron_find_files(struct store *store, struct megatron_files *files);

/* Sets the ranks of each file, and checks that no file is missing. */
rsd_status megatron_assign_ranks(const struct store *store, struct megatron_files *files,
                                 const struct megatron_args *args);
void megatron_files_drop(struct megatron_files *files);

#endif
