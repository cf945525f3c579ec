/* reshard_checkpoint.h - part 6 of reshard.h, which includes it: tensors in checkpoints.
 *
 *     rsd_checkpoint_open("step-1000", NULL, &checkpoint);
 *     rsd_read(checkpoint, "w", NULL, RSD_F32, array, nbytes);   one tensor, whole
 *     rsd_load(checkpoint, 1, &tensor, NULL, NULL);              into any layout
 *     rsd_save("step-2000", 1, &tensor, NULL, NULL);             as torch saves it
 *     rsd_convert(checkpoint, "hf", NULL, NULL);                 whole tensors, as safetensors
 *     rsd_diff(checkpoint, other, NULL, NULL, NULL, &n, NULL);   compares all tensors, bit by bit
 *
 * rsd_checkpoint_open, rsd_read, rsd_load, rsd_save and rsd_convert are the simple tier. The rest is the full
 * tier. Conventions, such as "Shared" and "since 0.2", are those of reshard.h.
 */
#ifndef RESHARD_CHECKPOINT_H
#define RESHARD_CHECKPOINT_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

struct rsd_transport; /* reshard_transport.h: messages between processes */
struct rsd_storage;   /* reshard_storage.h: credentials and limits for URLs */

/* ---- 6.1 Opening ------------------------------------------------------------------------------
 *
 * A checkpoint is a layout whose ranks are files. The format is detected:
 *
 *     PyTorch's distributed checkpoints     a directory with .metadata, or __0.metadata, __1.metadata, ...
 *     safetensors                           a file, or a directory with an index.json or with shards
 *     what torch.save writes                a file (.pt, .pth, .bin), or a directory with its index
 *     Orbax                                 a directory with _METADATA or manifest.ocdbt; a step of a
 *                                           CheckpointManager, or its directory, of which the last step
 *     what ranks save with FSDP             a directory with model_world_size_N_rank_R.pt of every rank R
 *     DeepSpeed, Megatron                   the directory that the trainer writes, or that of one step
 *
 * The library never runs or builds what a file contains: it reads a pickle as data. Opening reads names,
 * shapes and offsets; bytes of tensors are read by the calls below. Names in a file cannot lead out of its
 * directory. EFORMAT names the file, the tensor and the byte.
 */

/* An open checkpoint. Shared. */
typedef struct rsd_checkpoint rsd_checkpoint;

typedef enum rsd_format {
    RSD_FORMAT_DCP = 1,
    RSD_FORMAT_SAFETENSORS = 2,
    RSD_FORMAT_TORCH_SAVE = 3,
    RSD_FORMAT_FSDP = 4,
    RSD_FORMAT_DEEPSPEED = 5,
    RSD_FORMAT_MEGATRON = 6,
    RSD_FORMAT_ORBAX = 7
} rsd_format;

/* Returns "dcp", "safetensors", "torch.save", "fsdp", "deepspeed", "megatron" or "orbax"; NULL if the format is
 * invalid. */
const char *rsd_format_name(rsd_format format);

typedef struct rsd_open_options {
    size_t struct_nbytes; /* use RSD_INIT */
    rsd_format format;    /* 0: detect it */
    /* The one metadata file of a DCP directory to read, such as __3.metadata. NULL: .metadata, or all of
     * __0.metadata, __1.metadata, ... */
    const char *metadata;
    struct rsd_storage *storage; /* for s3:// and https:// paths; NULL: requests are not signed */
    /* 1: links in the directory may lead out of it. 0: only a link in a snapshot of a Hugging Face cache may,
     * to a blob of the same cache. */
    int32_t follow_links;
    int32_t as_is; /* 1: open one rank's file of several by itself, with the parts that it has */
    /* 1: where copies of a tensor differ between ranks, take that of the lowest rank. 0: EMISMATCH. */
    int32_t take_rank_0;
    int32_t model_dtype; /* DeepSpeed, 1: parameters as the model file has them, not in fp32 */
    /* Megatron's torch_dist, 1: one tensor per layer, decoder.layers.0. and so on, and optimizer states as
     * optimizer.state.NAME.KEY. */
    int32_t unstack;
    int64_t vocab_size; /* Megatron: rows of embeddings and output layers; 0: with their padding */
    /* Megatron: rules "RE=S(1)" that say how tensor-parallel ranks cut parameters whose whole name matches:
     * S(d), R, or gated. */
    int64_t nfrom_rules;
    const char *const *from_rules;
    /* A directory with one file per rank, of which no file says how the tensors are cut: rules with the mesh
     * of the ranks and the places of the tensors. Files are in the order of the numbers in their names.
     * NULL: files say it. */
    struct rsd_rules *from;
    /* Tensors under other names: the name of a built-in map, or the path of a file of one. Fused tensors are
     * split, or put together. docs/names.md describes it. NULL: as stored. */
    const char *names;
    /* Only with names: attention heads, and those of keys and values. 0: as the checkpoint says. */
    int64_t nheads, nkv_heads;
} rsd_open_options;

