/* http_engine.c - many requests at once, on threads of their own.
 *
 *     http_start --> waiting --> active (at most max_requests) --> done
 *                       ^             |
 *                       +--- again ---+    after a delay that doubles, times a random number
 *
 * An engine is a thread with its connections. One engine would be slower than a fast network, so there are two,
 * which share the limit on requests.
 */
#include "remote.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

enum { MAX_IDLE = 64 };
#define FIRST_DELAY 0.1 /* seconds */
#define LAST_DELAY  20.0

struct http_engine {
    const struct curl_library *curl;
    void *multi;
    pthread_t thread;
    pid_t process;
    int max_requests, max_attempts;
    _Atomic int nrequests; /* that are not finished */
    void *idle[MAX_IDLE];  /* easy handles; of the thread */
    int nidle;
    uint64_t random;
    struct http_request *active; /* of the thread */
    int nactive;
    pthread_mutex_t lock; /* for what follows */
    pthread_cond_t finished;
    struct http_request *waiting, **waiting_end;
    bool stop, any_cancelled;
};

/* ---- the thread ---- */

static void unlink_request(struct http_request **list, const struct http_request *request)
{
    while (*list && *list != request)
        list = &(*list)->next;
    if (*list)
        *list = request->next;
}

static void append_waiting(struct http_engine *engine, struct http_request *request)
{
    request->next = NULL;
    *engine->waiting_end = request;
    engine->waiting_end = &request->next;
}

static void find_waiting_end(struct http_engine *engine)
{
    engine->waiting_end = &engine->waiting;
    while (*engine->waiting_end)
        engine->waiting_end = &(*engine->waiting_end)->next;
}

/* Ends a request. It may be freed by the one who waits. */
static void finish_request(struct http_engine *engine, struct http_request *request)
{
    if (request->easy) {
        if (engine->nidle < MAX_IDLE)
            engine->idle[engine->nidle++] = request->easy;
        else
            engine->curl->easy_cleanup(request->easy);
    }
    engine->curl->slist_free_all(request->header_list);
    request->easy = request->header_list = NULL;
    atomic_fetch_sub(&engine->nrequests, 1);
    if (request->done) {
        request->done(request);
        return;
    }
    pthread_mutex_lock(&engine->lock);
    request->finished = true;
    pthread_cond_broadcast(&engine->finished);
    pthread_mutex_unlock(&engine->lock);
}

static void fail_request(struct http_engine *engine, struct http_request *request,
                         rsd_status status, const char *message)
{
    request->status = status;
    snprintf(request->error, sizeof request->error, "%s", message);
    finish_request(engine, request);
}

static double random_fraction(struct http_engine *engine)
{
    engine->random ^= engine->random << 13;
    engine->random ^= engine->random >> 7;
    engine->random ^= engine->random << 17;
    return (double)(engine->random >> 11) * 0x1p-53;
}

/* Schedules another attempt, or ends the request if it had enough. */
static void repeat_request(struct http_engine *engine, struct http_request *request, double delay)
{
    if (request->nattempts >= engine->max_attempts) {
        size_t n = strlen(request->error);
        if (request->nattempts > 1)
            snprintf(request->error + n, sizeof request->error - n, " (%d attempts)",
                     request->nattempts);
        finish_request(engine, request);
        return;
    }
    double longest =
        FIRST_DELAY * (double)((uint64_t)1 << (request->nattempts < 20 ? request->nattempts : 20));
    longest = longest < LAST_DELAY ? longest : LAST_DELAY;
    request->not_before = seconds_now() + delay + longest * random_fraction(engine);
    atomic_fetch_add(&request->storage->nretries, 1);
    pthread_mutex_lock(&engine->lock);
    append_waiting(engine, request);
    pthread_mutex_unlock(&engine->lock);
}

