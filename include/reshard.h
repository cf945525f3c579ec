/* reshard.h - moves sharded tensors from one layout to another.
 *
 *   layout   which rank holds which elements of a tensor
 *   plan     which rank sends which box to which rank, so that one layout becomes another
 *   exec     a plan that is bound to arrays, threads or processes, and can be run many times
 *
 * One call moves a tensor if one process has the arrays of all ranks:
 *
 *     rsd_layout *rows = NULL, *tiles = NULL;
 *     rsd_status status = rsd_problem_parse("f32[4096,4096] : 4:S0 -> 2x2:S0,S1", &rows, &tiles);
 *     if (status == RSD_OK)
 *         status = rsd_reshard(rows, tiles, src, dst);    src[r], dst[r]: the arrays of rank r
 *     if (status != RSD_OK)
 *         fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
 *     rsd_layout_free(rows);
 *     rsd_layout_free(tiles);
 *
 * The interface has three tiers:
 *
 *   simple         In memory: rsd_layout_parse, rsd_layout_local, rsd_reshard. Files: rsd_checkpoint_open,
 *                  rsd_read, rsd_load, rsd_save, rsd_convert. Most programs need no more.
 *   full           everything in reshard.h, reshard_checkpoint.h (files), reshard_transport.h (processes)
 *                  and reshard_mpi.h (a library of its own).
 *   experimental   reshard_experimental.h. It may change in any version.
 *
 * The parts of this header: 1 errors, simple calls, 2 elements, 3 layouts, 4 plans, 5 execution in one
 * process. It includes the other headers, except reshard_mpi.h, reshard_cuda.h and reshard_experimental.h.
 *
 * Conventions
 *   - Errors: a function that can fail returns rsd_status, and RSD_OK (0) on success. Outputs are the last
 *     parameters and are written only on success. rsd_error() has the message.
 *   - Ownership: the caller frees an object with the ..._free function of its type, which accepts NULL. Text
 *     and lists that are returned through a pointer are freed with rsd_free. Arguments may be freed as soon
 *     as the call returns, except tensor memory during a run. Pointers must not be NULL unless documented.
 *   - Growing structs: a struct that begins with struct_nbytes may have more fields in a later version.
 *     Initialize it with RSD_INIT: rsd_plan_options options = RSD_INIT(rsd_plan_options);
 *   - Threads: every type says how threads may use it. "Immutable": any number of threads at once.
 *     "Shared": the same, the object synchronizes itself. "One thread": no two calls at the same time.
 *     Structs with public fields are plain data of the caller.
 *   - Versions: types and functions exist since version 0.1, unless they say "since 0.2". Enum values,
 *     RSD_MAX_... and structs without struct_nbytes do not change. docs/versions.md has the policy.
 *   - Side effects: the library does not print, exit, abort or read environment variables. Its only global
 *     state is the last error of each thread, and an identifier of this host that is read at load time. It
 *     starts threads only in rsd_pool_new, in rsd_save_start, and during collective calls on checkpoints.
 *   - Tensor memory belongs to the caller and needs no alignment. Indices and counts are int64_t.
 */
#ifndef RESHARD_H
#define RESHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Errors and versions ------------------------------------------------------------------ */

/* Errors are grouped by cause: 1 to 5 the caller, 10 to 12 the machine, 20 and 21 the data, 30 and 31 another rank. */
typedef enum rsd_status {
    RSD_OK = 0,
    RSD_EINVAL = 1,        /* an invalid argument */
    RSD_EMISMATCH = 2,     /* arguments that do not match each other, or a source that lacks data */
    RSD_ELIMIT = 3,        /* a value beyond a limit */
    RSD_EEXIST = 4,        /* an output that exists */
    RSD_ECANCELLED = 5,    /* a call that was cancelled */
    RSD_ENOMEM = 10,       /* no memory */
    RSD_EIO = 11,          /* a read or write that failed */
    RSD_ENOENT = 12,       /* a file that does not exist */
    RSD_EFORMAT = 20,      /* a file that violates its format */
    RSD_EUNSUPPORTED = 21, /* valid, but not supported, such as the minimum of complex numbers */
    RSD_EPEER = 30,        /* a rank that failed or terminated */
    RSD_ETIMEOUT = 31      /* a rank that did not respond in time */
} rsd_status;

/* Returns "EINVAL", "ENOMEM", ..., or "OK" for 0. Never returns NULL. */
const char *rsd_status_name(rsd_status status);

