/* opened.h - what the fuzz targets do with a checkpoint that opened: everything there is to ask, and every
 * tensor that is small is loaded. */
#ifndef OPENED_H
#define OPENED_H

#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Makes a directory for the files of inputs. The number of the process may be that of one that was killed and left its
 * directory, so the name is a new one. */
static inline void make_input_directory(char *path, size_t capacity)
{
    const char *above = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    int n = snprintf(path, capacity - 6, "%s/reshard-fuzz-", above);
    memset(path + n, 'X', 6); /* which mkdtemp replaces */
    path[n + 6] = '\0';
    if (!mkdtemp(path))
        abort();
}

enum { MOST_LOADED = 1 << 20 };

static void load_tensor(rsd_checkpoint *checkpoint, const rsd_tensor_info *tensor)
{
    static const int64_t origin[RSD_MAX_DIMS];
    const int32_t rank = 0;
    rsd_layout *layout;
    if (tensor->nbytes > MOST_LOADED ||
        rsd_layout_new_boxes(tensor->dtype, tensor->ndim, tensor->shape, 1, &rank, origin,
                             tensor->shape, &layout))
        return;
    char *memory = malloc((size_t)tensor->nbytes + 1);
    void *array = memory;
    rsd_tensor local = {sizeof local, tensor->name, layout, 0, 0, &array, NULL, NULL};
    if (memory && rsd_load(checkpoint, 1, &local, NULL, NULL) == RSD_ENOMEM)
        abort();
    free(memory);
    rsd_layout_free(layout);
}

static void ask_tensor(rsd_checkpoint *checkpoint, int64_t index)
{
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    rsd_extent stored = {.struct_nbytes = sizeof stored};
    rsd_layout *layout;
    int64_t found;
    if (rsd_checkpoint_tensor(checkpoint, index, &tensor) ||
        rsd_checkpoint_find(checkpoint, tensor.name, &found) || found != index ||
        rsd_checkpoint_layout(checkpoint, index, &layout))
        abort();
    rsd_layout_free(layout);
    for (int64_t box = 0; box < tensor.nboxes; box++)
        if (rsd_checkpoint_box(checkpoint, index, box, &stored) ||
            stored.file >= rsd_checkpoint_nfiles(checkpoint))
            abort();
    if (tensor.nboxes < 64)
        load_tensor(checkpoint, &tensor);
}

static void ask_everything(rsd_checkpoint *checkpoint)
{
    for (int64_t i = 0; i < rsd_checkpoint_ntensors(checkpoint) && i < 64; i++)
        ask_tensor(checkpoint, i);
    for (int64_t i = 0; i < rsd_checkpoint_nvalues(checkpoint) && i < 64; i++) {
        char *json = NULL;
        if (!rsd_checkpoint_value_name(checkpoint, i))
            abort();
        if (rsd_checkpoint_value(checkpoint, i, &json) == RSD_ENOMEM)
            abort();
        rsd_free(json);
    }
}

#endif
