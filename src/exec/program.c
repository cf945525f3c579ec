/* program.c - a plan compiled into loops over bytes or numbers, for arrays with given strides.
 *
 * If both layouts are formulas, the overlaps of one array with one rank often repeat along a dim at a constant
 * distance, for example in a block-cyclic layout. Such overlaps are one progression:
 *
 *     |--len--|       |--len--|       |--len--|        count times, src_step and dst_step apart
 *
 * A combination of one progression per dim is one copy with at most two loops per dim, for any number of pieces. All
 * other plans are compiled piece by piece.
 */
#include "program.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

/* Adds a copy with its loops to the program. */
static rsd_status append_copy(struct program *program, struct copy_op op, const struct loops *loops)
{
    TRY(GROW(program->copies, program->copies_capacity, program->ncopies + 1));
    op.first_loop = program->nloops;
    op.block = (struct block){.run = loops->run, .element = loops->element, .nloops = loops->n};
    int64_t nbytes = (int64_t)loops->run * loops->element.dst_unit;
    TRY(GROW(program->loops, program->loops_capacity, program->nloops + (size_t)loops->n));
    for (int32_t i = 0; i < loops->n; i++) {
        program->loops[program->nloops++] = loops->loop[i];
        nbytes *= loops->loop[i].count;
    }
    program->copies[program->ncopies++] = op;
    program->nbytes += nbytes;
    return RSD_OK;
}

/* Cuts a long run into rows and a rest, so that several threads can copy it. */
static rsd_status append_long_copy(struct program *program, struct copy_op op, struct loops *loops)
{
    enum { ROW = 1 << 16 };
    if (loops->run < 4 * ROW)
        return append_copy(program, op, loops);
    struct loops rest = *loops;
    int64_t nrows = (int64_t)(loops->run / ROW);
    int64_t src_row = (int64_t)ROW * loops->element.src_unit,
            dst_row = (int64_t)ROW * loops->element.dst_unit;
    loops->run = ROW;
    loops_add(loops, nrows, src_row, dst_row);
    TRY(append_copy(program, op, loops));
    rest.run %= ROW;
    if (rest.run == 0)
        return RSD_OK;
    op.src_offset += nrows * src_row;
    op.dst_offset += nrows * dst_row;
    return append_copy(program, op, &rest);
}

void program_mark_arrays(const struct program *program, struct run_arrays *arrays)
{
    for (size_t i = 0; i < program->ncopies; i++)
        arrays->spans[program->copies[i].src].used = arrays->spans[program->copies[i].dst].used =
            true;
    for (size_t i = 0; i < program->nterms; i++)
        arrays->spans[program->terms[i].src].used = true;
    for (size_t i = 0; i < program->nsums; i++)
        arrays->spans[program->sums[i].dst].used = true;
}

void program_finish(struct program *program)
{
    for (size_t i = 0; i < program->ncopies; i++) {
        struct block *block = &program->copies[i].block;
        *block = copy_block_of(block->run, block->element, block->nloops,
                               program->loops + program->copies[i].first_loop);
    }
}

void program_drop(struct program *program)
{
    mem_free(program->copies);
    mem_free(program->sums);
    mem_free(program->loops);
    mem_free(program->terms);
    mem_free(program->strides);
    *program = (struct program){0};
}

/* ---- the plan that is being compiled ---- */

struct plan_compiler {
    struct program *program;
    const rsd_plan *plan;
    const struct plan_arrays *arrays;
};

/* ---- progressions ---- */

struct progression {
    int64_t pos;            /* contribution of this dim to the mesh position of the sender */
    int64_t src_at, dst_at; /* of the first */
    int64_t len, count, src_step, dst_step;
};

struct family {
    struct progression *list;
    size_t n, capacity;
};

