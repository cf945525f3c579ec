/* device_arrays.c - the arrays of a run, for kernels of a device.
 *
 * Kernels use memory of their device, of devices that it can access, managed memory and pinned memory. Pageable
 * arrays are pinned for the time of the run.
 */
#include "device_arrays.h"

#include <assert.h>
#include <unistd.h>

/* Whether a run uses an array. */
static bool uses_array(const struct run_arrays *arrays, int64_t number)
{
    return arrays->spans[number].used && arrays->spans[number].nbytes > 0;
}

rsd_status device_arrays_choose(const struct run_arrays *arrays, const struct rsd_exec *exec,
                                struct memory_device **device)
{
    *device = NULL;
    if (!memory_has_devices())
        return RSD_OK;
    for (int64_t i = 0; i < arrays->n; i++) {
        const void *address = arrays->addresses[i];
        if (!uses_array(arrays, i) || !address)
            continue;
        struct memory_place place = memory_find_place(address);
        if (!place.for_host || (exec->has_stream && place.device >= 0))
            return place.kind->open_stream_device(exec->stream, place.device, device);
    }
    return RSD_OK;
}

rsd_status device_arrays_new(struct memory_device *device, const struct run_arrays *arrays,
                             struct device_arrays *out)
{
    size_t narrays = (size_t)arrays->n;
    struct device_arrays there = {.device = device};
    if (narrays > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 arrays for a device");
    there.addresses = mem_new(narrays, sizeof *there.addresses);
    there.places = mem_new(narrays, sizeof *there.places);
    there.pinned = mem_new(narrays, sizeof *there.pinned);
    if (!there.addresses || !there.places || !there.pinned) {
        device_arrays_drop(&there);
        return RSD_ENOMEM;
    }
    *out = there;
    return RSD_OK;
}

void device_arrays_release(struct device_arrays *there)
{
    while (there->npinned > 0)
        there->device->kind->unpin(there->device, there->pinned[--there->npinned].begin);
}

void device_arrays_drop(struct device_arrays *there)
{
    device_arrays_release(there);
    mem_free(there->addresses);
    mem_free(there->places);
    mem_free(there->pinned);
    *there = (struct device_arrays){0};
}

rsd_status device_enable_access(struct memory_device *device, const struct memory_place *place,
                                const void *address, uint64_t nbytes)
{
    if (place->device < 0 || place->for_host)
        return RSD_OK;
    if (place->kind != device->kind)
        return fail(RSD_EUNSUPPORTED, "%s device %d cannot access the memory of %s device %d",
                    device->kind->name, device->ordinal, place->kind->name, place->device);
    return device->kind->enable_access(device, place->device, address, (size_t)nbytes);
}

/* Adds the pages of an array. Arrays come in the order of their addresses. */
static void add_pages(struct device_arrays *there, const void *address, uint64_t nbytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    char *begin = (char *)without_const(address) - (uintptr_t)address % page;
    size_t n = ((uintptr_t)address + nbytes - (uintptr_t)begin + page - 1) / page * page;
    assert(there->pinned); /* it has one range per array */
    struct page_range *last = there->npinned ? &there->pinned[there->npinned - 1] : NULL;
    if (!last || begin >= last->begin + last->nbytes)
        there->pinned[there->npinned++] = (struct page_range){begin, n};
    else if (begin + n > last->begin + last->nbytes)
        last->nbytes = (size_t)(begin + n - last->begin);
}

/* Pins the pages that were listed. On failure none is pinned. */
static rsd_status pin_pages(struct device_arrays *there)
{
    size_t wanted = there->npinned;
    for (there->npinned = 0; there->npinned < wanted; there->npinned++) {
        const struct page_range *range = &there->pinned[there->npinned];
        rsd_status status = there->device->kind->pin(there->device, range->begin, range->nbytes);
        if (status) {
            device_arrays_release(there);
            return fail_in(status, "an array in pageable memory: ");
        }
    }
    return RSD_OK;
}

rsd_status device_arrays_prepare(struct device_arrays *there, const struct run_arrays *arrays)
{
    device_arrays_release(there);
    rsd_status status = RSD_OK;
    for (int64_t i = 0; i < arrays->n && !status; i++) {
        int64_t number = arrays->order[i];
        const void *address = arrays->addresses[number];
        there->addresses[number] = address;
        there->places[number] = (struct memory_place){.device = -1};
        if (!uses_array(arrays, number))
            continue;
        there->places[number] = memory_find_place(address);
        uint64_t nbytes = arrays->spans[number].nbytes;
        status = device_enable_access(there->device, &there->places[number], address, nbytes);
        if (!there->places[number].for_kernels)
            add_pages(there, address, nbytes);
    }
    if (status)
        there->npinned = 0; /* nothing is pinned yet */
    return status ? status : pin_pages(there);
}
