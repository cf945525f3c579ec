/* device_share.c - device memory that the ranks of a host export to each other.
 *
 * Each rank has a table in shared memory of its own: where its arrays lie, and what another process needs to map the
 * allocations that they lie in. The table has a version, which changes when an array moves; it only changes between
 * runs. Mappings of other ranks' memory are kept as long as one of their last tables names them.
 *
 *     | header | one entry per array | pieces of allocations ... |
 */
#include "exchange_device.h"

#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

struct export_header {
    uint64_t narrays, npieces;
};

/* An array in device memory: npieces pieces from first_piece on, and its offset in the first of them. */
struct array_export {
    uint64_t address, allocation; /* in its own process */
    uint64_t first_piece, npieces, offset;
};

/* ---- exporting ---- */

/* Arrays that are not sent may lie elsewhere in every run. */
static bool is_unchanged(const struct device_exports *exports, const struct device_arrays *arrays,
                         const struct run_arrays *run)
{
    if (!exports->list)
        return false;
    for (int64_t i = 0; i < run->n; i++)
        if (run->spans[i].sent &&
            (exports->list[i].address != (uint64_t)(uintptr_t)arrays->addresses[i] ||
             exports->list[i].allocation != arrays->places[i].allocation))
            return false;
    return true;
}

static bool is_device_memory(const struct memory_place *place)
{
    return place->device >= 0 && !place->for_host;
}

/* Fills the lists. An array that is not sent, or cannot be exported, has no pieces. */
static rsd_status list_exports(struct device_exports *exports, const struct device_arrays *arrays,
                               const struct run_arrays *run)
{
    struct memory_device *device = arrays->device;
    for (int64_t i = 0; i < run->n; i++) {
        struct array_export *one = &exports->list[i];
        const struct array_span *span = &run->spans[i];
        *one = (struct array_export){.address = (uint64_t)(uintptr_t)arrays->addresses[i],
                                     .allocation = arrays->places[i].allocation,
                                     .first_piece = exports->pieces.n};
        if (!span->sent || !is_device_memory(&arrays->places[i]))
            continue;
        rsd_status status = device->kind->export_range(
            device, arrays->addresses[i], (size_t)span->nbytes, &exports->pieces, &one->offset);
        if (status == RSD_ENOMEM)
            return status;
        if (status)
            snprintf(exports->why, sizeof exports->why, "%s", rsd_error());
        one->npieces = exports->pieces.n - one->first_piece;
    }
    return RSD_OK;
}

/* Puts the lists into shared memory, into a larger segment if they need one. */
static rsd_status publish_exports(struct exchange *x, struct device_exports *exports)
{
    struct export_header header = {(uint64_t)x->arrays.n, exports->pieces.n};
    size_t arrays_nbytes = (size_t)header.narrays * sizeof *exports->list,
           pieces_nbytes = exports->pieces.n * sizeof *exports->pieces.list,
           nbytes = sizeof header + arrays_nbytes + pieces_nbytes;
    if (!exports->segment.base || shared_segment_capacity(&exports->segment) < nbytes) {
        shared_segment_drop(&exports->segment);
        TRY(shared_segment_new(2 * nbytes, &exports->segment));
    }
    char *at = shared_segment_data(&exports->segment);
    memcpy(at, &header, sizeof header);
    memcpy(at + sizeof header, exports->list, arrays_nbytes);
    if (pieces_nbytes)
        memcpy(at + sizeof header + arrays_nbytes, exports->pieces.list, pieces_nbytes);
    x->host->exported->segment = shared_segment_name(&exports->segment);
    atomic_fetch_add_explicit(&x->host->exported->version, 1, memory_order_release);
    return RSD_OK;
}

