/* thread_group.c - a transport between threads of one process: every rank is a thread.
 *
 * A send puts a message into the inbox of the receiver. Its bytes stay with the sender. A test of a receive finds the
 * message and copies the bytes. Then the send is done. Receives from one rank with one tag match messages in the order
 * in which they were started.
 *
 * Invariants:
 *   (1) A message is in an inbox from its send until it is taken or cancelled, so a run that failed leaves nothing
 *       there. The receiver's lock guards its inbox and the state of messages to it.
 *   (2) A taken message is being copied: its cancel waits for that, which no other thread can hold up.
 */
#include "peer.h"

#include <pthread.h>
#include <sched.h>

/* A send or a receive, from its start until it is done. */
struct thread_message {
    int32_t from, to, tag;
    bool receives;
    enum { STATE_WAITS, STATE_TAKEN, STATE_DONE } state;
    const char *out;
    char *in;
    size_t nbytes;
    size_t narrived; /* of a receive: bytes of the message that it matched */
    struct thread_message *next;
};

struct thread_rank {
    struct rsd_thread_group *group;
    int32_t rank;
    pthread_mutex_t lock;
    struct thread_message *first, **last; /* the inbox */
    struct thread_message *receives;      /* receives in progress, in the order of their start */
    struct thread_message *unused;        /* messages of this rank that can be reused */
};

struct rsd_thread_group {
    int32_t nranks;
    struct thread_rank *ranks;
};

/* ---- messages ---- */

/* Returns a message from the list of unused ones of this rank, or a new one. */
static rsd_status new_message(struct thread_rank *own, struct thread_message **message)
{
    pthread_mutex_lock(&own->lock);
    struct thread_message *made = own->unused;
    if (made)
        own->unused = made->next;
    pthread_mutex_unlock(&own->lock);
    if (!made)
        made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    *message = made;
    return RSD_OK;
}

static void reuse_message(struct thread_rank *own, struct thread_message *message)
{
    pthread_mutex_lock(&own->lock);
    message->next = own->unused;
    own->unused = message;
    pthread_mutex_unlock(&own->lock);
}

static rsd_status check_address(const struct thread_rank *own, int32_t rank, int32_t tag)
{
    if (rank < 0 || rank >= own->group->nranks)
        return fail(RSD_EINVAL, "rank %d is out of range: the thread group has %d ranks", (int)rank,
                    (int)own->group->nranks);
    if (tag < 0 || tag >= TAG_END)
        return fail(RSD_EINVAL, "tag %d is out of range (0 to %d)", (int)tag, TAG_END - 1);
    return RSD_OK;
}

/* The send of the transport: appends the message to the queue of the receiver, which copies the bytes. */
static rsd_status thread_send(void *context, int32_t to, int32_t tag, const void *data,
                              size_t nbytes, void **request)
{
    struct thread_rank *own = context;
    struct thread_message *message;
    TRY(check_address(own, to, tag));
    TRY(new_message(own, &message));
    *message = (struct thread_message){
        .from = own->rank, .to = to, .tag = tag, .out = data, .nbytes = nbytes};
    struct thread_rank *receiver = &own->group->ranks[to];
    pthread_mutex_lock(&receiver->lock);
    *receiver->last = message;
    receiver->last = &message->next;
    pthread_mutex_unlock(&receiver->lock);
    *request = message;
    return RSD_OK;
}

/* The recv of the transport: appends the message to the receives of this rank, in the order of calls. */
static rsd_status thread_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                              void **request)
{
    struct thread_rank *own = context;
    struct thread_message *message;
    TRY(check_address(own, from, tag));
    TRY(new_message(own, &message));
    *message = (struct thread_message){
        .from = from, .to = own->rank, .tag = tag, .receives = true, .in = data, .nbytes = nbytes};
    pthread_mutex_lock(&own->lock);
    struct thread_message **last = &own->receives;
    while (*last)
        last = &(*last)->next;
    *last = message;
    pthread_mutex_unlock(&own->lock);
    *request = message;
    return RSD_OK;
}

/* Removes a message from an inbox: the first that matches a receive, or a given one. */
static struct thread_message *unlink_message(struct thread_rank *receiver,
                                             const struct thread_message *wanted)
{
    for (struct thread_message **at = &receiver->first; *at; at = &(*at)->next) {
        struct thread_message *message = *at;
        if (wanted->receives ? message->from != wanted->from || message->tag != wanted->tag
                             : message != wanted)
            continue;
        *at = message->next;
        if (receiver->last == &message->next)
            receiver->last = at;
        return message;
    }
    return NULL;
}

static bool is_sent(struct thread_rank *receiver, const struct thread_message *message)
{
    pthread_mutex_lock(&receiver->lock);
    bool done = message->state == STATE_DONE;
    pthread_mutex_unlock(&receiver->lock);
    return done;
}

static void unlink_receive(struct thread_rank *own, const struct thread_message *receive)
{
    struct thread_message **at = &own->receives;
    while (*at != receive)
        at = &(*at)->next;
    *at = receive->next;
}

