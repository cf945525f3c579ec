/* test_mpi_large.c - one piece of more than 2^31 bytes and elements, from rank 0 to rank 1: by messages, through
 * shared memory, from an arena; dense, and into rows with gaps. */
#include "reshard_mpi.h"

#include "tap.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int rank;

/* Returns the expected byte at an index. The sequence does not repeat at a power of two. */
static unsigned char byte_at(uint64_t at)
{
    uint64_t mixed = (at / 4093) * UINT64_C(0x9e3779b97f4a7c15) + at;
    return (unsigned char)(mixed >> 56 ^ mixed);
}

static unsigned char *get_memory(size_t nbytes)
{
    void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Writes or checks every 509th byte, and all bytes around 2^31 and 2^32. */
static bool go_through(unsigned char *bytes, uint64_t first, uint64_t n, bool writing)
{
    uint64_t step = 509;
    for (uint64_t i = 0; i < n; i += step) {
        uint64_t at = first + i, near = at & INT32_MAX;
        step = near < 4096 || near > INT32_MAX - 4096 || i + 8192 > n ? 1 : 509;
        if (writing)
            bytes[i] = byte_at(at);
        if (bytes[i] != byte_at(at)) {
            printf("# byte %llu is wrong\n", (unsigned long long)at);
            return false;
        }
    }
    return true;
}

static void move(const char *problem, int64_t rows, int64_t columns, int64_t gap, const char *how)
{
    rsd_layout *a, *b;
    rsd_plan *plan;
    rsd_exec *exec = NULL;
    rsd_arena *arena = NULL;
    uint64_t nbytes = (uint64_t)(rows * columns), spread = (uint64_t)(rows * (columns + gap));
    rsd_exchange_options options = {.struct_nbytes = sizeof options, .timeout = 120};
    const int64_t strides[] = {columns + gap, 1};
    rsd_bind_options bind = {.struct_nbytes = sizeof bind,
                             .dst_strides = rank == 1 && gap ? strides : NULL};
    unsigned char *src = NULL, *dst = NULL;
    bool fine = !rsd_problem_parse(problem, &a, &b) && !rsd_plan_new(a, b, NULL, &plan);
    options.node = strcmp(how, "messages") ? 0 : -1;
    if (rank == 0 && strcmp(how, "arena") == 0) {
        void *memory = NULL;
        fine = fine && !rsd_arena_new((int64_t)nbytes, &arena) &&
               !rsd_arena_alloc(arena, (int64_t)nbytes, &memory);
        src = memory;
        options.arena = arena;
    } else if (rank == 0) {
        src = get_memory(nbytes);
    } else {
        dst = get_memory(spread);
    }
    fine = fine && (src || dst);
    for (int64_t row = 0; src && row < rows; row++)
        go_through(src + row * columns, (uint64_t)(row * columns), (uint64_t)columns, true);
    const rsd_plan *plans[] = {plan};
    fine = fine && !rsd_bind_mpi_many(1, plans, &bind, MPI_COMM_WORLD, &options, &exec) &&
           !rsd_exec_run(exec, (const void *const *)&src, (void *const *)&dst);
    if (!fine)
        printf("# rank %d: %s\n", rank, rsd_error());
    for (int64_t row = 0; dst && fine && row < rows; row++)
        fine = go_through(dst + row * (columns + gap), (uint64_t)(row * columns), (uint64_t)columns,
                          false);
    int own = fine, all;
    MPI_Allreduce(&own, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (rank == 0) {
        CASE("%s, %s", problem, how);
        CHECK(all == 1);
    }
    rsd_exec_free(exec);
    if (arena)
        rsd_arena_free(arena);
    else if (src)
        munmap(src, nbytes);
    if (dst)
        munmap(dst, spread);
    rsd_plan_free(plan);
    rsd_layout_free(a);
    rsd_layout_free(b);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int64_t room = (int64_t)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (room < (int64_t)8 << 30) {
        if (rank == 0)
            printf("1..0 # SKIP it takes 8 GB of memory\n");
        MPI_Finalize();
        return 0;
    }
    move("u8[2,1100000029] : 1 ranks=0:R -> 1 ranks=1:R", 2, 1100000029, 67, "messages");
    move("u8[2200000011] : 1 ranks=0:R -> 1 ranks=1:R", 1, 2200000011, 0, "shared memory");
    move("u8[2,1100000029] : 1 ranks=0:R -> 1 ranks=1:R", 2, 1100000029, 67, "arena");
    int failed = rank == 0 ? tap_end() : 0;
    MPI_Finalize();
    return failed;
}
