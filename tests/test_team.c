/* test_team.c - the transport between threads: messages in order, whoever tests first; nothing left behind
 * by a cancel; meetings that wait for all and name who does not come. */
#include "reshard.h"
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>

enum { NRANKS = 4, NROUNDS = 200 };

static rsd_transport seat_of(rsd_thread_group *team, int32_t rank)
{
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    OK(rsd_thread_group_transport(team, rank, &transport));
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
    CASE("messages of one tag come in order, those of another pass them by");
    rsd_thread_group *team;
    OK(rsd_thread_group_new(2, &team));
    rsd_transport a = seat_of(team, 0), b = seat_of(team, 1);
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

    CASE("receives that are about the same are served in their order, whichever is tested");
    for (int i = 0; i < 2; i++) {
        OK(b.recv(b.context, 0, 5, &in[i], sizeof(int), &received[i]));
        OK(a.send(a.context, 1, 5, &out[i], sizeof(int), &sent[i]));
    }
    CHECK(is_done(&b, received[1]) && is_done(&a, sent[1]) && is_done(&a, sent[0]));
    CHECK(in[0] == 10 && in[1] == 11 && is_done(&b, received[0]), "%d %d", in[0], in[1]);

    CASE("a rank can send to itself, and nothing at all");
    OK(a.send(a.context, 0, 0, &out[1], sizeof(int), &sent[0]));
    OK(a.recv(a.context, 0, 0, &in[0], sizeof(int), &received[0]));
    CHECK(is_done(&a, received[0]) && is_done(&a, sent[0]) && in[0] == 11);
    OK(a.send(a.context, 1, 0, NULL, 0, &sent[0]));
    OK(b.recv(b.context, 0, 0, NULL, 0, &received[0]));
    CHECK(is_done(&b, received[0]) && is_done(&a, sent[0]));

    CASE("what is cancelled is gone, on both sides");
    OK(a.send(a.context, 1, 5, &out[0], sizeof(int), &sent[0]));
    OK(b.recv(b.context, 0, 5, &in[0], sizeof(int), &received[0]));
    a.cancel(a.context, sent[0]);
    CHECK(!is_done(&b, received[0]), "received what was cancelled");
    b.cancel(b.context, received[0]);
    OK(a.send(a.context, 1, 5, &out[1], sizeof(int), &sent[1]));
    OK(b.recv(b.context, 0, 5, &in[1], sizeof(int), &received[1]));
    CHECK(is_done(&b, received[1]) && is_done(&a, sent[1]) && in[1] == 11);
    OK(a.send(a.context, 1, 5, &out[0], sizeof(int), &sent[0])); /* freed with the team */

    CASE("what makes no sense is refused");
    int32_t done;
    OK(b.recv(b.context, 0, 5, in, 2 * sizeof(int), &received[0]));
    FAILS(RSD_EPEER, "rank 0 sent 4 bytes where rank 1 waits for 8",
          b.test(b.context, received[0], &done));
    b.cancel(b.context, received[0]);
    CHECK(is_done(&a, sent[0]));
    FAILS(RSD_EINVAL, "rank 2 of a team of 2", a.send(a.context, 2, 0, out, 4, &sent[0]));
    FAILS(RSD_EINVAL, "rank -1 of a team of 2", a.recv(a.context, -1, 0, in, 4, &sent[0]));
    FAILS(RSD_EINVAL, "tag 64", a.send(a.context, 1, 64, out, 4, &sent[0]));
    rsd_transport none = {.struct_nbytes = sizeof none};
    FAILS(RSD_EINVAL, "rank 2 of a team of 2", rsd_thread_group_transport(team, 2, &none));
    none.struct_nbytes = 0;
    FAILS(RSD_EINVAL, "struct_nbytes", rsd_thread_group_transport(team, 0, &none));
    rsd_thread_group_free(team);
    FAILS(RSD_EINVAL, "a team of 0 ranks", rsd_thread_group_new(0, &team));
    rsd_thread_group_free(NULL);
}

/* ---- with threads ---- */

struct member {
    pthread_t thread;
    rsd_thread_group *team;
    int32_t rank;
    bool absent, odd;
    double timeout;
    rsd_status status;
    char message[200];
    bool wrong;
};

static void run_team(struct member *members, double timeout, void *(*work)(void *), int absent,
                     int odd)
{
    rsd_thread_group *team;
    OK(rsd_thread_group_new(NRANKS, &team));
    for (int32_t i = 0; i < NRANKS; i++) {
        members[i] = (struct member){
            .team = team, .rank = i, .absent = i == absent, .odd = i == odd, .timeout = timeout};
        pthread_create(&members[i].thread, NULL, work, &members[i]);
    }
    for (int i = 0; i < NRANKS; i++)
        pthread_join(members[i].thread, NULL);
    rsd_thread_group_free(team);
}

/* Each rank tells every other one something, again and again, and they meet in between. */
static void *talk(void *context)
{
    struct member *member = context;
    rsd_transport t = {.struct_nbytes = sizeof t};
    member->status = rsd_thread_group_transport(member->team, member->rank, &t);
    for (int32_t round = 0; round < NROUNDS && !member->status; round++) {
        int32_t out[NRANKS], in[NRANKS], all[NRANKS], left = 2 * NRANKS;
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
        if (round % 8 == 0 && !member->status)
            member->status = t.allgather(t.context, &out[0], sizeof out[0], all, member->timeout);
        for (int32_t i = 0; i < NRANKS && round % 8 == 0; i++)
            member->wrong |= all[i] != round * 100 + i * 10;
    }
    return NULL;
}

static void *meet(void *context)
{
    struct member *member = context;
    char own[2] = {(char)('a' + member->rank), 'x'}, all[2 * NRANKS];
    rsd_transport t = {.struct_nbytes = sizeof t};
    member->status = rsd_thread_group_transport(member->team, member->rank, &t);
    if (!member->status && !member->absent)
        member->status = t.allgather(t.context, own, member->odd ? 2 : 1, all, member->timeout);
    snprintf(member->message, sizeof member->message, "%s", member->status ? rsd_error() : "");
    return NULL;
}

static void between_threads(void)
{
    struct member members[NRANKS];
    CASE("what threads tell each other arrives, whoever comes first");
    run_team(members, 60, talk, -1, -1);
    for (int i = 0; i < NRANKS; i++)
        CHECK(members[i].status == RSD_OK && !members[i].wrong, "rank %d", i);

    CASE("a rank that does not come to a meeting is named to those who wait");
    run_team(members, 0.2, meet, 2, -1);
    for (int i = 0; i < NRANKS; i++)
        if (i != 2)
            CHECK(members[i].status == RSD_ETIMEOUT &&
                      strstr(members[i].message, "rank 2 has not come"),
                  "rank %d: %s", i, members[i].message);

    CASE("one that gives more than the others is named on all");
    run_team(members, 60, meet, -1, 3);
    for (int i = 0; i < NRANKS; i++)
        CHECK(members[i].status == RSD_EMISMATCH && strstr(members[i].message, "rank 3 gives 2"),
              "rank %d: %s", i, members[i].message);
}

int main(void)
{
    in_one_thread();
    between_threads();
    return tap_end();
}
