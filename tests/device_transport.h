/* device_transport.h - a transport that insists on memory of a CUDA device, as NCCL does, for tests on one host. */
#ifndef DEVICE_TRANSPORT_H
#define DEVICE_TRANSPORT_H

#include "reshard.h"

#include <stdbool.h>

enum { DEVICE_TRANSPORT_RANKS = 16 };

/* Wraps a transport, which carries the bytes. If it takes memory of one device only, a message has a number in front of
 * it: how often its ranks have exchanged messages. So calls of exchange that do not match are an error. */
struct device_transport {
    rsd_transport base;
    size_t number_nbytes;
    int64_t ncalls[DEVICE_TRANSPORT_RANKS]; /* with messages from or to each rank */
    int64_t nmessages;
    bool fails; /* the next exchange does */
};

/* Returns the table. `device` is that of rsd_transport. The wrapped transport is not released with it. */
rsd_transport device_transport_of(struct device_transport *wrapped, const rsd_transport *base,
                                  int32_t device);

#endif