/* Returns the message of the last error of the calling thread, or "" if there was none. It is one line:
 *     shape differs in dim 1: source 4096, destination 4095
 * It is valid until the next call into the library by the same thread. */
const char *rsd_error(void);

/* The version of this header, as text and as 10000 * major + 100 * minor + patch. rsd_version returns the
 * version of the library that runs. */
#define RSD_VERSION        "0.2.0"
#define RSD_VERSION_NUMBER 200
const char *rsd_version(void);

/* Frees text or a list that a call returned through a pointer. Accepts NULL. */
void rsd_free(void *returned);

/* Returns the word that a misspelled text is likely to mean, in any case; NULL: none is similar. For messages, as the
 * library's own. Since 0.2. */
const char *rsd_nearest_word(const char *text, size_t nwords, const char *const *words);

/* Initializes a struct that begins with struct_nbytes: sets that field, and all others to 0. Since 0.2. */
/* clang-format off */
#ifdef __cplusplus
#define RSD_INIT(type) ([] { type rsd_ = type(); rsd_.struct_nbytes = sizeof(type); return rsd_; }())
#else
#define RSD_INIT(type) ((type){.struct_nbytes = sizeof(type)})
#endif
/* clang-format on */

/* ---- Simple calls (those for files are in reshard_checkpoint.h) ---------------------------------
 *
 *     rsd_array array;
 *     rsd_layout_parse("f32[4096,4096] @ 4:S0", &layout);
 *     rsd_layout_local(layout, 3, &array);                array.shape is {1024, 4096}
 *     void *memory = malloc(array.nbytes);                the array of rank 3
 */

/* The most dims of a tensor, axes of a mesh, and segments of a segmented shard. */
enum { RSD_MAX_DIMS = 16, RSD_MAX_AXES = 16, RSD_MAX_SEGMENTS = 4096 };

/* A layout: see part 3. Immutable. */
typedef struct rsd_layout rsd_layout;

/* Creates a layout from text, such as "f32[8,8] @ 4:S0". EINVAL: the message has the column of the mistake, from 1. */
rsd_status rsd_layout_parse(const char *text, rsd_layout **layout);

/* Creates both layouts of a problem, such as "f32[8,8] : 4:S0 -> 2x2:S0,S1". EINVAL: as rsd_layout_parse. */
rsd_status rsd_problem_parse(const char *text, rsd_layout **src, rsd_layout **dst);

/* Frees a layout. Accepts NULL. */
void rsd_layout_free(rsd_layout *layout);

/* An array: the local memory of one rank, or of one explicit box. */
typedef struct rsd_array {
    int32_t rank;
    int32_t ndim;
    int64_t place;               /* position in placement order, see part 3 */
    int64_t shape[RSD_MAX_DIMS]; /* local extents */
    size_t nbytes;               /* of a dense array; 0 if it is empty */
} rsd_array;

/* Returns the array of one rank. EINVAL: the rank has no array, or several explicit boxes; then use
 * rsd_layout_arrays_of. Since 0.2. */
rsd_status rsd_layout_local(const rsd_layout *layout, int32_t rank, rsd_array *array);

/* Moves a tensor in the calling thread. src and dst list the arrays of all ranks, in the order of
 * rsd_layout_array. Empty arrays may be NULL. Sources and destinations must not overlap: EINVAL, where the
 * library can see it without comparing every element. It fails as rsd_plan_new does, before anything is moved. */
rsd_status rsd_reshard(const rsd_layout *src_layout, const rsd_layout *dst_layout,
                       const void *const *src, void *const *dst);

/* ---- 2. Elements: dtypes and boxes -------------------------------------------------------------
 *
 *     rsd_box saved = {2, {0, 0}, {4, 8}}, wanted = {2, {2, 0}, {4, 8}};
 *     rsd_box_overlap(&saved, &wanted, &region);          in_saved {2, 0}, in_wanted {0, 0}, len {2, 8}
 */

/* The element type. The 8-bit floats, F4X2 and C32 can be moved, but not reduced or cast. F4X2 is torch's
 * float4_e2m1fn_x2, two 4-bit floats in one byte: its extents count bytes. C64 is two f32, C128 two f64, C32 two f16. */
