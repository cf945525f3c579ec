/* reshard.h - move any sharded tensor from any layout to any other.
 *
 *     A layout says where every element lives.
 *     A plan is where two layouts meet.
 *     Everything else carries a plan out.
 *
 * In one call, for four ranks whose arrays are all in this process:
 *
 *     const void *src[4];                      the array of each rank, in the layout before the arrow
 *     void *dst[4];                            and in the layout after it
 *     rsd_layout *a, *b;
 *     rsd_problem_parse("f32[4096,4096] : 4:S0 -> 2x2:S0,S1", &a, &b);
 *     rsd_reshard(a, b, src, dst);
 *
 * Planned once and run many times, on two threads:
 *
 *     rsd_plan_new(a, b, NULL, &plan);
 *     rsd_pool_new(2, &pool);
 *     rsd_bind_threads(plan, pool, &exec);
 *     for (;;) rsd_exec_run(exec, src, dst);
 *
 * The parts, in the order a user meets them:
 *
 *     1  status        what went wrong, and who can fix it
 *     2  elements      dtypes and boxes
 *     3  layouts       where every element lives: from text, from C, and what can be asked
 *     4  plans         who gives what to whom
 *     5  moving        carrying a plan out in one process
 *
 * and in reshard_checkpoint.h and reshard_transport.h, which come with it:
 *
 *     6  checkpoints   looking into files; loading, saving, converting and proving
 *     7  transports    carrying a plan out between processes
 *
 * reshard_experimental.h, which does not come with it, has calls that may still change.
 *
 * What holds everywhere:
 *   - A function that can fail returns rsd_status, 0 when all is well. Outputs come last and are
 *     written only on success. Functions that cannot fail return their answer.
 *   - Layouts, meshes and plans never change once made, so threads may share them. Nothing passed
 *     to a call has to outlive it, except tensor memory while a run is in flight.
 *   - What a call makes for the caller is given back by its own ..._free, which accepts NULL. Text
 *     and lists returned through a pointer are given back by rsd_free. Pointers may be NULL only where
 *     that is said.
 *   - Structs that begin with struct_nbytes may grow: set it to their sizeof, and the rest to 0. The
 *     other structs, RSD_MAX_DIMS and the numbers of enums never change.
 *   - The library never prints, exits or aborts, reads no environment variable and has no globals
 *     but the last error of each thread, and which boot of the host this is, read when it is loaded.
 *   - It starts no thread except in rsd_pool_new, in rsd_save_start and, while they last, in calls on
 *     checkpoints that many ranks make together.
 *   - The caller owns tensor memory; it need not be aligned. Coordinates and element counts are
 *     int64_t.
 */
#ifndef RESHARD_H
#define RESHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Status ------------------------------------------------------------------------------ */

/* The code answers "who can fix it". */
typedef enum rsd_status {
    RSD_OK = 0,

    /* The caller: an argument that makes no sense by itself, such as S(2) of a tensor with two dims;
     * two things that do not fit each other, such as shapes that differ or data that is missing; more
     * than fits, such as 2^63 bytes; an output that is already there; a stop that was asked for. */
    RSD_EINVAL = 1,
    RSD_EMISMATCH = 2,
    RSD_ELIMIT = 3,
    RSD_EEXIST = 4,
    RSD_ECANCELLED = 5,

    /* The machine: no memory; a read or write that failed; a file that does not exist. */
    RSD_ENOMEM = 10,
    RSD_EIO = 11,
    RSD_ENOENT = 12,

    /* The data: a file that breaks its format; well formed, but nothing here can do it, such as the
     * minimum of complex numbers. */
    RSD_EFORMAT = 20,
    RSD_EUNSUPPORTED = 21,

    /* A peer. */
    RSD_EPEER = 30,
    RSD_ETIMEOUT = 31
} rsd_status;

/* "EINVAL", "ENOMEM", ...; "OK" for 0. Never NULL. */
const char *rsd_status_name(rsd_status status);

