/* test_mpi_files.c - ranks of MPI save a checkpoint, directly and in the background, and load it in another layout.
 * Every rank checks its own arrays. Exits with 1 if a check fails.
 *
 *     mpirun -np 3 test_mpi_files DIRECTORY */
#include "oracle.h"
#include "reshard_mpi.h"

#include <stdio.h>
#include <string.h>

static int nfailed;

static bool fine(bool holds, int rank, const char *what)
{
    if (!holds) {
        printf("# rank %d: %s: %s\n", rank, what, rsd_error());
        nfailed++;
    }
    return holds;
}

static rsd_layout *layout_of(int nranks, const char *placement)
{
    char text[100];
    rsd_layout *layout = NULL;
    snprintf(text, sizeof text, "f32[300,70] @ %d : %s", nranks, placement);
    fine(rsd_layout_parse(text, &layout) == RSD_OK, -1, text);
    return layout;
}

static void save(const char *path, const rsd_transport *transport, const rsd_layout *layout,
                 struct memory *memory)
{
    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = "weight",
                        .layout = layout,
                        .rank = transport->rank,
                        .arrays = memory->array + transport->rank};
    rsd_io io = {.struct_nbytes = sizeof io, .transport = transport};
    rsd_save_options options = {.struct_nbytes = sizeof options, .io = &io};
    rsd_report report = {.struct_nbytes = sizeof report};
    rsd_async_save *saving = NULL;
    fine(rsd_save(path, 1, &local, &options, &report) == RSD_OK, transport->rank, "save");
    fine(report.nfiles_written == transport->nranks, transport->rank, "files of all ranks");
    fine(rsd_save(path, 1, &local, &options, NULL) == RSD_EEXIST, transport->rank, "save again");
    options.overwrite = 1;
    options.compress = 3;
    if (fine(rsd_save_start(path, 1, &local, &options, &saving) == RSD_OK, transport->rank,
             "start"))
        fine(rsd_save_wait(saving, &report) == RSD_OK, transport->rank, "wait");
}

static void load(const char *path, const rsd_transport *transport, const rsd_layout *layout)
{
    struct memory expected = oracle_memory(layout, NULL), got = oracle_memory(layout, NULL);
    rsd_checkpoint *checkpoint = NULL;
    rsd_io io = {.struct_nbytes = sizeof io, .transport = transport};
    rsd_load_options options = {.struct_nbytes = sizeof options, .io = &io};
    int32_t rank = transport->rank;
    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = "weight",
                        .layout = layout,
                        .rank = rank,
                        .arrays = got.array + rank};
    oracle_fill(layout, NULL, &expected);
    if (fine(rsd_checkpoint_open(path, NULL, &checkpoint) == RSD_OK, rank, "open"))
        fine(rsd_load(checkpoint, 1, &local, &options, NULL) == RSD_OK, rank, "load");
    fine(memcmp(expected.array[rank], got.array[rank], got.nbytes[rank]) == 0, rank, "same bytes");
    if (rank == transport->nranks - 1)
        local.name = "nothing";
    if (checkpoint)
        fine(rsd_load(checkpoint, 1, &local, &options, NULL) == RSD_EMISMATCH, rank,
             "what one rank cannot load");
    rsd_checkpoint_close(checkpoint);
    oracle_memory_free(&expected);
    oracle_memory_free(&got);
}

int main(int argc, char **argv)
{
    int provided;
    rsd_transport transport = {.struct_nbytes = sizeof transport};
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
    if (argc != 2 || rsd_mpi_transport(MPI_COMM_WORLD, &transport))
        return 2;
    char path[4096];
    snprintf(path, sizeof path, "%s/saved", argv[1]);
    rsd_layout *rows = layout_of(transport.nranks, "S(0)"),
               *columns = layout_of(transport.nranks, "S(1)");
    struct memory memory = oracle_memory(rows, NULL);
    oracle_fill(rows, NULL, &memory);
    save(path, &transport, rows, &memory);
    load(path, &transport, columns);
    oracle_memory_free(&memory);
    rsd_layout_free(rows);
    rsd_layout_free(columns);
    rsd_mpi_transport_free(&transport);
    MPI_Finalize();
    return nfailed > 0;
}
