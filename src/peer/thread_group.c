/* team.c - a transport between threads of one process: every rank is a thread.
 *
 *     send: the message waits in the inbox of its getter, and its bytes where they are
 *     recv: found there by a test, it is copied straight into place, and the sender's test says done;
 *           receives that are about the same get messages in the order they were started
 *
 * Invariants:
 *   (1) A message is in an inbox from its send until it is taken or cancelled, so nothing is left behind
 *       by a run that failed. The getter's lock guards its inbox and the state of messages to it.
 *   (2) A taken message is being copied: its cancel waits for that, which no other thread can hold up.
 *   (3) At a meeting, the last to come hands out for all: the others wait and their memory is there.
 */
#include "peer.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

enum { MAX_TAG = 63 };

/* A send or a receive, from its start until its test says done. */
struct message {
    int32_t from, to, tag;
    bool receives;
    enum { WAITS, TAKEN, DONE } state;
    const char *out;
    char *in;
    size_t nbytes;
    struct message *next;
};

/* What a rank has. */
struct seat {
    struct rsd_thread_group *team;
    int32_t rank;
    pthread_mutex_t lock;
    struct message *first, **last; /* the inbox */
    struct message *started;       /* receives, the first one first */
    struct message *spare;         /* of this rank's own, to be used again */

    /* At a meeting, under the team's lock. */
    bool here;
    const char *own;
    char *all;
    size_t nbytes;
    int32_t missing, odd; /* who did not come, who came with something else; -1: nobody */
};

struct rsd_thread_group {
    int32_t nranks, nhere;
    int64_t nmeetings; /* that are over */
    pthread_mutex_t lock;
    pthread_cond_t met;
    struct seat *seats;
};

/* ---- messages ---- */

static rsd_status new_message(struct seat *seat, struct message **message)
{
    pthread_mutex_lock(&seat->lock);
    struct message *made = seat->spare;
    if (made)
        seat->spare = made->next;
    pthread_mutex_unlock(&seat->lock);
    if (!made)
        made = mem_new(1, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    *message = made;
    return RSD_OK;
}

static void put_by(struct seat *seat, struct message *message)
{
    pthread_mutex_lock(&seat->lock);
    message->next = seat->spare;
    seat->spare = message;
    pthread_mutex_unlock(&seat->lock);
}

static rsd_status check_peer(const struct seat *seat, int32_t peer, int32_t tag)
{
    if (peer < 0 || peer >= seat->team->nranks)
        return fail(RSD_EINVAL, "rank %d of a team of %d", (int)peer, (int)seat->team->nranks);
    if (tag < 0 || tag > MAX_TAG)
        return fail(RSD_EINVAL, "tag %d: tags are 0 to %d", (int)tag, (int)MAX_TAG);
    return RSD_OK;
}

static rsd_status team_send(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                            void **request)
{
    struct seat *seat = context;
    struct message *message;
    TRY(check_peer(seat, to, tag));
    TRY(new_message(seat, &message));
    *message = (struct message){
        .from = seat->rank, .to = to, .tag = tag, .state = WAITS, .out = data, .nbytes = nbytes};
    struct seat *getter = &seat->team->seats[to];
    pthread_mutex_lock(&getter->lock);
    *getter->last = message;
    getter->last = &message->next;
    pthread_mutex_unlock(&getter->lock);
    *request = message;
    return RSD_OK;
}

static rsd_status team_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                            void **request)
{
    struct seat *seat = context;
    struct message *message;
    TRY(check_peer(seat, from, tag));
    TRY(new_message(seat, &message));
    *message = (struct message){
        .from = from, .to = seat->rank, .tag = tag, .receives = true, .in = data, .nbytes = nbytes};
    pthread_mutex_lock(&seat->lock);
    struct message **last = &seat->started;
    while (*last)
        last = &(*last)->next;
    *last = message;
    pthread_mutex_unlock(&seat->lock);
    *request = message;
    return RSD_OK;
}

