/* reshard_checkpoint.h - part 6 of reshard.h, which includes it: tensors in checkpoints.
 *
 *     rsd_checkpoint_open("step-1000", NULL, &checkpoint);
 *     rsd_load(checkpoint, 1, &local, NULL, NULL);               any layout in the files, any in memory
 *     rsd_save("step-2000", 1, &local, NULL, NULL);              as torch saves it
 *     rsd_convert(checkpoint, "hf", NULL, NULL);                 whole tensors, as safetensors
 *     rsd_diff(checkpoint, other, NULL, NULL, NULL, &n, NULL);   the same tensors, bit by bit?
 */
#ifndef RESHARD_CHECKPOINT_H
#define RESHARD_CHECKPOINT_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rsd_transport; /* reshard_transport.h: how processes talk to each other */
struct rsd_storage;   /* reshard_storage.h: credentials and limits for URLs */

/* ---- 6.1 Looking -----------------------------------------------------------------------------
 *
 * A checkpoint is a layout whose ranks are files. Three formats are read, and which one it is, is found
 * out by looking:
 *
 *     PyTorch's distributed checkpoints     a folder with .metadata, or __0.metadata, __1.metadata, ...
 *     safetensors                           a file, or a folder with an index.json or with shards
 *     what torch.save writes                a file (.pt, .pth, .bin), or a folder with its index
 *
 * Nothing in a file is ever run or built: a pickle is read as data. Opening reads names, shapes and
 * places; bytes of tensors are read when they are loaded. Names found in a file cannot lead out of its
 * folder. EFORMAT names the file, the tensor and the byte. Several threads may use one checkpoint at once.
 */
typedef struct rsd_checkpoint rsd_checkpoint;

typedef enum rsd_format {
    RSD_FORMAT_DCP = 1,
    RSD_FORMAT_SAFETENSORS = 2,
    RSD_FORMAT_TORCH_SAVE = 3
} rsd_format;

/* "dcp", "safetensors", "torch.save"; NULL for a number that is no format. */
const char *rsd_format_name(rsd_format format);

typedef struct rsd_open_options {
    size_t struct_nbytes; /* sizeof(rsd_open_options) */
    rsd_format format;    /* 0: find out */
    const char
        *metadata; /* the one file of a DCP folder that says what is in it, such as __3.metadata;
                           * NULL: .metadata, or all of __0.metadata, __1.metadata, ... */
    struct rsd_storage *storage; /* reshard_storage.h: for s3:// and https://; NULL: unsigned */
} rsd_open_options;

/* options may be NULL. ENOENT: the path, or a file that the checkpoint needs, does not exist. EFORMAT: not
 * a checkpoint, or a broken one. */
rsd_status rsd_checkpoint_open(const char *path, const rsd_open_options *options,
                               rsd_checkpoint **checkpoint);
void rsd_checkpoint_close(rsd_checkpoint *checkpoint); /* accepts NULL */

rsd_format rsd_checkpoint_format(const rsd_checkpoint *checkpoint);

/* Tensors are numbered in the order of the file. */
typedef struct rsd_tensor_info {
    size_t struct_nbytes; /* sizeof(rsd_tensor_info), set by the caller */
    const char *name;     /* valid as long as the checkpoint */
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    int64_t nbytes;   /* of the whole tensor */
    int64_t nboxes;   /* in how many parts it is stored */
    const char *path; /* in a nested state dict, as a JSON list; NULL: not known */
} rsd_tensor_info;

int64_t rsd_checkpoint_ntensors(const rsd_checkpoint *checkpoint);
rsd_status rsd_checkpoint_tensor(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_tensor_info *tensor);

/* EMISMATCH: there is no tensor of this name. */
rsd_status rsd_checkpoint_find(const rsd_checkpoint *checkpoint, const char *name, int64_t *index);

/* Where a tensor lies in the files: explicit boxes, the rank being the number of the file. */
rsd_status rsd_checkpoint_layout(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_layout **layout);

int64_t rsd_checkpoint_nfiles(const rsd_checkpoint *checkpoint);
const char *rsd_checkpoint_file(const rsd_checkpoint *checkpoint,
                                int64_t index); /* NULL: no such */

/* One stored box of a tensor. file is -1 if nothing says where its bytes are. */
typedef struct rsd_extent {
    size_t struct_nbytes; /* sizeof(rsd_extent), set by the caller */
    rsd_box box;
    int64_t file;
    uint64_t offset, nbytes; /* of the item in the file, with what is around the bytes */
} rsd_extent;

