/* transport_mpi.c - MPI as a transport.
 *
 * All transports of a communicator share one hidden duplicate of it, which is stored as an attribute of the
 * communicator: MPI may support few communicators, and creating one is slow. Each transport has 64 tags of its own in
 * the duplicate. No function waits without a time-out.
 */
#include "reshard_mpi.h"

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NTAGS = 64, NAMED_RANKS_MOST = 256 };
static const double default_timeout = 300; /* seconds */

/* Of MPIs that have it: whether messages may lie in the memory of CUDA devices. */
extern int MPIX_Query_cuda_support(void) __attribute__((weak));

/* A message in progress, or a free one in a list. */
struct mpi_message {
    MPI_Request request;
    int nbytes; /* that a receive expects; -1: a send */
    struct mpi_message
        *next; /* the next of the same request of the transport, or the next free one */
};

struct mpi_block {
    struct mpi_block *next;
    struct mpi_message messages[64];
};

struct mpi_link {
    MPI_Comm comm;
    int first_tag;
    struct mpi_block *blocks;
    struct mpi_message *unused;
};

static rsd_status fail_mpi(int code, const char *function)
{
    char why[MPI_MAX_ERROR_STRING] = "", text[MPI_MAX_ERROR_STRING + 64];
    int length = 0;
    MPI_Error_string(code, why, &length);
    snprintf(text, sizeof text, "%s: %s", function, why);
    return rsd_set_error(RSD_EPEER, text);
}

static rsd_status fail_late(const char *rank, double timeout)
{
    char text[120];
    snprintf(text, sizeof text, "timed out after %g s: %s has not entered the call", timeout, rank);
    return rsd_set_error(RSD_ETIMEOUT, text);
}

static rsd_status fail_memory(void)
{
    return rsd_set_error(RSD_ENOMEM, "no memory for a message");
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        rsd_status status_ = (call);                                                               \
        if (status_ != RSD_OK)                                                                     \
            return status_;                                                                        \
    } while (0)

#define TRY_MPI(call, function)                                                                    \
    do {                                                                                           \
        int code_ = (call);                                                                        \
        if (code_ != MPI_SUCCESS)                                                                  \
            return fail_mpi(code_, function);                                                      \
    } while (0)

/* ---- messages ---- */

/* Returns a message from the list of unused ones, which grows by blocks. NULL: no memory. */
static struct mpi_message *new_mpi_message(struct mpi_link *link)
{
    if (!link->unused) {
        struct mpi_block *block = calloc(1, sizeof *block);
        if (!block)
            return NULL;
        block->next = link->blocks;
        link->blocks = block;
        for (size_t i = 0; i < sizeof block->messages / sizeof *block->messages; i++) {
            block->messages[i].next = link->unused;
            link->unused = &block->messages[i];
        }
    }
    struct mpi_message *message = link->unused;
    link->unused = message->next;
    message->next = NULL;
    return message;
}

/* Makes all messages of a request free. */
static void reuse_mpi_messages(struct mpi_link *link, struct mpi_message *message)
{
    while (message) {
        struct mpi_message *next = message->next;
        message->next = link->unused;
        link->unused = message;
        message = next;
    }
}

static rsd_status finish_start(struct mpi_link *link, struct mpi_message *message, int code,
                               const char *function, void **request)
{
    if (code != MPI_SUCCESS) {
        reuse_mpi_messages(link, message);
        return fail_mpi(code, function);
    }
    *request = message;
    return RSD_OK;
}

static rsd_status link_send(void *context, int32_t to, int32_t tag, const void *data, size_t nbytes,
                            void **request)
{
    struct mpi_link *link = context;
    struct mpi_message *message = new_mpi_message(link);
    if (!message)
        return fail_memory();
    message->nbytes = -1;
    int code = MPI_Isend(data, (int)nbytes, MPI_BYTE, to, link->first_tag + tag, link->comm,
                         &message->request);
    return finish_start(link, message, code, "MPI_Isend", request);
}

static rsd_status link_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                            void **request)
{
    struct mpi_link *link = context;
    struct mpi_message *message = new_mpi_message(link);
    if (!message)
        return fail_memory();
    message->nbytes = (int)nbytes;
    int code = MPI_Irecv(data, (int)nbytes, MPI_BYTE, from, link->first_tag + tag, link->comm,
                         &message->request);
    return finish_start(link, message, code, "MPI_Irecv", request);
}

