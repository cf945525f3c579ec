/* test_gather.c - votes and gathers between ranks that are threads. All ranks receive the same bytes and return the
 * same status, errors name a rank that fails, differs or is late, and no message is left in the transport. */
#include "peer_state.h"
#include "ranks.h"

#include <stdatomic.h>
#include <unistd.h>

/* ---- gathers ---- */

static void fill_block(unsigned char *block, size_t nbytes, int32_t rank)
{
    for (size_t i = 0; i < nbytes; i++)
        block[i] = (unsigned char)(rank * 31 + (int)(i % 251) + 1);
}

static bool is_gathered(const unsigned char *all, size_t nbytes, int32_t nranks)
{
    unsigned char *expected = malloc(nbytes + 1);
    bool right = true;
    for (int32_t i = 0; i < nranks; i++) {
        fill_block(expected, nbytes, i);
        right = right && memcmp(all + (size_t)i * nbytes, expected, nbytes) == 0;
    }
    free(expected);
    return right;
}

static void gather_sizes(struct rank *rank, void *context)
{
    static const size_t sizes[] = {0, 1, 8, 255, 256, 257, 5000};
    (void)context;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        unsigned char *own = malloc(n + 1), *all = calloc((size_t)rank->nranks, n + 1);
        fill_block(own, n, rank->rank);
        NEED_OK(rank, rsd_gather(&rank->transport, own, n, all, 60));
        NEED(rank, is_gathered(all, n, rank->nranks), "%zu bytes: other bytes were gathered", n);
        free(own);
        free(all);
    }
    NEED_OK(rank, rsd_gather(&rank->transport, NULL, 0, NULL, 60));
}

/* In several pieces. */
static void gather_much(struct rank *rank, void *context)
{
    size_t n = ((size_t)1 << 24) / (size_t)rank->nranks * 2 + 12345;
    unsigned char *own = malloc(n), *all = malloc((size_t)rank->nranks * n);
    (void)context;
    fill_block(own, n, rank->rank);
    NEED_OK(rank, rsd_gather(&rank->transport, own, n, all, 60));
    NEED(rank, is_gathered(all, n, rank->nranks), "%zu bytes: other bytes were gathered", n);
    free(own);
    free(all);
}

static void gather_differently(struct rank *rank, void *context)
{
    char own[2] = {'x', 'y'}, all[16];
    int32_t odd = (int32_t)(uintptr_t)context, node_of[8];
    char text[100];
    for (int again = 0; again < 2; again++) {
        snprintf(text, sizeof text,
                 "rank %d called rsd_gather of %d bytes, rank 0 called rsd_gather of %d bytes",
                 odd ? (int)odd : 1, odd ? 2 : 1, odd ? 1 : 2);
        NEED_FAILS(rank, RSD_EMISMATCH, text,
                   rsd_gather(&rank->transport, own, rank->rank == odd ? 2 : 1, all, 60));
        NEED_FAILS(rank, RSD_EMISMATCH, "called rsd_transport_nodes",
                   rank->rank == odd ? rsd_transport_nodes(&rank->transport, node_of)
                                     : rsd_gather(&rank->transport, own, 1, all, 60));
        NEED_OK(rank, rsd_gather(&rank->transport, own, 1, all, 60));
    }
}

static void gather_nodes(struct rank *rank, void *context)
{
    int32_t node_of[16];
    (void)context;
    NEED_OK(rank, rsd_transport_nodes(&rank->transport, node_of));
    for (int32_t i = 0; i < rank->nranks; i++)
        NEED(rank, node_of[i] == 0, "rank %d is on host %d", (int)i, (int)node_of[i]);
}

/* ---- votes ---- */

/* With a host group of all ranks, of pairs of ranks, or none. */
enum sharing { BY_MESSAGES, IN_PAIRS, ALL_SHARE, NSHARING };