static int compare_overlaps(const void *a, const void *b)
{
    const struct span_overlap *x = a, *y = b;
    if (x->other_pos != y->other_pos)
        return x->other_pos < y->other_pos ? -1 : 1;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Returns how many overlaps, from the first on, have the distance of the first two. */
static size_t count_repeats(const struct span_overlap *list, size_t n)
{
    size_t count = 1;
    while (count < n && list[count].other_pos == list[0].other_pos &&
           list[count].len == list[0].len &&
           list[count].own_at - list[count - 1].own_at == list[1].own_at - list[0].own_at &&
           list[count].other_at - list[count - 1].other_at == list[1].other_at - list[0].other_at)
        count++;
    return count;
}

/* Groups the overlaps along one dim into progressions. */
static rsd_status find_progressions(struct span_overlap *list, size_t n, struct family *family)
{
    family->n = 0;
    if (n > 1)
        qsort(list, n, sizeof *list, compare_overlaps);
    for (size_t i = 0; i < n;) {
        size_t count = count_repeats(list + i, n - i);
        struct progression one = {.pos = list[i].other_pos,
                                  .src_at = list[i].other_at,
                                  .dst_at = list[i].own_at,
                                  .len = list[i].len,
                                  .count = (int64_t)count};
        if (count > 1) {
            one.src_step = list[i + 1].other_at - list[i].other_at;
            one.dst_step = list[i + 1].own_at - list[i].own_at;
        }
        TRY(GROW(family->list, family->capacity, family->n + 1));
        family->list[family->n++] = one;
        i += count;
    }
    return RSD_OK;
}

/* Adds the copy for one progression per dim. */
static rsd_status add_combination(const struct plan_compiler *c, const struct receiver *receiver,
                                  const struct family *families, const size_t *at)
{
    const rsd_plan *plan = c->plan;
    int32_t ndim = plan->src->ndim;
    int64_t position = receiver->sender_offset;
    for (int32_t d = 0; d < ndim; d++) {
        assert(families[d].list);
        position += families[d].list[at[d]].pos;
    }
    int64_t src = mesh_array_at(plan->src->mesh, position);
    const int64_t *src_strides = plan_array_strides(c->arrays, src, false);
    const int64_t *dst_strides = plan_array_strides(c->arrays, receiver->array, true);
    struct copy_op op = {.src = plan_array_number(c->arrays, src, false),
                         .dst = plan_array_number(c->arrays, receiver->array, true)};
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++) {
        const struct progression *one = &families[d].list[at[d]];
        op.src_offset += one->src_at * src_strides[d];
        op.dst_offset += one->dst_at * dst_strides[d];
        loops_add(&loops, one->len, src_strides[d], dst_strides[d]);
        loops_add(&loops, one->count, one->src_step * src_strides[d],
                  one->dst_step * dst_strides[d]);
    }
    loops_finish(&loops, element_of(plan->src->dtype, plan->dst->dtype));
    return append_long_copy(c->program, op, &loops);
}

/* Adds the copies of one destination array: all combinations of the progressions of its dims. */
static rsd_status add_array_families(const struct plan_compiler *c, int64_t array,
                                     struct overlap *overlap, struct family *families)
{
    const rsd_plan *plan = c->plan;
    int32_t ndim = plan->src->ndim, d = 0;
    size_t at[RSD_MAX_DIMS] = {0};
    struct receiver receiver = plan_receiver(plan, array);
    TRY(overlap_start(overlap, plan->dst, array, NULL, NULL, plan->src, NULL));
    if (overlap->exhausted)
        return RSD_OK;
    for (d = 0; d < ndim; d++)
        TRY(find_progressions(overlap->dims[d].list, overlap->dims[d].n, &families[d]));
    do {
        TRY(add_combination(c, &receiver, families, at));
        for (d = ndim - 1; d >= 0 && ++at[d] == families[d].n; d--)
            at[d] = 0;
    } while (d >= 0);
    return RSD_OK;
}

/* Adds the copies of a plan between two meshes, as families of equal pieces. */
static rsd_status add_families(const struct plan_compiler *c)
{
    struct overlap overlap = {0};
    struct family families[RSD_MAX_DIMS] = {{0}};
    rsd_status status = RSD_OK;
    int64_t narrays = rsd_layout_narrays(c->plan->dst);
    for (int64_t array = 0; array < narrays && !status; array++)
        status = add_array_families(c, array, &overlap, families);
    overlap_drop(&overlap);
    for (int32_t d = 0; d < RSD_MAX_DIMS; d++)
        mem_free(families[d].list);
    return status;
}

/* ---- piece by piece ---- */

static int64_t byte_offset(int32_t ndim, const int64_t *at, const int64_t *strides)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < ndim; d++)
        offset += at[d] * strides[d];
    return offset;
}

