/* bench_choices.c - what the choices of a caller bring: each row is one way beside another, not beside a limit.
 * docs/performance.md explains them. */
#include "bench.h"

#include <fcntl.h>
#include <unistd.h>

enum { NTENSORS = 300, MOST = 4 * NTENSORS };

/* One way to move: an exec with the arrays of its four ranks, for one tensor or for many. */
struct way {
    rsd_layout *a, *b;
    rsd_exec *exec, *each[NTENSORS];
    const void *src[MOST];
    void *dst[MOST];
};

struct choice {
    struct way first, second;
    const char *path;
    rsd_checkpoint *checkpoint;
    rsd_tensor tensor;
    rsd_pool *pool, *pool_used;
    int32_t nthreads;
};

static char *new_memory(const rsd_layout *layout, int64_t index, size_t shift)
{
    rsd_array array;
    must(rsd_layout_array(layout, index, &array));
    return (char *)touched(array.nbytes + shift) + shift;
}

/* Parses a problem, allocates arrays that begin `shift` bytes behind a page, and binds to a pool. */
static void set_way(struct way *way, const char *problem, size_t shift, rsd_pool *pool)
{
    rsd_plan *plan;
    must(rsd_problem_parse(problem, &way->a, &way->b));
    for (int i = 0; i < 4; i++) {
        way->src[i] = new_memory(way->a, i, shift);
        way->dst[i] = new_memory(way->b, i, shift);
    }
    must(rsd_plan_new(way->a, way->b, NULL, &plan));
    must(rsd_bind_threads(plan, pool, &way->exec));
    rsd_plan_free(plan);
}

static void run_way(const struct way *way)
{
    must(rsd_exec_run(way->exec, way->src, way->dst));
}

static void run_first(void *context)
{
    run_way(&((struct choice *)context)->first);
}

static void run_second(void *context)
{
    run_way(&((struct choice *)context)->second);
}

static void run_first_often(void *context)
{
    for (int i = 0; i < 1000; i++)
        run_first(context);
}

static void run_second_often(void *context)
{
    for (int i = 0; i < 1000; i++)
        run_second(context);
}

static void reshard_often(void *context)
{
    struct way *way = &((struct choice *)context)->first;
    for (int i = 0; i < 1000; i++)
        must(rsd_reshard(way->a, way->b, way->src, way->dst));
}

static void run_each(void *context)
{
    struct way *way = &((struct choice *)context)->first;
    for (int i = 0; i < NTENSORS; i++)
        must(rsd_exec_run(way->each[i], way->src + (ptrdiff_t)4 * i, way->dst + (ptrdiff_t)4 * i));
}

static void compare(struct choice *choice, const char *title, const char *other, work_fn *first,
                    work_fn *second, double per)
{
    double seconds[2];
    best_of(15, 2, (work_fn *const[]){first, second}, choice, seconds);
    bench_row(title, 1e3 * seconds[0] / per, 1e3 * seconds[1] / per, "ms", other);
}

static void compare_large(struct choice *choice)
{
    static const char large[] = "f32[8192,8192] : 4:S0 -> 4:S1";
    struct way *first = &choice->first, *second = &choice->second;
    set_way(first, large, 0, choice->pool);
    set_way(second, large, 0, NULL);
    compare(choice, "268 MB, with a pool", "no pool: one thread", run_first, run_second, 1);
    set_way(second, large, 4, choice->pool);
    compare(choice, "268 MB, arrays at multiples of 64 bytes", "4 bytes further", run_first,
            run_second, 1);
}