/* Opens a checkpoint, whose format is detected, and reads what it contains: names, shapes and offsets, but no tensor
 * data. options may be NULL. ENOENT: the path, or a file that the checkpoint needs, does not exist. EFORMAT: the
 * path is not a checkpoint, or the checkpoint is damaged. */
rsd_status rsd_checkpoint_open(const char *path, const rsd_open_options *options,
                               rsd_checkpoint **checkpoint);
void rsd_checkpoint_close(rsd_checkpoint *checkpoint); /* accepts NULL */

/* Returns the name of a built-in map of names, and its text if `text` is not NULL; NULL if the index is invalid. */
const char *rsd_name_map(int64_t index, const char **text);

/* Returns the format that was detected. */
rsd_format rsd_checkpoint_format(const rsd_checkpoint *checkpoint);

/* A tensor of a checkpoint. Since 0.2. */
typedef struct rsd_tensor_info {
    size_t struct_nbytes; /* use RSD_INIT */
    const char *name;     /* valid until the checkpoint is closed */
    rsd_dtype dtype;
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    int64_t nbytes;   /* of the whole tensor */
    int64_t nboxes;   /* the number of its stored boxes */
    const char *path; /* in a nested state dict, as a JSON list; NULL: not known */
} rsd_tensor_info;

/* Return the number of tensors, and fill in a description of one. They are numbered in the order of the file. EINVAL:
 * the index is invalid. */
int64_t rsd_checkpoint_ntensors(const rsd_checkpoint *checkpoint);
rsd_status rsd_checkpoint_tensor(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_tensor_info *tensor);

/* Finds the number of a tensor by its name. EMISMATCH: there is none; the message names a similar one. EUNSUPPORTED:
 * the checkpoint has it, but it cannot be read. */
rsd_status rsd_checkpoint_find(const rsd_checkpoint *checkpoint, const char *name, int64_t *index);

/* Creates the layout of a tensor in the files: explicit boxes, whose rank is the number of the file. EINVAL: the index
 * is invalid. */
rsd_status rsd_checkpoint_layout(const rsd_checkpoint *checkpoint, int64_t index,
                                 rsd_layout **layout);

/* Return the number of files, and the name of one in the directory; NULL if the index is invalid. */
int64_t rsd_checkpoint_nfiles(const rsd_checkpoint *checkpoint);
const char *rsd_checkpoint_file(const rsd_checkpoint *checkpoint, int64_t index);

/* Returns a note: what a user should know of a checkpoint and cannot see in its tensors and values, such as files
 * that were not read. Returns NULL if the index is invalid: notes are numbered from 0. */
const char *rsd_checkpoint_note(const rsd_checkpoint *checkpoint, int64_t index);

/* Returns EFORMAT if the tensors claim far more bytes than the files can have. A program that allocates memory for the
 * tensors of a file that it does not trust calls this first. Since 0.2. */
rsd_status rsd_checkpoint_check_claims(rsd_checkpoint *checkpoint);

/* One stored box of a tensor. Since 0.2. */
typedef struct rsd_extent {
    size_t struct_nbytes; /* use RSD_INIT */
    rsd_box box;
    int64_t file;            /* -1: no file is known to hold the bytes */
    uint64_t offset, nbytes; /* of the item in the file, with what is around the bytes */
    /* The transforms that the item went through, as a JSON list of names; NULL: none. */
    const char *transforms;
} rsd_extent;

/* Returns one of the nboxes stored boxes of a tensor. EINVAL: a number is invalid. */
rsd_status rsd_checkpoint_box(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t box,
                              rsd_extent *extent);

