/* loops.c - a strided copy as the shortest nest of loops.
 *
 *     for i < count of loop 0                 Loops are sorted so that the destination is written in
 *       for j < count of loop 1               order. Loops that are contiguous on both sides are
 *         copy run units                      merged, into each other or into the run.
 */
#include "memory.h"

static bool is_outside_of(const struct loop *a, const struct loop *b)
{
    if (a->dst_stride != b->dst_stride)
        return a->dst_stride > b->dst_stride;
    return a->src_stride > b->src_stride;
}

static void sort_loops(struct loops *loops)
{
    for (int32_t i = 1; i < loops->n; i++)
        for (int32_t j = i; j > 0 && is_outside_of(&loops->loop[j], &loops->loop[j - 1]); j--) {
            struct loop swapped = loops->loop[j];
            loops->loop[j] = loops->loop[j - 1];
            loops->loop[j - 1] = swapped;
        }
}

/* Merges each loop with the one inside of it, if both sides continue where the inner loop ends. */
static void merge_loops(struct loops *loops)
{
    int32_t n = 0;
    for (int32_t i = 1; i < loops->n; i++) {
        struct loop *outer = &loops->loop[n], inner = loops->loop[i];
        if (outer->src_stride == inner.count * inner.src_stride &&
            outer->dst_stride == inner.count * inner.dst_stride) {
            inner.count *= outer->count;
            *outer = inner;
        } else {
            loops->loop[++n] = inner;
        }
    }
    loops->n = loops->n ? n + 1 : 0;
}

static bool continues_run(const struct loops *loops)
{
    const struct loop *inner = &loops->loop[loops->n - 1];
    return inner->src_stride == (int64_t)loops->run * loops->element.src_unit &&
           inner->dst_stride == (int64_t)loops->run * loops->element.dst_unit;
}

void loops_finish(struct loops *loops, struct element element)
{
    sort_loops(loops);
    merge_loops(loops);
    loops->element = element;
    loops->run = (size_t)element.nunits;
    while (loops->n > 0 && continues_run(loops))
        loops->run *= (size_t)loops->loop[--loops->n].count;
}

bool loops_next(const struct loops *loops, int64_t index[MAX_LOOPS], int64_t *src, int64_t *dst)
{
    for (int32_t i = loops->n - 1; i >= 0; i--) {
        const struct loop *loop = &loops->loop[i];
        *src += loop->src_stride;
        *dst += loop->dst_stride;
        if (++index[i] < loop->count)
            return true;
        *src -= loop->count * loop->src_stride;
        *dst -= loop->count * loop->dst_stride;
        index[i] = 0;
    }
    return false;
}
