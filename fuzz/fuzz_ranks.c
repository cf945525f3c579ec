/* fuzz_ranks.c - any bytes as the pickles of per-rank files: those of two ranks' models, and of an optimizer.
 *
 *     2 bytes   the length of the first pickle, little-endian
 *     2 bytes   the length of the second
 *     ...       the pickles; the third has what is left, and is that of rank 0's optimizer
 *
 * The storages beside them do not change. The model of rank 0 is opened alone too.
 */
#include "archives.h"
#include "opened.h"

#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static char folder[64];
static const char *const names[] = {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt",
                                    "optim_world_size_2_rank_0.pt"};

enum { NFILES = 3 };

static void remove_folder(void)
{
    char path[128];
    for (size_t i = 0; i < NFILES; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

static void write_model(const char *name, const void *pickle, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    write_archive(path, pickle, n);
}

static void try_open(const char *path, const rsd_open_options *options)
{
    rsd_checkpoint *checkpoint;
    if (rsd_checkpoint_open(path, options, &checkpoint))
        return;
    ask_everything(checkpoint);
    rsd_checkpoint_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[128];
    if (n < 4)
        return 0;
    if (!*folder) {
        make_input_directory(folder, sizeof folder);
        atexit(remove_folder);
    }
    size_t first = data[0] | (size_t)data[1] << 8, second = data[2] | (size_t)data[3] << 8;
    data += 4;
    n -= 4;
    first = first < n ? first : n;
    second = second < n - first ? second : n - first;
    write_model(names[0], data, first);
    write_model(names[1], data + first, second);
    snprintf(path, sizeof path, "%s/%s", folder, names[2]);
    unlink(path);
    if (n > first + second)
        write_model(names[2], data + first + second, n - first - second);
    try_open(folder, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options)});
    try_open(folder,
             &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options), .take_rank_0 = 1});
    snprintf(path, sizeof path, "%s/%s", folder, names[0]);
    try_open(path, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options), .as_is = 1});
    return 0;
}