/* Reads the character that a text begins with, in UTF-8. Returns its length in bytes, or 0 if it is not valid.
 * *hidden is 1 if it must not reach a terminal as it is, else 0: a control character, one that has no width or changes
 * the direction of text, or bytes that are not valid. Names in checkpoints may have any characters. Since 0.2. */
int32_t rsd_text_char(const char *text, uint32_t *code, int32_t *hidden);

/* Values are all that is not a tensor: step counts, learning rates, names. *json is the value as JSON if
 * it is plain (numbers, text, bytes, and lists and dicts of them), else NULL. Free it with rsd_free. A
 * value's path is like that of rsd_tensor_info. Names and paths are NULL if the index is invalid; then
 * rsd_checkpoint_value returns EINVAL. EUNSUPPORTED: a tensor that cannot be read, listed as a value. */
int64_t rsd_checkpoint_nvalues(const rsd_checkpoint *checkpoint);
const char *rsd_checkpoint_value_name(const rsd_checkpoint *checkpoint, int64_t index);
const char *rsd_checkpoint_value_path(const rsd_checkpoint *checkpoint, int64_t index);
rsd_status rsd_checkpoint_value(rsd_checkpoint *checkpoint, int64_t index, char **json);

/* Returns the id that torch assigned to the save; NULL: none. Valid as long as the checkpoint. */
const char *rsd_checkpoint_save_id(const rsd_checkpoint *checkpoint);

/* Returns where the item of a value is; its box has no dims. EINVAL: the index is invalid. */
rsd_status rsd_checkpoint_value_extent(const rsd_checkpoint *checkpoint, int64_t index,
                                       rsd_extent *extent);

/* Returns the stored item of a value, decompressed: what torch.save wrote. Its pickle may contain anything:
 * unpickle it only if you trust the file. Free it with rsd_free; it is NULL if the value has no item. EFORMAT: it is
 * not an archive, or a CRC-32 is wrong. */
rsd_status rsd_checkpoint_value_item(rsd_checkpoint *checkpoint, int64_t index, void **item,
                                     size_t *nbytes);

/* ---- 6.2 What all calls share -----------------------------------------------------------------*/

/* The progress of a call, reported about once per megabyte and at the end. Calls come one at a time,
 * from any thread. A callback that does not return 0 cancels the call, which then fails with ECANCELLED.
 * The thread that calls it does not work meanwhile; the others do. */
typedef struct rsd_progress {
    size_t struct_nbytes;
    int64_t nbytes_done, nbytes_total; /* of tensors, as wide as they are read */
} rsd_progress;
typedef int rsd_on_progress(void *context, const rsd_progress *progress);

/* How a call reads and writes: its threads, memory, progress and ranks. Where it is an argument, NULL stands
 * for the defaults. Since 0.2. */
typedef struct rsd_io {
    size_t struct_nbytes; /* use RSD_INIT */
    rsd_pool *pool;       /* NULL: the calling thread alone */
    int64_t max_nbytes;   /* limit of the buffers of this process; 0: 256 MB */
    rsd_on_progress *on_progress;
    void *context;                         /* of on_progress */
    const struct rsd_transport *transport; /* NULL: this process alone; else see 6.7 */
    double timeout; /* seconds without a heartbeat after which a rank counts as lost; 0: 300 */
    /* A stream of CUDA, whose work is done before arrays on a device are used. NULL: the default stream. */
    void *stream;
    struct rsd_storage *storage; /* of paths that are written; as that of rsd_open_options */
} rsd_io;

/* What a call did. Where it is an argument, NULL means that nobody needs it. */
typedef struct rsd_report {
    size_t struct_nbytes;         /* use RSD_INIT */
    int64_t ntensors;             /* that were read or written */
    int64_t nbytes_needed;        /* of tensors, in what was read */
    int64_t nbytes_read;          /* from files, for them */
    int64_t nbytes_decoded_again; /* of compressed items that were decompressed more than once */
    int64_t nbytes_unchecked;     /* read only in part, or stored without a CRC-32 */
    int64_t nbytes_written;       /* to files */
    int64_t nfiles_written;       /* without those that a resumed run found complete */
    int64_t nbytes_memory;        /* the largest size of all buffers at one time */
    int64_t nleft_out;            /* tensors and values of the source that the target lacks */
    double seconds;
    int64_t nbytes_shared; /* of files that were not written, but share extents with the source */
} rsd_report;

