/* test_transport.c - the library obeys the rules that reshard_transport.h states for its calls of a transport.
 *
 * Each rank has a transport that checks every call, and passes it on to a thread group. A request is freed when it
 * ends, so the address sanitizer finds a request that is used afterwards. */
#include "peer.h"
#include "ranks.h"
#include "reshard_experimental.h"

enum { MAX_NRANKS = 5, MAX_TAG = 63 };

struct strict {
    struct rank *rank;
    rsd_transport inner;
    pthread_t thread;
    const char *arrays; /* of the caller: no message may be in them */
    size_t arrays_nbytes;
    int64_t nlive; /* requests that have not ended */
    int64_t nmessages;
};

struct strict_request {
    void *inner;
    const unsigned char *data;
    size_t nbytes;
    bool sending;
    struct hash before; /* of the bytes of a send */
};

static struct hash hash_of(const void *data, size_t nbytes)
{
    struct hash hash;
    hash_start(&hash, "message");
    hash_bytes(&hash, data, nbytes);
    return hash;
}

static void check_call(const struct strict *s)
{
    NEED(s->rank, pthread_equal(s->thread, pthread_self()), "called from another thread");
}

static rsd_status start_message(struct strict *s, bool sending, int32_t peer, int32_t tag,
                                void *data, size_t nbytes, void **request)
{
    const char *chars = data;
    struct strict_request *r = calloc(1, sizeof *r);
    check_call(s);
    NEED(s->rank, peer >= 0 && peer < s->inner.nranks && peer != s->inner.rank,
         "a message to or from rank %d", (int)peer);
    NEED(s->rank, tag >= 0 && tag <= MAX_TAG, "tag %d", (int)tag);
    NEED(s->rank, nbytes >= 1 && nbytes <= (size_t)1 << 30, "%zu bytes", nbytes);
    NEED(s->rank, data, "data is NULL");
    NEED(s->rank, chars >= s->arrays + s->arrays_nbytes || chars + nbytes <= s->arrays,
         "a message in an array of the caller");
    *r = (struct strict_request){.data = data, .nbytes = nbytes, .sending = sending};
    if (sending)
        r->before = hash_of(data, nbytes);
    rsd_status status = sending
                            ? s->inner.send(s->inner.context, peer, tag, data, nbytes, &r->inner)
                            : s->inner.recv(s->inner.context, peer, tag, data, nbytes, &r->inner);
    if (status) {
        free(r);
        return status;
    }
    s->nlive++;
    s->nmessages++;
    *request = r;
    return RSD_OK;
}

static rsd_status strict_send(void *context, int32_t to, int32_t tag, const void *data,
                              size_t nbytes, void **request)
{
    return start_message(context, true, to, tag, without_const(data), nbytes, request);
}

static rsd_status strict_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                              void **request)
{
    return start_message(context, false, from, tag, data, nbytes, request);
}

static void end_request(struct strict *s, struct strict_request *r)
{
    if (r->sending) {
        struct hash after = hash_of(r->data, r->nbytes);
        NEED(s->rank, memcmp(&after, &r->before, sizeof after) == 0,
             "a message changed while it was sent");
    }
    s->nlive--;
    free(r);
}

static rsd_status strict_test(void *context, void *request, int32_t *done)
{
    struct strict *s = context;
    struct strict_request *r = request;
    check_call(s);
    rsd_status status = s->inner.test(s->inner.context, r->inner, done);
    if (!status && *done)
        end_request(s, r);
    return status;
}

static int32_t strict_cancel(void *context, void *request)
{
    struct strict *s = context;
    struct strict_request *r = request;
    check_call(s);
    int32_t unused = s->inner.cancel(s->inner.context, r->inner);
    end_request(s, r);
    return unused;
}

/* ---- calls that use a transport ---- */

static void run_plan(const rsd_transport *transport, struct strict *s, const char *problem)
{
    struct rank *rank = s->rank;
    rsd_layout *from = NULL, *to = NULL;
    rsd_plan *plan = NULL;
    rsd_exec *exec = NULL;
    rsd_array src_array, dst_array;
    char arrays[2][4096] = {{0}};
    const void *src = arrays[0];
    void *dst = arrays[1];
    rsd_exchange_options options = RSD_INIT(rsd_exchange_options);
    options.node = -1;
    options.max_nbytes = 1; /* many small messages */
    s->arrays = arrays[0];
    s->arrays_nbytes = sizeof arrays;
    NEED_OK(rank, rsd_problem_parse(problem, &from, &to));
    NEED_OK(rank, rsd_layout_local(from, rank->rank, &src_array));
    NEED_OK(rank, rsd_layout_local(to, rank->rank, &dst_array));
    NEED(rank, src_array.nbytes <= sizeof *arrays && dst_array.nbytes <= sizeof *arrays,
         "too large");
    NEED_OK(rank, rsd_plan_new(from, to, NULL, &plan));
    const rsd_plan *plans[] = {plan};
    NEED_OK(rank, rsd_bind_transport(1, plans, NULL, transport, &options, &exec));
    for (int i = 0; i < 3; i++)
        NEED_OK(rank, rsd_exec_run(exec, &src, &dst));
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(from);
    rsd_layout_free(to);
    s->arrays_nbytes = 0;
}

