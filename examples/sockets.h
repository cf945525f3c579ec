/* sockets.h - a transport over stream sockets, for a program that runs plans over its own network.
 *
 * Two ranks have one stream for each tag. Messages on it need no header, since both sides know their lengths. No function
 * waits: test moves the bytes that the socket takes or has. */
#ifndef SOCKETS_H
#define SOCKETS_H

#include "elements.h"

#include <errno.h>
#include <sys/socket.h>

enum { NRANKS = 4, NTAGS = 8 }; /* execs and rsd_gather use tags below 8 */

struct message {
    struct message *next;
    struct stream *stream;
    char *data;
    size_t nbytes, nmoved;
};

struct stream {
    int fd;
    struct message *sends, *receives; /* not complete, in their order */
};

static inline rsd_status add_message(struct stream *stream, struct message **queue, char *data,
                                     size_t nbytes, void **request)
{
    struct message *message = zeroed(sizeof *message);
    *message = (struct message){NULL, stream, data, nbytes, 0};
    while (*queue)
        queue = &(*queue)->next;
    *request = *queue = message;
    return RSD_OK;
}

static inline rsd_status start_send(void *streams, int32_t to, int32_t tag, const void *data,
                                    size_t nbytes, void **request)
{
    struct stream *stream = (struct stream *)streams + to * NTAGS + tag;
    return add_message(stream, &stream->sends, (char *)(uintptr_t)data, nbytes, request);
}

static inline rsd_status start_receive(void *streams, int32_t from, int32_t tag, void *data,
                                       size_t nbytes, void **request)
{
    struct stream *stream = (struct stream *)streams + from * NTAGS + tag;
    return add_message(stream, &stream->receives, data, nbytes, request);
}

/* Moves bytes of the first messages of a queue. Those that are complete leave it. */
static inline rsd_status progress(struct stream *stream, struct message **queue)
{
    while (*queue) {
        char *at = (*queue)->data + (*queue)->nmoved;
        size_t left = (*queue)->nbytes - (*queue)->nmoved;
        ssize_t moved = queue == &stream->sends
                            ? send(stream->fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                            : recv(stream->fd, at, left, MSG_DONTWAIT);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR))
            return RSD_OK;
        if (moved <= 0)
            return rsd_set_error(RSD_EPEER, "the other rank has closed its socket");
        (*queue)->nmoved += (size_t)moved;
        if ((*queue)->nmoved == (*queue)->nbytes)
            *queue = (*queue)->next;
    }
    return RSD_OK;
}

static inline rsd_status test_request(void *streams, void *request, int32_t *done)
{
    struct message *message = request;
    rsd_status sent = progress(message->stream, &message->stream->sends);
    rsd_status received = progress(message->stream, &message->stream->receives);
    (void)streams;
    *done = message->nmoved == message->nbytes;
    if (*done)
        free(message);
    return *done ? RSD_OK : sent ? sent : received;
}

static inline int32_t cancel_request(void *streams, void *request)
{
    (void)streams, (void)request;
    return 0; /* it stays in its queue, with its memory */
}

/* Returns the transport of a rank, whose streams are streams[rank * NTAGS + tag]. */
static inline rsd_transport socket_transport(int32_t rank, struct stream *streams)
{
    return (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                           .context = streams,
                           .rank = rank,
                           .nranks = NRANKS,
                           .send = start_send,
                           .recv = start_receive,
                           .test = test_request,
                           .cancel = cancel_request};
}

#endif
