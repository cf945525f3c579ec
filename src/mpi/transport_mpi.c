/* link.c - MPI as a transport: messages, and the first meeting.
 *
 * All transports of a communicator share one hidden duplicate of it, kept as its attribute: communicators
 * are few in some MPIs, and making one is dear. Each transport has 64 tags of its own in the duplicate, and one
 * for its gathers.
 *
 * Nothing here waits without looking at the clock: a rank that does not come is named.
 */
#include "reshard_mpi.h"

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GATHER_TAG = 64, NTAGS, FLAT_GATHER_MOST = 256, PIECE_NBYTES = 256 };
static const double patience = 300; /* seconds, unless options say otherwise */

/* A message on its way; free ones are a list. */
struct message {
    MPI_Request request;
    struct message *next;
};

struct block {
    struct block *next;
    struct message messages[64];
};

/* What is gathered passes through memory of the link, a piece of each rank at a time: after a time-out MPI may
 * still write there, and no memory is needed to take part. */
struct link {
    MPI_Comm comm;
    int first_tag, nranks, rank;
    bool lost; /* it stays for ever */
    struct block *blocks;
    struct message *spare;
    MPI_Request *requests; /* a receive and a send for each rank */
    char *own, *all;       /* one piece, one of each rank */
};

static rsd_status failed(int code, const char *what)
{
    char why[MPI_MAX_ERROR_STRING] = "", text[MPI_MAX_ERROR_STRING + 64];
    int length = 0;
    MPI_Error_string(code, why, &length);
    snprintf(text, sizeof text, "%s: %s", what, why);
    return rsd_set_error(RSD_EPEER, text);
}

static rsd_status late(const char *who, double timeout)
{
    char text[120];
    snprintf(text, sizeof text, "%s did not come within %g s", who, timeout);
    return rsd_set_error(RSD_ETIMEOUT, text);
}

static rsd_status no_memory(void)
{
    return rsd_set_error(RSD_ENOMEM, "no memory for a message of MPI");
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        rsd_status status_ = (call);                                                               \
        if (status_ != RSD_OK)                                                                     \
            return status_;                                                                        \
    } while (0)

#define TRY_MPI(call, what)                                                                        \
    do {                                                                                           \
        int code_ = (call);                                                                        \
        if (code_ != MPI_SUCCESS)                                                                  \
            return failed(code_, what);                                                            \
    } while (0)

/* ---- messages ---- */

static struct message *take_message(struct link *link)
{
    if (!link->spare) {
        struct block *block = calloc(1, sizeof *block);
        if (!block)
            return NULL;
        block->next = link->blocks;
        link->blocks = block;
        for (size_t i = 0; i < sizeof block->messages / sizeof *block->messages; i++) {
            block->messages[i].next = link->spare;
            link->spare = &block->messages[i];
        }
    }
    struct message *message = link->spare;
    link->spare = message->next;
    return message;
}

static void give_message(struct link *link, struct message *message)
{
    message->next = link->spare;
    link->spare = message;
}

static rsd_status link_send(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                            void **request)
{
    struct link *link = context;
    struct message *message = take_message(link);
    if (!message)
        return no_memory();
    TRY_MPI(MPI_Isend(data, (int)nbytes, MPI_BYTE, to, link->first_tag + tag, link->comm,
                      &message->request),
            "MPI_Isend");
    *request = message;
    return RSD_OK;
}

static rsd_status link_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                            void **request)
{
    struct link *link = context;
    struct message *message = take_message(link);
    if (!message)
        return no_memory();
    TRY_MPI(MPI_Irecv(data, (int)nbytes, MPI_BYTE, from, link->first_tag + tag, link->comm,
                      &message->request),
            "MPI_Irecv");
    *request = message;
    return RSD_OK;
}

