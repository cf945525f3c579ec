/* bench_store.c - calls on checkpoints beside plain cp, pread and pwrite of the same files.
 *
 * The checkpoint is a Llama-like model of 1.9 GB, saved by 8 ranks, in memory (/dev/shm) and on the disk (build/).
 * Files on the disk are flushed on both sides. */
#include "bench.h"

#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HIDDEN = 2048, INTER = 5632, LAYERS = 16, VOCAB = 32000, MOST = 7 * LAYERS + 3 };

struct model {
    int n;
    char names[MOST][64];
    int64_t shapes[MOST][2];
    int64_t nbytes;
    char *memory; /* every array is in it */
    size_t memory_nbytes;
};

static struct model model;
static rsd_pool *pool;

static void add_tensor(const char *name, int64_t rows, int64_t cols)
{
    snprintf(model.names[model.n], sizeof model.names[0], "%s", name);
    model.shapes[model.n][0] = rows;
    model.shapes[model.n][1] = cols;
    model.nbytes += rows * cols * 2;
    model.n++;
}

static void make_model(void)
{
    char name[64];
    add_tensor("model.embed_tokens.weight", VOCAB, HIDDEN);
    for (int i = 0; i < LAYERS; i++) {
        static const char *const square[] = {"q", "k", "v", "o"};
        for (int k = 0; k < 4; k++) {
            snprintf(name, sizeof name, "model.layers.%d.self_attn.%s_proj.weight", i, square[k]);
            add_tensor(name, HIDDEN, HIDDEN);
        }
        snprintf(name, sizeof name, "model.layers.%d.mlp.up_proj.weight", i);
        add_tensor(name, INTER, HIDDEN);
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate_proj.weight", i);
        add_tensor(name, INTER, HIDDEN);
        snprintf(name, sizeof name, "model.layers.%d.mlp.down_proj.weight", i);
        add_tensor(name, HIDDEN, INTER);
    }
    add_tensor("lm_head.weight", VOCAB, HIDDEN);
    model.memory_nbytes = (size_t)VOCAB * HIDDEN * 2;
    model.memory = touched(model.memory_nbytes);
    for (size_t i = 0; i < model.memory_nbytes; i++)
        model.memory[i] = (char)(i * 2654435761u >> 13);
}

/* ---- ours ---- */

static void save_as(const char *path, int nranks, int dim)
{
    static rsd_tensor locals[MOST];
    static void *arrays[MOST][64];
    rsd_layout *layouts[MOST];
    char text[128];
    for (int i = 0; i < model.n; i++) {
        snprintf(text, sizeof text, "bf16[%lld,%lld] @ %d : S(%d)", (long long)model.shapes[i][0],
                 (long long)model.shapes[i][1], nranks, dim);
        must(rsd_layout_parse(text, &layouts[i]));
        for (int r = 0; r < nranks; r++)
            arrays[i][r] = model.memory;
        locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                 .name = model.names[i],
                                 .layout = layouts[i],
                                 .rank = RSD_EVERY_RANK,
                                 .arrays = arrays[i]};
    }
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
    rsd_save_options options = {.struct_nbytes = sizeof options, .overwrite = 1, .io = &io};
    must(rsd_save(path, model.n, locals, &options, NULL));
    for (int i = 0; i < model.n; i++)
        rsd_layout_free(layouts[i]);
}

static int remove_one(const char *path, const struct stat *about, int kind, struct FTW *ftw)
{
    (void)about, (void)kind, (void)ftw;
    return remove(path);
}

