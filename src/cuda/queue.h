/* queue.h - private to cuda: a queue from inside. */
#ifndef QUEUE_H
#define QUEUE_H

#include "device.h"

enum { NMARKS = 64, RING_NBYTES = 1 << 20 };

struct cuda_queue {
    struct memory_queue base;
    struct cuda_device *device;
    struct cuda_queue *next; /* while it is kept */
    cu_stream stream, own;
    cu_event events[NMARKS]; /* of mark i: i modulo NMARKS */
    uint64_t nmarks;         /* made so far */
    bool unmarked;           /* work was queued after the last mark */
    char *ring;
    size_t ring_nbytes;
    size_t ring_at;        /* where the next tables go */
    uint64_t ring_mark[2]; /* behind the last launch that reads each half */
    bool ring_used[2];     /* the half has such a mark */
};

static inline struct cuda_queue *cuda_queue_of(struct memory_queue *queue)
{
    return (struct cuda_queue *)(void *)queue;
}

/* A part of the ring that no launch reads any more. Requires device_enter. */
rsd_status queue_take_ring(struct cuda_queue *queue, size_t nbytes, char **out);

#endif