static struct peer *open_peer(struct rank *rank, enum sharing sharing, double timeout)
{
    struct peer *peer = NULL;
    int64_t host_of[16];
    for (int32_t i = 0; i < rank->nranks; i++)
        host_of[i] = sharing == BY_MESSAGES ? i : sharing == IN_PAIRS ? i / 2 : 0;
    NEED_OK(rank, peer_open(&rank->transport, timeout, TAG_DATA, &peer));
    NEED_OK(rank, peer_share_host(peer, host_of));
    return peer;
}

static void vote_often(struct rank *rank, void *context)
{
    struct peer *peer = open_peer(rank, (enum sharing)(uintptr_t)context, 60);
    for (int i = 0; i < 200 && !rank->wrong[0]; i++) {
        struct peer_call call = peer_call_named("vote %d", i);
        int32_t failing = i % (rank->nranks + 3), differing = i / 7 % (rank->nranks + 3);
        bool fails = rank->rank >= failing, differs = rank->rank >= differing && rank->rank > 0;
        char text[100];
        if (differs)
            hash_i64(&call.arguments, 1);
        if (fails)
            error_set("failure of rank %d", (int)rank->rank);
        rsd_status status = peer_vote(peer, fails ? RSD_ELIMIT : RSD_OK, &call);
        rsd_status expected = failing < rank->nranks                         ? RSD_ELIMIT
                              : differing < rank->nranks && rank->nranks > 1 ? RSD_EMISMATCH
                                                                             : RSD_OK;
        snprintf(text, sizeof text,
                 expected == RSD_ELIMIT ? "%s%d: failure of rank %d"
                                        : "%s%d passed different arguments than rank 0 to vote %d",
                 rank->nranks > 1 ? "rank " : "",
                 expected == RSD_ELIMIT ? (int)failing
                 : differing            ? (int)differing
                                        : 1,
                 expected == RSD_ELIMIT ? (int)failing : i);
        NEED(rank, status == expected, "vote %d: %s, not %s: %s", i, rsd_status_name(status),
             rsd_status_name(expected), rsd_error());
        NEED(rank, !status || rank->nranks == 1 || strcmp(rsd_error(), text) == 0, "'%s', not '%s'",
             rsd_error(), text);
    }
    peer_close(peer);
}

static void gather_often(struct rank *rank, void *context)
{
    struct peer *peer = open_peer(rank, (enum sharing)(uintptr_t)context, 60);
    struct peer_call call = peer_call_named("gather");
    unsigned char own[1000], all[16 * 1000];
    for (size_t n = 0; n <= sizeof own && !rank->wrong[0]; n += 1 + n / 3) {
        fill_block(own, n, rank->rank);
        NEED_OK(rank, peer_gather(peer, RSD_OK, &call, own, n, all));
        NEED(rank, is_gathered(all, n, rank->nranks), "%zu bytes: other bytes were gathered", n);
    }
    peer_close(peer);
}

static void no_call_is_alike(struct rank *rank, void *context)
{
    struct peer *peer = open_peer(rank, (enum sharing)(uintptr_t)context, 60);
    struct peer_call call = peer_call_named("call of rank %d", (int)rank->rank);
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 1 called call of rank 1, rank 0 called call of rank 0",
               peer_vote(peer, RSD_OK, &call));
    peer_close(peer);
}

/* ---- late ranks ---- */

struct lateness {
    int32_t late;
    enum sharing sharing;
};

static void one_is_late(struct rank *rank, void *context)
{
    const struct lateness *l = context;
    struct peer *peer = open_peer(rank, l->sharing, 0.5);
    struct peer_call call = peer_call_named("vote");
    char text[100];
    snprintf(text, sizeof text, "timed out after 0.5 s: rank %d has not entered the call",
             (int)l->late);
    NEED_OK(rank, peer_vote(peer, RSD_OK, &call));
    if (rank->rank != l->late) {
        NEED_FAILS(rank, RSD_ETIMEOUT, text, peer_vote(peer, RSD_OK, &call));
        NEED_FAILS(rank, RSD_EINVAL, "can only be freed", peer_vote(peer, RSD_OK, &call));
    }
    peer_close(peer);
}

