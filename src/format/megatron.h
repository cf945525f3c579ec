/* megatron.h - checkpoints of Megatron. Private to format. */
#ifndef MEGATRON_H
#define MEGATRON_H

#include "rank_parts.h"

/* ---- megatron_rules.c: how tensor-parallel ranks cut a parameter ---- */

enum megatron_join {
    JOIN_UNKNOWN, /* no rule: copies, or it cannot be read */
    JOIN_COPIES,  /* every rank has all of it */
    JOIN_ROWS,    /* dim 0 is cut */
    JOIN_COLUMNS, /* dim 1 is cut */
    JOIN_GATED /* dim 0 is cut; of a gated MLP each rank has rows of the gate, then rows of the other half */
};

/* Finds the rule of a parameter by the end of its name. */
enum megatron_join megatron_find_rule(struct slice name);

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
    bool gated, has_gated; /* has_gated: args says whether the MLP is gated */
};

struct megatron_files {
    char *directory;            /* in the store; "" is the store itself */
    struct megatron_file *list; /* sorted by stage, expert and tensor */
    size_t n, capacity;
    int32_t nnumbers;           /* in the names of directories */
    uint32_t metadata;          /* .metadata of torch_dist; UINT32_MAX: there is none */
    bool distributed_optimizer; /* a file has a part of one */
};

/* Finds the directory of the last iteration, or of the store itself. The caller frees it. */
rsd_status megatron_find_directory(struct store *store, char **directory);

/* Finds the files of all ranks, and adds them to the store. */
rsd_status megatron_find_files(struct store *store, struct megatron_files *files);

/* Gives each file its ranks, and checks that no file is missing. */
rsd_status megatron_assign_ranks(const struct store *store, struct megatron_files *files,
                                 const struct megatron_args *args);
void megatron_files_drop(struct megatron_files *files);

#endif
