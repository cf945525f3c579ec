/* test_thread_group.c - the transport between threads: messages arrive in order, whichever request is tested first,
 * and a cancelled message leaves nothing. */
#include "reshard.h"
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>

enum { NRANKS = 4, NROUNDS = 200 };

static rsd_transport transport_of(rsd_thread_group *group, int32_t rank)
{
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    OK(rsd_thread_group_transport(group, rank, &transport));
    return transport;
}

static bool is_done(const rsd_transport *t, void *request)
{
    int32_t done = 0;
    OK(t->test(t->context, request, &done));
    return done;
}

static void in_one_thread(void)
{
    CASE("messages with one tag arrive in order, independently of other tags");
    rsd_thread_group *group;
    OK(rsd_thread_group_new(2, &group));
    rsd_transport a = transport_of(group, 0), b = transport_of(group, 1);
    int out[3] = {10, 11, 12}, in[3] = {0};
    void *sent[3], *received[3];
    for (int i = 0; i < 3; i++)
        OK(a.send(a.context, 1, i == 2 ? 63 : 5, &out[i], sizeof(int), &sent[i]));
    CHECK(!is_done(&a, sent[0]) && !is_done(&a, sent[2]), "sent before anyone received");
    OK(b.recv(b.context, 0, 63, &in[2], sizeof(int), &received[2]));
    CHECK(is_done(&b, received[2]) && is_done(&a, sent[2]) && !is_done(&a, sent[0]));
    for (int i = 0; i < 2; i++) {
        OK(b.recv(b.context, 0, 5, &in[i], sizeof(int), &received[i]));
        CHECK(is_done(&b, received[i]) && is_done(&a, sent[i]));
    }
    CHECK(in[0] == 10 && in[1] == 11 && in[2] == 12, "%d %d %d", in[0], in[1], in[2]);

    CASE("receives with the same rank and tag complete in order, whichever is tested first");
    for (int i = 0; i < 2; i++) {
        OK(b.recv(b.context, 0, 5, &in[i], sizeof(int), &received[i]));
        OK(a.send(a.context, 1, 5, &out[i], sizeof(int), &sent[i]));
    }
    CHECK(is_done(&b, received[1]) && is_done(&a, sent[1]) && is_done(&a, sent[0]));
    CHECK(in[0] == 10 && in[1] == 11 && is_done(&b, received[0]), "%d %d", in[0], in[1]);

    CASE("a rank can send to itself, and can send an empty message");
    OK(a.send(a.context, 0, 0, &out[1], sizeof(int), &sent[0]));
    OK(a.recv(a.context, 0, 0, &in[0], sizeof(int), &received[0]));
    CHECK(is_done(&a, received[0]) && is_done(&a, sent[0]) && in[0] == 11);
    OK(a.send(a.context, 1, 0, NULL, 0, &sent[0]));
    OK(b.recv(b.context, 0, 0, NULL, 0, &received[0]));
    CHECK(is_done(&b, received[0]) && is_done(&a, sent[0]));

    CASE("a cancelled message is removed on both sides");
    OK(a.send(a.context, 1, 5, &out[0], sizeof(int), &sent[0]));
    OK(b.recv(b.context, 0, 5, &in[0], sizeof(int), &received[0]));
    CHECK(a.cancel(a.context, sent[0]) == 1);
    CHECK(!is_done(&b, received[0]), "received what was cancelled");
    CHECK(b.cancel(b.context, received[0]) == 1);
    OK(a.send(a.context, 1, 5, &out[1], sizeof(int), &sent[1]));
    OK(b.recv(b.context, 0, 5, &in[1], sizeof(int), &received[1]));
    CHECK(is_done(&b, received[1]) && is_done(&a, sent[1]) && in[1] == 11);
    OK(a.send(a.context, 1, 5, &out[0], sizeof(int), &sent[0])); /* freed with the group */

    CASE("invalid arguments are refused");
    int32_t done;
    OK(b.recv(b.context, 0, 5, in, 2 * sizeof(int), &received[0]));
    FAILS(RSD_EPEER, "rank 0 sent 4 bytes where rank 1 expects 8",
          b.test(b.context, received[0], &done));
    CHECK(b.cancel(b.context, received[0]) == 1);
    CHECK(is_done(&a, sent[0]));
    for (int i = 0; i < 2;
         i++) { /* the first receive matches the first message, whichever is tested first */
        OK(b.recv(b.context, 0, 5, in + i, i ? sizeof(int) : 1, &received[i]));
        OK(a.send(a.context, 1, 5, &out[i], sizeof(int), &sent[i]));
    }
    CHECK(is_done(&b, received[1]) && in[1] == 11);
    FAILS(RSD_EPEER, "rank 0 sent 4 bytes where rank 1 expects 1",
          b.test(b.context, received[0], &done));
    CHECK(b.cancel(b.context, received[0]) == 1);
    CHECK(is_done(&a, sent[0]) && is_done(&a, sent[1]));
    FAILS(RSD_EINVAL, "rank 2 is out of range", a.send(a.context, 2, 0, out, 4, &sent[0]));
    FAILS(RSD_EINVAL, "rank -1 is out of range", a.recv(a.context, -1, 0, in, 4, &sent[0]));
    FAILS(RSD_EINVAL, "tag 64 is out of range (0 to 63)",
          a.send(a.context, 1, 64, out, 4, &sent[0]));
    rsd_transport none = {.struct_nbytes = sizeof none};
    FAILS(RSD_EINVAL, "the thread group has 2 ranks", rsd_thread_group_transport(group, 2, &none));
    none.struct_nbytes = 0;
    FAILS(RSD_EINVAL, "struct_nbytes", rsd_thread_group_transport(group, 0, &none));
    rsd_thread_group_free(group);
    FAILS(RSD_EINVAL, "invalid number of ranks 0", rsd_thread_group_new(0, &group));
    rsd_thread_group_free(NULL);
}