static void use_stash(const rsd_transport *transport, struct strict *s)
{
    struct rank *rank = s->rank;
    rsd_stash *stash = NULL;
    int64_t id[2];
    char arrays[2][100] = {"the same on all ranks"};
    rsd_stash_options options = RSD_INIT(rsd_stash_options);
    options.check = 1;
    s->arrays = arrays[0];
    s->arrays_nbytes = sizeof arrays;
    NEED_OK(rank, rsd_stash_new(transport, &options, &stash));
    NEED_OK(rank, rsd_stash_put(stash, arrays[0], sizeof *arrays, &id[0]));
    NEED_OK(rank, rsd_stash_put(stash, NULL, 0, &id[1])); /* an empty buffer, and one byte */
    NEED_OK(rank, rsd_stash_get(stash, id[1], NULL));
    NEED_OK(rank, rsd_stash_put(stash, arrays[0], 1, &id[1]));
    NEED_OK(rank, rsd_stash_prefetch(stash, id[0], arrays[1]));
    NEED_OK(rank, rsd_stash_get(stash, id[0], arrays[1]));
    NEED_OK(rank, rsd_stash_get(stash, id[1], arrays[1]));
    rsd_stash_free(stash);
    s->arrays_nbytes = 0;
}

static rsd_status send_rank(void *context)
{
    struct peer_step *step = context;
    char bytes[1000] = {0};
    return payload_put(&step->own, bytes, sizeof bytes);
}

static rsd_status merge_nothing(void *context, const struct payload *all, struct payload *result)
{
    (void)context;
    return payload_put(result, all[0].bytes, all[0].n);
}

/* Steps with payloads, and with empty ones. */
static void take_steps(const rsd_transport *transport, struct strict *s)
{
    for (int i = 0; i < 2; i++) {
        struct peer_step step = {.work = send_rank, .merge = merge_nothing};
        step.context = &step;
        if (i) {
            step.work = NULL;
            step.merge = NULL;
        }
        NEED_OK(s->rank, peer_step(transport, 60, &step));
        payload_drop(&step.own);
        payload_drop(&step.result);
    }
}

static void use_transport(struct rank *rank, void *context)
{
    struct strict s = {.rank = rank, .inner = rank->transport, .thread = pthread_self()};
    rsd_transport transport = {.struct_nbytes = sizeof transport,
                               .context = &s,
                               .rank = rank->rank,
                               .nranks = rank->nranks,
                               .send = strict_send,
                               .recv = strict_recv,
                               .test = strict_test,
                               .cancel = strict_cancel};
    char own[100] = {0}, all[MAX_NRANKS * sizeof own], problem[100];
    int32_t nodes[MAX_NRANKS];
    (void)context;
    NEED_OK(rank, rsd_gather(&transport, own, sizeof own, all, 60));
    NEED_OK(rank, rsd_gather(&transport, NULL, 0, NULL, 60));
    NEED_OK(rank, rsd_transport_nodes(&transport, nodes));
    static const struct {
        const char *tensor, *from, *to;
    } problems[] = {{"f32[20,7]", "S0", "S1"},
                    {"f32[9,9]", "P", "R"},
                    {"f64[1]", "S0", "R"},
                    {"u8[0,4]", "S1", "R"},
                    {"f32[12,12]", "R", "S0"}};
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
        snprintf(problem, sizeof problem, "%s : %d:%s -> %d:%s", problems[i].tensor,
                 (int)rank->nranks, problems[i].from, (int)rank->nranks, problems[i].to);
        run_plan(&transport, &s, problem);
    }
    use_stash(&transport, &s);
    take_steps(&transport, &s);
    NEED(rank, s.nlive == 0, "%lld requests have not ended", (long long)s.nlive);
    NEED(rank, (s.nmessages > 0) == (rank->nranks > 1), "%lld messages", (long long)s.nmessages);
}

/* A transport that fails: the library cancels its requests, and uses none of them afterwards. */
static void fail_transport(struct rank *rank, void *context)
{
    struct strict s = {.rank = rank, .inner = rank->transport, .thread = pthread_self()};
    char own[100] = {0}, all[MAX_NRANKS * sizeof own];
    rsd_transport transport = {.struct_nbytes = sizeof transport,
                               .context = &s,
                               .rank = rank->rank,
                               .nranks = rank->nranks,
                               .send = strict_send,
                               .recv = strict_recv,
                               .test = strict_test,
                               .cancel = strict_cancel};
    (void)context;
    if (rank->rank > 0) /* rank 0 never makes the call */
        NEED_FAILS(rank, RSD_ETIMEOUT, "rank 0 has not entered the call",
                   rsd_gather(&transport, own, sizeof own, all, 0.3));
    NEED(rank, s.nlive == 0, "%lld requests have not ended", (long long)s.nlive);
}

int main(void)
{
    for (int32_t nranks = 1; nranks <= MAX_NRANKS; nranks++) {
        CASE("messages, requests and threads of every call, with %d ranks", (int)nranks);
        on_ranks(nranks, use_transport, NULL);
    }
    CASE("after a time-out every request is cancelled");
    on_ranks(3, fail_transport, NULL);
    return tap_end();
}
