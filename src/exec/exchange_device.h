/* exchange_device.h - an exec between ranks whose arrays lie on a device. Private to exec. */
#ifndef EXCHANGE_DEVICE_H
#define EXCHANGE_DEVICE_H

#include "device_arrays.h"
#include "exchange.h"

/* ---- exchange_rounds.c ---- */

struct rounds;

/* Makes the buffers of messages that a transport takes from a device, and moves the channels there. *rounds stays NULL
 * if there are none. */
rsd_status rounds_start(struct exchange *x, struct memory_device *device, struct rounds **rounds);
void rounds_free(struct rounds *rounds, bool lost); /* accepts NULL */
/* The rest accepts NULL too. */
void rounds_begin_stage(struct rounds *rounds);
rsd_status rounds_progress(struct exchange *x, struct rounds *rounds, bool *moved);
/* Returns false if the transport may still use the buffers. */
bool rounds_cancel(struct exchange *x, struct rounds *rounds);

/* ---- device_share.c ---- */

struct array_export;
struct device_mapping;

/* What this rank exports. Starts as {0}. */
struct device_exports {
    struct array_export *list;
    struct memory_pieces pieces;
    struct shared_segment segment;
    char why[160]; /* why an array could not be exported */
};

/* Exports the arrays of the current run. An array that cannot be exported is not an error. */
rsd_status device_export_arrays(struct exchange *x, const struct device_arrays *arrays,
                                struct device_exports *exports);
bool device_exports_array(const struct device_exports *exports, int64_t number);
void device_exports_drop(struct device_exports *exports);

/* The device memory of another rank, mapped into this process. Starts as {0}. */
struct device_imports {
    const void **addresses; /* of its arrays; NULL: not on a device */
    struct device_mapping *list;
    size_t n, capacity;
    uint64_t version; /* of its table */
    struct shared_segment table;
    struct shared_segment_name table_name;
};

/* Maps the arrays of a rank, if its table has changed. */
rsd_status device_import_arrays(const struct host_rank *host, struct memory_device *device,
                                struct device_imports *imports);
void device_imports_drop(struct device_imports *imports);

#endif