rsd_status rsd_checkpoint_box(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t box,
                              rsd_extent *stored);

/* Values are what is not a tensor: step counts, learning rates, names. json is the value as JSON if it
 * is plain (numbers, text, bytes, lists and dicts of them), else NULL; give it back with rsd_free. */
int64_t rsd_checkpoint_nvalues(const rsd_checkpoint *checkpoint);
const char *rsd_checkpoint_value_name(const rsd_checkpoint *checkpoint, int64_t index);
const char *rsd_checkpoint_value_path(const rsd_checkpoint *checkpoint,
                                      int64_t index); /* as that of rsd_tensor_info */
rsd_status rsd_checkpoint_value(rsd_checkpoint *checkpoint, int64_t index, char **json);

/* The item of a value as it is stored, decompressed: what torch.save wrote. Its pickle may be anything, so
 * it is for those who trust the file. Give it back with rsd_free; NULL if the value has no item. */
rsd_status rsd_checkpoint_value_item(rsd_checkpoint *checkpoint, int64_t index, void **item,
                                     size_t *nbytes);

/* ---- 6.2 Loading ------------------------------------------------------------------------------
 *
 * Loading goes from any layout in the files to any layout in memory, and reads only what is needed,
 * each byte once.
 */

/* A tensor in the caller's memory: what one rank has of it, or every rank. */
typedef struct rsd_tensor {
    size_t struct_nbytes;     /* sizeof(rsd_tensor) */
    const char *name;         /* in the checkpoint */
    const rsd_layout *layout; /* explicit boxes that do not cover the tensor are fine for loading */
    int32_t rank;             /* or RSD_EVERY_RANK */
    int32_t column_major;     /* 1: dense arrays whose first dim runs fastest */
    void *const *arrays;      /* of the rank, or all, in the order of rsd_layout_array */
    const int64_t *strides;   /* in elements, one per dim of each of these arrays; NULL: dense */
    const char *path;         /* saving: where it is in a nested state dict, as a JSON list of texts
                               * and numbers; NULL: under its name */
} rsd_tensor;

/* How far the work is, told after every megabyte or so. Calls come one at a time, from any thread; to
 * return anything but 0 is to stop it: it then fails with ECANCELLED. The work waits for the answer, so it
 * should come soon. */
typedef struct rsd_progress {
    size_t struct_nbytes;
    int64_t nbytes_done, nbytes_total; /* of tensors, as wide as they are read */
} rsd_progress;
typedef int rsd_on_progress(void *context, const rsd_progress *progress);

/* What was done. */
typedef struct rsd_report {
    size_t struct_nbytes;         /* sizeof(rsd_report), set by the caller */
    int64_t ntensors;             /* that were read or written */
    int64_t nbytes_needed;        /* of tensors, in what was read */
    int64_t nbytes_read;          /* for them */
    int64_t nbytes_decoded_again; /* of compressed items that had to be entered more than once */
    int64_t nbytes_unchecked;     /* read in part only, or stored without a CRC-32 */
    int64_t nbytes_written;       /* to files */
    int64_t nfiles_written;       /* those that a resumed run found complete not counted */
    int64_t nbytes_memory;        /* most buffers at one time */
    int64_t nleft_out;            /* tensors and values of the source that the target has not */
    double seconds;
    int64_t nbytes_shared; /* of files that were not written, but share extents with the source */
} rsd_report;

typedef struct rsd_load_options {
    size_t struct_nbytes;  /* sizeof(rsd_load_options) */
    rsd_pool *pool;        /* NULL: the calling thread alone */
    int64_t max_nbytes;    /* for buffers; 0: 256 MiB */
    int32_t allow_missing; /* 1: tensors that are not there are left out, their memory untouched */
    int32_t allow_cast;    /* 1: dtypes may differ and are converted */
    rsd_on_progress *on_progress;
    void *context;
    const struct rsd_transport *transport; /* NULL: this process alone. 6.6 says more */
    double timeout;                        /* seconds without a sign of life of some rank; 0: 300 */
} rsd_load_options;

/* options and report may be NULL. Several locals may be of one tensor. EMISMATCH before anything is read:
 * a tensor that is not there, another shape or dtype, a box that no file has. The structs are one
 * struct_nbytes apart. */