/* ---- 6.3 Loading ------------------------------------------------------------------------------
 *
 * Loading reads from any layout in files into any layout in memory. It reads only the bytes that are needed,
 * each once.
 */

/* Reads a box of one tensor (NULL: all of it) into a dense row-major array, in the calling thread. dtype
 * is that of the array: 0 means as stored, and elements of another dtype are converted. EINVAL: nbytes
 * is not the size of the array, or the box is not inside the tensor. EMISMATCH: no such tensor, or no
 * file has some element. EUNSUPPORTED: the elements cannot be converted. EFORMAT: the CRC-32 is wrong. On
 * failure the contents of the array are unspecified. Since 0.2. */
rsd_status rsd_read(rsd_checkpoint *checkpoint, const char *name, const rsd_box *box,
                    rsd_dtype dtype, void *out, size_t nbytes);

/* A tensor in the caller's memory: the arrays of one rank, or of every rank. Since 0.2. */
typedef struct rsd_tensor {
    size_t struct_nbytes;     /* use RSD_INIT */
    const char *name;         /* in the checkpoint */
    const rsd_layout *layout; /* for loading, explicit boxes need not cover the tensor */
    int32_t rank;             /* or RSD_EVERY_RANK */
    int32_t column_major;     /* 1: dense arrays whose first dim is contiguous */
    void *const *arrays;      /* of the rank, or all, in the order of rsd_layout_array */
    const int64_t *strides;   /* in elements, one per dim of each of these arrays; NULL: dense */
    const char *path;         /* saving: in a nested state dict, as a JSON list; NULL: the name */
} rsd_tensor;

typedef struct rsd_load_options {
    size_t struct_nbytes;  /* use RSD_INIT */
    int32_t allow_missing; /* 1: skip tensors that are not in the checkpoint */
    int32_t allow_cast;    /* 1: convert elements of another dtype */
    const rsd_io *io;
} rsd_load_options;

/* Loads tensors, or shards of them, into arrays of the caller. Only the bytes that are needed are read. options and
 * report may be NULL. Several structs may be of one tensor. The structs lie struct_nbytes apart. EMISMATCH before
 * anything is read: a missing tensor, another shape or dtype, or an element that no file has. EFORMAT: a file is
 * damaged. After EFORMAT and other failures while files are read, the contents of the arrays are unspecified. */
rsd_status rsd_load(rsd_checkpoint *checkpoint, int64_t ntensors, const rsd_tensor *tensors,
                    const rsd_load_options *options, rsd_report *report);

/* ---- 6.4 Saving -------------------------------------------------------------------------------
 *
 * A save is written beside its path, in the staging directory PATH.reshard-part, and renamed when it is
 * complete and on disk: a reader finds the old checkpoint or the new one, never a part of either. The files
 * are those that torch writes for the same tensors: __R_0.distcp for each rank R, with replicas distributed
 * over the ranks that hold them.
 */
typedef struct rsd_value {
    size_t struct_nbytes; /* use RSD_INIT */
    const char *name, *json;
    const char *path; /* like that of rsd_tensor */
} rsd_value;

typedef struct rsd_save_options {
    size_t struct_nbytes;   /* use RSD_INIT */
    int64_t nranks;         /* to write files for, at most 131072; 0: as many as the layouts name */
    int32_t overwrite;      /* 1: replace a checkpoint; other files in its directory stay */
    int32_t to_lowest_rank; /* 1: the lowest rank that holds a replica writes it */
    int32_t compress;       /* 0: no; else the level of zstd, 1 to 19; torch uses 3 */
    int64_t nvalues;
    const rsd_value *values; /* each is written by one rank, the one that torch selects */
    const rsd_io *io;
    int32_t torch_places; /* as that of rsd_convert_options */
} rsd_save_options;

/* Saves a DCP checkpoint. EMISMATCH: no array has some element. EINVAL: a Partial layout, whose values
 * are not known yet. EEXIST: the path exists. After a failure, what was at the path is still there, and nothing
 * else is left. options and report may be NULL. */
rsd_status rsd_save(const char *path, int64_t ntensors, const rsd_tensor *tensors,
                    const rsd_save_options *options, rsd_report *report);

