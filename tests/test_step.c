/* test_step.c - collective steps of ranks that are threads: all return the same status, a failure stops all ranks,
 * slow ranks are not lost, and errors name a lost rank. */
#include "peer.h"
#include "tap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST = 8 };

struct member {
    rsd_transport transport;
    pthread_t thread;
    void *(*main)(void *member); /* NULL: take_steps */
    int32_t nsteps;
    bool absent, slow, endless, cancels, large;
    rsd_status fails; /* in step `fails_at` */
    int32_t fails_at;
    double timeout;
    struct peer_step *step;
    int32_t at, nright; /* steps that were taken */
    rsd_status status;
    char message[256];
    _Atomic int ncalls;
};

static rsd_status work(void *context)
{
    struct member *m = context;
    int64_t number = m->transport.rank + 100 * m->at;
    m->step->nbytes_total = 10;
    if (m->slow)
        usleep(3000000);
    while (m->endless && !m->step->stop)
        usleep(1000);
    if (m->endless)
        return fail(RSD_ECANCELLED, "stopped");
    m->step->nbytes_done = 10;
    if (m->fails && m->at == m->fails_at)
        return fail(m->fails, "it failed on purpose");
    for (int i = 0; i < (m->large ? 3000000 : m->transport.rank); i++) /* payloads of any length */
        TRY(payload_put(&m->step->own, &number, sizeof number));
    return RSD_OK;
}

/* Counts the numbers of each rank, and checks them. */
static rsd_status merge(void *context, const struct payload *all, struct payload *result)
{
    const struct member *m = context;
    for (int32_t rank = 0; rank < m->transport.nranks; rank++) {
        int64_t number, n = 0;
        for (size_t at = 0; at < all[rank].n; n++) {
            TRY(payload_take(&all[rank], &at, &number, sizeof number));
            if (number != rank + 100 * m->at)
                return fail(RSD_EMISMATCH, "rank %d sent %lld", (int)rank, (long long)number);
        }
        TRY(payload_put(result, &n, sizeof n));
    }
    return RSD_OK;
}

static int on_progress(void *context, const rsd_progress *progress)
{
    struct member *m = context;
    m->ncalls++;
    return m->cancels || progress->nbytes_done > progress->nbytes_total;
}

static bool take_step(struct member *m)
{
    struct peer_step step = {.work = work, .merge = merge, .context = m};
    step.on_progress = on_progress;
    step.progress_context = m;
    m->step = &step;
    m->status = peer_step(&m->transport, m->timeout, &step);
    snprintf(m->message, sizeof m->message, "%s", m->status ? rsd_error() : "");
    for (size_t at = 0, rank = 0; at < step.result.n && !m->status; rank++) {
        int64_t n = -1;
        payload_take(&step.result, &at, &n, sizeof n);
        m->nright += n == (m->large ? 3000000 : (int64_t)rank);
    }
    payload_drop(&step.own);
    payload_drop(&step.result);
    return m->status == RSD_OK;
}

static void *take_steps(void *context)
{
    struct member *m = context;
    for (m->at = 0; m->at < m->nsteps && !m->absent; m->at++)
        if (!take_step(m) && m->at >= m->fails_at)
            break;
    return NULL;
}

static void run_all(struct member *members, int32_t n)
{
    rsd_thread_group *group = NULL;
    OK(rsd_thread_group_new(n, &group));
    for (int32_t i = 0; i < n; i++) {
        members[i].transport.struct_nbytes = sizeof(rsd_transport);
        OK(rsd_thread_group_transport(group, i, &members[i].transport));
        pthread_create(&members[i].thread, NULL, members[i].main ? members[i].main : take_steps,
                       &members[i]);
    }
    for (int32_t i = 0; i < n; i++)
        pthread_join(members[i].thread, NULL);
    rsd_thread_group_free(group);
}

static void payloads_arrive(void)
{
    for (int32_t n = 2; n <= MOST; n += 3) {
        struct member members[MOST] = {0};
        CASE("%d ranks send payloads of any length, step after step", (int)n);
        for (int32_t i = 0; i < n; i++)
            members[i].nsteps = 5;
        run_all(members, n);
        for (int32_t i = 0; i < n; i++)
            CHECK(!members[i].status && members[i].nright == 5 * n && members[i].ncalls >= 5,
                  "rank %d: %s, %d, %d calls of on_progress", (int)i, members[i].message,
                  (int)members[i].nright, (int)members[i].ncalls);
    }
    CASE("payloads that exceed the size of a message");
    struct member members[2] = {{.nsteps = 1, .large = true}, {.nsteps = 1, .large = true}};
    run_all(members, 2);
    for (int32_t i = 0; i < 2; i++)
        CHECK(!members[i].status && members[i].nright == 2, "%s", members[i].message);
}