/* The first message in an inbox that a receive is about, or this very one. */
static struct message *unlink_message(struct seat *getter, const struct message *like)
{
    for (struct message **at = &getter->first; *at; at = &(*at)->next) {
        struct message *message = *at;
        if (like->receives ? message->from != like->from || message->tag != like->tag
                           : message != like)
            continue;
        *at = message->next;
        if (getter->last == &message->next)
            getter->last = at;
        return message;
    }
    return NULL;
}

static bool is_sent(struct seat *getter, const struct message *message)
{
    pthread_mutex_lock(&getter->lock);
    bool done = message->state == DONE;
    pthread_mutex_unlock(&getter->lock);
    return done;
}

static void unlink_receive(struct seat *seat, const struct message *receive)
{
    struct message **at = &seat->started;
    while (*at != receive)
        at = &(*at)->next;
    *at = receive->next;
}

/* The receive whose turn it is among those that are about the same. */
static struct message *first_receive(const struct seat *seat, const struct message *like)
{
    struct message *first = seat->started;
    while (first->from != like->from || first->tag != like->tag || first->state == DONE)
        first = first->next;
    return first;
}

/* Takes messages until this receive has one, or there are none. */
static rsd_status receive(struct seat *seat, struct message *receive, bool *done)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&seat->lock);
    while (receive->state != DONE && !status) {
        struct message *turn = first_receive(seat, receive);
        struct message *sent = unlink_message(seat, turn);
        if (!sent)
            break;
        sent->state = TAKEN;
        turn->state = TAKEN;
        pthread_mutex_unlock(&seat->lock);
        if (sent->nbytes != turn->nbytes)
            status = fail(RSD_EPEER, "rank %d sent %zu bytes where rank %d waits for %zu",
                          (int)turn->from, sent->nbytes, (int)seat->rank, turn->nbytes);
        else if (sent->nbytes > 0)
            memcpy(turn->in, sent->out, sent->nbytes);
        pthread_mutex_lock(&seat->lock);
        sent->state = DONE;
        turn->state = DONE;
    }
    *done = receive->state == DONE;
    if (*done && !status)
        unlink_receive(seat, receive);
    pthread_mutex_unlock(&seat->lock);
    return status;
}

static rsd_status team_test(void *context, void *request, int32_t *done)
{
    struct seat *seat = context;
    struct message *message = request;
    bool is_done;
    if (message->receives)
        TRY(receive(seat, message, &is_done));
    else
        is_done = is_sent(&seat->team->seats[message->to], message);
    if (is_done)
        put_by(seat, message);
    *done = is_done;
    return RSD_OK;
}

static void team_cancel(void *context, void *request)
{
    struct seat *seat = context;
    struct message *message = request;
    struct seat *getter = &seat->team->seats[message->to];
    pthread_mutex_lock(&getter->lock);
    if (message->receives)
        unlink_receive(seat, message);
    else
        unlink_message(getter, message);
    while (message->state == TAKEN) {
        pthread_mutex_unlock(&getter->lock);
        sched_yield();
        pthread_mutex_lock(&getter->lock);
    }
    pthread_mutex_unlock(&getter->lock);
    put_by(seat, message);
}

/* ---- meetings ---- */

/* Everybody who is here goes, with the same answer. */
static void end_meeting(struct rsd_thread_group *team, int32_t missing, int32_t odd)
{
    for (int32_t i = 0; i < team->nranks; i++)
        if (team->seats[i].here) {
            team->seats[i].here = false;
            team->seats[i].missing = missing;
            team->seats[i].odd = odd;
        }
    team->nhere = 0;
    team->nmeetings++;
    pthread_cond_broadcast(&team->met);
}

static void hand_out(struct rsd_thread_group *team)
{
    int32_t odd = -1;
    for (int32_t i = team->nranks; i-- > 1;)
        if (team->seats[i].nbytes != team->seats[0].nbytes)
            odd = i;
    for (int32_t i = 0; i < team->nranks && odd < 0; i++) {
        size_t n = team->seats[i].nbytes;
        for (int32_t k = 0; n > 0 && k < team->nranks; k++)
            memcpy(team->seats[i].all + (size_t)k * n, team->seats[k].own, n);
    }
    end_meeting(team, -1, odd);
}