rsd_status rsd_load(rsd_checkpoint *checkpoint, int64_t nlocals, const rsd_tensor *locals,
                    const rsd_load_options *options, rsd_report *report);

/* ---- 6.3 Saving -------------------------------------------------------------------------------
 *
 * A save is built beside its path, in PATH.reshard-part, and renamed when it is complete and on disk: a
 * reader finds the old checkpoint or the new one, never a part of either. The files are those that torch
 * writes for the same tensors: __R_0.distcp for each rank R, replicas spread over their holders.
 */
typedef struct rsd_value {
    size_t struct_nbytes; /* sizeof(rsd_value) */
    const char *name, *json;
    const char *path; /* as that of rsd_tensor */
} rsd_value;

typedef struct rsd_save_options {
    size_t struct_nbytes;   /* sizeof(rsd_save_options) */
    rsd_pool *pool;         /* NULL: the calling thread alone */
    int64_t nranks;         /* files are made for so many; 0: as many as the layouts name */
    int64_t max_nbytes;     /* for buffers; 0: 256 MiB */
    int32_t overwrite;      /* 1: replace a checkpoint that is there. Other files there are kept */
    int32_t to_lowest_rank; /* 1: the first holder of a replica writes it */
    int32_t compress;       /* 0: no. Else zstd, of this level; torch uses 3 */
    int32_t one_rank;       /* 1: this process writes what `rank` has; rsd_save_publish ends it */
    int32_t rank;
    int64_t nvalues;
    const rsd_value *values; /* each written by one rank, as torch deals them out */
    rsd_on_progress *on_progress;
    void *context;
    const struct rsd_transport *transport; /* NULL: this process alone. 6.6 says more */
    double timeout;                        /* seconds without a sign of life of some rank; 0: 300 */
    struct rsd_storage *storage; /* as that of rsd_open_options */
    int32_t torch_places; /* as that of rsd_convert_options */
} rsd_save_options;

/* Saves as a DCP checkpoint. Every element has to be in some rank's array, else EMISMATCH. A Partial
 * layout is refused with EINVAL: its values are not known yet. EEXIST: there is something at the path.
 * options and report may be NULL.
 *
 * With one_rank, every rank's process makes the same call with the same tensors, layouts and values in the
 * same order, each with its own arrays, and when all have returned, one of them calls rsd_save_publish:
 * EMISMATCH if some rank saved something else. */
rsd_status rsd_save(const char *path, int64_t nlocals, const rsd_tensor *locals,
                    const rsd_save_options *options, rsd_report *report);
rsd_status rsd_save_publish(const char *path, int64_t nranks, int32_t overwrite);

/* The same in two halves: rsd_save_start returns when everything is copied, and the arrays may change
 * again; the files are written by a thread of its own, so a relative path is looked up later. rsd_save_wait
 * waits for them, publishes, and frees the save, also when it fails. */
typedef struct rsd_async_save rsd_async_save;
rsd_status rsd_save_start(const char *path, int64_t nlocals, const rsd_tensor *locals,
                          const rsd_save_options *options, rsd_async_save **saving);
rsd_status rsd_save_wait(rsd_async_save *saving, rsd_report *report);

/* For whoever plans a checkpoint and writes its metadata himself: items into one data file, one behind the
 * other in their order, as torch.save writes them. */
typedef struct rsd_item {
    size_t struct_nbytes; /* sizeof(rsd_item) */
    const char *name;     /* for messages */
    rsd_dtype dtype;      /* 0: bytes, which are written as they are */
    int32_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* in elements; NULL: dense. Another order is kept, as torch does */
    const void *data;
    uint64_t nbytes; /* of bytes; for a tensor it is not looked at */
} rsd_item;

typedef struct rsd_items_options {
    size_t struct_nbytes; /* sizeof(rsd_items_options) */
    rsd_pool *pool;       /* NULL: the calling thread alone */
    int64_t max_nbytes;   /* for buffers; 0: 256 MiB */
    uint64_t offset;      /* where to begin: what the file has before it is kept; 0: a new file */
    int32_t compress;     /* 0: no. Else zstd, of this level, for each item; by one thread */
    int32_t sync;         /* 1: it is on disk when the call returns */
    rsd_on_progress *on_progress;
    void *context;
    struct rsd_storage *storage; /* as that of rsd_open_options */
} rsd_items_options;

/* Item i lies at byte places[2 * i] of the file, in places[2 * i + 1] bytes. options and report may be
 * NULL. After a failure the file has what it has. */