static void slow_is_not_dead(void)
{
    CASE("work may take longer than the time-out");
    struct member members[3] = {{.nsteps = 1}, {.nsteps = 1, .slow = true}, {.nsteps = 1}};
    for (int32_t i = 0; i < 3; i++)
        members[i].timeout = 2;
    run_all(members, 3);
    for (int32_t i = 0; i < 3; i++)
        CHECK(!members[i].status && members[i].nright == 3, "rank %d: %s", (int)i,
              members[i].message);
}

static void one_failure_stops_all(void)
{
    for (int32_t failing = 0; failing < 3; failing++) {
        CASE("rank %d fails: all ranks return its status, during any work", (int)failing);
        struct member members[3] = {{.nsteps = 0}};
        char expected[64];
        snprintf(expected, sizeof expected, "rank %d: it failed on purpose", (int)failing);
        for (int32_t i = 0; i < 3; i++) {
            members[i].nsteps = 3;
            members[i].fails_at = 1;
            members[i].fails = i == failing ? RSD_ELIMIT : RSD_OK;
        }
        run_all(members, 3);
        for (int32_t i = 0; i < 3; i++)
            CHECK(members[i].status == RSD_ELIMIT && strcmp(members[i].message, expected) == 0,
                  "rank %d: %s", (int)i, members[i].message);
    }
    CASE("all fail the same way: the error names no rank");
    struct member same[3] = {{.nsteps = 0}};
    for (int32_t i = 0; i < 3; i++)
        same[i] = (struct member){.nsteps = 1, .fails = RSD_EIO};
    run_all(same, 3);
    for (int32_t i = 0; i < 3; i++)
        CHECK(same[i].status == RSD_EIO && strcmp(same[i].message, "it failed on purpose") == 0,
              "rank %d: %s", (int)i, same[i].message);
}

static void one_stops_all(void)
{
    for (int32_t stopping = 0; stopping < 3; stopping++) {
        CASE("rank %d is cancelled: the endless work of others ends", (int)stopping);
        struct member members[3] = {{.nsteps = 0}};
        for (int32_t i = 0; i < 3; i++)
            members[i] = (struct member){
                .nsteps = 1, .endless = i != stopping, .cancels = i == stopping, .timeout = 60};
        run_all(members, 3);
        for (int32_t i = 0; i < 3; i++)
            CHECK(members[i].status == RSD_ECANCELLED, "rank %d: %s", (int)i, members[i].message);
    }
    CASE("after a cancelled step the ranks can continue");
    struct member members[3] = {{.nsteps = 0}};
    for (int32_t i = 0; i < 3; i++)
        members[i] = (struct member){.nsteps = 3, .fails_at = 3, .cancels = i == 1};
    run_all(members, 3);
    for (int32_t i = 0; i < 3; i++)
        CHECK(members[i].status == RSD_ECANCELLED && members[i].at == 3, "rank %d: %s at %d",
              (int)i, members[i].message, (int)members[i].at);
}

static void one_rank_alone(void)
{
    CASE("one rank works in the calling thread, and needs no transport");
    struct member m = {.transport = {.nranks = 1}, .nsteps = 1};
    CHECK(take_step(&m) && m.nright == 1, "%s", m.message);
    m.fails = RSD_ELIMIT;
    CHECK(!take_step(&m) && m.status == RSD_ELIMIT &&
              strcmp(m.message, "it failed on purpose") == 0,
          "%s", m.message);
}

/* ---- a rank that sends invalid bytes ---- */

enum { LAST_BEAT = 4, INVALID_STATUS = 12345 };
struct raw_beat {
    int64_t kind, status, stopped, nbytes_done, nbytes_total;
    uint64_t npayload;
};

static void complete(const rsd_transport *t, void *request)
{
    for (int32_t done = 0; !done;)
        if (t->test(t->context, request, &done))
            return;
}