/* clang-format off */
typedef enum rsd_dtype {
    RSD_F64 = 1, RSD_F32 = 2, RSD_F16 = 3, RSD_BF16 = 4, RSD_F8E4M3 = 5, RSD_F8E5M2 = 6,
    RSD_I64 = 7, RSD_I32 = 8, RSD_I16 = 9, RSD_I8 = 10,
    RSD_U64 = 11, RSD_U32 = 12, RSD_U16 = 13, RSD_U8 = 14, RSD_BOOL = 15,
    RSD_C64 = 16, RSD_C128 = 17, RSD_F8E4M3FNUZ = 18, RSD_F8E5M2FNUZ = 19, RSD_F8E8M0 = 20,
    RSD_F4X2 = 21, RSD_C32 = 22
} rsd_dtype;
/* clang-format on */

/* Return the name in the notation, such as "f32" (NULL if the dtype is invalid), the bytes of one element (0 if it is
 * invalid), and the dtype of a name, also of PyTorch's and NumPy's, such as "float32" (EINVAL if it is unknown). */
const char *rsd_dtype_name(rsd_dtype dtype);
size_t rsd_dtype_nbytes(rsd_dtype dtype);
rsd_status rsd_dtype_parse(const char *name, rsd_dtype *dtype);

/* A box of elements: lo[d] <= index[d] < lo[d] + len[d]. A box without dims is one element. A box with a len
 * of 0 is empty and valid. ndim is at most RSD_MAX_DIMS; lo and len are 0 to 2^62. */
typedef struct rsd_box {
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS];
    int64_t len[RSD_MAX_DIMS];
} rsd_box;

/* Where the overlap of two boxes lies in each of them. */
typedef struct rsd_region {
    int32_t ndim;
    int64_t in_saved[RSD_MAX_DIMS];  /* offset from the start of the saved box */
    int64_t in_wanted[RSD_MAX_DIMS]; /* offset from the start of the wanted box */
    int64_t len[RSD_MAX_DIMS];
} rsd_region;

/* Returns 1 if the boxes share an element, else 0. Invalid boxes, empty boxes and boxes with different ndim
 * share none. Two boxes without dims always do. */
int rsd_box_overlaps(const rsd_box *a, const rsd_box *b);

/* Returns the overlap of two boxes. If they share no element, len is 0 in each dim where they do not overlap,
 * and the offsets lie within the boxes. EINVAL: ndim differs, or a box is invalid. */
rsd_status rsd_box_overlap(const rsd_box *saved, const rsd_box *wanted, rsd_region *region);

/* ---- 3. Layouts -------------------------------------------------------------------------------
 *
 * A layout is a dtype, a global shape and, for each rank, the boxes that it holds. There are two kinds:
 *
 *   - Mesh and placements: the ranks are an n-dimensional mesh with one placement per axis, applied left to
 *     right. Each rank has one dense array of its own indices in ascending order, as torch's local tensor.
 *     The cost of such a layout does not depend on the number of ranks.
 *   - Explicit boxes: each rank has any number of boxes, and one dense array per box.
 *
 * The notation is one line of text for any layout, and for a problem, which is two layouts of one tensor:
 *
 *     f32[4096,4096] @ dp=2,tp=4 : S(0),S(1)     one placement per mesh axis, as torch's DTensor
 *     f32[4096,4096] @ 2x4 : S0,R                the same without names
 *     f32[4096,4096] @ dp=2,tp=4 : [tp.dp, -]    for each dim the axes that cut it, in order, as JAX
 *     f32[16,1] @ { 0:4 | 4:7 | 7:11 | 11:16 }   explicit boxes: "|" separates ranks, ";" boxes of a rank
 *     f32[4096,4096] : 2x4:S0,S1 -> 8:S1         a problem
 *
 *     S(d)         shard dim d: chunks of ceil(n/m), as torch.chunk; the last may be short or empty
 *     B(d)         balanced: lengths differ by at most 1
 *     S(d;4,2,2)   segmented: dim d consists of segments (fused QKV, gate-up), each sharded separately
 *     _S(d,f)      torch's strided shard with split factor f
 *     C(d,b)       block-cyclic with blocks of b, as ScaLAPACK
 *     R            replicate
 *     P(sum)       partial: the value is the reduction over the axis; also avg min max product band bor bxor
 *
 * A mesh may list its ranks: `2x2 ranks=4-7`, `4 ranks=3,1,0,2`. The same rank on both sides of a problem is
 * the same process. docs/notation.md has the grammar.
 */

/* A mesh of ranks. Immutable. */
typedef struct rsd_mesh rsd_mesh;

/* Creates a layout from its part after the mesh, such as "S0,R" or "[tp.dp, -]". EINVAL: as rsd_layout_parse. */
rsd_status rsd_layout_parse_on(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                               const rsd_mesh *mesh, const char *placements, rsd_layout **layout);

