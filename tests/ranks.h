/* ranks.h - ranks that are threads, for tests. Each does the same work, and reports what is wrong. */
#ifndef RANKS_H
#define RANKS_H

#include "reshard.h"
#include "tap.h"

#include <pthread.h>
#include <stdlib.h>

struct rank {
    pthread_t thread;
    rsd_thread_group *group;
    rsd_transport transport;
    int32_t rank, nranks;
    void (*work)(struct rank *rank, void *context);
    void *context;
    char wrong[300]; /* the first failure; empty: none */
};

/* In a rank's work: NEED(rank, condition, "format", values ...). */
#define NEED(rank, condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition) && !(rank)->wrong[0])                                                     \
            snprintf((rank)->wrong, sizeof(rank)->wrong, __VA_ARGS__);                             \
    } while (0)
#define NEED_OK(rank, call) NEED(rank, (call) == RSD_OK, "%s: %s", #call, rsd_error())
#define NEED_FAILS(rank, status, text, call)                                                       \
    do {                                                                                           \
        rsd_status got_ = (call);                                                                  \
        NEED(rank, got_ == (status), "%s: %s (%s)", #call, rsd_status_name(got_), rsd_error());    \
        NEED(rank, strstr(rsd_error(), (text)) != NULL, "%s: '%s' is not in '%s'", #call, (text),  \
             rsd_error());                                                                         \
    } while (0)

static inline void *rank_main(void *context)
{
    struct rank *rank = context;
    rank->transport.struct_nbytes = sizeof rank->transport;
    NEED_OK(rank, rsd_thread_group_transport(rank->group, rank->rank, &rank->transport));
    rank->work(rank, rank->context);
    return NULL;
}

/* Runs the work on all ranks. Returns whether no rank found anything wrong. */
static inline bool on_ranks(int32_t nranks, void (*work)(struct rank *rank, void *context),
                            void *context)
{
    rsd_thread_group *group;
    struct rank *ranks = calloc((size_t)nranks, sizeof *ranks);
    bool fine = OK(rsd_thread_group_new(nranks, &group));
    for (int32_t i = 0; i < nranks && fine; i++) {
        ranks[i] = (struct rank){
            .group = group, .rank = i, .nranks = nranks, .work = work, .context = context};
        pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i]);
    }
    for (int32_t i = 0; i < nranks && ranks[i].group; i++) {
        pthread_join(ranks[i].thread, NULL);
        fine =
            CHECK(!ranks[i].wrong[0], "rank %d of %d: %s", (int)i, (int)nranks, ranks[i].wrong) &&
            fine;
    }
    rsd_thread_group_free(group);
    free(ranks);
    return fine;
}

#endif
