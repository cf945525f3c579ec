/* test_messages.c - a rank that sends wrong bytes: the calls of all ranks return, without a crash, and a rank that
 * succeeds has the right result.
 *
 * The transport of one rank changes one message that it receives. Several groups of ranks run at the same time, since
 * most of them wait for a time-out.
 */
#include "conversions.h"
#include "folder.h"
#include "random.h"
#include "reshard.h"
#include "tap.h"
#include "truth.h"
#include "workers.h"

#include <pthread.h>
#include <stdlib.h>

enum { NRANKS = 3, NGROUPS = 8, FIRST_STEP_TAG = 60, VOTE_TAG = 5 };
static const double timeout = 1;
static char folder[256];

/* ---- a transport that changes a message ---- */

enum message_kind { HEARTBEATS, PAYLOADS, VOTES, NKINDS };

/* Which message is changed, and how. */
struct change {
    int32_t rank; /* that receives it */
    enum message_kind kind;
    int64_t at; /* among the messages of its kind */
    bool swept; /* instead: `at` is a word among those that `from` sends, which becomes INT64_MAX */
    int32_t from;
    struct random random;
    bool done;
};

struct changed_transport {
    rsd_transport inner;
    struct change *change; /* NULL: none */
    int64_t nreceived;
};

struct receipt {
    void *request;
    char *data; /* NULL: a message that is sent, or not changed */
    size_t nbytes;
    int64_t word; /* to be changed; -1: any */
};

static bool has_kind(enum message_kind kind, int32_t tag)
{
    if (kind == VOTES)
        return tag == VOTE_TAG;
    return tag >= FIRST_STEP_TAG && (tag - FIRST_STEP_TAG) % 2 == (kind == PAYLOADS);
}

static rsd_status wrap_request(rsd_status status, struct receipt wanted, void **wrapped)
{
    struct receipt *receipt = malloc(sizeof *receipt);
    if (!receipt)
        abort();
    *receipt = wanted;
    *wrapped = receipt;
    if (status)
        free(receipt);
    return status;
}

static rsd_status send_plainly(void *context, int32_t to, int32_t tag, const void *data,
                               size_t nbytes, void **request)
{
    const rsd_transport *t = &((struct changed_transport *)context)->inner;
    void *inner = NULL;
    rsd_status status = t->send(t->context, to, tag, data, nbytes, &inner);
    return wrap_request(status, (struct receipt){.request = inner}, request);
}

static rsd_status receive_changed(void *context, int32_t from, int32_t tag, void *data,
                                  size_t nbytes, void **request)
{
    struct changed_transport *changed = context;
    const rsd_transport *t = &changed->inner;
    struct change *change = changed->change;
    void *inner = NULL;
    bool counts = change && has_kind(change->kind, tag) && (!change->swept || from == change->from);
    int64_t n = !counts ? 0 : change->swept ? (int64_t)nbytes / 8 : 1;
    int64_t into = counts ? change->at - changed->nreceived : -1;
    changed->nreceived += n;
    rsd_status status = t->recv(t->context, from, tag, data, nbytes, &inner);
    struct receipt receipt = {inner, into >= 0 && into < n ? data : NULL, nbytes, into};
    return wrap_request(status, receipt, request);
}

/* Changes a word of a message, or one byte of it. */
static void change_bytes(struct change *change, char *data, size_t nbytes, int64_t word)
{
    struct random *r = &change->random;
    uint64_t words[] = {0,
                        1,
                        UINT64_MAX,
                        (uint64_t)INT64_MIN,
                        INT64_MAX,
                        1u << 20,
                        4,
                        (uint64_t)1 << 31,
                        (uint64_t)1 << 40,
                        random_next(r),
                        (1u << 30) + 1};
    int64_t nwords = (int64_t)nbytes / 8;
    change->done = true;
    if (change->swept) {
        memcpy(data + 8 * word, &words[4], 8);
        return;
    }
    if (nwords == 0 || random_below(r, 8) == 0) {
        data[random_below(r, (int64_t)nbytes)] ^= (char)(1 << random_below(r, 8));
        return;
    }
    char *at = data + 8 * random_below(r, random_below(r, 2) ? nwords : nwords < 8 ? nwords : 8);
    memcpy(at, &words[random_below(r, sizeof words / sizeof *words)], 8);
}

static rsd_status test_changed(void *context, void *request, int32_t *done)
{
    struct changed_transport *changed = context;
    struct receipt *receipt = request;
    rsd_status status = changed->inner.test(changed->inner.context, receipt->request, done);
    if (status || !*done)
        return status;
    if (receipt->data)
        change_bytes(changed->change, receipt->data, receipt->nbytes, receipt->word);
    free(receipt);
    return RSD_OK;
}