/* Hands a request to libcurl. On failure the request is finished. */
static void start_attempt(struct http_engine *engine, struct http_request *request)
{
    if (!request->easy)
        request->easy = engine->nidle ? engine->idle[--engine->nidle] : engine->curl->easy_init();
    rsd_status status = fail(RSD_ENOMEM, "out of memory");
    if (request->easy)
        status = http_prepare(request, engine->curl);
    if (status) {
        fail_request(engine, request, status, rsd_error());
        return;
    }
    request->nattempts++;
    atomic_fetch_add(&request->storage->nrequests, 1);
    if (engine->curl->multi_add_handle(engine->multi, request->easy) != 0) {
        fail_request(engine, request, RSD_EIO, "libcurl refused the request");
        return;
    }
    request->next = engine->active;
    engine->active = request;
    engine->nactive++;
}

/* Judges a transfer that is over. The request is repeated later, or finished. */
static void end_attempt(struct http_engine *engine, struct http_request *request, int curl_code)
{
    double delay = 0;
    engine->curl->multi_remove_handle(engine->multi, request->easy);
    unlink_request(&engine->active, request);
    engine->nactive--;
    atomic_fetch_add(&request->storage->nbytes_received, (int64_t)request->nreceived);
    enum http_outcome outcome = http_judge(request, engine->curl, curl_code, &delay);
    if (outcome != HTTP_FAILED && request->body)
        atomic_fetch_add(&request->storage->nbytes_sent, (int64_t)request->body_nbytes);
    if (outcome == HTTP_AGAIN && !request->cancelled)
        repeat_request(engine, request, delay);
    else
        finish_request(engine, request);
}

/* Takes the next request that may begin; NULL: none. *wait: until one may, at most what it was. */
static struct http_request *take_waiting(struct http_engine *engine, double *wait)
{
    struct http_request *found = NULL;
    double now = seconds_now();
    pthread_mutex_lock(&engine->lock);
    for (struct http_request **at = &engine->waiting; *at && !found; at = &(*at)->next) {
        double left = (*at)->not_before - now;
        if (left <= 0 || (*at)->cancelled)
            found = *at;
        else if (left < *wait)
            *wait = left;
    }
    if (found) {
        unlink_request(&engine->waiting, found);
        find_waiting_end(engine);
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

/* Ends active requests that were cancelled; those that wait end when they are taken. */
static void end_cancelled(struct http_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    bool any = engine->any_cancelled;
    engine->any_cancelled = false;
    pthread_mutex_unlock(&engine->lock);
    for (struct http_request *request = engine->active, *next; any && request; request = next) {
        next = request->next;
        if (!request->cancelled)
            continue;
        engine->curl->multi_remove_handle(engine->multi, request->easy);
        unlink_request(&engine->active, request);
        engine->nactive--;
        fail_request(engine, request, RSD_ECANCELLED, "cancelled");
    }
}

static bool is_stopped(struct http_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    bool stop = engine->stop;
    pthread_mutex_unlock(&engine->lock);
    return stop;
}

/* The thread of the engine: starts, performs and ends requests until it is stopped. */
static void *run_engine(void *context)
{
    struct http_engine *engine = context;
    const struct curl_library *curl = engine->curl;
    while (!is_stopped(engine)) {
        int n;
        double wait = 1;
        struct http_request *request;
        end_cancelled(engine);
        while (engine->nactive < engine->max_requests && (request = take_waiting(engine, &wait))) {
            if (request->cancelled)
                fail_request(engine, request, RSD_ECANCELLED, "cancelled");
            else
                start_attempt(engine, request);
        }
        curl->multi_perform(engine->multi, &n);
        bool any = false;
        for (struct curl_message *message; (message = curl->multi_info_read(engine->multi, &n));) {
            void *easy = message->easy;
            int code = message->data.code;
            if (message->kind != CURL_DONE)
                continue;
            curl->easy_getinfo(easy, CURL_INFO_PRIVATE, &request);
            end_attempt(engine, request, code);
            any = true;
        }
        if (!any)
            curl->multi_poll(engine->multi, NULL, 0, (int)(wait * 1000) + 1, NULL);
    }
    return NULL;
}

/* ---- starting and stopping ---- */

/* Starts an engine with at most so many requests at once, and its thread. */
static rsd_status start_engine(const rsd_storage *storage, int max_requests,
                               struct http_engine **out)
{
    const struct curl_library *curl;
    sigset_t all, before;
    TRY(curl_library_open(&curl));
    struct http_engine *engine = mem_new(1, sizeof *engine);
    if (!engine)
        return RSD_ENOMEM;
    *engine = (struct http_engine){.curl = curl,
                                   .multi = curl->multi_init(),
                                   .process = getpid(),
                                   .max_requests = max_requests,
                                   .max_attempts = storage->max_attempts,
                                   .random = (uint64_t)(seconds_now() * 1e9) | 1};
    if (!engine->multi) {
        mem_free(engine);
        return fail(RSD_ENOMEM, "out of memory");
    }
    engine->random ^= (uint64_t)engine->process << 40;
    engine->waiting_end = &engine->waiting;
    curl->multi_setopt(engine->multi, CURL_MULTI_MAXCONNECTS, (long)max_requests);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->finished, NULL);
    /* The program's signals are for its own threads; and OpenSSL may raise SIGPIPE. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&engine->thread, NULL, run_engine, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        curl->multi_cleanup(engine->multi);
        pthread_mutex_destroy(&engine->lock);
        pthread_cond_destroy(&engine->finished);
        mem_free(engine);
        return fail(RSD_EIO, "cannot start a thread: %s", strerror(error));
    }
    *out = engine;
    return RSD_OK;
}

void http_engine_stop(struct http_engine *engine)
{
    if (!engine || engine->process != getpid()) /* the thread is the parent's */
        return;
    pthread_mutex_lock(&engine->lock);
    engine->stop = true;
    pthread_mutex_unlock(&engine->lock);
    engine->curl->multi_wakeup(engine->multi);
    pthread_join(engine->thread, NULL);
    for (int i = 0; i < engine->nidle; i++)
        engine->curl->easy_cleanup(engine->idle[i]);
    engine->curl->multi_cleanup(engine->multi);
    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->finished);
    mem_free(engine);
}