rsd_status device_export_arrays(struct exchange *x, const struct device_arrays *arrays,
                                struct device_exports *exports)
{
    if (!x->host || is_unchanged(exports, arrays, &x->arrays))
        return RSD_OK;
    if (!exports->list)
        exports->list = mem_new((size_t)x->arrays.n, sizeof *exports->list);
    if (!exports->list)
        return RSD_ENOMEM;
    struct memory_pieces before = exports->pieces;
    exports->pieces = (struct memory_pieces){0};
    rsd_status status = list_exports(exports, arrays, &x->arrays);
    if (!status)
        status = publish_exports(x, exports);
    memory_pieces_drop(&before); /* after those of this run, which are often the same */
    if (status) {                /* the next run tries again */
        mem_free(exports->list);
        exports->list = NULL;
    }
    return status;
}

bool device_exports_array(const struct device_exports *exports, int64_t number)
{
    return exports->list && exports->list[number].npieces > 0;
}

void device_exports_drop(struct device_exports *exports)
{
    shared_segment_drop(&exports->segment);
    memory_pieces_drop(&exports->pieces);
    mem_free(exports->list);
    *exports = (struct device_exports){0};
}

/* ---- importing ---- */

/* A mapping of consecutive pieces of another process. */
struct device_mapping {
    struct memory_mapping *mapping;
    uint64_t first, last, npieces; /* the first and last numbers of the pieces */
    uint64_t nbytes, version;      /* version: of the table that named it last */
};

void device_imports_drop(struct device_imports *imports)
{
    for (size_t i = 0; i < imports->n; i++)
        imports->list[i].mapping->kind->unmap(imports->list[i].mapping);
    mem_free(imports->list);
    mem_free(imports->addresses);
    shared_segment_drop(&imports->table);
    *imports = (struct device_imports){0};
}

/* Returns the mapping of these pieces. Maps them if that was not done in an earlier run. */
static rsd_status find_device_mapping(struct device_imports *imports, struct memory_device *device,
                                      const struct memory_piece *pieces, uint64_t npieces,
                                      const struct device_mapping **out)
{
    struct device_mapping wanted = {.first = pieces[0].id,
                                    .last = pieces[npieces - 1].id,
                                    .npieces = npieces,
                                    .version = imports->version};
    for (uint64_t i = 0; i < npieces; i++)
        wanted.nbytes += pieces[i].nbytes;
    for (size_t i = 0; i < imports->n; i++) {
        struct device_mapping *one = &imports->list[i];
        if (one->first == wanted.first && one->last == wanted.last &&
            one->npieces == wanted.npieces && one->nbytes == wanted.nbytes) {
            one->version = wanted.version;
            *out = one;
            return RSD_OK;
        }
    }
    TRY(GROW(imports->list, imports->capacity, imports->n + 1));
    TRY(device->kind->import_range(device, pieces, (size_t)npieces, &wanted.mapping));
    imports->list[imports->n] = wanted;
    *out = &imports->list[imports->n++];
    return RSD_OK;
}

/* Frees the mappings that the last KEPT_VERSIONS tables do not name. Allocators return memory in turns, and to map it
 * takes longer than a small move. */
static void drop_old_mappings(struct device_imports *imports)
{
    enum { KEPT_VERSIONS = 4 };
    size_t kept = 0;
    for (size_t i = 0; i < imports->n; i++)
        if (imports->version - imports->list[i].version < KEPT_VERSIONS)
            imports->list[kept++] = imports->list[i];
        else
            imports->list[i].mapping->kind->unmap(imports->list[i].mapping);
    imports->n = kept;
}