/* One line about the last failure in this thread, with the values in it:
 *     shape differs in dim 1: source 4096, destination 4095
 * Empty if nothing failed yet. Valid until the next call into the library by the same thread. */
const char *rsd_error(void);

/* The version of this header, as text and as 10000 * major + 100 * minor + patch, and that of the
 * library that runs. */
#define RSD_VERSION        "0.1.0"
#define RSD_VERSION_NUMBER 100
const char *rsd_version(void);

/* Gives back text or a list that a call returned through a pointer. Accepts NULL. */
void rsd_free(void *returned);

/* ---- 2. Elements: dtypes and boxes ---------------------------------------------------------- */

/* The dtype matters only where values are combined (Partial); a move sees bytes. The 8-bit floats,
 * F4X2 and C32 are carried as opaque bits. F4X2 is two 4-bit floats in one byte, as torch's
 * float4_e2m1fn_x2: its extents count bytes. C64 is two f32, C128 two f64, C32 two f16. */
typedef enum rsd_dtype {
    RSD_F64 = 1,
    RSD_F32 = 2,
    RSD_F16 = 3,
    RSD_BF16 = 4,
    RSD_F8E4M3 = 5,
    RSD_F8E5M2 = 6,
    RSD_I64 = 7,
    RSD_I32 = 8,
    RSD_I16 = 9,
    RSD_I8 = 10,
    RSD_U64 = 11,
    RSD_U32 = 12,
    RSD_U16 = 13,
    RSD_U8 = 14,
    RSD_BOOL = 15,
    RSD_C64 = 16,
    RSD_C128 = 17,
    RSD_F8E4M3FNUZ = 18,
    RSD_F8E5M2FNUZ = 19,
    RSD_F8E8M0 = 20,
    RSD_F4X2 = 21,
    RSD_C32 = 22
} rsd_dtype;

/* The name in the notation: "f32". NULL for a number that is no dtype. */
const char *rsd_dtype_name(rsd_dtype dtype);

/* Bytes of one element: 4 for RSD_F32. 0 for a number that is no dtype. */
size_t rsd_dtype_nbytes(rsd_dtype dtype);

/* EINVAL: an unknown name. */
rsd_status rsd_dtype_parse(const char *name, rsd_dtype *dtype);

enum {
    RSD_MAX_DIMS = 16,      /* of a tensor */
    RSD_MAX_AXES = 16,      /* of a mesh */
    RSD_MAX_SEGMENTS = 4096 /* of a segmented shard */
};

/* A block of elements: lo[d] <= index[d] < lo[d] + len[d]. A box with a len of 0 is empty, which
 * is valid and common. A box with no dims is one element. */
typedef struct rsd_box {
    int32_t ndim;
    int64_t lo[RSD_MAX_DIMS];
    int64_t len[RSD_MAX_DIMS];
} rsd_box;

/* Where the meeting of two boxes lies in each of them. */
typedef struct rsd_region {
    int32_t ndim;
    int64_t in_saved[RSD_MAX_DIMS];  /* offset from the start of the saved box */
    int64_t in_wanted[RSD_MAX_DIMS]; /* offset from the start of the wanted box */
    int64_t len[RSD_MAX_DIMS];
} rsd_region;

/* 1 if the two boxes share at least one element, else 0. So an empty box overlaps nothing, two
 * boxes without dims always overlap, and boxes of different ndim, or that are none, never do. */
int rsd_box_overlaps(const rsd_box *a, const rsd_box *b);

/* The region that the two boxes share. Boxes that share nothing give a region with a len of 0 in
 * each dim where they do not meet; its offsets lie within the boxes. EINVAL: ndim differs or is out
 * of range, or a lo or len is negative or beyond 2^62. */
rsd_status rsd_box_overlap(const rsd_box *saved, const rsd_box *wanted, rsd_region *region);

