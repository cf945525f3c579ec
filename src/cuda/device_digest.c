/* device_digest.c - the remainders of memory on a device, computed there.
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

/* Computes the powers of x by which remainders are moved: powers[(crc * 8 + k) * 256 + b] is x^(8 * b * 256^k). */
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

/* Makes the tables of digests, once per device. */
static rsd_status upload_powers(struct cuda_device *device)
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
        status = device_upload(device, address, made, nbytes);
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
        status = upload_powers(device);
    pthread_mutex_unlock(&device->lock);
    TRY(status);
    CU_TRY(cuFuncSetAttribute, *function, CU_FUNCTION_MAX_DYNAMIC_SHARED, SHARED_NBYTES);
    return RSD_OK;
}

/* The tables of one launch. */
struct digest_tables {
    struct gpu_digest *digests;
    struct gpu_loop *loops;
    const void **arrays;
    size_t n, nloops;
    int64_t ntiles;
};

/* Makes the tables of a launch: one entry for each of the rows, with its loops and its address. */
static rsd_status make_tables(const struct digest_rows *rows, size_t n,
                              struct digest_tables *tables)
{
    size_t nloops = 0, next = 0;
    for (size_t i = 0; i < n; i++)
        nloops += (size_t)rows[i].nloops;
    tables->digests = mem_new(n, sizeof *tables->digests);
    tables->loops = mem_new(nloops, sizeof *tables->loops);
    tables->arrays = mem_new(n, sizeof *tables->arrays);
    if (!tables->digests || !tables->loops || !tables->arrays)
        return RSD_ENOMEM;
    if (n > UINT32_MAX || nloops > UINT32_MAX)
        return fail(RSD_ELIMIT, "more than 2^32 rows for a GPU");
    tables->n = n;
    tables->nloops = nloops;
    for (size_t i = 0; i < n; i++) {
        struct gpu_digest *digest = &tables->digests[i];
        *digest = (struct gpu_digest){.run = rows[i].run,
                                      .nrows = 1,
                                      .after = rows[i].after,
                                      .first_tile = tables->ntiles,
                                      .array = (gpu_u32)i,
                                      .first_loop = (gpu_u32)next,
                                      .nloops = (gpu_u32)rows[i].nloops,
                                      .result = rows[i].result};
        tables->arrays[i] = rows[i].address;
        for (int32_t k = 0; k < rows[i].nloops; k++) {
            const struct loop *loop = &rows[i].loops[k];
            tables->loops[next++] =
                (struct gpu_loop){loop->count, loop->src_stride, loop->dst_stride};
            digest->nrows *= loop->count;
        }
        tables->ntiles += gpu_digest_ntiles(digest, tables->loops);
    }
    return RSD_OK;
}

static void drop_tables(struct digest_tables *tables)
{
    mem_free(tables->digests);
    mem_free(tables->loops);
    mem_free(tables->arrays);
}

/* Copies the tables into the ring of the queue, and launches the kernel. */
static rsd_status launch_digests(struct cuda_queue *queue, struct digest_tables *tables,
                                 cu_address results)
{
    const struct driver *cu = queue->device->cu;
    size_t digests_nbytes = tables->n * sizeof *tables->digests,
           loops_nbytes = tables->nloops * sizeof *tables->loops,
           arrays_nbytes = tables->n * sizeof *tables->arrays;
    char *at;
    cu_function function;
    TRY(prepare_digests(queue->device, &function));
    TRY(queue_take_ring(queue, (digests_nbytes + loops_nbytes + arrays_nbytes + 15) / 16 * 16,
                        &at));
    cu_address where = (cu_address)(uintptr_t)at, loops_at = where + digests_nbytes,
               arrays_at = loops_at + loops_nbytes, powers = queue->device->digest_tables,
               nibbles = powers + NPOWERS * sizeof(gpu_u64);
    uint32_t count = (uint32_t)tables->n;
    memcpy(at, tables->digests, digests_nbytes);
    if (loops_nbytes)
        memcpy(at + digests_nbytes, tables->loops, loops_nbytes);
    memcpy(at + digests_nbytes + loops_nbytes, tables->arrays, arrays_nbytes);
    void *parameters[] = {&where,  &count,   &loops_at, &arrays_at,
                          &powers, &nibbles, &results,  &tables->ntiles};
    unsigned nblocks =
        (unsigned)min_i64(ceil_div(tables->ntiles, NTHREADS / 32), queue->device->nprocessors);
    CU_TRY(cuLaunchKernel, function, nblocks, 1, 1, NTHREADS, 1, 1, SHARED_NBYTES, queue->stream,
           parameters, NULL);
    return RSD_OK;
}

/* Launches, waits, and adds what the device computed to the results. */
static rsd_status run_digests(struct cuda_queue *queue, struct digest_tables *tables,
                              uint64_t (*results)[2], size_t nresults)
{
    const struct driver *cu = queue->device->cu;
    size_t nbytes = nresults * sizeof *results;
    cu_address sums;
    uint64_t(*found)[2] = mem_new(nresults, sizeof *found);
    if (!found)
        return RSD_ENOMEM;
    rsd_status status = driver_check(cu->cuMemAlloc(&sums, nbytes), "cuMemAlloc");
    if (!status) {
        status =
            driver_check(cu->cuMemsetD8Async(sums, 0, nbytes, queue->stream), "cuMemsetD8Async");
        if (!status)
            status = launch_digests(queue, tables, sums);
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

rsd_status cuda_digest(struct memory_queue *base, const struct digest_rows *rows, size_t n,
                       uint64_t (*results)[2], size_t nresults)
{
    struct cuda_queue *queue = cuda_queue_of(base);
    struct digest_tables tables = {0};
    if (n == 0)
        return RSD_OK;
    rsd_status status = make_tables(rows, n, &tables);
    if (!status)
        status = device_enter(queue->device);
    if (!status) {
        status = run_digests(queue, &tables, results, nresults);
        device_leave(queue->device);
    }
    drop_tables(&tables);
    return status;
}