rsd_status rsd_dcp_write_items(const char *path, int64_t nitems, const rsd_item *items,
                               const rsd_items_options *options, uint64_t *places,
                               rsd_report *report);

/* ---- 6.4 Converting ---------------------------------------------------------------------------
 *
 * From any format that can be read to DCP or safetensors, in any layout, within a memory budget. What
 * cannot be finished (a full disk, a kill) can be resumed.
 */

/* What becomes of a tensor. Set to what it is before the call: keep, its own name, its own dtype, no
 * layout. */
typedef struct rsd_tensor_target {
    size_t struct_nbytes;
    int32_t keep;       /* 0: leave it out */
    rsd_dtype dtype;    /* another one: its elements are converted */
    const char *name;   /* copied when the call returns */
    rsd_layout *layout; /* taken over; its dtype does not matter. NULL: whole, on rank 0 */
} rsd_tensor_target;
/* Anything but RSD_OK ends the conversion with that status; the message is rsd_error's. */
typedef rsd_status rsd_map_tensor(void *context, const rsd_tensor_info *tensor,
                                  rsd_tensor_target *choice);

/* Whether files of the output share extents with those of the input, on file systems that can (XFS, btrfs).
 * ALWAYS: EUNSUPPORTED if the file system cannot. */
typedef enum rsd_reflink {
    RSD_REFLINK_AUTO = 0,
    RSD_REFLINK_ALWAYS = 1,
    RSD_REFLINK_NEVER = 2
} rsd_reflink;

typedef struct rsd_convert_options {
    size_t struct_nbytes;     /* sizeof(rsd_convert_options) */
    rsd_format format;        /* RSD_FORMAT_DCP or RSD_FORMAT_SAFETENSORS; 0: safetensors */
    rsd_pool *pool;           /* NULL: the calling thread alone */
    int64_t max_nbytes;       /* for buffers; 0: 256 MiB */
    int64_t max_shard_nbytes; /* safetensors, whole tensors: of one file; 0: all in one */
    int64_t nranks;           /* DCP: files are made for so many; 0: as many as the layouts name */
    int32_t every_replica;    /* safetensors: one file a rank, with all that the rank holds */
    int32_t compress;         /* DCP: 0, or zstd of this level */
    int32_t overwrite;   /* 1: replace a checkpoint that is there. Other files there are kept */
    int32_t resume;      /* 1: go on from what a stopped run of the same kind left */
    int32_t dry;         /* 1: check everything, report what would be done, and do nothing */
    int64_t nside_files; /* files that go into the folder too, such as a config */
    const char *const *side_files;
    rsd_map_tensor *choose; /* called for every tensor in turn; NULL: all as they are, whole */
    void *choose_context;
    rsd_on_progress *on_progress;
    void *context;
    const struct rsd_transport *transport; /* NULL: this process alone. 6.6 says more */
    double timeout;                        /* seconds without a sign of life of some rank; 0: 300 */
    struct rsd_storage *storage; /* as that of rsd_open_options */
    rsd_reflink reflink;
    int32_t unchecked;    /* 1: what is shared is not read to check its CRC, where the output needs none */
    int32_t torch_places; /* 1: DCP items follow each other as torch places them, and safetensors headers
                           * are as short as they can be; 0: large ones begin at multiples of 4 KiB */
} rsd_convert_options;

/* options and report may be NULL. With safetensors, an out that ends in .safetensors is one file.
 * EEXIST: there is something at the path, or what an earlier run left. ECANCELLED, EIO and ENOENT leave what is
 * complete in OUT.reshard-part, for `resume`; after other failures there is nothing. */
rsd_status rsd_convert(rsd_checkpoint *in, const char *out, const rsd_convert_options *options,
                       rsd_report *report);

/* ---- 6.5 Proving -----------------------------------------------------------------------------
 *
 * The digest of a tensor is 128 bits of its values, dtype and shape: the same whatever the layout, the
 * format, the byte order of the file and the number of threads. It finds accidents, not malice.
 */
typedef struct rsd_prove_options {
    size_t struct_nbytes; /* sizeof(rsd_prove_options) */
    rsd_pool *pool;       /* NULL: the calling thread alone */
    int64_t max_nbytes;   /* for buffers; 0: 256 MiB */
    rsd_on_progress *on_progress;
    void *context;
    const struct rsd_transport *transport; /* NULL: this process alone. 6.6 says more */
    double timeout;                        /* seconds without a sign of life of some rank; 0: 300 */
} rsd_prove_options;

