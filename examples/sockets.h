/* sockets.h - a transport over stream sockets, for a program that runs plans over its own network.
 *
 * Two ranks have one socket for each tag. Messages on it need no header, since both sides know their lengths. No function
 * waits: test moves the bytes that the socket takes or has. */
#ifndef SOCKETS_H
#define SOCKETS_H

#include "elements.h"

#include <errno.h>
#include <sys/socket.h>

enum { NRANKS = 4, NTAGS = 8 }; /* execs and rsd_gather use tags below 8 */
enum { SENDS, RECEIVES };

struct message {
    struct message *next;
    struct queue *queue;
    char *data; /* what is left of it */
    size_t nleft;
};

struct queue { /* one way of a socket */
    int fd, way;
    struct message *first; /* of those that are not complete, in their order */
};

typedef struct queue rank_queues[NRANKS][NTAGS][2]; /* by peer, tag and way */

static inline rsd_status add_message(struct queue *queue, void *data, size_t nbytes, void **request)
{
    struct message *message = zeroed(sizeof *message), **last = &queue->first;
    *message = (struct message){NULL, queue, data, nbytes};
    while (*last)
        last = &(*last)->next;
    *request = *last = message;
    return RSD_OK;
}

static inline rsd_status start_send(void *context, int32_t to, int32_t tag, const void *data,
                                    size_t nbytes, void **request)
{
    rank_queues *queues = context;
    return add_message(&(*queues)[to][tag][SENDS], (void *)(uintptr_t)data, nbytes, request);
}

static inline rsd_status start_receive(void *context, int32_t from, int32_t tag, void *data,
                                       size_t nbytes, void **request)
{
    rank_queues *queues = context;
    return add_message(&(*queues)[from][tag][RECEIVES], data, nbytes, request);
}

/* Moves bytes of the messages of the queue, up to this one. Those that are complete leave the queue. */
static inline rsd_status test_request(void *context, void *request, int32_t *done)
{
    struct message *message = request;
    struct queue *queue = message->queue;
    (void)context;
    while (message->nleft > 0) {
        struct message *first = queue->first;
        ssize_t moved =
            queue->way == SENDS
                ? send(queue->fd, first->data, first->nleft, MSG_DONTWAIT | MSG_NOSIGNAL)
                : recv(queue->fd, first->data, first->nleft, MSG_DONTWAIT);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (moved <= 0)
            return rsd_set_error(RSD_EPEER, "the other rank has closed its socket");
        first->data += moved;
        first->nleft -= (size_t)moved;
        if (first->nleft == 0)
            queue->first = first->next;
    }
    *done = message->nleft == 0;
    if (*done)
        free(message);
    return RSD_OK;
}

static inline int32_t cancel_request(void *context, void *request)
{
    (void)context, (void)request;
    return 0; /* it stays in its queue, with its memory */
}

static inline rsd_transport socket_transport(int32_t rank, rank_queues *queues)
{
    return (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                           .context = queues,
                           .rank = rank,
                           .nranks = NRANKS,
                           .send = start_send,
                           .recv = start_receive,
                           .test = test_request,
                           .cancel = cancel_request};
}

#endif