/* Returns the canonical text of a layout or problem, from which an equal layout can be parsed. The caller
 * frees it with rsd_free. EMISMATCH: the two layouts of a problem differ in shape. */
rsd_status rsd_layout_print(const rsd_layout *layout, char **text);
rsd_status rsd_problem_print(const rsd_layout *src, const rsd_layout *dst, char **text);

/* Adds a reference to a layout and returns it. The caller frees it as any other layout. */
rsd_layout *rsd_layout_share(const rsd_layout *layout);

/* -- meshes -- */

/* Create a mesh from text, such as "dp=2,tp=4" or "2x2 ranks=4-7", and such text, for rsd_free, from a mesh. */
rsd_status rsd_mesh_parse(const char *text, rsd_mesh **mesh);
rsd_status rsd_mesh_print(const rsd_mesh *mesh, char **text);

/* Creates a mesh with counts[a] ranks along axis a. Positions are row-major: the last axis changes fastest.
 * names and each entry of it may be NULL. ranks lists the rank at each position; NULL: 0, 1, 2, ... EINVAL: a
 * count below 1, or a rank or a name that occurs twice. */
rsd_status rsd_mesh_new(int32_t naxes, const int64_t *counts, const char *const *names,
                        const int32_t *ranks, rsd_mesh **mesh);
rsd_mesh *rsd_mesh_share(const rsd_mesh *mesh); /* as rsd_layout_share */
void rsd_mesh_free(rsd_mesh *mesh);             /* accepts NULL */

/* Return the number of axes of a mesh, the count and the name of one axis, and the number of ranks. */
int32_t rsd_mesh_naxes(const rsd_mesh *mesh);
int64_t rsd_mesh_count(const rsd_mesh *mesh, int32_t axis);    /* 0 if the axis does not exist */
const char *rsd_mesh_name(const rsd_mesh *mesh, int32_t axis); /* NULL if the axis has no name */
int64_t rsd_mesh_nranks(const rsd_mesh *mesh);

/* Convert between a rank and its coordinates, one per axis. EINVAL: the mesh does not contain them. */
rsd_status rsd_mesh_coords(const rsd_mesh *mesh, int32_t rank, int64_t *coords);
rsd_status rsd_mesh_rank(const rsd_mesh *mesh, const int64_t *coords, int32_t *rank);

/* -- layouts from C -- */

typedef enum rsd_kind {
    RSD_REPLICATE = 0,
    RSD_SHARD = 1,     /* S(dim) */
    RSD_BALANCED = 2,  /* B(dim) */
    RSD_STRIDED = 3,   /* _S(dim,factor) */
    RSD_SEGMENTED = 4, /* S(dim;segments) */
    RSD_CYCLIC = 5,    /* C(dim,factor) */
    RSD_PARTIAL = 6    /* P(reduce) */
} rsd_kind;

/* clang-format off */
typedef enum rsd_reduce {
    RSD_REDUCE_SUM = 0, RSD_REDUCE_AVG = 1, RSD_REDUCE_MIN = 2, RSD_REDUCE_MAX = 3,
    RSD_REDUCE_PRODUCT = 4, RSD_REDUCE_BAND = 5, RSD_REDUCE_BOR = 6, RSD_REDUCE_BXOR = 7
} rsd_reduce;
/* clang-format on */

/* Return "sum", "avg", ... (NULL if the reduction is invalid), and the reduction of such a name, "mean" or "prod". */
const char *rsd_reduce_name(rsd_reduce reduce);
rsd_status rsd_reduce_parse(const char *name, rsd_reduce *reduce);

/* What one mesh axis does to a tensor. Fields that a kind does not use are ignored. A negative dim is from the end. */
typedef struct rsd_placement {
    rsd_kind kind;
    int32_t dim;
    rsd_reduce reduce;       /* RSD_PARTIAL */
    int32_t nsegments;       /* RSD_SEGMENTED */
    const int64_t *segments; /* RSD_SEGMENTED: lengths, which add up to the extent of dim */
    int64_t factor;          /* RSD_STRIDED: split factor. RSD_CYCLIC: block */
} rsd_placement;

/* Creates a layout from one placement per mesh axis, applied left to right. EINVAL: one does not fit the tensor. */
rsd_status rsd_layout_new(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const rsd_mesh *mesh,
                          const rsd_placement *placements, rsd_layout **layout);

/* Creates a layout from the axes that cut each dim, in order: naxes[d] of them, all dims in one list. An axis
 * that cuts no dim replicates. Example: [tp.dp, -] on dp=2,tp=4 has naxes {2,0} and axes {1,0}. */