/* A save in progress, which a thread of its own writes. One thread. Since 0.2. */
typedef struct rsd_async_save rsd_async_save;

/* A save in two parts. rsd_save_start returns when everything is copied: the arrays may then change. It fails as
 * rsd_save does, and then there is no save to wait for. rsd_save_wait waits until the files are written, publishes
 * them at the path, and frees the save, also if it fails. Every save that was started needs this call. The
 * transport must not be freed before. */
rsd_status rsd_save_start(const char *path, int64_t ntensors, const rsd_tensor *tensors,
                          const rsd_save_options *options, rsd_async_save **save);
rsd_status rsd_save_wait(rsd_async_save *save, rsd_report *report);

/* ---- 6.5 Converting ---------------------------------------------------------------------------
 *
 * A conversion writes any format that can be read as DCP, safetensors, torch.save or the files of FSDP, within a
 * memory limit. DCP and safetensors have any layout, torch.save has whole tensors. FSDP has files per rank
 * of a mesh, with the placements of torch. A conversion that was stopped (by a full disk, by a signal) can be resumed.
 */

/* What becomes of a tensor. The library sets keep to 1, name and dtype to the tensor's own, and layout to NULL; the
 * function changes what it wants. Since 0.2. */
typedef struct rsd_tensor_target {
    size_t struct_nbytes;
    int32_t keep;       /* 0: leave it out */
    rsd_dtype dtype;    /* another one: convert its elements */
    const char *name;   /* copied when the call returns */
    rsd_layout *layout; /* now owned by the library; its dtype is ignored. NULL: whole, on rank 0 */
} rsd_tensor_target;

/* Decides what becomes of a tensor. Any status but RSD_OK ends the call that asks, with that status and the message
 * of rsd_error. Since 0.2. */
typedef rsd_status rsd_map_tensor(void *context, const rsd_tensor_info *tensor,
                                  rsd_tensor_target *target);

/* Whether files of the output share extents with those of the input, on file systems that can (XFS, btrfs).
 * ALWAYS: EUNSUPPORTED if the file system cannot. */
typedef enum rsd_reflink {
    RSD_REFLINK_AUTO = 0,
    RSD_REFLINK_ALWAYS = 1,
    RSD_REFLINK_NEVER = 2
} rsd_reflink;

/* Checks an output before it is put at its path; in object storage, when it is there, and a bad output is removed.
 * Collective, if the conversion is: all ranks pass one, or none. A status other than RSD_OK ends the conversion,
 * and nothing is put at the path. */
typedef rsd_status rsd_check_output(void *context, rsd_checkpoint *output);

typedef struct rsd_convert_options {
    size_t struct_nbytes;     /* use RSD_INIT */
    rsd_format format;        /* 0: safetensors. DEEPSPEED, MEGATRON and ORBAX cannot be written */
    int64_t max_shard_nbytes; /* whole tensors: limit of a file; 0: all in one file */
    int64_t nranks;           /* DCP: to write files for, at most 131072; 0: those of the layouts */
    int32_t every_replica;    /* safetensors: one file per rank, with all that the rank holds */
    int32_t compress;         /* DCP: 0, or the level of zstd */
    int32_t overwrite;   /* 1: replace an existing checkpoint; other files in its directory stay */
    int32_t resume;      /* 1: continue a stopped run of the same kind */
    int32_t dry;         /* 1: check everything and report what would be done, but write nothing */
    int64_t nside_files; /* files to copy into the directory, such as a config */
    const char *const *side_files;
    rsd_map_tensor *map; /* called for every tensor in turn; NULL: all tensors as they are, whole */
    void *map_context;
    const rsd_io *io;
    rsd_reflink reflink;
    /* 1: do not read shared data to check its CRC, where the output needs none. */
    int32_t unchecked;
    /* 1: DCP items follow each other as torch places them, and safetensors headers are as short as possible.
     * 0: large arrays begin at multiples of 4096 bytes. */
    int32_t torch_places;
    rsd_check_output *check; /* NULL: the output is not checked */
    void *check_context;
    int32_t adapter; /* 1: whole tensors are in one file, named as PEFT names that of an adapter */
} rsd_convert_options;