/* Sends the last heartbeat at once, with the status of the member and counts of bytes that cannot be added. */
static void *send_nonsense(void *context)
{
    const struct member *m = context;
    const rsd_transport *t = &m->transport;
    struct raw_beat beat = {.kind = LAST_BEAT,
                            .status = m->fails,
                            .stopped = m->fails == RSD_ECANCELLED,
                            .nbytes_done = INT64_MAX,
                            .nbytes_total = INT64_MAX};
    char payload[1024];
    void *request;
    if (!t->send(t->context, 0, TAG_STEP, &beat, sizeof beat, &request))
        complete(t, request);
    for (beat.kind = 0; beat.kind != LAST_BEAT;) {
        if (t->recv(t->context, 0, TAG_STEP + 2, &beat, sizeof beat, &request))
            return NULL;
        complete(t, request);
    }
    if (beat.npayload <= sizeof payload &&
        !t->recv(t->context, 0, TAG_STEP + 3, payload, beat.npayload, &request))
        complete(t, request);
    return NULL;
}

static void nonsense_is_refused(void)
{
    CASE("a status that does not exist is a failure of the rank that sent it");
    struct member members[2] = {{.nsteps = 1},
                                {.main = send_nonsense, .fails = (rsd_status)INVALID_STATUS}};
    run_all(members, 2);
    CHECK(members[0].status == RSD_EPEER && strstr(members[0].message, "rank 1"), "%s",
          members[0].message);
}

static void stops_have_a_cause(void)
{
    CASE("a rank that was stopped though no rank failed is named");
    struct member members[2] = {{.nsteps = 1}, {.main = send_nonsense, .fails = RSD_ECANCELLED}};
    run_all(members, 2);
    CHECK(members[0].status == RSD_EPEER &&
              strcmp(members[0].message, "rank 1 was stopped, but no rank failed") == 0,
          "%s: %s", rsd_status_name(members[0].status), members[0].message);
}

static void early_ends_are_taken(void)
{
    CASE("ranks that send their last heartbeat too early do not stop the others");
    struct member members[4] = {
        {.nsteps = 1}, {.main = send_nonsense}, {.main = send_nonsense}, {.nsteps = 1}};
    run_all(members, 4);
    CHECK(!members[0].status && !members[3].status, "%s, %s", members[0].message,
          members[3].message);
}

/* Rank 0: ends the step before anybody worked. */
static void *end_step(void *context)
{
    const struct member *m = context;
    const rsd_transport *t = &m->transport;
    struct raw_beat beat = {.kind = LAST_BEAT, .status = m->fails};
    void *request;
    if (!t->send(t->context, 1, TAG_STEP + 2, &beat, sizeof beat, &request))
        complete(t, request);
    return NULL;
}

static void early_results_are_refused(void)
{
    CASE("a result of rank 0 without the work of another rank is an error there");
    struct member members[2] = {{.main = end_step}, {.nsteps = 1, .endless = true}};
    run_all(members, 2);
    CHECK(members[1].status == RSD_EPEER &&
              strcmp(members[1].message, "rank 0 ended the step before rank 1") == 0,
          "%s: %s", rsd_status_name(members[1].status), members[1].message);
    CASE("a failure without a message has one");
    members[0] = (struct member){.main = end_step, .fails = RSD_EFORMAT};
    members[1] = (struct member){.nsteps = 1, .endless = true};
    run_all(members, 2);
    CHECK(members[1].status == RSD_EFORMAT && members[1].message[0], "%s",
          rsd_status_name(members[1].status));
}

static void lost_is_named(void)
{
    for (int32_t lost = 0; lost < 3; lost++) {
        CASE("rank %d never takes the step: the others return, and name it", (int)lost);
        struct member members[3] = {{.nsteps = 0}};
        char expected[64];
        snprintf(expected, sizeof expected, "timed out: no heartbeat from rank %d for 1.5 s",
                 (int)lost);
        for (int32_t i = 0; i < 3; i++)
            members[i] = (struct member){
                .nsteps = 1, .timeout = 1.5, .absent = i == lost, .endless = i == (lost + 1) % 3};
        run_all(members, 3);
        for (int32_t i = 0; i < 3; i++)
            if (i != lost)
                CHECK(members[i].status == RSD_ETIMEOUT && strstr(members[i].message, expected),
                      "rank %d: %s", (int)i, members[i].message);
    }
}

int main(void)
{
    payloads_arrive();
    slow_is_not_dead();
    one_failure_stops_all();
    one_stops_all();
    one_rank_alone();
    nonsense_is_refused();
    stops_have_a_cause();
    early_ends_are_taken();
    early_results_are_refused();
    lost_is_named();
    return tap_end();
}