static void remove_all(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static rsd_report convert(const char *from, const char *to, int64_t max_shard, int64_t budget)
{
    rsd_checkpoint *in;
    rsd_io io = {.struct_nbytes = sizeof io, .pool = pool, .max_nbytes = budget};
    rsd_convert_options options = {
        .struct_nbytes = sizeof options, .max_shard_nbytes = max_shard, .io = &io};
    rsd_report report = {.struct_nbytes = sizeof report};
    must(rsd_checkpoint_open(from, NULL, &in));
    must(rsd_convert(in, to, &options, &report));
    rsd_checkpoint_close(in);
    return report;
}

/* ---- the limits ---- */

static void shell(const char *format, const char *a, const char *b)
{
    char command[1024];
    snprintf(command, sizeof command, format, a, b, a, b);
    if (system(command) != 0) {
        fprintf(stderr, "failed: %s\n", command);
        exit(1);
    }
}

struct io {
    const char *folder;
    int nfiles, thread;
    char *memory;
    size_t nbytes; /* of each file */
    int write, sync;
};

/* Reads or writes every second file, a megabyte at a time. */
static void *io_thread(void *context)
{
    struct io *io = context;
    char path[256];
    size_t at_memory = 0;
    for (int i = io->thread; i < io->nfiles; i += 2) {
        snprintf(path, sizeof path, "%s/__%d_0.distcp", io->folder, i);
        int fd = open(path, io->write ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0666);
        off_t at = 0;
        if (fd >= 0 && io->write && io->sync && posix_fallocate(fd, 0, (off_t)io->nbytes))
            exit(1);
        if (fd >= 0 && !io->write)
            posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
        for (;;) {
            size_t want = 1 << 20;
            if (io->write && (size_t)at + want > io->nbytes)
                want = io->nbytes - (size_t)at;
            if (at_memory + want > model.memory_nbytes / 2)
                at_memory = 0;
            char *memory = io->memory + (size_t)io->thread * (model.memory_nbytes / 2) + at_memory;
            ssize_t n = io->write ? pwrite(fd, memory, want, at) : pread(fd, memory, want, at);
            if (n <= 0)
                break;
            at += n;
            at_memory += (size_t)n;
        }
        if (io->sync)
            fsync(fd);
        close(fd);
    }
    return NULL;
}

static double raw_io(const char *folder, int nfiles, size_t nbytes, int write, int sync)
{
    struct io io[2];
    pthread_t threads[2];
    double start = now();
    for (int t = 0; t < 2; t++) {
        io[t] = (struct io){folder, nfiles, t, model.memory, nbytes, write, sync};
        pthread_create(&threads[t], NULL, io_thread, &io[t]);
    }
    for (int t = 0; t < 2; t++)
        pthread_join(threads[t], NULL);
    return now() - start;
}

/* ---- problems ---- */

static char base[128];
static int on_disk;

static const char *at(const char *name)
{
    static char paths[8][256];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

static double copy_files(const char *from)
{
    double start = now();
    shell(on_disk ? "mkdir %2$s && for f in %1$s/*.distcp; do cp $f %2$s/ & done; wait; sync %2$s/*"
                  : "mkdir %2$s && for f in %1$s/*.distcp; do cp $f %2$s/ & done; wait",
          from, at("copy"));
    double took = now() - start;
    remove_all(at("copy"));
    return took;
}

static double gb(double seconds)
{
    return 1e-9 * (double)model.nbytes / seconds;
}

static void merging(const char *source, const char *what, int64_t max_shard)
{
    double ours = 1e99, limit = 1e99;
    for (int round = 0; round < 5; round++) {
        double took = copy_files(source);
        limit = took < limit ? took : limit;
        double start = now();
        convert(source, at("merged"), max_shard, 0);
        took = now() - start;
        ours = took < ours ? took : ours;
        remove_all(at("merged"));
    }
    bench_row(what, gb(ours), gb(limit), "GB/s", "cp of the source files, all at once, no CRC");
}

static void loading(const char *source)
{
    double ours = 1e99, limit = 1e99;
    char *memory = touched((size_t)model.nbytes);
    for (int round = 0; round < 4; round++) {
        double took = raw_io(source, 8, 0, 0, 0);
        limit = took < limit ? took : limit;
        static rsd_tensor locals[MOST];
        static void *arrays[MOST][4];
        rsd_layout *layouts[MOST];
        rsd_checkpoint *in;
        size_t used = 0;
        double start = now();
        for (int i = 0; i < model.n; i++) {
            char text[128];
            snprintf(text, sizeof text, "bf16[%lld,%lld] @ 2x2 : S(0),S(1)",
                     (long long)model.shapes[i][0], (long long)model.shapes[i][1]);
            must(rsd_layout_parse(text, &layouts[i]));
            for (int r = 0; r < 4; r++) {
                arrays[i][r] = memory + used;
                used += (size_t)(model.shapes[i][0] * model.shapes[i][1] / 2);
            }
            locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                     .name = model.names[i],
                                     .layout = layouts[i],
                                     .rank = RSD_EVERY_RANK,
                                     .arrays = arrays[i]};
        }
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
        rsd_load_options options = {.struct_nbytes = sizeof options, .io = &io};
        must(rsd_checkpoint_open(source, NULL, &in));
        must(rsd_load(in, model.n, locals, &options, NULL));
        rsd_checkpoint_close(in);
        took = now() - start;
        ours = took < ours ? took : ours;
        for (int i = 0; i < model.n; i++)
            rsd_layout_free(layouts[i]);
    }
    free(memory);
    bench_row("load into 2x2:S0,S1, destination touched", gb(ours), gb(limit), "GB/s",
              "pread of the same bytes, 2 threads");
}

static void saving(void)
{
    double ours = 1e99, limit = 1e99;
    for (int round = 0; round < 4; round++) {
        mkdir(at("raw"), 0777);
        double took = raw_io(at("raw"), 2, (size_t)model.nbytes / 2, 1, on_disk);
        limit = took < limit ? took : limit;
        remove_all(at("raw"));
        double start = now();
        save_as(at("saved"), 2, 0);
        took = now() - start;
        ours = took < ours ? took : ours;
        remove_all(at("saved"));
    }
    bench_row("save, 2 threads, 2 files", gb(ours), gb(limit), "GB/s",
              "pwrite of the same bytes into 2 files");
}

static int drop_caches(void)
{
    FILE *file = fopen("/proc/sys/vm/drop_caches", "w");
    if (!file)
        return 0;
    sync();
    int fine = fputs("1\n", file) >= 0;
    return fclose(file) == 0 && fine;
}

static void cold(const char *source)
{
    double ours = 1e99, limit = 1e99;
    for (int round = 0; round < 3; round++) {
        if (!drop_caches())
            return;
        double took = raw_io(source, 8, 0, 0, 0);
        limit = took < limit ? took : limit;
        drop_caches();
        rsd_checkpoint *in;
        char(*digests)[RSD_DIGEST_NCHARS] = malloc(MOST * sizeof *digests);
        rsd_io io = {.struct_nbytes = sizeof io, .pool = pool};
        double start = now();
        must(rsd_checkpoint_open(source, NULL, &in));
        must(rsd_digest(in, 0, NULL, &io, digests, NULL));
        rsd_checkpoint_close(in);
        took = now() - start;
        ours = took < ours ? took : ours;
        free(digests);
    }
    bench_row("digest of every tensor, cold", gb(ours), gb(limit), "GB/s",
              "pread, cold, 2 threads");
}

static void everything(const char *folder, int disk)
{
    snprintf(base, sizeof base, "%s/reshard-bench-%d", folder, (int)getpid());
    on_disk = disk;
    remove_all(base);
    mkdir(base, 0777);
    bench_title(disk ? "checkpoints on the disk, flushed" : "checkpoints in memory");
    char rows[256], cols[256];
    snprintf(rows, sizeof rows, "%s", at("rows"));
    snprintf(cols, sizeof cols, "%s", at("cols"));
    save_as(rows, 8, 0);
    merging(rows, "8 ranks of S(0) -> 4 safetensors files", (int64_t)500 << 20);
    merging(rows, "8 ranks of S(0) -> 1 safetensors file", 0);
    save_as(cols, 8, 1);
    merging(cols, "8 ranks of S(1) -> 4 safetensors files", (int64_t)500 << 20);
    remove_all(cols);
    loading(rows);
    saving();
    if (disk)
        cold(rows);
    else {
        rsd_report report = convert(rows, at("merged"), (int64_t)500 << 20, (int64_t)256 << 20);
        printf("    bytes read / needed: %.4f; buffers at most %.1f MB\n",
               (double)report.nbytes_read / (double)report.nbytes_needed,
               1e-6 * (double)report.nbytes_memory);
    }
    remove_all(base);
}

static void digesting(void)
{
    char digest[RSD_DIGEST_NCHARS];
    int64_t shape[1] = {(int64_t)model.memory_nbytes};
    double ours = 1e99, limit = 1e99;
    uint64_t sum = 0;
    for (int round = 0; round < 7; round++) {
        double start = now();
        must(rsd_digest_array(RSD_U8, 1, shape, model.memory, digest));
        double took = now() - start;
        ours = took < ours ? took : ours;
        start = now();
        const uint64_t *words = (const uint64_t *)(void *)model.memory;
        for (size_t i = 0; i < model.memory_nbytes / 8; i++)
            sum += words[i];
        took = now() - start;
        limit = took < limit ? took : limit;
    }
    bench_title(sum ? "digest, one core" : "digest of nothing, one core");
    bench_row("digest of 131 MB in memory", 1e-9 * (double)model.memory_nbytes / ours,
              1e-9 * (double)model.memory_nbytes / limit, "GB/s", "adding it up");
}

/* Opens a .metadata of a million chunks, as torch writes it, in a separate process. */
static void opening(void)
{
    static const char folder[] = "build/bench-metadata", file[] = "build/bench-metadata/.metadata";
    struct rusage used;
    int outcome;
    if (access(file, R_OK) != 0 &&
        system("python3 bench/make_metadata.py build/bench-metadata.new && "
               "mv build/bench-metadata.new build/bench-metadata") != 0)
        return;
    double start = now();
    FILE *plain = fopen(file, "rb");
    while (plain && fread(model.memory, 1, 1 << 20, plain) > 0)
        continue;
    if (plain)
        fclose(plain);
    double limit = now() - start;
    start = now();
    pid_t child = fork();
    if (child == 0) {
        free(model.memory);
        rsd_checkpoint *checkpoint;
        _exit(rsd_checkpoint_open(folder, NULL, &checkpoint) != RSD_OK);
    }
    wait4(child, &outcome, 0, &used);
    bench_title("metadata");
    bench_row("open a .metadata of 1,000,000 chunks", now() - start, limit, "s",
              "reading the file");
    printf("    %ld MB at most%s\n", used.ru_maxrss / 1024, outcome ? ", and it failed" : "");
}

int main(int argc, char **argv)
{
    bench_open(argc, argv);
    must(rsd_pool_new(2, &pool));
    make_model();
    digesting();
    opening();
    everything("/dev/shm", 0);
    everything("build", 1);
    rsd_pool_free(pool);
    return 0;
}