/* MPI returns an error for a message that is longer than expected, but not for a shorter one. */
static rsd_status check_length(const struct mpi_message *message, const MPI_Status *status)
{
    int nbytes = 0;
    char text[120];
    MPI_Get_count(status, MPI_BYTE, &nbytes);
    if (message->nbytes < 0 || nbytes == message->nbytes)
        return RSD_OK;
    snprintf(text, sizeof text, "rank %d sent %d bytes where %d were expected", status->MPI_SOURCE,
             nbytes, message->nbytes);
    return rsd_set_error(RSD_EPEER, text);
}

static rsd_status test_message(struct mpi_message *message, int32_t *done)
{
    MPI_Status status;
    int flag = 1;
    if (message->request == MPI_REQUEST_NULL)
        return RSD_OK;
    TRY_MPI(MPI_Test(&message->request, &flag, &status), "MPI_Test");
    if (flag)
        return check_length(message, &status);
    *done = 0;
    return RSD_OK;
}

static rsd_status link_test(void *context, void *request, int32_t *done)
{
    *done = 1;
    for (struct mpi_message *message = request; message; message = message->next)
        TRY(test_message(message, done));
    if (*done)
        reuse_mpi_messages(context, request);
    return RSD_OK;
}

/* MPI can cancel a receive that is not matched, but no send. Memory of other requests may still be read or written. */
static int cancel_message(struct mpi_message *message)
{
    int ended = message->request == MPI_REQUEST_NULL; /* also after a failure */
    if (!ended && message->nbytes >= 0)
        MPI_Cancel(&message->request);
    if (!ended)
        MPI_Test(&message->request, &ended, MPI_STATUS_IGNORE);
    if (!ended)
        MPI_Request_free(&message->request);
    return ended;
}

static int32_t link_cancel(void *context, void *request)
{
    int all_ended = 1;
    for (struct mpi_message *message = request; message; message = message->next)
        all_ended = cancel_message(message) && all_ended;
    reuse_mpi_messages(context, request);
    return all_ended;
}

/* Messages in any memory that this MPI takes, with one request. If one cannot be started, the others are cancelled. */
static rsd_status link_exchange(void *context, size_t n, const rsd_device_message *messages,
                                void **request)
{
    void *all = NULL;
    for (size_t i = 0; i < n; i++) {
        const rsd_device_message *one = &messages[i];
        void *started = NULL;
        rsd_status status =
            one->sends ? link_send(context, one->peer, one->tag, one->data, one->nbytes, &started)
                       : link_recv(context, one->peer, one->tag, one->data, one->nbytes, &started);
        if (status || !started) {
            link_cancel(context, all);
            return status;
        }
        ((struct mpi_message *)started)->next = all;
        all = started;
    }
    *request = all;
    return RSD_OK;
}

/* ---- the duplicate ---- */

/* Keys of attributes. A communicator has its duplicate (MPI_COMM_NULL: it could not be created). The duplicate has
 * the number of transports created so far, and the number of its users. The values are stored in the attributes
 * themselves, without an allocation that could fail on one rank only. */
static int duplicate_key = MPI_KEYVAL_INVALID, serial_key = MPI_KEYVAL_INVALID,
           users_key = MPI_KEYVAL_INVALID;
union attribute {
    void *value;
    MPI_Comm comm;
    intptr_t number;
};
_Static_assert(sizeof(MPI_Comm) <= sizeof(void *), "a communicator fits into an attribute");

/* Adds to the number of users of a duplicate, and frees it when the last one leaves. The communicator itself is a user
 * until it is freed. */
static int add_users(MPI_Comm duplicate, int more)
{
    int found = 0;
    union attribute users = {.value = NULL};
    int code = MPI_Comm_get_attr(duplicate, users_key, &users.value, &found);
    users.number += more;
    if (code == MPI_SUCCESS && users.number > 0)
        return MPI_Comm_set_attr(duplicate, users_key, users.value);
    return code == MPI_SUCCESS ? MPI_Comm_free(&duplicate) : code;
}

static int drop_duplicate(MPI_Comm comm, int keyval, void *value, void *extra)
{
    union attribute kept = {.value = value};
    (void)comm, (void)keyval, (void)extra;
    return kept.comm == MPI_COMM_NULL ? MPI_SUCCESS : add_users(kept.comm, -1);
}