/* ---- 3. Layouts ------------------------------------------------------------------------------
 *
 * A layout is a dtype, a global shape and, for each rank, the boxes it holds. There are two kinds.
 *
 * Mesh and placements: the ranks form a grid with one placement per axis, applied left to right.
 * Each rank holds one dense array over its own indices in ascending order, as torch's local
 * tensor. Such a layout stays a formula: 100,000 ranks cost as little as two.
 *
 * Explicit boxes: each rank holds any number of boxes, and one dense array per box.
 *
 * One line of text names any layout, and two sides with an arrow any problem:
 *
 *     f32[4096,4096] @ dp=2,tp=4 : S(0),S(1)     one placement per mesh axis, as DTensor says it
 *     f32[4096,4096] @ 2x4 : S0,R                the same kind, short
 *     f32[4096,4096] @ dp=2,tp=4 : [tp.dp, -]    per dim the axes that cut it, in order, as JAX says it
 *     f32[16,1] @ { 0:4 | 4:7 | 7:11 | 11:16 }   explicit boxes: ranks split by |, boxes of one by ;
 *     f32[4096,4096] : 2x4:S0,S1 -> 8:S1         a problem
 *
 *     S(d)         shard dim d: ceil(n/m) each, the last may be short or empty, as torch.chunk
 *     B(d)         balanced: lengths differ by at most one
 *     S(d;4,2,2)   segmented: dim d is made of segments (fused QKV, gate-up), each sharded by itself
 *     _S(d,f)      torch's strided shard with split factor f
 *     C(d,b)       block-cyclic with blocks of b, as ScaLAPACK
 *     R            replicate
 *     P(sum)       partial: the value is the reduction over the axis; also avg min max product band
 *                  bor bxor
 *
 * A mesh may name its ranks: `2x2 ranks=4-7`, `4 ranks=3,1,0,2`. The same rank on both sides of a
 * problem is the same process. docs/notation.md has the grammar.
 */
typedef struct rsd_mesh rsd_mesh;
typedef struct rsd_layout rsd_layout;

/* "f32[8,8] @ 4:S0". EINVAL: the message gives the column, counted from 1. */
rsd_status rsd_layout_parse(const char *text, rsd_layout **layout);

/* "f32[8,8] : 4:S0 -> 2x2:S0,S1": both layouts of a problem. */
rsd_status rsd_problem_parse(const char *text, rsd_layout **src, rsd_layout **dst);

/* "S0,R" or "[tp.dp, -]": the part after the mesh, for a tensor and a mesh that are at hand. */
rsd_status rsd_layout_parse_on(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                               const rsd_mesh *mesh, const char *placements, rsd_layout **layout);

/* The one canonical text of a layout or problem; it parses to an equal layout. Two layouts of a
 * problem must agree in dtype and shape (EMISMATCH). Give the text back with rsd_free. */
rsd_status rsd_layout_print(const rsd_layout *layout, char **text);
rsd_status rsd_problem_print(const rsd_layout *src, const rsd_layout *dst, char **text);

/* One more reference to the same layout, to be freed like any other: for bindings that keep what they
 * borrowed. */
rsd_layout *rsd_layout_share(const rsd_layout *layout);
void rsd_layout_free(rsd_layout *layout);

/* -- from C -- */

/* "dp=2,tp=4", "2x2 ranks=4-7". */
rsd_status rsd_mesh_parse(const char *text, rsd_mesh **mesh);
rsd_status rsd_mesh_print(const rsd_mesh *mesh, char **text);

/* counts[a] ranks along axis a, row-major: the last axis runs fastest. names may be NULL, and so
 * may any name in it. ranks lists the rank at each position, or is NULL for 0, 1, 2, ...
 * EINVAL: a rank named twice, a count below 1, a name used twice. */
rsd_status rsd_mesh_new(int32_t naxes, const int64_t *counts, const char *const *names,
                        const int32_t *ranks, rsd_mesh **mesh);
rsd_mesh *rsd_mesh_share(const rsd_mesh *mesh);
void rsd_mesh_free(rsd_mesh *mesh);