rsd_status rsd_layout_new_by_dim(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                 const rsd_mesh *mesh, const int32_t *naxes, const int32_t *axes,
                                 rsd_layout **layout);

/* Creates a layout of explicit boxes. Box i belongs to ranks[i], begins at lo[i * ndim] and has the lengths
 * len[i * ndim]. Ranks may occur in any order and several times. Boxes may overlap and may leave elements
 * uncovered; rsd_layout_coverage tells. EINVAL: a box lies outside of the tensor and is not empty. */
rsd_status rsd_layout_new_boxes(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int64_t nboxes,
                                const int32_t *ranks, const int64_t *lo, const int64_t *len,
                                rsd_layout **layout);

/* The same as torch's EnumerableShardingSpec. EINVAL: boxes overlap. EMISMATCH: an element is in no box. */
rsd_status rsd_layout_new_enumerable(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                     int64_t nboxes, const int32_t *ranks, const int64_t *lo,
                                     const int64_t *len, rsd_layout **layout);

/* The same as torch's ChunkShardingSpec: cuts dim into nplaces chunks; chunk i belongs to ranks[i]. A rank
 * that occurs twice has two boxes. */
rsd_status rsd_layout_new_chunks(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int32_t dim,
                                 int64_t nplaces, const int32_t *ranks, rsd_layout **layout);

/* -- queries -- */

/* Return the dtype of a layout, its number of dims, its global shape, and its ranks. */
rsd_dtype rsd_layout_dtype(const rsd_layout *layout);
int32_t rsd_layout_ndim(const rsd_layout *layout);
const int64_t *rsd_layout_shape(const rsd_layout *layout); /* valid as long as the layout */
int64_t rsd_layout_world(const rsd_layout *layout);        /* the highest rank, plus 1 */
int64_t rsd_layout_nranks(const rsd_layout *layout);       /* the number of different ranks */

/* Returns the mesh, which is valid as long as the layout, or NULL for explicit boxes. */
const rsd_mesh *rsd_layout_mesh(const rsd_layout *layout);

/* Returns the placement of one mesh axis. Its segments are valid as long as the layout. EINVAL: explicit
 * boxes, or the axis does not exist. rsd_layout_axes has the order of several axes on one dim. */
rsd_status rsd_layout_placement(const rsd_layout *layout, int32_t axis, rsd_placement *placement);

/* Writes the mesh axes that cut a dim into axes[RSD_MAX_AXES], in order, and returns their number. A negative
 * dim counts from the end. Returns 0 if the dim does not exist. */
int32_t rsd_layout_axes(const rsd_layout *layout, int32_t dim, int32_t *axes);

/* Returns 1 if both layouts are equal: the same placements on the same ranks, or the same boxes in the same
 * order. Names of axes and the order of places are not compared. */
int rsd_layout_equal(const rsd_layout *a, const rsd_layout *b);

/* Places are in placement order: one per rank of a mesh, in mesh order, or one per explicit box, in the order
 * of the caller. The position of a rank is its first place. EINVAL: the rank or position does not exist. */
int64_t rsd_layout_nplaces(const rsd_layout *layout);
rsd_status rsd_layout_rank_at(const rsd_layout *layout, int64_t position, int32_t *rank);
rsd_status rsd_layout_position(const rsd_layout *layout, int32_t rank, int64_t *position);

/* Arrays are numbered by ascending rank: one per rank of a mesh, or one per explicit box. Those of one rank
 * are in the order of the caller. Pointers are passed in this order, also to rsd_reshard and rsd_exec_run. If
 * ranks 0..n-1 have one array each, array r is that of rank r. */
int64_t rsd_layout_narrays(const rsd_layout *layout);
rsd_status rsd_layout_array(const rsd_layout *layout, int64_t index, rsd_array *array);

/* Returns the arrays of one rank: `count` of them, from index `first`. count is 0 if the rank has none. */
void rsd_layout_arrays_of(const rsd_layout *layout, int32_t rank, int64_t *first, int64_t *count);

/* A box that a rank holds, and where it begins in which array. Since 0.2. */
typedef struct rsd_shard {
    rsd_box box;
    int64_t array;
    int64_t at[RSD_MAX_DIMS];
} rsd_shard;

/* Returns all boxes of a rank, array by array. A strided, segmented or cyclic shard is several boxes of one array. A
 * rank with an empty array has one empty box; a rank that is not in the layout has none. Free the list with rsd_free. */
rsd_status rsd_layout_boxes(const rsd_layout *layout, int32_t rank, rsd_shard **shards,
                            int64_t *nshards);