static int32_t cancel_plainly(void *context, void *request)
{
    const rsd_transport *t = &((struct changed_transport *)context)->inner;
    struct receipt *receipt = request;
    int32_t unused = t->cancel(t->context, receipt->request);
    free(receipt);
    return unused;
}

/* ---- calls ---- */

enum call { CONVERT, COMPRESS, VERIFY, DIGEST, DIFF, NFILE_CALLS, EXCHANGE = NFILE_CALLS, GATHER };
static const char *const call_names[] = {"convert", "convert, compressed", "verify",    "digest",
                                         "diff",    "a run of a plan",     "rsd_gather"};
enum { LARGE_NBYTES = 9 << 20, GATHERED = 1000, NDIGESTS = 2 }; /* large: the ranks split it */

struct trial {
    enum call call;
    struct change change;
    char in[300], out[300];
    rsd_status status[NRANKS];
    bool wrong[NRANKS]; /* the call succeeded with a wrong result */
    bool silent[NRANKS];
    char message[NRANKS][512];
};

static rsd_status shard_rows(void *context, const rsd_tensor_info *tensor,
                             rsd_tensor_target *target)
{
    const rsd_placement shard = {.kind = RSD_SHARD, .dim = 0};
    const int64_t count = 2;
    rsd_mesh *mesh = NULL;
    (void)context;
    if (tensor->ndim == 0)
        return RSD_OK;
    rsd_status status = rsd_mesh_new(1, &count, NULL, NULL, &mesh);
    if (!status)
        status = rsd_layout_new(tensor->dtype, tensor->ndim, tensor->shape, mesh, &shard,
                                &target->layout);
    rsd_mesh_free(mesh);
    return status;
}

static rsd_status digest_both(rsd_checkpoint *in, const rsd_io *io, bool *right)
{
    char all[NDIGESTS][RSD_DIGEST_NCHARS], alone[NDIGESTS][RSD_DIGEST_NCHARS];
    rsd_status status = rsd_digest(in, 0, NULL, io, all, NULL);
    if (!status)
        *right = !rsd_digest(in, 0, NULL, NULL, alone, NULL) && memcmp(all, alone, sizeof all) == 0;
    return status;
}

static rsd_status diff_both(const struct trial *trial, rsd_checkpoint *in, const rsd_io *io,
                            bool *right)
{
    rsd_checkpoint *other;
    rsd_diff_options options = {.struct_nbytes = sizeof options, .io = io};
    int64_t n = 0;
    rsd_status status = rsd_checkpoint_open(trial->in, NULL, &other);
    if (status)
        return status;
    status = rsd_diff(in, other, &options, NULL, NULL, &n, NULL);
    *right = n == 0;
    rsd_checkpoint_close(other);
    return status;
}

/* The output of a conversion is compared when all ranks are done. */
static rsd_status call_on_files(const struct trial *trial, const rsd_transport *transport,
                                bool *right)
{
    rsd_checkpoint *in;
    rsd_io io = {.struct_nbytes = sizeof io, .transport = transport, .timeout = timeout};
    rsd_convert_options convert = {.struct_nbytes = sizeof convert,
                                   .format = RSD_FORMAT_DCP,
                                   .map = shard_rows,
                                   .compress = trial->call == COMPRESS ? 3 : 0,
                                   .io = &io};
    int64_t n = 0;
    rsd_status status = rsd_checkpoint_open(trial->in, NULL, &in);
    if (status)
        return status;
    if (trial->call == DIGEST) {
        status = digest_both(in, &io, right);
    } else if (trial->call == DIFF) {
        status = diff_both(trial, in, &io, right);
    } else if (trial->call == VERIFY) {
        status = rsd_verify(in, &io, NULL, NULL, &n, NULL);
        *right = n == 0;
    } else {
        status = rsd_convert(in, trial->out, &convert, NULL);
        *right = true;
    }
    rsd_checkpoint_close(in);
    return status;
}

static rsd_status gather_bytes(const rsd_transport *transport, bool *right)
{
    char own[GATHERED], all[NRANKS * GATHERED];
    memset(own, transport->rank + 1, sizeof own);
    rsd_status status = rsd_gather(transport, own, sizeof own, all, timeout);
    return *right = true, status;
}