/* Writes the tensors of a checkpoint to files in another format or layout, within a memory budget. The output is at its
 * path when it is complete. options and report may be NULL. A path that ends in .safetensors is one file, and for
 * torch.save one that ends in .pt, .pth or .bin. EINVAL: the path is named like a file of another format. EEXIST: the
 * path exists, or an earlier run left its staging directory. ELIMIT: the file system has less space than the output is
 * known to need. ECANCELLED, EIO and ENOENT keep what is complete in OUT.reshard-part, for `resume`; other failures
 * leave nothing. */
rsd_status rsd_convert(rsd_checkpoint *in, const char *out, const rsd_convert_options *options,
                       rsd_report *report);

/* ---- 6.6 Verifying ----------------------------------------------------------------------------
 *
 * The digest of a tensor is 128 bits that depend on its values, dtype and shape, not on its layout, the
 * format, the byte order of the file or the number of threads. It detects accidents, not attacks.
 */

/* Computes digests of stored tensors: digests[i] is that of tensors[i]. If tensors is NULL: of all, in the order of the
 * checkpoint. EINVAL: a number is not that of a tensor. EFORMAT: a file is damaged. EMISMATCH: no file has some
 * element. */
rsd_status rsd_digest(rsd_checkpoint *checkpoint, int64_t ntensors, const int64_t *tensors,
                      const rsd_io *io, char (*digests)[RSD_DIGEST_NCHARS], rsd_report *report);

/* Computes digests of tensors in memory: digests[i] is that of tensors[i], the arrays of all ranks, or with a transport
 * in io those of this rank. Every element is read once, by the lowest rank that has it, and nothing is gathered. Arrays
 * on a CUDA device are read there. EMISMATCH: no array has some element. Since 0.2. */
rsd_status rsd_digest_tensors(int64_t ntensors, const rsd_tensor *tensors, const rsd_io *io,
                              char (*digests)[RSD_DIGEST_NCHARS]);

/* Computes the digest of a dense row-major array in memory, of the host or of a CUDA device. EINVAL: an invalid dtype
 * or shape. */
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

/* Called for each tensor that differs. The text is one line: for an element, the first one that differs in
 * row-major order, with its index and both values. */
typedef rsd_status rsd_on_difference(void *context, const char *name, rsd_difference difference,
                                     const char *text);

/* How rsd_diff compares. Since 0.2. */
typedef struct rsd_diff_options {
    size_t struct_nbytes; /* use RSD_INIT */
    /* Floating-point and complex elements are equal if |a - b| <= atol + rtol * |b|, also between dtypes, and
     * if they have the same bits. Other elements, and all if both are 0, are compared bit by bit. */
    double rtol, atol;
    /* Called for every tensor of a: the name in b, and the dtype that a is converted to before it is compared
     * bit by bit. A tensor that is not kept is left out, and so is its partner. The layout is ignored. With the
     * map of a conversion, its input is compared with its output. NULL: the same names and dtypes. */
    rsd_map_tensor *map;
    void *map_context;
    const rsd_io *io;
} rsd_diff_options;

/* Compares all tensors. *ndiffer is the number of tensors that differ: a difference is not a failure. Any status but
 * RSD_OK of on_difference ends the call with it. options, on_difference and report may be NULL. EFORMAT: a file is
 * damaged. EINVAL: a negative tolerance. */
rsd_status rsd_diff(rsd_checkpoint *a, rsd_checkpoint *b, const rsd_diff_options *options,
                    rsd_on_difference *on_difference, void *context, int64_t *ndiffer,
                    rsd_report *report);

/* Called for each finding: one line that names the file, the tensor and, where it is known, the byte. Any status but
 * RSD_OK ends the call with it. */
typedef rsd_status rsd_on_finding(void *context, const char *text);

/* Reads everything, and checks sizes, offsets, coverage and CRCs. *nfindings is the number of findings: damage is not
 * a failure of the call. on_finding and report may be NULL. */
rsd_status rsd_verify(rsd_checkpoint *checkpoint, const rsd_io *io, rsd_on_finding *on_finding,
                      void *context, int64_t *nfindings, rsd_report *report);