/* Tests a request until it is done or the time `end` is reached. Sets *done if it is done. */
static rsd_status wait_until(MPI_Request *request, const char *function, double end, int *done)
{
    for (;;) {
        TRY_MPI(MPI_Test(request, done, MPI_STATUS_IGNORE), function);
        if (*done || MPI_Wtime() > end)
            return RSD_OK;
        sched_yield();
    }
}

/* Waits until all ranks make their first call on a communicator. The duplicate does not exist yet, and the program
 * might receive messages on the communicator itself. So each rank sends a byte to each in a collective call. At the
 * time-out, the bytes of ranks that have not made the call are missing. */
static rsd_status wait_for_ranks(MPI_Comm comm, double timeout)
{
    static int counts[NAMED_RANKS_MOST], send_at[NAMED_RANKS_MOST], recv_at[NAMED_RANKS_MOST];
    static char own = 1, all[NAMED_RANKS_MOST]; /* after a time-out MPI may still use them */
    int n = 0, done = 0;
    MPI_Request request;
    char rank[32] = "a rank";
    MPI_Comm_size(comm, &n);
    if (n > NAMED_RANKS_MOST)
        return RSD_OK;
    for (int i = 0; i < n; i++) {
        counts[i] = 1;
        recv_at[i] = i;
        all[i] = 0;
    }
    TRY_MPI(MPI_Ialltoallv(&own, counts, send_at, MPI_BYTE, all, counts, recv_at, MPI_BYTE, comm,
                           &request),
            "MPI_Ialltoallv");
    TRY(wait_until(&request, "MPI_Ialltoallv", MPI_Wtime() + timeout, &done));
    for (int i = n - 1; i >= 0 && !done; i--)
        if (!((volatile char *)all)[i])
            snprintf(rank, sizeof rank, "rank %d", i);
    return done ? RSD_OK : fail_late(rank, timeout);
}