static void compare_small(struct choice *choice)
{
    struct way *way = &choice->first;
    const rsd_plan *plans[NTENSORS];
    rsd_plan *plan;
    set_way(&choice->first, "f32[64,64] : 4:S0 -> 4:S1", 0, NULL);
    set_way(&choice->second, "f32[64,64] : 4:S0 -> 4:S1", 0, choice->pool);
    compare(choice, "16 kB, bound once, per run", "rsd_reshard", run_first_often, reshard_often,
            1000);
    compare(choice, "16 kB, no pool", "with a pool", run_first_often, run_second_often, 1000);

    set_way(way, "f32[256,256] : 4:S0 -> 4:S1", 0, NULL);
    must(rsd_plan_new(way->a, way->b, NULL, &plan));
    for (int i = 0; i < NTENSORS; i++) {
        plans[i] = plan;
        must(rsd_bind_threads(plan, choice->pool, &way->each[i]));
        for (int k = 0; k < 4; k++) {
            way->src[4 * i + k] = new_memory(way->a, k, 0);
            way->dst[4 * i + k] = new_memory(way->b, k, 0);
        }
    }
    must(rsd_bind_threads_many(NTENSORS, plans, NULL, choice->pool, &way->exec));
    compare(choice, "300 tensors of 262 kB, one exec", "300 execs", run_first, run_each, 1);
}

static void load_tensor(void *context)
{
    struct choice *choice = context;
    rsd_load_options options = RSD_INIT(rsd_load_options);
    rsd_io io = RSD_INIT(rsd_io);
    io.pool = choice->pool_used;
    options.io = &io;
    must(rsd_load(choice->checkpoint, 1, &choice->tensor, &options, NULL));
}

static void load_with_pool(void *context)
{
    ((struct choice *)context)->pool_used = ((struct choice *)context)->pool;
    load_tensor(context);
}

static void load_without_pool(void *context)
{
    ((struct choice *)context)->pool_used = NULL;
    load_tensor(context);
}

/* Removes the files of the checkpoint from the page cache. */
static void drop_cache(const struct choice *choice)
{
    for (int64_t i = 0; i < rsd_checkpoint_nfiles(choice->checkpoint); i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", choice->path,
                 rsd_checkpoint_file(choice->checkpoint, i));
        int fd = open(path, O_RDONLY);
        if (fd < 0 || fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
            exit(1);
        close(fd);
    }
}

static void compare_files(struct choice *choice)
{
    char command[4200];
    double seconds[2] = {1e99, 1e99};
    void *arrays[4];
    set_way(&choice->first, "f32[8192,8192] : 4:S0 -> 4:S1", 0, NULL);
    for (int i = 0; i < 4; i++) {
        memcpy(&arrays[i], &choice->first.src[i], sizeof arrays[i]);
        memset(arrays[i], i, 64 << 20);
    }
    choice->tensor = RSD_INIT(rsd_tensor);
    choice->tensor.name = "matrix";
    choice->tensor.layout = choice->first.a;
    choice->tensor.rank = RSD_EVERY_RANK;
    choice->tensor.arrays = arrays;
    must(rsd_save(choice->path, 1, &choice->tensor, NULL, NULL));
    must(rsd_checkpoint_open(choice->path, NULL, &choice->checkpoint));
    choice->tensor.layout = choice->first.b;
    choice->tensor.arrays = choice->first.dst;
    compare(choice, "load 268 MB in the page cache, with a pool", "no pool: one thread",
            load_with_pool, load_without_pool, 1);
    for (int i = 0; i < 3; i++) {
        drop_cache(choice);
        double start = now();
        load_with_pool(choice);
        seconds[1] = now() - start < seconds[1] ? now() - start : seconds[1];
        start = now();
        load_with_pool(choice);
        seconds[0] = now() - start < seconds[0] ? now() - start : seconds[0];
    }
    bench_row("load 268 MB in the page cache", 1e3 * seconds[0], 1e3 * seconds[1], "ms",
              "not in the page cache");
    rsd_checkpoint_close(choice->checkpoint);
    snprintf(command, sizeof command, "rm -rf '%s'", choice->path);
    if (system(command) != 0)
        exit(1);
}

int main(int argc, char **argv)
{
    static struct choice choice;
    char path[64];
    bench_open(argc, argv);
    bench_title("What choices bring: the second column is the other way");
    choice.nthreads = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    must(rsd_pool_new(choice.nthreads, &choice.pool));
    printf("a pool has %d threads\n", (int)choice.nthreads);
    compare_large(&choice);
    compare_small(&choice);
    snprintf(path, sizeof path, "/var/tmp/bench_choices.%d", (int)getpid());
    choice.path = path;
    compare_files(&choice);
    return 0;
}