/* ---- 6.7 Collective calls ---------------------------------------------------------------------
 *
 * With a transport in rsd_io, rsd_load, rsd_save, rsd_convert and the calls of 6.6 are collective: every
 * rank makes the same call with the same arguments, the work is divided, and all return the same status. If
 * the call fails on one rank, it fails on all ranks, and the error names that rank. If one rank cancels,
 * all are cancelled. Only an invalid struct_nbytes, of the options, the report or the transport, fails on
 * its own rank alone: the other ranks then wait until the time-out.
 *
 *     io.transport = &transport;                   of rsd_mpi_transport, or any other
 *     options.io = &io;
 *     rsd_convert(in, "hf", &options, &report);    every rank reads and writes; rank 0 publishes
 *
 * Loading and saving: each rank passes its own arrays. Those that it saves are of its rank in the
 * transport. rsd_save_start agrees on what is saved before it returns. The ranks exchange no messages until
 * rsd_save_wait, which all ranks call.
 *
 * Converting: the files are the same, byte by byte, as those of one process. max_nbytes applies to each
 * rank. Any number of ranks can resume a stopped run. Verifying: every rank calls on_finding and
 * on_difference at the end, in the order of the checkpoint.
 *
 * Reports are sums over all ranks, except memory and seconds, which are maxima. Progress is that of all
 * ranks, and comes from the calling thread. A working rank sends heartbeats, so `timeout` does not limit
 * the work. ETIMEOUT names a rank without heartbeats. What was written is then kept for `resume`, and the
 * transport can only be freed. Only the calling thread uses the transport.
 */

/* ---- 6.8 Rules --------------------------------------------------------------------------------
 *
 * Rules decide what becomes of each tensor of a conversion: whether it is kept, its new name, its new dtype
 * and its layout. The command and the Python package use them; docs/rules.md describes them.
 *
 *     rsd_rules_new(NULL, &rules);
 *     rsd_rules_set_mesh(rules, mesh);
 *     rsd_rules_add(rules, RSD_RULE_PLACE, ".*[.]weight=S(0)");
 *     rsd_rules_add(rules, RSD_RULE_DEFAULT, "R");
 *     rsd_rules_check(rules, checkpoint, print_message, NULL, &nproblems);
 *     options.map = rsd_rules_map;
 *     options.map_context = rules;
 *     rsd_convert(checkpoint, "out", &options, &report);
 *
 * The checkpoint must stay open while rules are used. All of 6.8 is since 0.2.
 */

/* A set of rules. One thread. */
typedef struct rsd_rules rsd_rules;

/* Sets *matches to 1 if the expression matches: the whole name (whole is 1), or some part of it (0). Any
 * status but RSD_OK ends the call that asked. */
typedef rsd_status rsd_match_name(void *context, const char *expression, int32_t whole,
                                  const char *name, int32_t *matches);

/* decide is called for each tensor that the rules keep, after they have set its name and dtype and before
 * they set its layout. It may change all of them; a layout that it sets is final. */
typedef struct rsd_rules_options {
    size_t struct_nbytes;   /* use RSD_INIT */
    rsd_match_name *match;  /* matches the expressions; NULL: they are POSIX extended */
    rsd_map_tensor *decide; /* NULL: the rules decide alone */
    void *context;          /* of match and decide */
} rsd_rules_options;

/* Creates a set without rules, which keeps every tensor as it is. options may be NULL. */
rsd_status rsd_rules_new(const rsd_rules_options *options, rsd_rules **rules);
void rsd_rules_free(rsd_rules *rules); /* accepts NULL */

/* Sets the ranks to write for. Without a mesh, tensors stay whole. The mesh is shared. */
rsd_status rsd_rules_set_mesh(rsd_rules *rules, const rsd_mesh *mesh);

/* Adds built-in placement rules, tried after all others: fsdp, hsdp, llama-tp, moe-tp, qwen-tp, gpt2-tp, bert-tp or
 * replicate. fsdp+llama-tp and so on also shard over the axes that are not for tensors. A later call replaces an
 * earlier one. EINVAL: no such preset; the message names a similar one. */
rsd_status rsd_rules_set_preset(rsd_rules *rules, const char *name);

/* The text of a rule. An expression of PLACE and CAST must match the whole name in the checkpoint; one of
 * ONLY, EXCLUDE and RENAME may match any part of it. Of several PLACE or CAST rules the first that matches
 * applies. A later DEFAULT, or CAST without an expression, replaces an earlier one. The expression of RENAME is
 * always POSIX. */
