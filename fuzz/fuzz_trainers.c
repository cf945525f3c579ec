/* fuzz_trainers.c - any bytes as the pickles of checkpoints of DeepSpeed and Megatron.
 *
 *     1 byte    which one: 0 stage 1 of ZeRO, 1 stage 3, 2 universal, 3 Megatron
 *     2 bytes   the length of the first pickle, little-endian
 *     2 bytes   the length of the second
 *     ...       the pickles; the third has what is left
 *
 * The storages beside them do not change.
 */
#include "archives.h"
#include "opened.h"

#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { NKINDS = 4, MOST_FILES = 4 };

/* The files of each kind, and which of the three pickles each has. */
static const struct {
    const char *name;
    int pickle;
} files[NKINDS][MOST_FILES] = {{{"mp_rank_00_model_states.pt", 0},
                                {"zero_pp_rank_0_mp_rank_00_optim_states.pt", 1},
                                {"zero_pp_rank_1_mp_rank_00_optim_states.pt", 2}},
                               {{"zero_pp_rank_0_mp_rank_00_model_states.pt", 0},
                                {"zero_pp_rank_1_mp_rank_00_model_states.pt", 2},
                                {"zero_pp_rank_0_mp_rank_00_optim_states.pt", 1},
                                {"zero_pp_rank_1_mp_rank_00_optim_states.pt", 1}},
                               {{"mp_rank_00_model_states.pt", 0},
                                {"zero/w/fp32.pt", 1},
                                {"zero/w/exp_avg.pt", 2},
                                {"zero/optimizer_state.pt", 2}},
                               {{"mp_rank_00_000/model_optim_rng.pt", 0},
                                {"mp_rank_01_000/model_optim_rng.pt", 0},
                                {"mp_rank_00_001/model_optim_rng.pt", 1},
                                {"mp_rank_01_001/model_optim_rng.pt", 2}}};
static const char *const directories[NKINDS][MOST_FILES] = {
    {0},
    {0},
    {"zero", "zero/w"},
    {"mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"}};

static char folder[64];

static const char *path_of(int kind, const char *name)
{
    static char path[160];
    snprintf(path, sizeof path, "%s/%d/%s", folder, kind, name);
    return path;
}

static void make_folders(void)
{
    make_input_directory(folder, sizeof folder);
    for (int kind = 0; kind < NKINDS; kind++) {
        if (mkdir(path_of(kind, ""), 0700) != 0)
            abort();
        for (int i = 0; i < MOST_FILES && directories[kind][i]; i++)
            if (mkdir(path_of(kind, directories[kind][i]), 0700) != 0)
                abort();
    }
}

static void remove_folders(void)
{
    for (int kind = 0; kind < NKINDS; kind++) {
        for (int i = 0; i < MOST_FILES && files[kind][i].name; i++)
            unlink(path_of(kind, files[kind][i].name));
        for (int i = MOST_FILES - 1; i >= 0; i--)
            if (directories[kind][i])
                rmdir(path_of(kind, directories[kind][i]));
        rmdir(path_of(kind, ""));
    }
    rmdir(folder);
}

static void try_open(int kind, const rsd_open_options *options)
{
    rsd_checkpoint *checkpoint;
    if (rsd_checkpoint_open(path_of(kind, ""), options, &checkpoint))
        return;
    ask_everything(checkpoint);
    rsd_checkpoint_close(checkpoint);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const uint8_t *pickles[3];
    size_t lengths[3];
    if (n < 5)
        return 0;
    if (!*folder) {
        make_folders();
        atexit(remove_folders);
    }
    int kind = data[0] % NKINDS;
    lengths[0] = data[1] | (size_t)data[2] << 8;
    lengths[1] = data[3] | (size_t)data[4] << 8;
    data += 5;
    n -= 5;
    for (int i = 0; i < 3; i++) {
        pickles[i] = data;
        lengths[i] = i < 2 && lengths[i] < n ? lengths[i] : n;
        data += lengths[i];
        n -= lengths[i];
    }
    for (int i = 0; i < MOST_FILES && files[kind][i].name; i++)
        write_archive(path_of(kind, files[kind][i].name), pickles[files[kind][i].pickle],
                      lengths[files[kind][i].pickle]);
    try_open(kind, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options)});
    try_open(kind, &(rsd_open_options){.struct_nbytes = sizeof(rsd_open_options),
                                       .take_rank_0 = 1,
                                       .model_dtype = 1,
                                       .vocab_size = 2});
    return 0;
}