/* Only a liveness check finds the late rank. */
static void late_in_gather(struct rank *rank, void *context)
{
    int32_t late = (int32_t)(uintptr_t)context;
    char own = 'x', all[16], text[100];
    snprintf(text, sizeof text, "rank %d has not entered the call", (int)late);
    if (rank->rank != late)
        NEED_FAILS(rank, RSD_ETIMEOUT, text, rsd_gather(&rank->transport, &own, 1, all, 0.5));
}

/* ---- transports ---- */

/* A transport that counts requests, and fails at a given call. */
struct counting {
    rsd_transport real;
    _Atomic long nactive;
    long until_failure; /* calls of one function that still succeed; -1: all */
    int function;       /* 0 send, 1 recv, 2 test */
};

static bool fails_now(struct counting *c, int function)
{
    return c->function == function && c->until_failure >= 0 && c->until_failure-- == 0;
}

static rsd_status counting_send(void *context, int32_t to, int32_t tag, const void *data,
                                size_t nbytes, void **request)
{
    struct counting *c = context;
    if (fails_now(c, 0))
        return rsd_set_error(RSD_EIO, "send failed on purpose");
    c->nactive++;
    return c->real.send(c->real.context, to, tag, data, nbytes, request);
}

static rsd_status counting_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                                void **request)
{
    struct counting *c = context;
    if (fails_now(c, 1))
        return rsd_set_error(RSD_EIO, "recv failed on purpose");
    c->nactive++;
    return c->real.recv(c->real.context, from, tag, data, nbytes, request);
}

static rsd_status counting_test(void *context, void *request, int32_t *done)
{
    struct counting *c = context;
    if (fails_now(c, 2))
        return rsd_set_error(RSD_EIO, "test failed on purpose");
    rsd_status status = c->real.test(c->real.context, request, done);
    c->nactive -= !status && *done;
    return status;
}

static int32_t counting_cancel(void *context, void *request)
{
    struct counting *c = context;
    c->nactive--;
    return c->real.cancel(c->real.context, request);
}

static rsd_transport count_requests(struct counting *c, const rsd_transport *real)
{
    rsd_transport t = *real;
    c->real = *real;
    t.context = c;
    t.send = counting_send;
    t.recv = counting_recv;
    t.test = counting_test;
    t.cancel = counting_cancel;
    return t;
}

/* Every request ends, whether all goes well, all fail together, or one rank is late. */
static void requests_end(struct rank *rank, void *context)
{
    struct counting counting = {.until_failure = -1};
    rsd_transport real = rank->transport;
    char own = 'x', all[16];
    (void)context;
    rank->transport = count_requests(&counting, &real);
    NEED_OK(rank, rsd_gather(&rank->transport, &own, 1, all, 60));
    NEED_FAILS(rank, RSD_EMISMATCH, "rank 1",
               rsd_gather(&rank->transport, &own, (size_t)rank->rank, all, 60));
    NEED(rank, counting.nactive == 0, "%ld requests", counting.nactive);
    if (rank->rank > 0)
        NEED_FAILS(rank, RSD_ETIMEOUT, "rank 0", rsd_gather(&rank->transport, &own, 1, all, 0.3));
    NEED(rank, counting.nactive == 0, "%ld requests after a time-out", counting.nactive);
    rank->transport = real;
}

/* A send, receive or test of rank 1 fails, at any call. Rank 1 returns that, the others name a rank, and all requests
 * end. */
static void transport_fails(struct rank *rank, void *context)
{
    int function = (int)((uintptr_t)context % 3);
    long nth = (long)((uintptr_t)context / 3);
    struct counting counting = {.until_failure = rank->rank == 1 ? nth : -1, .function = function};
    rsd_transport real = rank->transport;
    char own = 'x', all[16];
    rank->transport = count_requests(&counting, &real);
    rsd_status status = rsd_gather(&rank->transport, &own, 1, all, 0.3);
    if (rank->rank == 1 && counting.until_failure < 0)
        NEED(rank, status == RSD_EIO && strstr(rsd_error(), "failed on purpose"), "%s",
             rsd_error());
    else
        NEED(rank, status == RSD_OK || (status == RSD_ETIMEOUT && strstr(rsd_error(), "rank ")),
             "%s: %s", rsd_status_name(status), rsd_error());
    NEED(rank, counting.nactive == 0, "%ld requests", counting.nactive);
    rank->transport = real;
}