/* How a layout covers its tensor. Since 0.2. */
typedef enum rsd_coverage_kind {
    RSD_COVERS_ONCE = 0,     /* every element is in exactly one place */
    RSD_COVERS_EVENLY = 1,   /* every element is in the same number of places: copies */
    RSD_COVERS_UNEVENLY = 2, /* every element is in some place; box is in more places than others */
    RSD_MISSES = 3           /* some elements are in no place; box is one of them */
} rsd_coverage_kind;

typedef struct rsd_coverage {
    size_t struct_nbytes; /* use RSD_INIT */
    rsd_coverage_kind kind;
    int64_t copies; /* RSD_COVERS_ONCE: 1. RSD_COVERS_EVENLY: the number of places. Else 0 */
    rsd_box box;    /* RSD_COVERS_UNEVENLY, RSD_MISSES */
} rsd_coverage;

/* Returns whether the layout covers its tensor. Each term of a partial value counts separately: P over four
 * ranks covers once. Any layout covers a tensor without elements once. */
rsd_status rsd_layout_coverage(const rsd_layout *layout, rsd_coverage *coverage);

/* ---- 4. Plans ---------------------------------------------------------------------------------
 *
 * A plan lists the pieces that make one layout into another. Every element of the destination is written
 * exactly once, and ranks keep what they have. Most plans have one stage of direct pieces. A plan has several
 * stages where that moves less: a reduction to several ranks is computed once and then forwarded. With a node
 * map, replicated data crosses each node boundary once.
 *
 *     rsd_plan *plan = NULL;
 *     rsd_totals totals = RSD_INIT(rsd_totals);
 *     rsd_status status = rsd_plan_new(src, dst, NULL, &plan);
 *     if (status == RSD_OK)
 *         status = rsd_plan_totals(plan, &totals);         totals.nbytes_moved, totals.nmessages, ...
 *     rsd_plan_free(plan);
 *
 * Pieces are computed during a walk, and a rank can walk its own pieces without the other ranks. Equal
 * layouts and options have equal plans with equal digests on all ranks.
 */

/* A plan. Immutable. */
typedef struct rsd_plan rsd_plan;

/* A walk over the pieces of a plan. One thread. */
typedef struct rsd_cursor rsd_cursor;

typedef struct rsd_plan_options {
    size_t struct_nbytes;   /* use RSD_INIT */
    int64_t nranks;         /* the number of ranks in node_of */
    const int32_t *node_of; /* the node of each rank: any numbers; NULL: unknown */
    int32_t cast;           /* 1: the layouts may have different dtypes. Since 0.2 */
} rsd_plan_options;

/* Creates a plan. options may be NULL. EMISMATCH: dtype or shape differ, or the source lacks a box that the
 * destination needs. EINVAL: the destination is partial where the source is not. EUNSUPPORTED: the dtype does
 * not have the reduction, or the cast. ELIMIT: a dim is cut into more than 2^26 spans, as by small block-cyclic blocks.
 * With `cast`, elements are converted while they are moved, to the bits of rsd_load, and partial values after they are
 * combined. Bytes are counted as they are sent: mostly in the narrower dtype, as docs/planning.md says. */
rsd_status rsd_plan_new(const rsd_layout *src, const rsd_layout *dst,
                        const rsd_plan_options *options, rsd_plan **plan);
rsd_plan *rsd_plan_share(const rsd_plan *plan); /* as rsd_layout_share */
void rsd_plan_free(rsd_plan *plan);             /* accepts NULL */

/* Return the layouts of a plan, valid as long as the plan. */
const rsd_layout *rsd_plan_src(const rsd_plan *plan);
const rsd_layout *rsd_plan_dst(const rsd_plan *plan);

/* Creates the plan from the destination to the source. EINVAL: the plan reduces. EMISMATCH: the destination lacks data. */
rsd_status rsd_plan_inverse(const rsd_plan *plan, rsd_plan **inverse);

/* Creates the plan of the backward pass: from the layout of the gradient to that of the plan's source, with
 * Replicate in place of Partial. A partial gradient is reduced; a replicated gradient does not move. */
rsd_status rsd_plan_backward(const rsd_plan *plan, const rsd_layout *gradient, rsd_plan **backward);

/* Writes the digest: 32 hexadecimal digits and a NUL. It depends on layouts, options and the planner only. */
enum { RSD_DIGEST_NCHARS = 33 };
void rsd_plan_digest(const rsd_plan *plan, char digest[RSD_DIGEST_NCHARS]);