/* Returns the engine with the fewest requests. The second one is started when the first has several; the storage is
 * locked. */
static rsd_status choose_engine(rsd_storage *storage, struct http_engine **chosen)
{
    struct http_engine **engines = storage->engines;
    int half = storage->max_requests / HTTP_NENGINES;
    if (!engines[0])
        TRY(start_engine(storage, storage->max_requests - half, &engines[0]));
    *chosen = engines[0];
    int load = atomic_load(&engines[0]->nrequests);
    if (!engines[1] && half > 0 && load >= HTTP_NENGINES)
        TRY(start_engine(storage, half, &engines[1]));
    if (engines[1] && atomic_load(&engines[1]->nrequests) < load)
        *chosen = engines[1];
    return RSD_OK;
}

rsd_status http_start(struct http_request *request)
{
    rsd_storage *storage = request->storage;
    struct http_engine *engine = NULL;
    pthread_mutex_lock(&storage->lock);
    rsd_status status = choose_engine(storage, &engine);
    pthread_mutex_unlock(&storage->lock);
    if (status)
        return status;
    if (engine->process != getpid())
        return fail(RSD_EINVAL, "the storage was used before this process forked; make another");
    request->engine = engine;
    request->nattempts = request->nrefreshes = 0;
    request->not_before = 0;
    request->cancelled = request->finished = false;
    atomic_fetch_add(&engine->nrequests, 1);
    pthread_mutex_lock(&engine->lock);
    append_waiting(engine, request);
    pthread_mutex_unlock(&engine->lock);
    engine->curl->multi_wakeup(engine->multi);
    return RSD_OK;
}

rsd_status http_wait(struct http_request *request)
{
    struct http_engine *engine = request->engine;
    pthread_mutex_lock(&engine->lock);
    while (!request->finished)
        pthread_cond_wait(&engine->finished, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    return request->status ? fail(request->status, "%s", request->error) : RSD_OK;
}

rsd_status http_run(struct http_request *request)
{
    TRY(http_start(request));
    return http_wait(request);
}

void http_cancel(struct http_request *request)
{
    struct http_engine *engine = request->engine;
    pthread_mutex_lock(&engine->lock);
    request->cancelled = true;
    engine->any_cancelled = true;
    pthread_mutex_unlock(&engine->lock);
    engine->curl->multi_wakeup(engine->multi);
}