/* ---- memory that a transport may still use ---- */

/* A transport that cannot cancel: it reads and writes the memory of its requests at the end. */
struct stubborn {
    rsd_transport real;
    struct request {
        void *request;
        unsigned char *data;
        size_t nbytes;
        bool receives, cancelled;
    } requests[400];
    int n;
};
static struct stubborn stubborn_ranks[3][3]; /* so that what is never freed is not a leak */

static struct request *new_request(struct stubborn *s, const void *data, size_t nbytes,
                                   bool receives)
{
    struct request *made = &s->requests[s->n++ % 400];
    *made = (struct request){
        .data = (unsigned char *)(uintptr_t)data, .nbytes = nbytes, .receives = receives};
    return made;
}

static rsd_status stubborn_send(void *context, int32_t to, int32_t tag, const void *data,
                                size_t nbytes, void **request)
{
    struct stubborn *s = context;
    struct request *made = *request = new_request(s, data, nbytes, false);
    return s->real.send(s->real.context, to, tag, data, nbytes, &made->request);
}

static rsd_status stubborn_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                                void **request)
{
    struct stubborn *s = context;
    struct request *made = *request = new_request(s, data, nbytes, true);
    return s->real.recv(s->real.context, from, tag, data, nbytes, &made->request);
}

static rsd_status stubborn_test(void *context, void *request, int32_t *done)
{
    struct stubborn *s = context;
    return s->real.test(s->real.context, ((struct request *)request)->request, done);
}

static int32_t stubborn_cancel(void *context, void *request)
{
    struct stubborn *s = context;
    s->real.cancel(s->real.context, ((struct request *)request)->request);
    ((struct request *)request)->cancelled = true;
    return 0;
}

static int use_cancelled(struct stubborn *s)
{
    int n = 0, sum = 0;
    for (int i = 0; i < 400; i++)
        if (s->requests[i].cancelled) {
            for (size_t k = 0; k < s->requests[i].nbytes; k++)
                sum += s->requests[i].data[k];
            if (s->requests[i].receives)
                memset(s->requests[i].data, 0x5a, s->requests[i].nbytes);
            n++;
        }
    return n + (sum < 0);
}

static void run_late(struct rank *rank, bool late)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = NULL;
    float from[30] = {0}, to[30];
    const void *src = from;
    void *dst = to;
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .node = -1, .timeout = 0.3};
    NEED_OK(rank, rsd_problem_parse("f32[30] : 3:S0 -> 3:R", &a, &b));
    NEED_OK(rank, rsd_plan_new(a, b, NULL, &plan));
    const rsd_plan *plans[] = {plan};
    NEED_OK(rank, rsd_bind_transport(1, plans, NULL, &rank->transport, &options, &exec));
    if (!late)
        NEED_FAILS(rank, RSD_ETIMEOUT, "rank 1", rsd_exec_run(exec, &src, &dst));
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

static rsd_status send_payload(void *context)
{
    struct peer_step *step = context;
    char payload[100] = {0};
    return payload_put(&step->own, payload, sizeof payload);
}

static void step_late(struct rank *rank, bool late)
{
    struct peer_step step = {.work = send_payload, .context = &step};
    if (late)
        return;
    NEED_FAILS(rank, RSD_ETIMEOUT, "rank 1", peer_step(&rank->transport, 0.5, &step));
    payload_drop(&step.own);
    payload_drop(&step.result);
}

static void cannot_cancel(struct rank *rank, void *context)
{
    struct stubborn *s = &stubborn_ranks[(uintptr_t)context][rank->rank];
    rsd_transport real = rank->transport;
    char own = 'x', all[16];
    bool late = rank->rank == 1;
    s->real = real;
    rank->transport.context = s;
    rank->transport.send = stubborn_send;
    rank->transport.recv = stubborn_recv;
    rank->transport.test = stubborn_test;
    rank->transport.cancel = stubborn_cancel;
    if ((uintptr_t)context == 0 && !late)
        NEED_FAILS(rank, RSD_ETIMEOUT, "rank 1", rsd_gather(&rank->transport, &own, 1, all, 0.3));
    if ((uintptr_t)context == 1)
        run_late(rank, late);
    if ((uintptr_t)context == 2)
        step_late(rank, late);
    int n = use_cancelled(s);
    NEED(rank, late || n > 0, "nothing was cancelled");
    rank->transport = real;
}