typedef enum rsd_rule {
    RSD_RULE_PLACE = 1,        /* EXPRESSION=PLACEMENTS */
    RSD_RULE_DEFAULT = 2,      /* PLACEMENTS of tensors that no other rule matches */
    RSD_RULE_ONLY = 3,         /* EXPRESSION: keep only tensors that match one of these rules */
    RSD_RULE_EXCLUDE = 4,      /* EXPRESSION: leave out tensors that match */
    RSD_RULE_STRIP_PREFIX = 5, /* TEXT: remove it from the start of names; the first that fits */
    RSD_RULE_RENAME = 6,       /* s/EXPRESSION/NEW/ or s/EXPRESSION/NEW/g, as in sed */
    RSD_RULE_CAST = 7,         /* DTYPE of all floating-point tensors, or EXPRESSION=DTYPE */
    RSD_RULE_PART = 8,         /* KEY: if the state dict has it, keep only what is below it, and
                                * remove "KEY." from names */
    RSD_RULE_MODEL = 9,        /* "": keep only the model of what a trainer wrote, under the names
                                * that it has without the trainer and without wrappers. If it cannot
                                * be told which part that is, rsd_rules_check fails with EINVAL,
                                * unless rules of ONLY or STRIP_PREFIX choose */
    RSD_RULE_CONFIG = 10, /* PATH of the config.json of the model, or its text, which begins with {:
                             * presets do not cut its heads */
    RSD_RULE_KV_HEADS = 11, /* "replicate": presets let ranks share a KV head, if there are more
                             * ranks than KV heads. Else such a mesh is a problem */
    RSD_RULE_HEADS = 12     /* N or N,K: the attention heads, and those of keys and values, instead
                             * of those of CONFIG */
} rsd_rule;

/* Adds a rule. EINVAL: the text is not valid for this kind of rule. */
rsd_status rsd_rules_add(rsd_rules *rules, rsd_rule kind, const char *text);

/* Adds the PLACE rules of a file, tried after those of rsd_rules_add: one EXPRESSION PLACEMENTS per line,
 * separated by white space. # starts a comment. EINVAL: an invalid line; the message has its number. ENOENT: the file
 * does not exist. ELIMIT: it has more than 16 MB or 50,000 lines. After a failure, the lines before are added. */
rsd_status rsd_rules_add_file(rsd_rules *rules, const char *path);

/* One message of a check: a problem (1), or a note about a rule without effect (0). A problem that many
 * tensors have is one message, with their number and the first names. Any status but RSD_OK ends the
 * check. */
typedef rsd_status rsd_on_rule_message(void *context, int32_t is_problem, const char *text);

/* Applies the rules to every tensor of a checkpoint and reports all problems: tensors that cannot be mapped,
 * PLACE rules of rsd_rules_add that match no tensor, or no tensor left to write. on_message and nproblems may
 * be NULL. EINVAL: rules that need a mesh without one, or a preset that does not fit the mesh. */
rsd_status rsd_rules_check(rsd_rules *rules, rsd_checkpoint *checkpoint,
                           rsd_on_rule_message *on_message, void *context, int64_t *nproblems);

/* Lists the presets that fit the tensors that the rules keep, such as "llama-tp, fsdp+llama-tp, fsdp, hsdp, replicate".
 * Of those with -tp, the one that has rules for the most parameters comes first, if it has them for more than half. If a
 * mesh is set, presets for another number of axes are left out. Optimizer state does not count. *names must be freed with
 * rsd_free. Fails as rsd_rules_check does, but problems of tensors are not errors. Since 0.2. */
rsd_status rsd_rules_presets(rsd_rules *rules, rsd_checkpoint *checkpoint, char **names);

/* An rsd_map_tensor whose context is the rules. Rules with a mesh or a PART require a call of
 * rsd_rules_check for the checkpoint first. The name in *target is valid until the next call. */
rsd_status rsd_rules_map(void *rules, const rsd_tensor_info *tensor, rsd_tensor_target *target);

/* Creates the layout of a tensor on a mesh, for functions that decide. Placements are those of a PLACE rule; a tensor
 * without dims is replicated. EINVAL: the placements are invalid, or do not fit the tensor. */
rsd_status rsd_rules_layout(const rsd_mesh *mesh, const rsd_tensor_info *tensor,
                            const char *placements, rsd_layout **layout);

#ifdef __cplusplus
}
#endif

#endif