/* Returns how partial values are combined, for callers that execute pieces themselves: nterms values in
 * ascending rank, by `reduce`, the result divided by `divisor`. An average is a sum with a divisor. f16 and
 * bf16 are combined in f32 and rounded once. Integers are combined in 64 bits and wrap once. bool: sum and
 * max are "or", product and min are "and". nterms is 1 if nothing is reduced. */
void rsd_plan_reduction(const rsd_plan *plan, rsd_reduce *reduce, int64_t *nterms,
                        int64_t *divisor);

/* Returns the bytes that rank `from` sends to rank `to` in all stages, or keeps if both are the same; 0: none. */
rsd_status rsd_plan_nbytes(const rsd_plan *plan, int32_t from, int32_t to, int64_t *nbytes);

/* Totals of all ranks. */
typedef struct rsd_totals {
    size_t struct_nbytes;   /* use RSD_INIT */
    int64_t npieces;        /* including those that ranks keep */
    int64_t nmessages;      /* ordered pairs of different ranks that exchange bytes */
    int64_t nstages;        /* 0 if there is nothing to do */
    int64_t nbytes_total;   /* of all destination arrays */
    int64_t nbytes_kept;    /* that ranks copy from their own source */
    int64_t nbytes_moved;   /* that ranks send to other ranks */
    int64_t nbytes_least;   /* lower bound of nbytes_moved for any plan, see docs/planning.md */
    int64_t nbytes_crossed; /* that cross nodes; 0 without a node map */
    int64_t nbytes_crossed_least; /* lower bound of nbytes_crossed; -1: unknown (reductions) */
} rsd_totals;

/* Computes the bytes and messages of a plan. ELIMIT: a total does not fit into 63 bits. */
rsd_status rsd_plan_totals(const rsd_plan *plan, rsd_totals *totals);

/* Totals of one rank. */
typedef struct rsd_rank_totals {
    size_t struct_nbytes;                                          /* use RSD_INIT */
    int64_t npieces_received, nmessages_received, nbytes_received; /* from other ranks */
    int64_t npieces_sent, nmessages_sent, nbytes_sent;             /* to other ranks */
    int64_t npieces_kept, nbytes_kept;
    int64_t nbytes_src, nbytes_dst; /* of its arrays; their sum is its peak memory */
} rsd_rank_totals;

/* Returns the totals of one rank, which are 0 for a rank without arrays. EINVAL: the rank is negative. */
rsd_status rsd_plan_rank_totals(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals);

/* One piece of a plan. Only the first box.ndim entries of lists are used. */
typedef struct rsd_piece {
    int32_t from, to;         /* ranks; equal if the rank keeps the piece */
    int32_t stage;            /* sent after the sender has received everything of earlier stages */
    int32_t from_destination; /* 1: sent from the destination array, filled in an earlier stage */
    int32_t reduce;           /* 1: one of the partial values that are combined into the box */
    int64_t from_array;       /* of the source layout; with from_destination, of the destination */
    int64_t to_array;         /* of the destination layout */
    int64_t nbytes;
    rsd_box box;                   /* in the global tensor */
    int64_t from_at[RSD_MAX_DIMS]; /* where the box begins in the sender's array */
    int64_t to_at[RSD_MAX_DIMS];   /* where the box begins in the receiver's array */
} rsd_piece;

typedef enum rsd_side {
    RSD_RECEIVES = 1, /* pieces that a rank receives, including those that it keeps */
    RSD_SENDS = 2     /* pieces that a rank sends, including those that it keeps */
} rsd_side;
enum { RSD_EVERY_RANK = -1 };

/* Starts a walk over the pieces of one rank, or of every rank:
 *
 *     rsd_cursor *cursor = NULL;
 *     const rsd_piece *piece = NULL;
 *     rsd_status status = rsd_plan_walk(plan, rank, RSD_RECEIVES, &cursor);
 *     while (!status && !(status = rsd_cursor_next(cursor, &piece)) && piece)
 *         use(piece);
 *     rsd_cursor_free(cursor);
 *
 * The pieces of one rank are ordered by stage. Those of a pair of ranks have the same order on both sides: a message
 * can be packed and unpacked in this order. The partial values of a box are consecutive, in ascending rank (of their
 * first copies, if the source is replicated too), so all destinations have the same bits. Pieces of every rank have a
 * fixed order, in which with RSD_RECEIVES those of one receiver are consecutive. */
rsd_status rsd_plan_walk(const rsd_plan *plan, int32_t rank, rsd_side side, rsd_cursor **cursor);