rsd_status program_add_piece(struct program *program, const rsd_plan *plan, const rsd_piece *piece,
                             const struct plan_arrays *from, const struct plan_arrays *to)
{
    int32_t ndim = piece->box.ndim;
    bool forwarded = piece->from_destination;
    const int64_t *from_strides = plan_array_strides(from, piece->from_array, forwarded);
    const int64_t *to_strides = plan_array_strides(to, piece->to_array, true);
    struct copy_op op = {.src = plan_array_number(from, piece->from_array, forwarded),
                         .dst = plan_array_number(to, piece->to_array, true),
                         .src_offset = byte_offset(ndim, piece->from_at, from_strides),
                         .dst_offset = byte_offset(ndim, piece->to_at, to_strides),
                         .stage = piece->stage,
                         .peer = piece->from};
    struct loops loops = {0};
    for (int32_t d = 0; d < ndim; d++)
        loops_add(&loops, piece->box.len[d], from_strides[d], to_strides[d]);
    loops_finish(&loops, element_of((forwarded ? plan->dst : plan->src)->dtype, plan->dst->dtype));
    return append_long_copy(program, op, &loops);
}

/* Begins a sum with the loops of its destination, outermost first; extents of 1 need none. */
static rsd_status start_sum(struct program *program, const rsd_plan *plan, const rsd_piece *piece,
                            const struct plan_arrays *to)
{
    const int64_t *to_strides = plan_array_strides(to, piece->to_array, true);
    struct sum_op sum = {.dst = plan_array_number(to, piece->to_array, true),
                         .dst_offset = byte_offset(plan->dst->ndim, piece->to_at, to_strides),
                         .first_loop = (int64_t)program->nloops,
                         .first_term = (int64_t)program->nterms,
                         .reduction = {plan->src->dtype, plan->dst->dtype, plan->reduce,
                                       plan->divisor, plan->reduced.total}};
    TRY(GROW(program->loops, program->loops_capacity, program->nloops + RSD_MAX_DIMS));
    for (int32_t d = 0; d < plan->dst->ndim; d++)
        if (piece->box.len[d] > 1) {
            program->loops[program->nloops++] =
                (struct loop){.count = piece->box.len[d], .dst_stride = to_strides[d]};
            sum.nloops++;
        }
    TRY(GROW(program->sums, program->sums_capacity, program->nsums + 1));
    program->sums[program->nsums++] = sum;
    program->nbytes += piece->nbytes;
    return RSD_OK;
}

/* Adds a term to the last sum. */
static rsd_status append_term(struct program *program, const rsd_piece *piece,
                              const struct plan_arrays *from)
{
    int32_t ndim = piece->box.ndim;
    const int64_t *from_strides = plan_array_strides(from, piece->from_array, false);
    struct sum_term term = {.src = plan_array_number(from, piece->from_array, false),
                            .offset = byte_offset(ndim, piece->from_at, from_strides),
                            .first_stride = (int64_t)program->nstrides,
                            .peer = piece->from};
    TRY(GROW(program->terms, program->terms_capacity, program->nterms + 1));
    TRY(GROW(program->strides, program->strides_capacity, program->nstrides + (size_t)ndim));
    for (int32_t d = 0; d < ndim; d++)
        if (piece->box.len[d] > 1)
            program->strides[program->nstrides++] = from_strides[d];
    program->terms[program->nterms++] = term;
    return RSD_OK;
}

/* Sums are computed in batches along the innermost loop. If that is short, it is exchanged with the longest loop. */
static void put_longest_inside(struct program *program, struct sum_op *sum)
{
    struct loop *loops = program->loops + sum->first_loop, *last = loops + sum->nloops - 1;
    int32_t longest = sum->nloops - 1;
    if (sum->nloops < 2 || last->count >= 32)
        return;
    for (int32_t i = 0; i < sum->nloops; i++)
        if (loops[i].count > loops[longest].count)
            longest = i;
    struct loop swapped = *last;
    *last = loops[longest];
    loops[longest] = swapped;
    for (int64_t t = 0; t < sum->reduction.nterms; t++) {
        int64_t *strides = program->strides + program->terms[sum->first_term + t].first_stride;
        int64_t stride = strides[sum->nloops - 1];
        strides[sum->nloops - 1] = strides[longest];
        strides[longest] = stride;
    }
}