int32_t rsd_mesh_naxes(const rsd_mesh *mesh);
int64_t rsd_mesh_count(const rsd_mesh *mesh, int32_t axis);    /* 0 for an axis it does not have */
const char *rsd_mesh_name(const rsd_mesh *mesh, int32_t axis); /* NULL if it has none */
int64_t rsd_mesh_nranks(const rsd_mesh *mesh);

/* Between a rank and its coordinates, one per axis. EINVAL: no such rank, no such coordinates. */
rsd_status rsd_mesh_coords(const rsd_mesh *mesh, int32_t rank, int64_t *coords);
rsd_status rsd_mesh_rank(const rsd_mesh *mesh, const int64_t *coords, int32_t *rank);

typedef enum rsd_kind {
    RSD_REPLICATE = 0,
    RSD_SHARD = 1,     /* S(dim) */
    RSD_BALANCED = 2,  /* B(dim) */
    RSD_STRIDED = 3,   /* _S(dim,factor) */
    RSD_SEGMENTED = 4, /* S(dim;segments) */
    RSD_CYCLIC = 5,    /* C(dim,factor), factor being the block */
    RSD_PARTIAL = 6    /* P(reduce) */
} rsd_kind;

typedef enum rsd_reduce {
    RSD_REDUCE_SUM = 0,
    RSD_REDUCE_AVG = 1,
    RSD_REDUCE_MIN = 2,
    RSD_REDUCE_MAX = 3,
    RSD_REDUCE_PRODUCT = 4,
    RSD_REDUCE_BAND = 5,
    RSD_REDUCE_BOR = 6,
    RSD_REDUCE_BXOR = 7
} rsd_reduce;

/* "sum", "avg", ...; NULL for a number that is no reduction. */
const char *rsd_reduce_name(rsd_reduce reduce);

/* What one mesh axis does to the tensor. Fields that a kind does not use are ignored, so
 * {.kind = RSD_SHARD, .dim = 0} is complete. A negative dim counts from the end. */
typedef struct rsd_placement {
    rsd_kind kind;
    int32_t dim;
    rsd_reduce reduce;       /* RSD_PARTIAL */
    int32_t nsegments;       /* RSD_SEGMENTED */
    const int64_t *segments; /* RSD_SEGMENTED: lengths that add up to the extent of dim */
    int64_t factor;          /* RSD_STRIDED: split factor. RSD_CYCLIC: block */
} rsd_placement;

/* One placement per axis of the mesh, applied left to right. */
rsd_status rsd_layout_new(rsd_dtype dtype, int32_t ndim, const int64_t *shape, const rsd_mesh *mesh,
                          const rsd_placement *placements, rsd_layout **layout);

/* Per tensor dim the mesh axes that cut it, first to last: naxes[d] of them, all in one list.
 * An axis that cuts no dim replicates. For [tp.dp, -] on dp=2,tp=4: naxes {2,0}, axes {1,0}. */
rsd_status rsd_layout_new_by_dim(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                 const rsd_mesh *mesh, const int32_t *naxes, const int32_t *axes,
                                 rsd_layout **layout);

/* Explicit boxes: box i starts at lo[i * ndim], has the lengths len[i * ndim], and belongs to
 * ranks[i]; ranks come in any order and as often as they like. Boxes may overlap and leave holes:
 * rsd_layout_coverage tells. EINVAL: a box that is not empty and lies outside the tensor. */
rsd_status rsd_layout_new_boxes(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int64_t nboxes,
                                const int32_t *ranks, const int64_t *lo, const int64_t *len,
                                rsd_layout **layout);

/* The same, as torch's EnumerableShardingSpec: boxes that overlap are refused with EINVAL, a hole
 * with EMISMATCH, with the values. */
rsd_status rsd_layout_new_enumerable(rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                                     int64_t nboxes, const int32_t *ranks, const int64_t *lo,
                                     const int64_t *len, rsd_layout **layout);

/* As torch's ChunkShardingSpec: dim is cut into nplaces chunks and chunk i goes to ranks[i], in any
 * order. A rank may be named twice and then holds two boxes. */
