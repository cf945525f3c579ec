/* digest.c - the remainders of memory on a device, computed there.
 *
 * Two tables are made once for each device: powers of x, by which the remainder of a run is moved to its
 * place in the tensor, and the products of nibbles with x^2048, by which a warp steps over 256 bytes.
 */
#include "queue.h"
#include "tables.h"

enum {
    NTHREADS = 1024,
    NPOWERS = GPU_NCRC * 8 * 256,
    NNIBBLES = GPU_NCRC * 16 * 16,
    SHARED_NBYTES = NNIBBLES * 32 * 8,
    CU_FUNCTION_MAX_DYNAMIC_SHARED = 8
};

static const gpu_u64 one = (gpu_u64)1 << 63;

static void make_powers(gpu_u64 *powers)
{
    for (int crc = 0; crc < GPU_NCRC; crc++) {
        gpu_u64 base = one >> 8; /* x^8 */
        for (int k = 0; k < 8; k++, powers += 256) {
            powers[0] = one;
            for (int b = 1; b < 256; b++)
                powers[b] = gpu_times(crc, powers[b - 1], base);
            base = gpu_times(crc, powers[255], base);
        }
    }
}

static void make_nibbles(const gpu_u64 *powers, gpu_u64 *nibbles)
{
    for (int crc = 0; crc < GPU_NCRC; crc++)
        for (int j = 0; j < 16; j++)
            for (gpu_u64 value = 0; value < 16; value++)
                *nibbles++ = gpu_shift(crc, powers, value << 4 * j, 256);
}

static rsd_status upload_tables(struct cuda_device *device)
{
    const struct driver *cu = device->cu;
    size_t nbytes = (NPOWERS + NNIBBLES) * sizeof(gpu_u64);
    cu_address address = 0;
    gpu_u64 *made = mem_new(NPOWERS + NNIBBLES, sizeof *made);
    if (!made)
        return RSD_ENOMEM;
    make_powers(made);
    make_nibbles(made, made + NPOWERS);
    rsd_status status = driver_check(cu->cuMemAlloc(&address, nbytes), "cuMemAlloc");
    if (!status)
        status = driver_check(cu->cuMemcpyHtoD(address, made, nbytes), "cuMemcpyHtoD");
    mem_free(made);
    TRY(status);
    device->digest_tables = address;
    return RSD_OK;
}

/* The kernel and its tables, made at the first use. */
static rsd_status prepare_digests(struct cuda_device *device, cu_function *function)
{
    const struct driver *cu = device->cu;
    rsd_status status = RSD_OK;
    TRY(device_kernel(device, KERNEL_DIGEST, function));
    pthread_mutex_lock(&device->lock);
    if (!device->digest_tables)
        status = upload_tables(device);
    pthread_mutex_unlock(&device->lock);
    TRY(status);
    CU_TRY(cuFuncSetAttribute, *function, CU_FUNCTION_MAX_DYNAMIC_SHARED, SHARED_NBYTES);
    return RSD_OK;
}

static int64_t number_tiles(struct gpu_digest *digests, size_t n, const struct gpu_loop *loops)
{
    int64_t next = 0;
    for (size_t i = 0; i < n; i++) {
        digests[i].first_tile = next;
        next += gpu_digest_ntiles(&digests[i], loops);
    }
    return next;
}

/* Tables and results in the ring, which kernels and the CPU both see. */
static rsd_status launch_digests(struct cuda_queue *queue, const struct gpu_digest *digests,
                                 size_t n, const struct gpu_loop *loops, size_t nloops,
                                 const void *const *arrays, size_t narrays, int64_t ntiles,
                                 cu_address results)
{
    const struct driver *cu = queue->device->cu;
    size_t digests_nbytes = n * sizeof *digests, loops_nbytes = nloops * sizeof *loops,
           arrays_nbytes = narrays * sizeof *arrays;
    char *at;
    cu_function function;
    TRY(prepare_digests(queue->device, &function));
    TRY(queue_take_ring(queue, digests_nbytes + loops_nbytes + arrays_nbytes, &at));
    cu_address where = (cu_address)(uintptr_t)at, loops_at = where + digests_nbytes,
               arrays_at = loops_at + loops_nbytes, powers = queue->device->digest_tables,
               nibbles = powers + NPOWERS * sizeof(gpu_u64);
    uint32_t count = (uint32_t)n;
    memcpy(at, digests, digests_nbytes);
    if (loops_nbytes)
        memcpy(at + digests_nbytes, loops, loops_nbytes);
    memcpy(at + digests_nbytes + loops_nbytes, arrays, arrays_nbytes);
    void *parameters[] = {&where,  &count,   &loops_at, &arrays_at,
                          &powers, &nibbles, &results,  &ntiles};
    unsigned nblocks =
        (unsigned)min_i64(ceil_div(ntiles, NTHREADS / 32), queue->device->nprocessors);
    CU_TRY(cuLaunchKernel, function, nblocks, 1, 1, NTHREADS, 1, 1, SHARED_NBYTES, queue->stream,
           parameters, NULL);
    return RSD_OK;
}

static rsd_status run_digests(struct cuda_queue *queue, struct gpu_digest *digests, size_t n,
                              const struct gpu_loop *loops, size_t nloops,
                              const void *const *arrays, size_t narrays, uint64_t (*results)[2],
                              size_t nresults)
{
    const struct driver *cu = queue->device->cu;
    size_t nbytes = nresults * sizeof *results;
    cu_address sums;
    int64_t ntiles = number_tiles(digests, n, loops);
    uint64_t(*found)[2] = mem_new(nresults, sizeof *found);
    if (!found)
        return RSD_ENOMEM;
    rsd_status status = driver_check(cu->cuMemAlloc(&sums, nbytes), "cuMemAlloc");
    if (!status) {
        status =
            driver_check(cu->cuMemsetD8Async(sums, 0, nbytes, queue->stream), "cuMemsetD8Async");
        if (!status)
            status =
                launch_digests(queue, digests, n, loops, nloops, arrays, narrays, ntiles, sums);
        if (!status)
            status = driver_check(cu->cuStreamSynchronize(queue->stream), "cuStreamSynchronize");
        if (!status)
            status = driver_check(cu->cuMemcpyDtoH(found, sums, nbytes), "cuMemcpyDtoH");
        cu->cuMemFree(sums);
    }
    for (size_t i = 0; i < nresults && !status; i++) {
        results[i][0] ^= found[i][GPU_ECMA];
        results[i][1] ^= found[i][GPU_JONES];
    }
    mem_free(found);
    return status;
}

rsd_status cuda_digest(struct cuda_queue *queue, struct gpu_digest *digests, size_t n,
                       const struct gpu_loop *loops, size_t nloops, const void *const *arrays,
                       size_t narrays, uint64_t (*results)[2], size_t nresults)
{
    if (n == 0)
        return RSD_OK;
    TRY(device_enter(queue->device));
    rsd_status status =
        run_digests(queue, digests, n, loops, nloops, arrays, narrays, results, nresults);
    device_leave(queue->device);
    return status;
}
