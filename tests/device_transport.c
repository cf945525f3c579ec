/* device_transport.c - see device_transport.h. */
#include "device_transport.h"
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

/* A message of the base transport: one in host memory, or the copy of one on the device behind its number. */
struct wrapped_message {
    void *request;
    bool done;
    char *copy;
    void *device; /* NULL: sent, or in host memory */
    size_t nbytes;
    int64_t number;
    int32_t peer;
};

struct wrapped_request {
    size_t n;
    struct wrapped_message messages[];
};

static struct wrapped_request *new_request(size_t n)
{
    struct wrapped_request *made = calloc(1, sizeof *made + n * sizeof(struct wrapped_message));
    if (made)
        made->n = n;
    return made;
}

static rsd_status wrapped_send(void *context, int32_t to, int32_t tag, const void *data,
                               size_t nbytes, void **request)
{
    struct device_transport *t = context;
    struct wrapped_request *made = new_request(1);
    if (gpu_is_device_memory(data))
        return rsd_set_error(RSD_EINVAL, "a message on the device was sent as one of the host");
    *request = made;
    return t->base.send(t->base.context, to, tag, data, nbytes, &made->messages[0].request);
}

static rsd_status wrapped_recv(void *context, int32_t from, int32_t tag, void *data, size_t nbytes,
                               void **request)
{
    struct device_transport *t = context;
    struct wrapped_request *made = new_request(1);
    *request = made;
    return t->base.recv(t->base.context, from, tag, data, nbytes, &made->messages[0].request);
}

static rsd_status start_message(struct device_transport *t, const rsd_device_message *given,
                                int64_t number, struct wrapped_message *message)
{
    size_t nbytes = t->number_nbytes + given->nbytes;
    if (!gpu_is_device_memory(given->data))
        return rsd_set_error(RSD_EINVAL, "a message of exchange is not on the device");
    *message = (struct wrapped_message){
        .copy = malloc(nbytes), .nbytes = given->nbytes, .number = number, .peer = given->peer};
    t->nmessages++;
    if (given->sends) {
        memcpy(message->copy, &number, t->number_nbytes);
        gpu_get(ON_GPU, message->copy + t->number_nbytes, given->data, given->nbytes);
        return t->base.send(t->base.context, given->peer, given->tag, message->copy, nbytes,
                            &message->request);
    }
    message->device = given->data;
    return t->base.recv(t->base.context, given->peer, given->tag, message->copy, nbytes,
                        &message->request);
}

static rsd_status wrapped_exchange(void *context, size_t n, const rsd_device_message *messages,
                                   void **request)
{
    struct device_transport *t = context;
    struct wrapped_request *made = new_request(n);
    bool called[DEVICE_TRANSPORT_RANKS] = {false};
    if (t->fails)
        return rsd_set_error(RSD_EIO, "exchange fails");
    for (size_t i = 0; i < n; i++) {
        int32_t peer = messages[i].peer;
        t->ncalls[peer] += !called[peer];
        called[peer] = true;
        rsd_status status = start_message(t, &messages[i], t->ncalls[peer], &made->messages[i]);
        if (status)
            return status;
    }
    *request = made;
    return RSD_OK;
}

/* Copies a message that has arrived to the device. */
static rsd_status take_message(const struct device_transport *t, struct wrapped_message *message)
{
    int64_t number = message->number;
    if (!message->device)
        return RSD_OK;
    memcpy(&number, message->copy, t->number_nbytes);
    gpu_put(ON_GPU, message->device, message->copy + t->number_nbytes, message->nbytes);
    return number == message->number ? RSD_OK
                                     : rsd_set_error(RSD_EPEER, "calls of exchange do not match");
}

static rsd_status wrapped_test(void *context, void *request, int32_t *done)
{
    struct device_transport *t = context;
    struct wrapped_request *made = request;
    *done = 1;
    for (size_t i = 0; i < made->n; i++) {
        struct wrapped_message *message = &made->messages[i];
        int32_t now = 1;
        if (message->done)
            continue;
        rsd_status status = t->base.test(t->base.context, message->request, &now);
        message->done = now;
        if (!status && now)
            status = take_message(t, message);
        if (status)
            return status;
        *done = *done && now;
    }
    for (size_t i = 0; *done && i < made->n; i++)
        free(made->messages[i].copy);
    if (*done)
        free(made);
    return RSD_OK;
}

/* Copies that the base transport may still use are not freed. */
static int32_t wrapped_cancel(void *context, void *request)
{
    struct device_transport *t = context;
    struct wrapped_request *made = request;
    int32_t ended = 1;
    for (size_t i = 0; i < made->n; i++)
        if (!made->messages[i].done && !t->base.cancel(t->base.context, made->messages[i].request))
            ended = made->messages[i].copy != NULL && ended;
    return ended;
}

rsd_transport device_transport_of(struct device_transport *wrapped, const rsd_transport *base,
                                  int32_t device)
{
    *wrapped =
        (struct device_transport){.base = *base, .number_nbytes = device < 0 ? 0 : sizeof(int64_t)};
    return (rsd_transport){.struct_nbytes = sizeof(rsd_transport),
                           .context = wrapped,
                           .rank = base->rank,
                           .nranks = base->nranks,
                           .send = wrapped_send,
                           .recv = wrapped_recv,
                           .test = wrapped_test,
                           .cancel = wrapped_cancel,
                           .exchange = wrapped_exchange,
                           .device = device};
}