/* Returns the next piece, valid until the next call, or NULL after the last. A cursor that failed can only be freed. */
rsd_status rsd_cursor_next(rsd_cursor *cursor, const rsd_piece **piece);
void rsd_cursor_free(rsd_cursor *cursor); /* accepts NULL */

enum {
    RSD_EXPLAIN_JSON = 1,  /* JSON instead of text */
    RSD_EXPLAIN_PAIRS = 2, /* with the bytes of every pair of ranks */
    RSD_EXPLAIN_RANKS = 4  /* with the totals and memory of every rank */
};

/* Describes the plan. The caller frees the text with rsd_free. docs/json.md lists the keys of the JSON. */
rsd_status rsd_plan_explain(const rsd_plan *plan, int32_t flags, char **text);

/* ---- 5. Execution in one process ---------------------------------------------------------------
 *
 * One process has the arrays of all ranks, as with rsd_reshard. A plan is bound once and run many times:
 *
 *     rsd_pool_new(2, &pool);
 *     rsd_bind_threads(plan, pool, &exec);
 *     for (step = 0; step < nsteps; step++)
 *         rsd_exec_run(exec, src, dst);
 */

/* A pool of 1 to 4096 threads that wait for work, for any number of execs. rsd_exec_run uses nthreads - 1 of
 * them and the calling thread, rsd_exec_start all of them. Where a pool is an argument, NULL stands for the
 * calling thread. A pool may be freed before the execs that use it. After a fork, the child process has no
 * threads of the pool, and its calls run in the calling thread. Shared. */
typedef struct rsd_pool rsd_pool;
/* Creates a pool and starts its threads. EINVAL: nthreads is not 1 to 4096. ENOMEM: a thread cannot be started. */
rsd_status rsd_pool_new(int32_t nthreads, rsd_pool **pool);
void rsd_pool_free(rsd_pool *pool); /* accepts NULL */

/* A plan that is bound to threads or processes. A run allocates no memory. One thread, one run at a time. */
typedef struct rsd_exec rsd_exec;
/* Binds a plan to the threads of a pool, for dense row-major arrays of all ranks. */
rsd_status rsd_bind_threads(const rsd_plan *plan, rsd_pool *pool, rsd_exec **exec);

/* The strides of the arrays of one plan, in elements: for each array of a run, in the same order, one per
 * dim. Strides must not be negative; those of a source may be 0. */
typedef struct rsd_bind_options {
    size_t struct_nbytes;       /* use RSD_INIT */
    const int64_t *src_strides; /* NULL: dense arrays */
    const int64_t *dst_strides; /* NULL: dense arrays */
    int32_t src_column_major;   /* 1: dense arrays whose first dim is contiguous, as Fortran's */
    int32_t dst_column_major;
} rsd_bind_options;

/* Binds several tensors to one exec: nplans plans with nplans options (NULL: dense row-major arrays). A run
 * takes the arrays of the first plan, then those of the second, and so on. EINVAL: two destination elements
 * have the same address, or strides are combined with column_major. */
rsd_status rsd_bind_threads_many(int64_t nplans, const rsd_plan *const *plans,
                                 const rsd_bind_options *options, rsd_pool *pool, rsd_exec **exec);
void rsd_exec_free(rsd_exec *exec); /* accepts NULL; waits for a run in progress */

/* Runs the plan and returns when all data has arrived. src and dst are lists as those of rsd_reshard. EINVAL before
 * anything moves: an array is NULL and not empty, or overlaps. This call and the three that follow are since 0.2. */
rsd_status rsd_exec_run(rsd_exec *exec, const void *const *src, void *const *dst);

/* The same in two calls, with other work of the caller in between. rsd_exec_start copies the lists of
 * pointers; the arrays stay in use until rsd_exec_wait returns. Without a pool, rsd_exec_start does all the
 * work. EINVAL: a run is in progress (rsd_exec_start), or none is (rsd_exec_wait). */
rsd_status rsd_exec_start(rsd_exec *exec, const void *const *src, void *const *dst);
rsd_status rsd_exec_wait(rsd_exec *exec);

/* Advances a run between processes, which has no threads of its own, as far as possible without waiting.
 * rsd_exec_wait returns its errors. EINVAL: no run is in progress. */
rsd_status rsd_exec_progress(rsd_exec *exec);

#ifdef __cplusplus
}
#endif

#include "reshard_checkpoint.h"
#include "reshard_storage.h"
#include "reshard_transport.h"

#endif
