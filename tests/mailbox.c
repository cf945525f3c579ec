/* mailbox.c - see mailbox.h. A message is copied into a queue when it is sent, and out of it when it is
 * asked for; every first test says "not yet", so that nobody relies on luck. */
#include "mailbox.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct message {
    int32_t from, to, tag;
    size_t nbytes;
    struct message *next;
    char bytes[];
};

struct end {
    struct mailbox *box;
    int32_t rank;
};

struct mailbox {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t nranks;
    struct message *first, **last;
    struct end *ends;
    char *gathered;
    int32_t arrived, left; /* at the meeting */
};

struct request {
    int32_t from, tag, ntests;
    void *data; /* NULL: a send, which is done */
    size_t nbytes;
};

struct mailbox *mailbox_new(int32_t nranks)
{
    struct mailbox *box = calloc(1, sizeof *box);
    box->nranks = nranks;
    box->last = &box->first;
    box->ends = calloc((size_t)nranks, sizeof *box->ends);
    for (int32_t i = 0; i < nranks; i++)
        box->ends[i] = (struct end){box, i};
    pthread_mutex_init(&box->lock, NULL);
    pthread_cond_init(&box->changed, NULL);
    return box;
}

void mailbox_free(struct mailbox *box)
{
    for (struct message *message = box->first, *next; message; message = next) {
        next = message->next;
        free(message);
    }
    free(box->gathered);
    free(box->ends);
    pthread_mutex_destroy(&box->lock);
    pthread_cond_destroy(&box->changed);
    free(box);
}

static rsd_status box_send(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                           void **request)
{
    struct end *end = context;
    struct message *message = malloc(sizeof *message + nbytes);
    *message = (struct message){end->rank, to, tag, nbytes, NULL};
    memcpy(message->bytes, data, nbytes);
    pthread_mutex_lock(&end->box->lock);
    *end->box->last = message;
    end->box->last = &message->next;
    pthread_mutex_unlock(&end->box->lock);
    *request = calloc(1, sizeof(struct request));
    return RSD_OK;
}

static rsd_status box_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                           void **request)
{
    struct request *made = malloc(sizeof *made);
    (void)context;
    *made = (struct request){from, tag, 0, data, nbytes};
    *request = made;
    return RSD_OK;
}

static struct message *take(struct mailbox *box, int32_t from, int32_t to, int32_t tag)
{
    for (struct message **at = &box->first; *at; at = &(*at)->next) {
        struct message *message = *at;
        if (message->from != from || message->to != to || message->tag != tag)
            continue;
        *at = message->next;
        if (box->last == &message->next)
            box->last = at;
        return message;
    }
    return NULL;
}

static rsd_status box_test(void *context, void *given, int32_t *done)
{
    struct end *end = context;
    struct request *request = given;
    *done = 0;
    if (request->ntests++ == 0)
        return RSD_OK;
    if (request->data) {
        pthread_mutex_lock(&end->box->lock);
        struct message *message = take(end->box, request->from, end->rank, request->tag);
        pthread_mutex_unlock(&end->box->lock);
        if (!message)
            return RSD_OK;
        rsd_status status = message->nbytes == request->nbytes ? RSD_OK : RSD_EPEER;
        if (!status)
            memcpy(request->data, message->bytes, message->nbytes);
        free(message);
        if (status)
            return status;
    }
    free(request);
    *done = 1;
    return RSD_OK;
}

static void box_cancel(void *context, void *request)
{
    (void)context;
    free(request);
}

static rsd_status box_allgather(void *context, const void *own, size_t nbytes, void *all)
{
    struct end *end = context;
    struct mailbox *box = end->box;
    pthread_mutex_lock(&box->lock);
    while (box->left > 0) /* those of the meeting before */
        pthread_cond_wait(&box->changed, &box->lock);
    if (box->arrived == 0) {
        free(box->gathered);
        box->gathered = calloc((size_t)box->nranks, nbytes);
    }
    memcpy(box->gathered + (size_t)end->rank * nbytes, own, nbytes);
    if (++box->arrived == box->nranks) {
        box->left = box->nranks;
        pthread_cond_broadcast(&box->changed);
    }
    while (box->left == 0)
        pthread_cond_wait(&box->changed, &box->lock);
    memcpy(all, box->gathered, (size_t)box->nranks * nbytes);
    if (--box->left == 0) {
        box->arrived = 0;
        pthread_cond_broadcast(&box->changed);
    }
    pthread_mutex_unlock(&box->lock);
    return RSD_OK;
}

rsd_transport mailbox_transport(struct mailbox *box, int32_t rank)
{
    return (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                           .context = &box->ends[rank],
                           .rank = rank,
                           .nranks = box->nranks,
                           .send = box_send,
                           .recv = box_recv,
                           .test = box_test,
                           .cancel = box_cancel,
                           .allgather = box_allgather};
}