/* Returns the oldest receive in progress with the rank and the tag of a given one. */
static struct thread_message *first_receive(const struct thread_rank *own,
                                            const struct thread_message *receive)
{
    struct thread_message *first = own->receives;
    while (first->from != receive->from || first->tag != receive->tag || first->state == STATE_DONE)
        first = first->next;
    return first;
}

/* Matches messages to receives until this receive has one. Returns false if the inbox has none for it. */
static bool take_messages(struct thread_rank *own, struct thread_message *receive)
{
    pthread_mutex_lock(&own->lock);
    while (receive->state != STATE_DONE) {
        struct thread_message *turn = first_receive(own, receive);
        struct thread_message *sent = unlink_message(own, turn);
        if (!sent)
            break;
        sent->state = turn->state = STATE_TAKEN;
        pthread_mutex_unlock(&own->lock);
        turn->narrived = sent->nbytes;
        if (sent->nbytes == turn->nbytes && sent->nbytes > 0)
            memcpy(turn->in, sent->out, sent->nbytes);
        pthread_mutex_lock(&own->lock);
        sent->state = turn->state = STATE_DONE;
    }
    bool done = receive->state == STATE_DONE;
    if (done && receive->narrived == receive->nbytes)
        unlink_receive(own, receive);
    pthread_mutex_unlock(&own->lock);
    return done;
}

/* The test of the transport. */
static rsd_status thread_test(void *context, void *request, int32_t *done)
{
    struct thread_rank *own = context;
    struct thread_message *message = request;
    *done = message->receives ? take_messages(own, message)
                              : is_sent(&own->group->ranks[message->to], message);
    if (!*done)
        return RSD_OK;
    if (message->receives && message->narrived != message->nbytes)
        return fail(RSD_EPEER, "rank %d sent %zu bytes where rank %d expects %zu",
                    (int)message->from, message->narrived, (int)own->rank, message->nbytes);
    reuse_message(own, message);
    return RSD_OK;
}

/* The cancel of the transport. Waits while another thread copies the message. */
static int32_t thread_cancel(void *context, void *request)
{
    struct thread_rank *own = context;
    struct thread_message *message = request;
    struct thread_rank *receiver = &own->group->ranks[message->to];
    pthread_mutex_lock(&receiver->lock);
    if (message->receives)
        unlink_receive(own, message);
    else
        unlink_message(receiver, message);
    while (message->state == STATE_TAKEN) {
        pthread_mutex_unlock(&receiver->lock);
        sched_yield();
        pthread_mutex_lock(&receiver->lock);
    }
    pthread_mutex_unlock(&receiver->lock);
    reuse_message(own, message);
    return 1;
}

/* ---- the group ---- */

rsd_status rsd_thread_group_new(int32_t nranks, rsd_thread_group **group)
{
    if (nranks < 1)
        return fail(RSD_EINVAL, "invalid number of ranks %d: a thread group has at least 1",
                    (int)nranks);
    struct rsd_thread_group *made = mem_new(1, sizeof *made);
    struct thread_rank *ranks = mem_new((size_t)nranks, sizeof *ranks);
    if (!made || !ranks) {
        mem_free(made);
        mem_free(ranks);
        return RSD_ENOMEM;
    }
    made->nranks = nranks;
    made->ranks = ranks;
    for (int32_t i = 0; i < nranks; i++) {
        ranks[i].group = made;
        ranks[i].rank = i;
        ranks[i].last = &ranks[i].first;
        pthread_mutex_init(&ranks[i].lock, NULL);
    }
    *group = made;
    return RSD_OK;
}

rsd_status rsd_thread_group_transport(rsd_thread_group *group, int32_t rank,
                                      rsd_transport *transport)
{
    TRY(report_check("rsd_transport", transport));
    if (rank < 0 || rank >= group->nranks)
        return fail(RSD_EINVAL, "rank %d is out of range: the thread group has %d ranks", (int)rank,
                    (int)group->nranks);
    rsd_transport made = {.context = &group->ranks[rank],
                          .rank = rank,
                          .nranks = group->nranks,
                          .send = thread_send,
                          .recv = thread_recv,
                          .test = thread_test,
                          .cancel = thread_cancel};
    report_copy(transport, &made, sizeof made);
    return RSD_OK;
}

static void free_messages(struct thread_message *message)
{
    while (message) {
        struct thread_message *next = message->next;
        mem_free(message);
        message = next;
    }
}

void rsd_thread_group_free(rsd_thread_group *group)
{
    if (!group)
        return;
    for (int32_t i = 0; i < group->nranks; i++) {
        free_messages(group->ranks[i].first);
        free_messages(group->ranks[i].receives);
        free_messages(group->ranks[i].unused);
        pthread_mutex_destroy(&group->ranks[i].lock);
    }
    mem_free(group->ranks);
    mem_free(group);
}