/* ---- a rank that sends invalid bytes ---- */

static void vote_with_nonsense(struct rank *rank, void *context)
{
    const rsd_transport *t = &rank->transport;
    struct peer_call call = peer_call_named("vote");
    unsigned char noise[sizeof(struct ballot)];
    void *request;
    uint64_t x = (uint64_t)(uintptr_t)context * 0x9e3779b97f4a7c15u + 1;
    if (rank->rank == 0) {
        struct peer *peer = open_peer(rank, BY_MESSAGES, 60);
        rsd_status status = peer_vote(peer, RSD_OK, &call);
        NEED(rank, status != RSD_OK && strlen(rsd_error()) < 4 * sizeof(struct ballot), "%s",
             rsd_error()); /* a byte that is not text is printed as \xff */
        peer_close(peer);
        return;
    }
    for (size_t i = 0; i < sizeof noise; i++, x = x * 6364136223846793005u + 1442695040888963407u)
        noise[i] = (uintptr_t)context == 1 ? 0xff : (unsigned char)(x >> 56);
    for (int receives = 0; receives < 2; receives++) {
        struct ballot other;
        rsd_status status = receives
                                ? t->recv(t->context, 0, TAG_VOTE, &other, sizeof other, &request)
                                : t->send(t->context, 0, TAG_VOTE, noise, sizeof noise, &request);
        for (int32_t done = 0; !status && !done;)
            status = t->test(t->context, request, &done);
    }
}

int main(void)
{
    static const int32_t counts[] = {1, 2, 3, 4, 5, 7, 8};
    enum { NCOUNTS = sizeof counts / sizeof *counts };
    CASE("every rank receives the bytes of all ranks");
    for (int i = 0; i < NCOUNTS; i++)
        on_ranks(counts[i], gather_sizes, NULL);
    on_ranks(3, gather_much, NULL);
    on_ranks(5, gather_nodes, NULL);
    CASE("all ranks name a rank that makes another call, and can continue");
    for (uintptr_t odd = 0; odd < 4; odd++)
        on_ranks(4, gather_differently, (void *)odd);
    for (uintptr_t sharing = 0; sharing < NSHARING; sharing++) {
        static const char *const names[] = {"by messages", "on several hosts", "on one host"};
        CASE("votes find the lowest rank that fails or differs, %s", names[sharing]);
        for (int i = 0; i < NCOUNTS; i++)
            on_ranks(counts[i], vote_often, (void *)sharing);
        on_ranks(5, no_call_is_alike, (void *)sharing);
        CASE("gathers of any size, %s", names[sharing]);
        for (int i = 0; i < NCOUNTS; i++)
            on_ranks(counts[i], gather_often, (void *)sharing);
        CASE("all other ranks name a late rank, %s", names[sharing]);
        for (int32_t late = 0; late < 5; late++)
            on_ranks(5, one_is_late, &(struct lateness){late, (enum sharing)sharing});
    }
    CASE("all other ranks name a rank that does not gather");
    for (uintptr_t late = 0; late < 5; late++)
        on_ranks(5, late_in_gather, (void *)late);
    CASE("every request ends");
    on_ranks(4, requests_end, NULL);
    for (uintptr_t way = 0; way < 3 * 12; way++)
        on_ranks(3, transport_fails, (void *)way);
    CASE("memory that a transport may still use is never freed");
    for (uintptr_t call = 0; call < 3; call++)
        on_ranks(3, cannot_cancel, (void *)call);
    CASE("invalid arguments are refused");
    for (uintptr_t seed = 1; seed < 200; seed++)
        on_ranks(2, vote_with_nonsense, (void *)seed);
    return tap_end();
}
