/* loops.c - a copy of a strided block as the shortest loop nest over bytes.
 *
 *     for i < count[0]                        loops outermost first, so that the destination is
 *       for j < count[1]                      written in order; what is contiguous on both sides
 *         copy run bytes                      has become part of the run
 */
#include "memory.h"

static bool goes_outside(const struct loops *loops, int32_t a, int32_t b)
{
    if (loops->dst_stride[a] != loops->dst_stride[b])
        return loops->dst_stride[a] > loops->dst_stride[b];
    return loops->src_stride[a] > loops->src_stride[b];
}

static void swap_loops(struct loops *loops, int32_t a, int32_t b)
{
    int64_t count = loops->count[a], src = loops->src_stride[a], dst = loops->dst_stride[a];
    loops->count[a] = loops->count[b];
    loops->src_stride[a] = loops->src_stride[b];
    loops->dst_stride[a] = loops->dst_stride[b];
    loops->count[b] = count;
    loops->src_stride[b] = src;
    loops->dst_stride[b] = dst;
}

/* Joins each loop with the one inside it where both sides just go on. */
static void merge(struct loops *loops)
{
    int32_t n = 0;
    for (int32_t i = 1; i < loops->n; i++)
        if (loops->src_stride[n] == loops->count[i] * loops->src_stride[i] &&
            loops->dst_stride[n] == loops->count[i] * loops->dst_stride[i]) {
            loops->count[n] *= loops->count[i];
            loops->src_stride[n] = loops->src_stride[i];
            loops->dst_stride[n] = loops->dst_stride[i];
        } else {
            n++;
            loops->count[n] = loops->count[i];
            loops->src_stride[n] = loops->src_stride[i];
            loops->dst_stride[n] = loops->dst_stride[i];
        }
    loops->n = loops->n ? n + 1 : 0;
}

void loops_finish(struct loops *loops, size_t element_nbytes)
{
    for (int32_t i = 1; i < loops->n; i++)
        for (int32_t j = i; j > 0 && goes_outside(loops, j, j - 1); j--)
            swap_loops(loops, j, j - 1);
    merge(loops);
    loops->run = element_nbytes;
    while (loops->n > 0 && loops->src_stride[loops->n - 1] == (int64_t)loops->run &&
           loops->dst_stride[loops->n - 1] == (int64_t)loops->run)
        loops->run *= (size_t)loops->count[--loops->n];
}