/* Creates the duplicate, within the time-out. Fails at once if an earlier call timed out. */
static rsd_status duplicate_comm(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    static MPI_Comm duplicate; /* after a time-out MPI may still write to it */
    static bool stuck;
    int done = 0;
    MPI_Request request;
    union attribute one = {.number = 1};
    if (stuck)
        return rsd_set_error(RSD_EPEER, "duplicating another communicator timed out");
    TRY(wait_for_ranks(comm, timeout));
    TRY_MPI(MPI_Comm_idup(comm, &duplicate, &request), "MPI_Comm_idup");
    TRY(wait_until(&request, "MPI_Comm_idup", MPI_Wtime() + timeout, &done));
    stuck = !done;
    if (stuck)
        return fail_late("a rank", timeout);
    TRY_MPI(MPI_Comm_set_errhandler(duplicate, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    TRY_MPI(MPI_Comm_set_attr(duplicate, serial_key, NULL), "MPI_Comm_set_attr");
    TRY_MPI(MPI_Comm_set_attr(duplicate, users_key, one.value), "MPI_Comm_set_attr");
    *out = duplicate;
    return RSD_OK;
}

/* Creates the duplicate. Not repeated after a time-out, since some ranks may have a duplicate and others not. */
static rsd_status make_duplicate(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    union attribute kept = {.value = NULL};
    kept.comm = MPI_COMM_NULL;
    rsd_status status = duplicate_comm(comm, timeout, &kept.comm);
    TRY_MPI(MPI_Comm_set_attr(comm, duplicate_key, kept.value), "MPI_Comm_set_attr");
    *out = kept.comm;
    return status;
}

/* Creates the keys of the attributes, once per process. */
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

/* Returns the duplicate of a communicator, and creates it in the first call. */
static rsd_status find_duplicate(MPI_Comm comm, double timeout, MPI_Comm *out)
{
    int found = 0, inter = 0;
    union attribute kept = {.value = NULL};
    if (comm == MPI_COMM_NULL)
        return rsd_set_error(RSD_EINVAL, "the communicator is MPI_COMM_NULL");
    TRY_MPI(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
    if (inter)
        return rsd_set_error(RSD_EUNSUPPORTED,
                             "intercommunicators are not supported: call MPI_Intercomm_merge");
    TRY(make_keys());
    TRY_MPI(MPI_Comm_get_attr(comm, duplicate_key, &kept.value, &found), "MPI_Comm_get_attr");
    if (!found)
        return make_duplicate(comm, timeout, out);
    if (kept.comm == MPI_COMM_NULL)
        return rsd_set_error(
            RSD_EPEER, "the first call on this communicator failed: use another communicator");
    *out = kept.comm;
    return RSD_OK;
}

/* Returns the first tag of the next transport. All ranks count transports in the same order. */
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

/* Frees a link, and its duplicate if this was the last user. Accepts NULL. */
static void free_link(void *context)
{
    struct mpi_link *link = context;
    int finalized = 0;
    if (!link)
        return;
    MPI_Finalized(&finalized);
    if (!finalized)
        add_users(link->comm, -1);
    for (struct mpi_block *block = link->blocks, *next; block; block = next) {
        next = block->next;
        free(block);
    }
    free(link);
}

/* Fills in a transport over a duplicate of the communicator, with 64 tags of its own. */
static rsd_status make_transport(MPI_Comm comm, double timeout, rsd_transport *transport)
{
    int initialized = 0, finalized = 0, first_tag = 0;
    MPI_Comm duplicate = MPI_COMM_NULL;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized)
        return rsd_set_error(RSD_EINVAL, "MPI is not initialized");
    TRY(find_duplicate(comm, timeout, &duplicate));
    TRY(next_tags(duplicate, &first_tag));
    struct mpi_link *link = calloc(1, sizeof *link);
    if (!link)
        return fail_memory();
    link->comm = duplicate;
    link->first_tag = first_tag;
    add_users(duplicate, 1);
    *transport = (rsd_transport){.struct_nbytes = sizeof *transport,
                                 .context = link,
                                 .send = link_send,
                                 .recv = link_recv,
                                 .test = link_test,
                                 .cancel = link_cancel,
                                 .device = -1};
    if (MPIX_Query_cuda_support && MPIX_Query_cuda_support())
        transport->exchange = link_exchange;
    MPI_Comm_rank(duplicate, &transport->rank);
    MPI_Comm_size(duplicate, &transport->nranks);
    return RSD_OK;
}

rsd_status rsd_mpi_transport(MPI_Comm comm, rsd_transport *transport)
{
    rsd_transport made;
    size_t nbytes = transport->struct_nbytes;
    if (nbytes < offsetof(rsd_transport, release))
        return rsd_set_error(RSD_EINVAL,
                             "rsd_transport.struct_nbytes should be sizeof(rsd_transport)");
    TRY(make_transport(comm, default_timeout, &made));
    memcpy(transport, &made, nbytes < sizeof made ? nbytes : sizeof made);
    transport->struct_nbytes = nbytes;
    return RSD_OK;
}

rsd_status rsd_mpi_transport_f(int32_t fortran_comm, rsd_transport *transport)
{
    return rsd_mpi_transport(MPI_Comm_f2c((MPI_Fint)fortran_comm), transport);
}

void rsd_mpi_transport_free(rsd_transport *transport)
{
    if (!transport)
        return;
    free_link(transport->context);
    transport->context = NULL;
}

/* ---- binding ---- */

/* Returns the time-out in options of any version. */
static double timeout_of(const rsd_exchange_options *given)
{
    rsd_exchange_options options = {.timeout = 0};
    if (given)
        memcpy(&options, given,
               given->struct_nbytes < sizeof options ? given->struct_nbytes : sizeof options);
    return options.timeout > 0 ? options.timeout : default_timeout;
}

rsd_status rsd_bind_mpi_many(int64_t nplans, const rsd_plan *const *plans,
                             const rsd_bind_options *bind, MPI_Comm comm,
                             const rsd_exchange_options *options, rsd_exec **exec)
{
    rsd_transport transport = {.context = NULL};
    TRY(make_transport(comm, timeout_of(options), &transport));
    transport.release = free_link;
    rsd_status status = rsd_bind_transport(nplans, plans, bind, &transport, options, exec);
    if (status)
        free_link(transport.context);
    return status;
}

rsd_status rsd_bind_mpi(const rsd_plan *plan, MPI_Comm comm, const rsd_exchange_options *options,
                        rsd_exec **exec)
{
    return rsd_bind_mpi_many(1, &plan, NULL, comm, options, exec);
}