/* The first to give up does so for all who are here, so that all name the same rank. */
static void give_up(struct rsd_thread_group *team)
{
    int32_t missing = 0;
    while (team->seats[missing].here)
        missing++;
    end_meeting(team, missing, -1);
}

static struct timespec deadline(double timeout)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    if (timeout > 1e9) /* for ever, as far as anyone will see */
        timeout = 1e9;
    at.tv_sec += (time_t)timeout;
    at.tv_nsec += (long)((timeout - (double)(time_t)timeout) * 1e9);
    if (at.tv_nsec >= 1000000000) {
        at.tv_nsec -= 1000000000;
        at.tv_sec++;
    }
    return at;
}

static rsd_status team_allgather(void *context, const void *own, size_t nbytes, void *all,
                                 double timeout)
{
    struct seat *seat = context;
    struct rsd_thread_group *team = seat->team;
    struct timespec until = deadline(timeout);
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&team->lock);
    int64_t meeting = team->nmeetings;
    seat->own = own;
    seat->all = all;
    seat->nbytes = nbytes;
    seat->here = true;
    if (++team->nhere == team->nranks)
        hand_out(team);
    int late = 0;
    while (team->nmeetings == meeting && !late)
        late = pthread_cond_timedwait(&team->met, &team->lock, &until);
    if (team->nmeetings == meeting)
        give_up(team);
    if (seat->missing >= 0)
        status = fail(RSD_ETIMEOUT, "rank %d has not come to where all meet for %g s",
                      (int)seat->missing, timeout);
    else if (seat->odd >= 0)
        status = fail(RSD_EMISMATCH, "rank %d gives %zu bytes where rank 0 gives %zu",
                      (int)seat->odd, team->seats[seat->odd].nbytes, team->seats[0].nbytes);
    pthread_mutex_unlock(&team->lock);
    return status;
}

/* ---- the team ---- */

rsd_status rsd_thread_group_new(int32_t nranks, rsd_thread_group **team)
{
    pthread_condattr_t clock;
    if (nranks < 1)
        return fail(RSD_EINVAL, "a team of %d ranks", (int)nranks);
    struct rsd_thread_group *made = mem_new(1, sizeof *made);
    struct seat *seats = mem_new((size_t)nranks, sizeof *seats);
    if (!made || !seats) {
        mem_free(made);
        mem_free(seats);
        return RSD_ENOMEM;
    }
    made->nranks = nranks;
    made->seats = seats;
    pthread_mutex_init(&made->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&made->met, &clock);
    pthread_condattr_destroy(&clock);
    for (int32_t i = 0; i < nranks; i++) {
        seats[i].team = made;
        seats[i].rank = i;
        seats[i].last = &seats[i].first;
        pthread_mutex_init(&seats[i].lock, NULL);
    }
    *team = made;
    return RSD_OK;
}

rsd_status rsd_thread_group_transport(rsd_thread_group *team, int32_t rank,
                                      rsd_transport *transport)
{
    TRY(report_check("rsd_transport", transport));
    if (rank < 0 || rank >= team->nranks)
        return fail(RSD_EINVAL, "rank %d of a team of %d", (int)rank, (int)team->nranks);
    rsd_transport made = {.context = &team->seats[rank],
                          .rank = rank,
                          .nranks = team->nranks,
                          .send = team_send,
                          .recv = team_recv,
                          .test = team_test,
                          .cancel = team_cancel,
                          .allgather = team_allgather};
    report_copy(transport, &made, sizeof made);
    return RSD_OK;
}

static void free_messages(struct message *message)
{
    while (message) {
        struct message *next = message->next;
        mem_free(message);
        message = next;
    }
}

void rsd_thread_group_free(rsd_thread_group *team)
{
    if (!team)
        return;
    for (int32_t i = 0; i < team->nranks; i++) {
        free_messages(team->seats[i].first);
        free_messages(team->seats[i].started);
        free_messages(team->seats[i].spare);
        pthread_mutex_destroy(&team->seats[i].lock);
    }
    pthread_cond_destroy(&team->met);
    pthread_mutex_destroy(&team->lock);
    mem_free(team->seats);
    mem_free(team);
}