static rsd_status link_test(void *context, void *request, int32_t *done)
{
    struct link *link = context;
    struct message *message = request;
    int flag = 0;
    TRY_MPI(MPI_Test(&message->request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    if (flag)
        give_message(link, message);
    *done = flag;
    return RSD_OK;
}

/* MPI promises only that a receive that was not matched is undone. */
static void link_cancel(void *context, void *request)
{
    struct link *link = context;
    struct message *message = request;
    if (message->request != MPI_REQUEST_NULL) { /* as it is after a failure */
        MPI_Cancel(&message->request);
        MPI_Request_free(&message->request);
    }
    give_message(link, message);
}

/* ---- the meeting ---- */

/* done: it is, and not that the time is over. */
static rsd_status wait_until(MPI_Request *request, const char *what, double end, int *done)
{
    for (;;) {
        TRY_MPI(MPI_Test(request, done, MPI_STATUS_IGNORE), what);
        if (*done || MPI_Wtime() > end)
            return RSD_OK;
        sched_yield();
    }
}

static rsd_status wait_for_all(int n, MPI_Request *requests, double timeout, double end)
{
    char who[32];
    for (int i = 0, done; i < n; i++) {
        TRY(wait_until(&requests[i], "a gather", end, &done));
        if (done)
            continue;
        snprintf(who, sizeof who, "rank %d", i);
        return late(who, timeout);
    }
    return RSD_OK;
}

/* Everybody to everybody: with few ranks it is as quick as a collective, and says who is late. */
static rsd_status gather_flat(struct link *link, size_t nbytes, double timeout, double end)
{
    int n = link->nranks, tag = link->first_tag + GATHER_TAG;
    MPI_Request *receives = link->requests, *sends = receives + n;
    for (int i = 0; i < n; i++)
        receives[i] = sends[i] = MPI_REQUEST_NULL;
    for (int i = 0; i < n; i++)
        if (i != link->rank)
            TRY_MPI(MPI_Irecv(link->all + (size_t)i * nbytes, (int)nbytes, MPI_BYTE, i, tag,
                              link->comm, &receives[i]),
                    "MPI_Irecv");
    for (int i = 0; i < n; i++)
        if (i != link->rank)
            TRY_MPI(MPI_Isend(link->own, (int)nbytes, MPI_BYTE, i, tag, link->comm, &sends[i]),
                    "MPI_Isend");
    memcpy(link->all + (size_t)link->rank * nbytes, link->own, nbytes);
    TRY(wait_for_all(n, receives, timeout, end));
    return wait_for_all(n, sends, timeout, end);
}

static rsd_status gather_piece(struct link *link, size_t nbytes, double timeout, double end)
{
    int done = 0;
    if (link->nranks <= FLAT_GATHER_MOST)
        return gather_flat(link, nbytes, timeout, end);
    TRY_MPI(MPI_Iallgather(link->own, (int)nbytes, MPI_BYTE, link->all, (int)nbytes, MPI_BYTE,
                           link->comm, &link->requests[0]),
            "MPI_Iallgather");
    TRY(wait_until(&link->requests[0], "MPI_Iallgather", end, &done));
    return done ? RSD_OK : late("some rank", timeout);
}

static rsd_status link_allgather(void *context, const void *own, size_t nbytes, void *all,
                                 double timeout)
{
    struct link *link = context;
    double end = MPI_Wtime() + timeout;
    for (size_t at = 0, n; at < nbytes; at += n) {
        n = nbytes - at < PIECE_NBYTES ? nbytes - at : PIECE_NBYTES;
        memcpy(link->own, (const char *)own + at, n);
        rsd_status status = gather_piece(link, n, timeout, end);
        if (status) {
            link->lost = true;
            return status;
        }
        for (int i = 0; i < link->nranks; i++)
            memcpy((char *)all + (size_t)i * nbytes + at, link->all + (size_t)i * n, n);
    }
    return RSD_OK;
}

/* ---- the duplicate ---- */

/* Kept with a communicator: its duplicate (MPI_COMM_NULL: it could not be made); and with that: how many
 * transports it has had, and how many use it. All are stored in the attribute itself, so that a rank without
 * memory still takes part. The keys belong to this process. */
static int duplicate_key = MPI_KEYVAL_INVALID, serial_key = MPI_KEYVAL_INVALID,
           users_key = MPI_KEYVAL_INVALID;
union kept {
    void *value;
    MPI_Comm comm;
    intptr_t number;
};
_Static_assert(sizeof(MPI_Comm) <= sizeof(void *), "a communicator fits into an attribute");

/* One more uses a duplicate, or one less: the last one frees it. The communicator that it was made from is a
 * user too, until that is freed. */
static int add_users(MPI_Comm duplicate, int more)
{
    int found = 0;
    union kept users = {.value = NULL};
    int code = MPI_Comm_get_attr(duplicate, users_key, &users.value, &found);
    users.number += more;
    if (code == MPI_SUCCESS && users.number > 0)
        return MPI_Comm_set_attr(duplicate, users_key, users.value);
    return code == MPI_SUCCESS ? MPI_Comm_free(&duplicate) : code;
}

static int drop_duplicate(MPI_Comm comm, int keyval, void *value, void *extra)
{
    union kept kept = {.value = value};
    (void)comm, (void)keyval, (void)extra;
    return kept.comm == MPI_COMM_NULL ? MPI_SUCCESS : add_users(kept.comm, -1);
}

/* All ranks come to their first call on a communicator, or it is said who does not. There is no duplicate to
 * send messages in yet, and in the communicator itself they might be received by its owner; so each rank gives
 * each a byte in a collective call, and who has not come when the time is over is seen by its byte. */
static rsd_status come_together(MPI_Comm comm, double timeout)
{
    static int counts[FLAT_GATHER_MOST], here[FLAT_GATHER_MOST], there[FLAT_GATHER_MOST];
    static char own = 1, all[FLAT_GATHER_MOST];
    int n = 0, done = 0;
    MPI_Request request;
    char who[32] = "some rank";
    MPI_Comm_size(comm, &n);
    if (n > FLAT_GATHER_MOST)
        return RSD_OK;
    for (int i = 0; i < n; i++) {
        counts[i] = 1;
        there[i] = i;
        all[i] = 0;
    }
    TRY_MPI(
        MPI_Ialltoallv(&own, counts, here, MPI_BYTE, all, counts, there, MPI_BYTE, comm, &request),
        "MPI_Ialltoallv");
    TRY(wait_until(&request, "MPI_Ialltoallv", MPI_Wtime() + timeout, &done));
    for (int i = n - 1; i >= 0 && !done; i--)
        if (!((volatile char *)all)[i])
            snprintf(who, sizeof who, "rank %d", i);
    return done ? RSD_OK : late(who, timeout);
}

static rsd_status duplicate_of(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    static MPI_Comm duplicate; /* after a time-out MPI may still write to it */
    static bool stuck;
    int done = 0;
    MPI_Request request;
    union kept one = {.number = 1};
    if (stuck)
        return rsd_set_error(RSD_EPEER, "another communicator could not be duplicated in time");
    TRY(come_together(comm, timeout));
    TRY_MPI(MPI_Comm_idup(comm, &duplicate, &request), "MPI_Comm_idup");
    TRY(wait_until(&request, "MPI_Comm_idup", MPI_Wtime() + timeout, &done));
    stuck = !done;
    if (stuck)
        return late("some rank", timeout);
    TRY_MPI(MPI_Comm_set_errhandler(duplicate, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    TRY_MPI(MPI_Comm_set_attr(duplicate, serial_key, NULL), "MPI_Comm_set_attr");
    TRY_MPI(MPI_Comm_set_attr(duplicate, users_key, one.value), "MPI_Comm_set_attr");
    *out = duplicate;
    return RSD_OK;
}

/* Whether it can be made is found out once: after a time-out some ranks may have a duplicate and some not. */
static rsd_status make_duplicate(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    union kept kept = {.value = NULL};
    kept.comm = MPI_COMM_NULL;
    rsd_status status = duplicate_of(comm, timeout, &kept.comm);
    TRY_MPI(MPI_Comm_set_attr(comm, duplicate_key, kept.value), "MPI_Comm_set_attr");
    *out = kept.comm;
    return status;
}

static rsd_status make_keys(void)
{
    if (duplicate_key != MPI_KEYVAL_INVALID)
        return RSD_OK;
    TRY_MPI(
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &serial_key, NULL),
        "MPI_Comm_create_keyval");
    TRY_MPI(
        MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &users_key, NULL),
        "MPI_Comm_create_keyval");
    TRY_MPI(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, drop_duplicate, &duplicate_key, NULL),
            "MPI_Comm_create_keyval");
    return RSD_OK;
}

static rsd_status find_duplicate(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    int found = 0, inter = 0;
    union kept kept = {.value = NULL};
    if (comm == MPI_COMM_NULL)
        return rsd_set_error(RSD_EINVAL, "the communicator is MPI_COMM_NULL");
    TRY_MPI(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
    if (inter)
        return rsd_set_error(RSD_EUNSUPPORTED,
                             "an intercommunicator: merge it first (MPI_Intercomm_merge)");
    TRY(make_keys());
    TRY_MPI(MPI_Comm_get_attr(comm, duplicate_key, &kept.value, &found), "MPI_Comm_get_attr");
    if (!found)
        return make_duplicate(comm, timeout, out);
    if (kept.comm == MPI_COMM_NULL)
        return rsd_set_error(RSD_EPEER, "the first call on this communicator failed: make another");
    *out = kept.comm;
    return RSD_OK;
}

/* The tags of the next transport: all ranks count alike. */
static rsd_status next_tags(MPI_Comm duplicate, int *first)
{
    void *value = NULL;
    int *most = NULL, found = 0;
    TRY_MPI(MPI_Comm_get_attr(duplicate, MPI_TAG_UB, (void *)&most, &found), "MPI_Comm_get_attr");
    int nserials = (found ? *most : 32767) / NTAGS;
    TRY_MPI(MPI_Comm_get_attr(duplicate, serial_key, &value, &found), "MPI_Comm_get_attr");
    intptr_t serial = (intptr_t)value;
    TRY_MPI(MPI_Comm_set_attr(duplicate, serial_key, (void *)((serial + 1) % nserials)),
            "MPI_Comm_set_attr");
    *first = (int)serial * NTAGS;
    return RSD_OK;
}

/* ---- the transport ---- */

static void link_drop(void *context)
{
    struct link *link = context;
    int finalised = 0;
    if (!link)
        return;
    MPI_Finalized(&finalised);
    if (!finalised)
        add_users(link->comm, -1);
    for (struct block *block = link->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    if (!link->lost)
        free(link);
}

/* One piece of memory: the link, its requests, its pieces. */
static struct link *link_with_room(int nranks)
{
    size_t n = (size_t)nranks, nrequests = 2 * n;
    struct link *link =
        calloc(1, sizeof *link + nrequests * sizeof(MPI_Request) + (n + 1) * PIECE_NBYTES);
    if (!link)
        return NULL;
    link->requests = (MPI_Request *)(void *)(link + 1);
    link->own = (char *)(link->requests + nrequests);
    link->all = link->own + PIECE_NBYTES;
    link->nranks = nranks;
    return link;
}

static rsd_status link_new(MPI_Comm comm, double timeout, struct link **out)
{
    int initialised = 0, finalised = 0, first_tag = 0, nranks = 0;
    MPI_Comm duplicate = MPI_COMM_NULL;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (!initialised || finalised)
        return rsd_set_error(RSD_EINVAL, "MPI is not initialised");
    TRY(find_duplicate(comm, timeout, &duplicate));
    TRY(next_tags(duplicate, &first_tag));
    MPI_Comm_size(duplicate, &nranks);
    struct link *link = link_with_room(nranks);
    if (!link)
        return no_memory();
    link->comm = duplicate;
    link->first_tag = first_tag;
    MPI_Comm_rank(duplicate, &link->rank);
    add_users(duplicate, 1);
    *out = link;
    return RSD_OK;
}

static rsd_transport table_of(struct link *link)
{
    return (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                           .context = link,
                           .rank = link->rank,
                           .nranks = link->nranks,
                           .send = link_send,
                           .recv = link_recv,
                           .test = link_test,
                           .cancel = link_cancel,
                           .allgather = link_allgather};
}

rsd_status rsd_mpi_transport(MPI_Comm comm, rsd_transport *transport)
{
    struct link *link = NULL;
    rsd_status status = link_new(comm, patience, &link);
    if (status || !link)
        return status;
    rsd_transport table = table_of(link);
    size_t nbytes = transport->struct_nbytes;
    if (nbytes < offsetof(rsd_transport, release)) {
        link_drop(link);
        return rsd_set_error(RSD_EINVAL,
                             "rsd_transport.struct_nbytes should be sizeof(rsd_transport)");
    }
    memcpy(transport, &table, nbytes < sizeof table ? nbytes : sizeof table);
    transport->struct_nbytes = nbytes;
    return RSD_OK;
}

rsd_status rsd_mpi_transport_f(int32_t fortran_comm, rsd_transport *transport)
{
    return rsd_mpi_transport(MPI_Comm_f2c((MPI_Fint)fortran_comm), transport);
}

void rsd_mpi_transport_free(rsd_transport *transport)
{
    if (transport && transport->context)
        link_drop(transport->context);
    if (transport)
        transport->context = NULL;
}

/* ---- binding ---- */

rsd_status rsd_bind_mpi_many(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, MPI_Comm comm,
                             const rsd_exchange_options *options, rsd_exec **exec)
{
    struct link *link = NULL;
    bool given = options && options->struct_nbytes >= sizeof *options && options->timeout > 0;
    rsd_status status = link_new(comm, given ? options->timeout : patience, &link);
    if (status || !link)
        return status;
    rsd_transport transport = table_of(link);
    transport.release = link_drop;
    status = rsd_bind_transport(nplans, plans, bind, &transport, options, exec);
    if (status)
        link_drop(link);
    return status;
}

rsd_status rsd_bind_mpi(const rsd_plan *plan, MPI_Comm comm, const rsd_exchange_options *options,
                        rsd_exec **exec)
{
    return rsd_bind_mpi_many(1, &plan, NULL, comm, options, exec);
}