/* Rows become columns, by messages. */
static rsd_status run_plan(const rsd_transport *transport, bool *right)
{
    rsd_layout *rows, *columns;
    rsd_plan *plan = NULL;
    rsd_exec *exec = NULL;
    unsigned char src[3 * 9], dst[9 * 3];
    const void *const srcs[] = {src};
    void *const dsts[] = {dst};
    rsd_exchange_options options = {
        .struct_nbytes = sizeof options, .timeout = timeout, .node = -1};
    rsd_status status = rsd_problem_parse("u8[9,9] : 3:S0 -> 3:S1", &rows, &columns);
    if (status)
        return status;
    for (int i = 0; i < 27; i++)
        src[i] = (unsigned char)(27 * transport->rank + i);
    status = rsd_plan_new(rows, columns, NULL, &plan);
    const rsd_plan *const plans[] = {plan};
    if (!status)
        status = rsd_bind_transport(1, plans, NULL, transport, &options, &exec);
    if (!status)
        status = rsd_exec_run(exec, srcs, dsts);
    *right = true;
    for (int i = 0; i < 27 && !status; i++)
        *right = *right && dst[i] == 9 * (i / 3) + 3 * transport->rank + i % 3;
    rsd_exec_free(exec);
    rsd_plan_free(plan);
    rsd_layout_free(rows);
    rsd_layout_free(columns);
    return status;
}

static rsd_status call_as_rank(struct worker *worker)
{
    struct trial *trial = (struct trial *)(uintptr_t)worker->task;
    int32_t rank = worker->transport.rank;
    struct changed_transport changed = {.inner = worker->transport};
    if (trial->change.rank == rank)
        changed.change = &trial->change;
    rsd_transport transport = {.struct_nbytes = sizeof transport,
                               .context = &changed,
                               .rank = rank,
                               .nranks = NRANKS,
                               .send = send_plainly,
                               .recv = receive_changed,
                               .test = test_changed,
                               .cancel = cancel_plainly};
    bool right = false;
    rsd_status status = trial->call == EXCHANGE ? run_plan(&transport, &right)
                        : trial->call == GATHER ? gather_bytes(&transport, &right)
                                                : call_on_files(trial, &transport, &right);
    trial->status[rank] = status;
    trial->wrong[rank] = !status && !right;
    trial->silent[rank] = status && !*rsd_error();
    snprintf(trial->message[rank], sizeof trial->message[rank], "%s", status ? rsd_error() : "");
    return status;
}

/* ---- trials ---- */

/* What a group of ranks runs, one trial after the other. */
struct trial_group {
    pthread_t thread;
    int number, ntrials;
    enum message_kind kind;
    enum call first_call;
    int ncalls;
    char expected[NFILE_CALLS][300]; /* the outputs of conversions by one process */
    int nchanged, nfailed, nwrong, nsilent;
    struct trial wrong;
};

static void convert_in_group(struct trial_group *group, struct trial *trial)
{
    bool succeeded = true;
    for (int32_t r = 0; r < NRANKS; r++)
        succeeded = succeeded && !trial->status[r];
    if (succeeded && !same_folders(group->expected[trial->call], trial->out))
        trial->wrong[0] = true;
    folder_remove(trial->out);
    char staging[320];
    snprintf(staging, sizeof staging, "%s.reshard-part", trial->out);
    folder_remove(staging);
}