/* digests[i] is that of tensors[i]; NULL tensors: of all, in the order of the checkpoint. */
rsd_status rsd_digest(rsd_checkpoint *checkpoint, int64_t ntensors, const int64_t *tensors,
                      const rsd_prove_options *options, char (*digests)[RSD_DIGEST_NCHARS],
                      rsd_report *report);

/* The same of an array in memory, dense and row-major. */
rsd_status rsd_digest_array(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const void *array,
                            char digest[RSD_DIGEST_NCHARS]);

typedef enum rsd_difference {
    RSD_SAME = 0,
    RSD_ONLY_IN_A = 1,
    RSD_ONLY_IN_B = 2,
    RSD_OTHER_DTYPE = 3,
    RSD_OTHER_SHAPE = 4,
    RSD_OTHER_ELEMENT = 5
} rsd_difference;

/* A line of text says what differs: for an element, the first one in row-major order, with its index and
 * both values. What does not differ is not told. */
typedef rsd_status rsd_on_difference(void *context, const char *name, rsd_difference difference,
                                     const char *text);

/* Compares all tensors, bit by bit. *ndiffer is how many differ. */
rsd_status rsd_diff(rsd_checkpoint *a, rsd_checkpoint *b, const rsd_prove_options *options,
                    rsd_on_difference *on_difference, void *context, int64_t *ndiffer,
                    rsd_report *report);

/* Reads everything: sizes, places, coverage, CRCs. Each finding is a line that names the file, the tensor
 * and, where it can be known, the byte. */
typedef rsd_status rsd_on_finding(void *context, const char *text);
rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_prove_options *options,
                      rsd_on_finding *on_finding, void *context, int64_t *nfindings,
                      rsd_report *report);

/* ---- 6.6 Many processes ------------------------------------------------------------------------
 *
 * With a transport in their options, rsd_load, rsd_save, rsd_convert and those of 6.5 are collective: every
 * rank of it calls them with the same arguments, the work is spread, and all return the same status. What
 * one rank cannot do, none has done: the message names it. Cancelled on one rank is cancelled on all.
 * Only a wrong struct_nbytes, of the options, the report or the transport, is told to its own rank alone, which
 * then knows of no others; they wait for it until `timeout`.
 *
 *     options.transport = &transport;              of rsd_mpi_transport, or anybody's
 *     rsd_convert(in, "hf", &options, &report);    each rank reads and writes its share; rank 0 publishes
 *
 * Loading and saving: each rank gives its own arrays; those that it saves are of its rank in the transport, and
 * one_rank, rank and rsd_save_publish are not needed. rsd_save_start agrees on what is saved before it
 * returns, then nobody talks until rsd_save_wait, which all ranks call.
 *
 * Converting: the files are, byte by byte, those of one process. max_nbytes is that of each rank, and a run
 * that was stopped is resumed by any number of ranks. Proving: findings and differences are told on every
 * rank when all is known, in the order of the checkpoint.
 *
 * Reports count all ranks together, but memory and seconds are the most of any; progress is of all ranks, and
 * comes from the calling thread. A rank that is at work says so again and again, so `timeout` is no limit for
 * the work; a rank of which nothing is heard for so long is named with ETIMEOUT. What has been written is then
 * left for `resume`, and the transport can only be freed. The transport is used by the calling thread alone.
 */

/* ---- 6.7 Rules --------------------------------------------------------------------------------
 *
 * Rules decide what becomes of each tensor of a conversion: whether it is kept, its new name, its new dtype
 * and its layout. The command and the Python package use them; docs/rules.md describes them.
 *
 *     rsd_rules_new(NULL, &rules);
 *     rsd_rules_set_mesh(rules, mesh);
 *     rsd_rules_add(rules, RSD_RULE_PLACE, ".*[.]weight=S(0)");
 *     rsd_rules_add(rules, RSD_RULE_DEFAULT, "R");
 *     rsd_rules_check(rules, checkpoint, print_message, NULL, &nproblems);
 *     options.choose = rsd_rules_map;
 *     options.choose_context = rules;
 *     rsd_convert(checkpoint, "out", &options, &report);
 *
 * One thread at a time may use a set of rules. The checkpoint must stay open while they are used.
 */
typedef struct rsd_rules rsd_rules;