rsd_status rsd_layout_new_chunks(rsd_dtype dtype, int32_t ndim, const int64_t *shape, int32_t dim,
                                 int64_t nplaces, const int32_t *ranks, rsd_layout **layout);

/* -- asking -- */

rsd_dtype rsd_layout_dtype(const rsd_layout *layout);
int32_t rsd_layout_ndim(const rsd_layout *layout);
const int64_t *rsd_layout_shape(const rsd_layout *layout); /* valid as long as the layout */
int64_t rsd_layout_world(const rsd_layout *layout);        /* highest rank named, plus one */
int64_t rsd_layout_nranks(const rsd_layout *layout);       /* different ranks named */

/* The mesh, valid as long as the layout, or NULL for explicit boxes. */
const rsd_mesh *rsd_layout_mesh(const rsd_layout *layout);

/* The placement of one mesh axis; its segments are valid as long as the layout. EINVAL: explicit
 * boxes, or no such axis. The order of several axes on one dim is in rsd_layout_axes. */
rsd_status rsd_layout_placement(const rsd_layout *layout, int32_t axis, rsd_placement *placement);

/* The mesh axes that cut a dim, first to last, into axes[RSD_MAX_AXES]; returns how many. A negative
 * dim counts from the end; a dim that is not there is cut by none. */
int32_t rsd_layout_axes(const rsd_layout *layout, int32_t dim, int32_t *axes);

/* 1 if both put every element in the same place of the same rank by the same description: axis
 * names and the order of places do not matter, the spelling of explicit boxes does. */
int rsd_layout_equal(const rsd_layout *a, const rsd_layout *b);

/* Places are in placement order: one per rank of a mesh, in mesh order, or one per explicit box, in
 * the order they were given. The position of a rank is its first; EINVAL names a rank without one. */
int64_t rsd_layout_nplaces(const rsd_layout *layout);
rsd_status rsd_layout_rank_at(const rsd_layout *layout, int64_t position, int32_t *rank);
rsd_status rsd_layout_position(const rsd_layout *layout, int32_t rank, int64_t *position);

/* Arrays are the pieces of memory that a layout stands for, numbered by ascending rank: one per
 * rank of a mesh, one per explicit box (those of one rank in the order they were given). rsd_exec_run takes
 * its pointers in this order, so for ranks 0..n-1 with one array each, array r is that of rank r. */
typedef struct rsd_array {
    int32_t rank;
    int32_t ndim;
    int64_t place;               /* its position in placement order */
    int64_t shape[RSD_MAX_DIMS]; /* local extents */
    size_t nbytes;               /* when dense; 0 when empty */
} rsd_array;

int64_t rsd_layout_narrays(const rsd_layout *layout);
rsd_status rsd_layout_array(const rsd_layout *layout, int64_t index, rsd_array *array);

/* The arrays of one rank: count of them, from index first. count is 0 for a rank without any. */
void rsd_layout_arrays_of(const rsd_layout *layout, int32_t rank, int64_t *first, int64_t *count);

/* A box that a rank holds, and where it begins in which array. */
typedef struct rsd_shard {
    rsd_box box;
    int64_t array;
    int64_t at[RSD_MAX_DIMS];
} rsd_shard;

/* All boxes of a rank, array by array. A rank the layout does not name has none; a rank with an empty
 * shard has one empty box, its lo at the end of the dims that were cut. A strided, segmented or cyclic
 * shard is several boxes of one array. Give the list back with rsd_free. */
rsd_status rsd_layout_boxes(const rsd_layout *layout, int32_t rank, rsd_shard **boxes,
                            int64_t *nboxes);

typedef enum rsd_coverage_kind {
    RSD_COVERS_ONCE = 0,   /* every element lives in exactly one place */
    RSD_COVERS_EVENLY = 1, /* every element lives in the same number of places: copies */
    RSD_COVERS_UNEVENLY =
        2,         /* every element lives somewhere, some more often: box is a doubled one */
    RSD_MISSES = 3 /* some elements live nowhere: box is a missing one */
} rsd_coverage_kind;