static void run_trial(struct trial_group *group, int number)
{
    struct workers workers;
    struct trial trial = {.call = group->first_call + (enum call)(number % group->ncalls)};
    struct random random = {(uint64_t)number * 7919 + (uint64_t)group->kind + 1};
    bool large = trial.call != CONVERT && trial.call != COMPRESS;
    trial.change = (struct change){.rank = (int32_t)random_below(&random, NRANKS),
                                   .kind = group->kind,
                                   .at = random_below(&random, group->kind == HEARTBEATS ? 8 : 4),
                                   .random = {random_next(&random)}};
    if (large)
        snprintf(trial.in, sizeof trial.in, "%s/large", folder);
    else
        snprintf(trial.in, sizeof trial.in, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    snprintf(trial.out, sizeof trial.out, "%s/out-%d", folder, group->number);
    workers_run(&workers, NRANKS, call_as_rank, &trial, 0);
    workers_free(&workers);
    if (!large)
        convert_in_group(group, &trial);
    bool failed = false, wrong = false;
    for (int32_t r = 0; r < NRANKS; r++) {
        failed = failed || trial.status[r];
        wrong = wrong || trial.wrong[r];
        group->nsilent += trial.silent[r];
    }
    group->nchanged += trial.change.done;
    group->nfailed += failed;
    if (wrong && group->nwrong++ == 0)
        group->wrong = trial;
}

static void *run_group(void *context)
{
    struct trial_group *group = context;
    for (int i = group->number; i < group->ntrials; i += NGROUPS)
        run_trial(group, i);
    return NULL;
}

/* Bytes of a payload are results of the rank that sends them: nobody can tell that they are wrong. */
static void run_trials(enum message_kind kind, enum call first_call, int ncalls, int ntrials)
{
    static struct trial_group groups[NGROUPS];
    int nchanged = 0, nfailed = 0;
    for (int i = 0; i < NGROUPS; i++) {
        groups[i] = (struct trial_group){.number = i,
                                         .ntrials = ntrials,
                                         .kind = kind,
                                         .first_call = first_call,
                                         .ncalls = ncalls};
        for (int k = 0; k < 2; k++)
            snprintf(groups[i].expected[k], sizeof groups[i].expected[k], "%s/expected-%d", folder,
                     k);
        if (pthread_create(&groups[i].thread, NULL, run_group, &groups[i]))
            abort();
    }
    for (int i = 0; i < NGROUPS; i++) {
        struct trial_group *group = &groups[i];
        const struct change *change = &group->wrong.change;
        pthread_join(group->thread, NULL);
        CHECK(kind == PAYLOADS || group->nwrong == 0,
              "%s succeeds with a wrong result: rank %d, message %lld",
              call_names[group->wrong.call], (int)change->rank, (long long)change->at);
        CHECK(group->nsilent == 0, "%d failures without a message", group->nsilent);
        nchanged += group->nchanged;
        nfailed += group->nfailed;
    }
    printf("# %d of %d messages were changed, %d calls failed\n", nchanged, ntrials, nfailed);
    CHECK(nchanged > ntrials / 4, "only %d messages were changed", nchanged);
    CHECK(nfailed > 0);
}

/* ---- each word of what a rank sends ---- */

enum { NREFUSALS = 3 };

/* One word after the other is changed, of all payloads that one rank receives of another in a call. */
struct sweep {
    enum call call;
    const char *in;
    int32_t rank, from;
    struct {
        const char *words; /* of a message that must come */
        int least;         /* for so many words that are changed */
    } refusals[NREFUSALS];
};

struct sweep_group {
    pthread_t thread;
    const struct sweep *sweep;
    int number, nwords, nsilent;
    int nrefused[NREFUSALS];
};

static void *run_sweep_group(void *context)
{
    struct sweep_group *group = context;
    const struct sweep *sweep = group->sweep;
    for (bool done = true; done; group->nwords += done) {
        struct workers workers;
        struct trial trial = {.call = sweep->call,
                              .change = {.rank = sweep->rank,
                                         .from = sweep->from,
                                         .kind = PAYLOADS,
                                         .swept = true,
                                         .at = group->number + NGROUPS * group->nwords}};
        char staging[320];
        snprintf(trial.in, sizeof trial.in, "%s", sweep->in);
        snprintf(trial.out, sizeof trial.out, "%s/out-%d", folder, group->number);
        snprintf(staging, sizeof staging, "%s.reshard-part", trial.out);
        workers_run(&workers, NRANKS, call_as_rank, &trial, 0);
        workers_free(&workers);
        for (int32_t r = 0; r < NRANKS; r++)
            group->nsilent += trial.silent[r];
        for (int i = 0; i < NREFUSALS && sweep->refusals[i].words; i++)
            group->nrefused[i] +=
                strstr(trial.message[sweep->rank], sweep->refusals[i].words) != NULL;
        done = trial.change.done;
        folder_remove(trial.out);
        folder_remove(staging);
    }
    return NULL;
}

static void run_sweep(const struct sweep *sweep)
{
    struct sweep_group groups[NGROUPS];
    int nwords = 0, nrefused[NREFUSALS] = {0};
    CASE("%s: each word that rank %d sends to rank %d may be wrong", call_names[sweep->call],
         (int)sweep->from, (int)sweep->rank);
    for (int i = 0; i < NGROUPS; i++) {
        groups[i] = (struct sweep_group){.sweep = sweep, .number = i};
        if (pthread_create(&groups[i].thread, NULL, run_sweep_group, &groups[i]))
            abort();
    }
    for (int i = 0; i < NGROUPS; i++) {
        pthread_join(groups[i].thread, NULL);
        nwords += groups[i].nwords;
        CHECK(groups[i].nsilent == 0, "%d failures without a message", groups[i].nsilent);
        for (int k = 0; k < NREFUSALS; k++)
            nrefused[k] += groups[i].nrefused[k];
    }
    printf("# %d words\n", nwords);
    for (int i = 0; i < NREFUSALS && sweep->refusals[i].words; i++)
        CHECK(nrefused[i] >= sweep->refusals[i].least, "%d calls say: %s", nrefused[i],
              sweep->refusals[i].words);
}

static void run_sweeps(void)
{
    char damaged[300], large[300], few[300];
    snprintf(damaged, sizeof damaged, "%s/damaged", folder);
    snprintf(large, sizeof large, "%s/large", folder);
    snprintf(few, sizeof few, "%s", golden_path("fsdp2_tp_adamw", "ckpt"));
    const struct sweep sweeps[] = {
        {VERIFY, damaged, 0, 1, {{"a finding that is longer than its message", 4}}},
        {COMPRESS,
         few,
         0,
         2,
         {{"wrote file ", 1},
          {"wrote item 9223372036854775807", 32},
          {"behind the end of its file", 64}}},
        {CONVERT, large, 0, 1, {{"wrote a part of item ", 1}}},
        {CONVERT, few, 1, 0, {{"wrote file ", 2}, {"bytes of file ", 2}}}};
    for (size_t i = 0; i < sizeof sweeps / sizeof *sweeps; i++)
        run_sweep(&sweeps[i]);
}

/* ---- inputs ---- */

static void make_large(void)
{
    static unsigned char bytes[LARGE_NBYTES], few[8];
    void *arrays[] = {bytes, few};
    rsd_layout *layouts[2];
    char path[300];
    rsd_save_options options = {.struct_nbytes = sizeof options};
    snprintf(path, sizeof path, "%s/large", folder);
    for (size_t i = 0; i < LARGE_NBYTES; i++)
        bytes[i] = (unsigned char)(i * 31 >> 3);
    OK(rsd_layout_parse("u8[9,1048576] @ 1 : R", &layouts[0]));
    OK(rsd_layout_parse("u8[8] @ 1 : R", &layouts[1]));
    rsd_tensor tensors[] = {
        {.struct_nbytes = sizeof *tensors, .name = "large", .layout = layouts[0], .arrays = arrays},
        {.struct_nbytes = sizeof *tensors,
         .name = "small",
         .layout = layouts[1],
         .arrays = arrays + 1}};
    OK(rsd_save(path, 2, tensors, &options, NULL));
    rsd_layout_free(layouts[0]);
    rsd_layout_free(layouts[1]);
}

static void make_expected(void)
{
    for (int k = 0; k < 2; k++) {
        rsd_checkpoint *in;
        char out[300];
        rsd_convert_options options = {.struct_nbytes = sizeof options,
                                       .format = RSD_FORMAT_DCP,
                                       .map = shard_rows,
                                       .compress = k == COMPRESS ? 3 : 0};
        snprintf(out, sizeof out, "%s/expected-%d", folder, k);
        OK(rsd_checkpoint_open(golden_path("fsdp2_tp_adamw", "ckpt"), NULL, &in));
        OK(rsd_convert(in, out, &options, NULL));
        rsd_checkpoint_close(in);
    }
}

/* A checkpoint in which every rank finds damage of its own. */
static void make_damaged(void)
{
    rsd_checkpoint *checkpoint;
    char path[300], file[320];
    snprintf(path, sizeof path, "%s/damaged", folder);
    snprintf(file, sizeof file, "%s/__0_0.distcp", path);
    conversion_make_large(path, 1, 4);
    OK(rsd_checkpoint_open(path, NULL, &checkpoint));
    for (int64_t t = 0; t < rsd_checkpoint_ntensors(checkpoint); t++) {
        rsd_extent extent = {.struct_nbytes = sizeof extent};
        OK(rsd_checkpoint_box(checkpoint, t, 0, &extent));
        conversion_flip_bit(file, (long)(extent.offset + extent.nbytes / 2));
    }
    rsd_checkpoint_close(checkpoint);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 24;
    snprintf(folder, sizeof folder, "%s", folder_new("messages"));
    CASE("checkpoints for the calls");
    make_large();
    make_expected();
    make_damaged();
    CASE("heartbeats that are changed: no crash, and no success with a wrong result");
    run_trials(HEARTBEATS, CONVERT, NFILE_CALLS, n);
    CASE("payloads that are changed: no crash");
    run_trials(PAYLOADS, CONVERT, NFILE_CALLS, n);
    CASE("votes that are changed: no crash, and no success with a wrong result");
    run_trials(VOTES, EXCHANGE, 2, n);
    run_sweeps();
    folder_remove(folder);
    return tap_end();
}