/* Merges loops of a complete sum that are contiguous in every array, from the innermost outwards. */
static void merge_sum(struct program *program)
{
    struct sum_op *sum = &program->sums[program->nsums - 1];
    struct loop *loops = program->loops + sum->first_loop;
    struct sum_term *terms = program->terms + sum->first_term;
    int32_t n = sum->nloops;
    for (int32_t i = n - 2; i >= 0; i--) {
        int64_t inner = loops[i + 1].count;
        bool joins = loops[i].dst_stride == inner * loops[i + 1].dst_stride;
        for (int64_t t = 0; t < sum->reduction.nterms && joins; t++) {
            const int64_t *strides = program->strides + terms[t].first_stride;
            joins = strides[i] == inner * strides[i + 1];
        }
        if (!joins)
            continue;
        loops[i + 1].count *= loops[i].count;
        memmove(loops + i, loops + i + 1, (size_t)(n - i - 1) * sizeof *loops);
        for (int64_t t = 0; t < sum->reduction.nterms; t++) {
            int64_t *strides = program->strides + terms[t].first_stride;
            memmove(strides + i, strides + i + 1, (size_t)(n - i - 1) * sizeof *strides);
        }
        n--;
    }
    sum->nloops = n;
    put_longest_inside(program, sum);
}

/* Returns how many terms the last sum still needs. */
static int64_t missing_terms(const struct program *program)
{
    if (program->nsums == 0)
        return 0;
    const struct sum_op *last = &program->sums[program->nsums - 1];
    return last->first_term + last->reduction.nterms - (int64_t)program->nterms;
}

rsd_status program_add_term(struct program *program, const rsd_plan *plan, const rsd_piece *piece,
                            const struct plan_arrays *from, const struct plan_arrays *to)
{
    if (missing_terms(program) == 0)
        TRY(start_sum(program, plan, piece, to));
    TRY(append_term(program, piece, from));
    if (missing_terms(program) == 0)
        merge_sum(program);
    return RSD_OK;
}

/* Adds all pieces of a plan, one by one. */
static rsd_status compile_pieces(const struct plan_compiler *c)
{
    rsd_cursor *cursor;
    const rsd_piece *piece;
    TRY(rsd_plan_walk(c->plan, RSD_EVERY_RANK, RSD_RECEIVES, &cursor));
    rsd_status status;
    while (!(status = rsd_cursor_next(cursor, &piece)) && piece) {
        status = (piece->reduce ? program_add_term : program_add_piece)(c->program, c->plan, piece,
                                                                        c->arrays, c->arrays);
        if (status)
            break;
    }
    rsd_cursor_free(cursor);
    return status;
}

rsd_status bind_options_copy(const rsd_bind_options *list, int64_t i, rsd_bind_options *options)
{
    /* A caller of another version has structs of another size, which is the distance between them. */
    const char *given = (const char *)list;
    if (list)
        given += (size_t)i * list->struct_nbytes;
    TRY(options_copy("rsd_bind_options", given, options, sizeof *options));
    if ((options->src_strides && options->src_column_major) ||
        (options->dst_strides && options->dst_column_major))
        return fail(RSD_EINVAL, "strides and column_major exclude each other: pass one of them");
    return RSD_OK;
}

rsd_status program_add_plan(struct program *program, struct run_arrays *arrays,
                            const rsd_plan *plan, const rsd_bind_options *options)
{
    struct plan_arrays before = {.number = arrays->n},
                       added = plan_arrays_next(&before, plan, RSD_EVERY_RANK);
    struct plan_compiler c = {.program = program, .plan = plan, .arrays = &added};
    int64_t *strides = mem_new(plan_arrays_nstrides(&added), sizeof *strides);
    if (!strides)
        return RSD_ENOMEM;
    added.strides = strides;
    rsd_status status = plan_arrays_fill_strides(&added, plan, options, strides);
    if (!status)
        status = plan_is_direct(plan) ? add_families(&c) : compile_pieces(&c);
    if (!status)
        status = run_arrays_add(arrays, plan, &added);
    mem_free(strides);
    return status;
}