typedef struct rsd_coverage {
    size_t struct_nbytes; /* sizeof(rsd_coverage), set by the caller */
    rsd_coverage_kind cover;
    int64_t copies; /* RSD_COVERS_ONCE: 1. RSD_COVERS_EVENLY: how many. Else 0 */
    rsd_box box;    /* RSD_COVERS_UNEVENLY, RSD_MISSES */
} rsd_coverage;

/* Does the layout cover its tensor? Each term of a partial value counts by itself: P over four ranks
 * covers once. A tensor without elements is covered once by anything. */
rsd_status rsd_layout_coverage(const rsd_layout *layout, rsd_coverage *check);

/* ---- 4. Plans --------------------------------------------------------------------------------
 *
 * A plan says who gives which box to whom so that one layout becomes another. Every element of the
 * destination is written exactly once, what a rank already holds does not travel, and nothing goes
 * through a full gather. A plan has one stage of direct pieces, or more where direct pieces would
 * move more than needed: a reduction to many places is reduced once and then handed out, and with
 * a node map a replicated destination crosses each host boundary once and fans out inside.
 *
 * A plan is a formula too: its pieces are computed as they are walked, and a rank can walk its own
 * part without anyone else's. Equal layouts and options give equal plans, with equal digests.
 */
typedef struct rsd_plan rsd_plan;
typedef struct rsd_cursor rsd_cursor;

typedef struct rsd_plan_options {
    size_t struct_nbytes;   /* sizeof(rsd_plan_options) */
    int64_t nranks;         /* how many ranks node_of lists */
    const int32_t *node_of; /* the host of each rank, by any numbers; NULL: not known */
} rsd_plan_options;

/* options may be NULL. EMISMATCH: dtype or shape differ, or the source does not hold a box that the
 * destination needs (the message names it). EINVAL: a Partial destination that is not Partial in the
 * source. EUNSUPPORTED: a reduction that the dtype does not have. ELIMIT: a dim cut into more than
 * 2^26 runs, as small block-cyclic blocks of a long dim are. */
rsd_status rsd_plan_new(const rsd_layout *src, const rsd_layout *dst,
                        const rsd_plan_options *options, rsd_plan **plan);
rsd_plan *rsd_plan_share(const rsd_plan *plan);
void rsd_plan_free(rsd_plan *plan);

/* The layouts of a plan, valid as long as the plan. */
const rsd_layout *rsd_plan_src(const rsd_plan *plan);
const rsd_layout *rsd_plan_dst(const rsd_plan *plan);

/* The plan that brings everything back. EINVAL: something was reduced, which has no way back.
 * EMISMATCH: the destination does not hold everything. */
rsd_status rsd_plan_inverse(const rsd_plan *plan, rsd_plan **inverse);

/* The backward of a redistribution: from the gradient's layout to the layout of the plan's source,
 * in which Partial becomes Replicate. The gradient's layout decides: a Partial gradient is reduced,
 * a replicated one is cut where it is. */
rsd_status rsd_plan_backward(const rsd_plan *plan, const rsd_layout *gradient, rsd_plan **backward);

/* 32 hex digits and a NUL: the same for the same layouts, options and planner, everywhere. */
enum { RSD_DIGEST_NCHARS = 33 };
void rsd_plan_digest(const rsd_plan *plan, char digest[RSD_DIGEST_NCHARS]);

/* How partial values become one, for those who carry pieces themselves: nterms of them in ascending
 * rank, combined by `reduce`, the result divided by `divisor` (averages are sums that are divided).
 * f16 and bf16 are combined in f32 and rounded once, integers in 64 bits and cut to size once, and
 * bool by or (sum, max) or and (product, min). nterms is 1 if nothing is reduced. */
void rsd_plan_reduction(const rsd_plan *plan, rsd_reduce *reduce, int64_t *nterms,
                        int64_t *divisor);

