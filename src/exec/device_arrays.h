/* device_arrays.h - the arrays of a run, for kernels of a device. Private to exec. */
#ifndef DEVICE_ARRAYS_H
#define DEVICE_ARRAYS_H

#include "run_arrays.h"

/* Opens the device whose kernels must do a run of an exec. *device is NULL if the CPU can do it. If the exec has a stream,
 * it is the device of the stream, and managed memory is left to kernels too. */
rsd_status device_arrays_choose(const struct run_arrays *arrays, const struct rsd_exec *exec,
                                struct memory_device **device);

/* Lets kernels of a device use an array of this process, if it lies on another device. EUNSUPPORTED: they cannot. */
rsd_status device_enable_access(struct memory_device *device, const struct memory_place *place,
                                const void *address, uint64_t nbytes);

/* Whole pages of pageable memory. */
struct page_range {
    char *begin;
    size_t nbytes;
};

/* What is kept between runs. */
struct device_arrays {
    struct memory_device *device;
    const void **addresses;      /* of the current run, by number */
    struct memory_place *places; /* the same */
    struct page_range *pinned;   /* pageable memory that is pinned for the current run */
    size_t npinned;
};

rsd_status device_arrays_new(struct memory_device *device, const struct run_arrays *arrays,
                             struct device_arrays *out);
/* Makes the arrays of a run usable by kernels. EUNSUPPORTED: the device cannot use one of them. */
rsd_status device_arrays_prepare(struct device_arrays *there, const struct run_arrays *arrays);
/* After the run. Nothing may still be queued that uses the arrays. */
void device_arrays_release(struct device_arrays *there);
void device_arrays_drop(struct device_arrays *there);

#endif