/* ---- with threads ---- */

struct member {
    pthread_t thread;
    rsd_thread_group *group;
    int32_t rank;
    rsd_status status;
    bool wrong;
};

/* Each rank sends a number to every rank, many times. */
static void *exchange_numbers(void *context)
{
    struct member *member = context;
    rsd_transport t = {.struct_nbytes = sizeof t};
    member->status = rsd_thread_group_transport(member->group, member->rank, &t);
    for (int32_t round = 0; round < NROUNDS && !member->status; round++) {
        int32_t out[NRANKS], in[NRANKS], left = 2 * NRANKS;
        void *requests[2 * NRANKS];
        for (int32_t i = 0; i < NRANKS && !member->status; i++) {
            out[i] = round * 100 + member->rank * 10 + i;
            member->status = t.recv(t.context, i, 7, &in[i], sizeof in[i], &requests[2 * i]);
            if (!member->status)
                member->status =
                    t.send(t.context, i, 7, &out[i], sizeof out[i], &requests[2 * i + 1]);
        }
        while (left > 0 && !member->status)
            for (int i = 0; i < 2 * NRANKS && !member->status; i++) {
                int32_t done = 0;
                if (requests[i])
                    member->status = t.test(t.context, requests[i], &done);
                if (done)
                    requests[i] = NULL, left--;
            }
        for (int32_t i = 0; i < NRANKS; i++)
            member->wrong |= in[i] != round * 100 + i * 10 + member->rank;
    }
    return NULL;
}

static void between_threads(void)
{
    struct member members[NRANKS];
    rsd_thread_group *group;
    CASE("messages between threads arrive, whether the send or the receive comes first");
    OK(rsd_thread_group_new(NRANKS, &group));
    for (int32_t i = 0; i < NRANKS; i++) {
        members[i] = (struct member){.group = group, .rank = i};
        pthread_create(&members[i].thread, NULL, exchange_numbers, &members[i]);
    }
    for (int i = 0; i < NRANKS; i++) {
        pthread_join(members[i].thread, NULL);
        CHECK(members[i].status == RSD_OK && !members[i].wrong, "rank %d", i);
    }
    rsd_thread_group_free(group);
}

int main(void)
{
    in_one_thread();
    between_threads();
    return tap_end();
}