/* Maps one array. What its owner says is checked against the size of the array and of the mapping. */
static rsd_status import_array(struct device_imports *imports, struct memory_device *device,
                               const struct array_export *one, const struct memory_piece *pieces,
                               uint64_t npieces, uint64_t nbytes, const void **address)
{
    const struct device_mapping *mapping;
    if (one->npieces == 0 || one->first_piece > npieces ||
        one->npieces > npieces - one->first_piece)
        return fail(RSD_EPEER, "invalid table of device memory");
    if (pieces[one->first_piece].pid == getpid()) { /* a thread of this process */
        const void *there = (const void *)(uintptr_t)one->address;
        struct memory_place place = memory_find_place(there);
        TRY(device_enable_access(device, &place, there, nbytes));
        *address = there;
        return RSD_OK;
    }
    TRY(find_device_mapping(imports, device, pieces + one->first_piece, one->npieces, &mapping));
    if (one->offset > mapping->nbytes || nbytes > mapping->nbytes - one->offset)
        return fail(RSD_EPEER, "an array lies outside of its device memory");
    *address = mapping->mapping->base + one->offset;
    return RSD_OK;
}

/* Maps all arrays in the table of another rank. EPEER: the table is invalid. */
static rsd_status import_table(struct device_imports *imports, const struct host_rank *host,
                               struct memory_device *device, char *table, uint64_t capacity)
{
    struct export_header header = {0};
    uint64_t narrays = (uint64_t)host->arrays.n;
    if (capacity >= sizeof header)
        memcpy(&header, table, sizeof header);
    uint64_t left = capacity < sizeof header ? 0 : capacity - sizeof header;
    if (header.narrays != narrays || narrays > left / sizeof(struct array_export) ||
        header.npieces >
            (left - narrays * sizeof(struct array_export)) / sizeof(struct memory_piece))
        return fail(RSD_EPEER, "invalid table of device memory");
    const struct array_export *list = (const void *)(table + sizeof header);
    const struct memory_piece *pieces = (const void *)(list + narrays);
    for (uint64_t i = 0; i < narrays; i++) {
        struct array_export one = list[i];
        imports->addresses[i] = NULL;
        if (one.npieces)
            TRY(import_array(imports, device, &one, pieces, header.npieces,
                             host->arrays.spans[i].nbytes, &imports->addresses[i]));
    }
    return RSD_OK;
}

/* Opens the table of a rank. It stays open, since opening takes longer than a small move. */
static rsd_status open_table(const struct host_rank *host, struct device_imports *imports)
{
    struct shared_segment_name name = host->exported->segment;
    if (imports->table.base && imports->table_name.number == name.number &&
        imports->table_name.nbytes == name.nbytes && imports->table_name.pid == name.pid &&
        imports->table_name.fd == name.fd)
        return RSD_OK;
    shared_segment_drop(&imports->table);
    TRY(shared_segment_open(&name, &imports->table));
    imports->table_name = name;
    return RSD_OK;
}

/* The table is copied first: its owner could change it while it is read. */
static rsd_status copy_table(const struct host_rank *host, struct device_imports *imports,
                             char **table, uint64_t *nbytes)
{
    TRY(open_table(host, imports));
    *nbytes = shared_segment_capacity(&imports->table);
    *table = mem_copy(shared_segment_data(&imports->table), (size_t)*nbytes, 1);
    return *table ? RSD_OK : RSD_ENOMEM;
}

rsd_status device_import_arrays(const struct host_rank *host, struct memory_device *device,
                                struct device_imports *imports)
{
    uint64_t version = atomic_load_explicit(&host->exported->version, memory_order_acquire), nbytes;
    char *table;
    if (imports->addresses && imports->version == version)
        return RSD_OK;
    if (!imports->addresses)
        imports->addresses = mem_new((size_t)host->arrays.n, sizeof *imports->addresses);
    if (!imports->addresses)
        return RSD_ENOMEM;
    imports->version = version;
    rsd_status status = copy_table(host, imports, &table, &nbytes);
    if (!status) {
        status = import_table(imports, host, device, table, nbytes);
        mem_free(table);
    }
    if (status)
        imports->version = version - 1; /* the next run tries again */
    else
        drop_old_mappings(imports);
    return status ? fail_in(status, "rank %d: ", (int)host->rank) : RSD_OK;
}