/* Bytes that rank `from` gives to rank `to` in all stages; from == to: what the rank keeps. */
rsd_status rsd_plan_nbytes(const rsd_plan *plan, int32_t from, int32_t to, int64_t *nbytes);

typedef struct rsd_totals {
    size_t struct_nbytes;         /* sizeof(rsd_totals), set by the caller */
    int64_t npieces;              /* kept ones included */
    int64_t nmessages;            /* ordered pairs of different ranks that exchange something */
    int64_t nstages;              /* 0 when nothing has to be done */
    int64_t nbytes_total;         /* what all destination arrays hold in the end */
    int64_t nbytes_kept;          /* given by a rank to itself: what was there already */
    int64_t nbytes_moved;         /* given to another rank */
    int64_t nbytes_least;         /* no plan moves less: docs/planning.md says why */
    int64_t nbytes_crossed;       /* given to another node; 0 without a node map */
    int64_t nbytes_crossed_least; /* no plan crosses less; -1, not known, for reductions */
} rsd_totals;

/* ELIMIT: a number does not fit into 63 bits. */
rsd_status rsd_plan_totals(const rsd_plan *plan, rsd_totals *totals);

/* One rank's part. */
typedef struct rsd_rank_totals {
    size_t struct_nbytes; /* sizeof(rsd_rank_totals), set by the caller */
    int64_t npieces_received, nmessages_received, nbytes_received; /* from other ranks */
    int64_t npieces_sent, nmessages_sent, nbytes_sent;             /* to other ranks */
    int64_t npieces_kept, nbytes_kept;
    int64_t nbytes_src, nbytes_dst; /* its arrays; together its peak, if all is in memory at once */
} rsd_rank_totals;

rsd_status rsd_plan_rank_totals(const rsd_plan *plan, int32_t rank, rsd_rank_totals *totals);

/* One piece of a plan. Of the arrays, only the first box.ndim entries mean something. */
typedef struct rsd_piece {
    int32_t from, to; /* ranks; equal when the piece stays where it is */
    int32_t stage;    /* given when all that the giver gets in earlier stages has arrived */
    int32_t
        from_destination; /* 1: given from the giver's destination array, filled in an earlier stage */
    int32_t reduce;       /* 1: one of the partial values that are combined into this box */
    int64_t
        from_array; /* array of the source layout; with from_destination, of the destination layout */
    int64_t to_array; /* array of the destination layout */
    int64_t nbytes;
    rsd_box box;                   /* in the global tensor */
    int64_t from_at[RSD_MAX_DIMS]; /* where the box begins in the giver's array */
    int64_t to_at[RSD_MAX_DIMS];   /* where it begins in the getter's array */
} rsd_piece;

typedef enum rsd_side {
    RSD_RECEIVES = 1, /* the pieces that a rank gets, from itself too */
    RSD_SENDS = 2     /* the pieces that a rank gives, to itself too */
} rsd_side;

enum { RSD_EVERY_RANK = -1 };

/* Walks the pieces of one rank, or of every rank:
 *
 *     status = rsd_plan_walk(plan, rank, RSD_RECEIVES, &cursor);
 *     while (!status && !(status = rsd_cursor_next(cursor, &piece)) && piece)
 *         ...
 *     rsd_cursor_free(cursor);
 *
 * The pieces of one rank come stage by stage, those of one pair of ranks in the same order on both
 * sides (so a message may be packed and unpacked in the order of the walk), and the partial values of
 * one box one after the other, in ascending rank (of their first copies, where the source is
 * replicated too: so every destination has the same bits). Pieces of every rank come in a fixed order
 * without such promises; those to one rank are together when receives are walked. */
rsd_status rsd_plan_walk(const rsd_plan *plan, int32_t rank, rsd_side side, rsd_cursor **cursor);

/* The next piece, valid until the next call; NULL after the last. */
rsd_status rsd_cursor_next(rsd_cursor *cursor, const rsd_piece **piece);
void rsd_cursor_free(rsd_cursor *cursor);