/* Sets *matches to 1 if the expression matches: the whole name (whole is 1), or some part of it (0). Any
 * status but RSD_OK ends the call that asked. */
typedef rsd_status rsd_match_name(void *context, const char *expression, int32_t whole,
                                  const char *name, int32_t *matches);

/* decide is called for each tensor that the rules keep, after they have set its name and dtype and before
 * they set its layout. It may change all of them; a layout that it sets is final. */
typedef struct rsd_rules_options {
    size_t struct_nbytes;   /* sizeof(rsd_rules_options) */
    rsd_match_name *match;  /* matches the expressions; NULL: they are POSIX extended */
    rsd_map_tensor *decide; /* NULL: the rules decide alone */
    void *context;          /* of match and decide */
} rsd_rules_options;

/* options may be NULL. */
rsd_status rsd_rules_new(const rsd_rules_options *options, rsd_rules **rules);
void rsd_rules_free(rsd_rules *rules); /* accepts NULL */

/* The ranks to write for. Without a mesh, tensors stay whole. The mesh is shared. */
rsd_status rsd_rules_set_mesh(rsd_rules *rules, const rsd_mesh *mesh);

/* Built-in placement rules, tried after all others: fsdp, hsdp, llama-tp or replicate. */
rsd_status rsd_rules_set_preset(rsd_rules *rules, const char *name);

/* The text of a rule. An expression of PLACE and CAST must match the whole name in the checkpoint; one of
 * ONLY, EXCLUDE and RENAME may match any part of it. Of several PLACE or CAST rules the first that matches
 * applies. A later DEFAULT or DTYPE replaces an earlier one. The expression of RENAME is always POSIX. */
typedef enum rsd_rule {
    RSD_RULE_PLACE = 1,        /* EXPRESSION=PLACEMENTS */
    RSD_RULE_DEFAULT = 2,      /* PLACEMENTS of tensors that no other rule matches */
    RSD_RULE_ONLY = 3,         /* EXPRESSION: keep only tensors that match one of these rules */
    RSD_RULE_EXCLUDE = 4,      /* EXPRESSION: leave out tensors that match */
    RSD_RULE_STRIP_PREFIX = 5, /* TEXT: remove it from the start of names; the first that fits */
    RSD_RULE_RENAME = 6,       /* s/EXPRESSION/NEW/ or s/EXPRESSION/NEW/g, as in sed */
    RSD_RULE_CAST = 7,         /* DTYPE of all floating-point tensors, or EXPRESSION=DTYPE */
    RSD_RULE_PART = 8          /* KEY: if the state dict has it, keep only what is below it, and
                                * remove "KEY." from names */
} rsd_rule;

/* EINVAL: the text is not valid for this kind of rule. */
rsd_status rsd_rules_add(rsd_rules *rules, rsd_rule kind, const char *text);

/* Adds the PLACE rules of a file, tried after those of rsd_rules_add: one EXPRESSION PLACEMENTS per line,
 * separated by white space. # starts a comment. */
rsd_status rsd_rules_add_file(rsd_rules *rules, const char *path);

/* One message of a check: a problem (1), or a note about a rule without effect (0). A problem that many
 * tensors have is one message, with their number and the first names. Any status but RSD_OK ends the check. */
typedef rsd_status rsd_on_rule_message(void *context, int32_t is_problem, const char *text);

/* Applies the rules to every tensor of a checkpoint and reports all problems: tensors that cannot be mapped,
 * PLACE rules of rsd_rules_add that match no tensor, or no tensor left to write. on_message and nproblems may
 * be NULL. EINVAL: rules that need a mesh without one, or a preset that does not fit the mesh. */
rsd_status rsd_rules_check(rsd_rules *rules, rsd_checkpoint *checkpoint,
                           rsd_on_rule_message *on_message, void *context, int64_t *nproblems);

/* An rsd_map_tensor whose context is the rules. Rules with a mesh or a PART require a call of
 * rsd_rules_check for the checkpoint first. The name in *target is valid until the next call. */
rsd_status rsd_rules_map(void *rules, const rsd_tensor_info *tensor, rsd_tensor_target *target);

/* The layout of a tensor on a mesh, for functions that decide. Placements are those of a PLACE rule; a tensor
 * without dims is replicated. */
rsd_status rsd_rules_layout(const rsd_mesh *mesh, const rsd_tensor_info *tensor,
                            const char *placements, rsd_layout **layout);

#ifdef __cplusplus
}
#endif

#endif
