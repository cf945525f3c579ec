/* program.h - a plan compiled into loops over bytes, or over numbers that are converted. Private to exec. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "run_arrays.h"

/* A block that is copied from one array to another, of this rank or of another rank of its host. */
struct copy_op {
    int64_t src, dst;               /* numbers of arrays */
    int64_t src_offset, dst_offset; /* bytes */
    size_t first_loop;              /* index into program.loops, which may be reallocated */
    struct block block;
    int32_t stage;
    int32_t peer; /* the rank that has the source; used by exchanges */
};

/* A block that is combined from the terms of several arrays. Its loops count elements of the destination; each term
 * has strides of its own. */
struct sum_op {
    int64_t dst, dst_offset;
    int64_t first_loop; /* index into program.loops; src_stride is not used */
    int64_t first_term; /* index into program.terms, reduction.nterms of them */
    int32_t nloops;
    struct reduction reduction;
};

struct sum_term {
    int64_t src, offset;
    int64_t first_stride; /* into program.strides: one per loop */
    int32_t peer;         /* the rank that has it */
};

struct program {
    struct copy_op *copies;
    struct sum_op *sums; /* all in stage 0 */
    struct loop *loops;
    struct sum_term *terms;
    int64_t *strides;
    size_t ncopies, copies_capacity, nsums, sums_capacity, nloops, loops_capacity, nterms,
        terms_capacity, nstrides, strides_capacity;
    int64_t nbytes; /* that all copies and sums write */
};

/* Copies the options of plan i from a list, and checks them. A NULL list stands for no options. */
rsd_status bind_options_copy(const rsd_bind_options *list, int64_t i, rsd_bind_options *options);

/* Adds a plan between the arrays of all ranks to the program, and these arrays to `arrays`. */
rsd_status program_add_plan(struct program *program, struct run_arrays *arrays,
                            const rsd_plan *plan, const rsd_bind_options *options);

/* Adds a copy of a piece from an array of one rank to that of another, or of the same one. */
rsd_status program_add_piece(struct program *program, const rsd_plan *plan, const rsd_piece *piece,
                             const struct plan_arrays *from, const struct plan_arrays *to);

/* Adds a piece that is one term of a sum. The terms of a sum come one after the other. */
rsd_status program_add_term(struct program *program, const rsd_plan *plan, const rsd_piece *piece,
                            const struct plan_arrays *from, const struct plan_arrays *to);

/* Marks the arrays that the program reads or writes as used. */
void program_mark_arrays(const struct program *program, struct run_arrays *arrays);

/* Requires that all is added. Must precede the first run. */
void program_finish(struct program *program);
void program_drop(struct program *program);

#endif