enum {
    RSD_EXPLAIN_JSON = 1,  /* JSON instead of text */
    RSD_EXPLAIN_PAIRS = 2, /* with the bytes between every pair of ranks */
    RSD_EXPLAIN_RANKS = 4  /* with every rank's totals and memory */
};

/* What the plan does, how much moves and how close that is to the least possible. Give the text
 * back with rsd_free. The keys of the JSON are those of the structs above; docs/json.md lists them. */
rsd_status rsd_plan_explain(const rsd_plan *plan, int32_t flags, char **text);

/* ---- 5. Moving in one process ----------------------------------------------------------------
 *
 * One process holds the arrays of all ranks. src and dst list their pointers in the order of
 * rsd_layout_array; an empty array may be NULL. Sources and destinations must not
 * overlap: EINVAL, where that can be seen without comparing all elements.
 */

/* Plan, bind and run, in the calling thread. */
rsd_status rsd_reshard(const rsd_layout *src_layout, const rsd_layout *dst_layout,
                       const void *const *src, void *const *dst);

/* Threads that wait for work, 1 to 4096 of them. A pool may serve any number of execs, from any
 * threads; rsd_exec_run works with nthreads - 1 of them and the calling thread, rsd_exec_start with all. NULL
 * stands for the calling thread alone wherever a pool is taken. Execs share the pool, so it may be
 * freed before them. After a fork the child has no threads in it, and works alone. */
typedef struct rsd_pool rsd_pool;
rsd_status rsd_pool_new(int32_t nthreads, rsd_pool **pool);
void rsd_pool_free(rsd_pool *pool);

/* A plan bound to threads or to a transport. Running it allocates nothing. */
typedef struct rsd_exec rsd_exec;

rsd_status rsd_bind_threads(const rsd_plan *plan, rsd_pool *pool, rsd_exec **exec);

/* How the arrays of one plan lie in memory. Strides count elements: for each array that a run takes,
 * in the same order, one per dim. They may not be negative; those of a source may be 0. */
typedef struct rsd_bind_options {
    size_t struct_nbytes;       /* sizeof(rsd_bind_options) */
    const int64_t *src_strides; /* NULL: dense arrays */
    const int64_t *dst_strides; /* NULL: dense arrays */
    int32_t src_column_major;   /* 1: dense arrays whose first dim runs fastest, as Fortran's */
    int32_t dst_column_major;
} rsd_bind_options;

/* Many tensors in one exec: nplans plans, with nplans options (or NULL: dense row-major arrays). src and
 * dst of a run then list the arrays of the first plan, then those of the second, and so on.
 * EINVAL: destination strides that let two elements share a place; strides and column_major. */
rsd_status rsd_bind_threads_many(int64_t nplans, const rsd_plan *const *plans,
                                 const rsd_bind_options *options, rsd_pool *pool, rsd_exec **exec);
void rsd_exec_free(rsd_exec *exec); /* waits for a run in flight */

/* Moves everything and returns when it is done. One run at a time per exec. */
rsd_status rsd_exec_run(rsd_exec *exec, const void *const *src, void *const *dst);

/* The same in two halves: the pool works while the caller does something else. The pointers are
 * copied by rsd_exec_start; the memory they point to stays in use until rsd_exec_wait returns. With no pool
 * rsd_exec_start does all the work. EINVAL: a second rsd_exec_start without a wait, a wait without a start.
 */
rsd_status rsd_exec_start(rsd_exec *exec, const void *const *src, void *const *dst);
rsd_status rsd_exec_wait(rsd_exec *exec);

/* Between the two, now and then: lets a run between processes, which has no threads of its own, move on as far as
 * it can without waiting. What goes wrong is told by rsd_exec_wait. EINVAL: nothing was started. */
rsd_status rsd_exec_progress(rsd_exec *exec);

#ifdef __cplusplus
}
#endif

#include "reshard_checkpoint.h"
#include "reshard_transport.h"

#endif
