/* load_slice.c - loads the shard of one rank from a checkpoint with another layout.
 *
 *     build/examples/load_slice ckpt model.lm_head.weight 'tp=4 : S(0)' 1
 *
 * Only the bytes that this rank needs are read, from any number of files. Introduces:
 * rsd_checkpoint_open, rsd_checkpoint_find, rsd_checkpoint_tensor, rsd_load, rsd_digest_array.
 */
#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>

static void or_die(rsd_status status)
{
    if (status != RSD_OK) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: load_slice CHECKPOINT TENSOR 'MESH : PLACEMENTS' RANK\n");
        return 2;
    }
    rsd_checkpoint *checkpoint;
    rsd_tensor_info tensor = {.struct_nbytes = sizeof tensor};
    int64_t index;
    or_die(rsd_checkpoint_open(argv[1], NULL, &checkpoint));
    or_die(rsd_checkpoint_find(checkpoint, argv[2], &index));
    or_die(rsd_checkpoint_tensor(checkpoint, index, &tensor));

    /* All ranks of a program use the same notation after the @. */
    char text[1024];
    int n = snprintf(text, sizeof text, "%s[", rsd_dtype_name(tensor.dtype));
    for (int32_t d = 0; d < tensor.ndim; d++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld", d ? "," : "",
                      (long long)tensor.shape[d]);
    snprintf(text + n, sizeof text - (size_t)n, "] @ %s", argv[3]);
    rsd_layout *layout;
    or_die(rsd_layout_parse(text, &layout));

    int32_t rank = (int32_t)atoi(argv[4]);
    int64_t first, count;
    rsd_array array;
    rsd_layout_arrays_of(layout, rank, &first, &count);
    if (count != 1) {
        fprintf(stderr, "rank %d has %lld arrays in %s\n", (int)rank, (long long)count, text);
        return 1;
    }
    or_die(rsd_layout_array(layout, first, &array));
    void *memory = malloc(array.nbytes ? array.nbytes : 1);
    if (!memory)
        return 1;

    rsd_tensor local = {.struct_nbytes = sizeof local,
                        .name = argv[2],
                        .layout = layout,
                        .rank = rank,
                        .arrays = &memory};
    rsd_report report = {.struct_nbytes = sizeof report};
    char digest[RSD_DIGEST_NCHARS];
    or_die(rsd_load(checkpoint, 1, &local, NULL, &report));
    or_die(rsd_digest_array(tensor.dtype, array.ndim, array.shape, memory, digest));
    printf("rank %d has %s[", (int)rank, rsd_dtype_name(tensor.dtype));
    for (int32_t d = 0; d < array.ndim; d++)
        printf("%s%lld", d ? "," : "", (long long)array.shape[d]);
    printf("]: %zu bytes, %lld read, digest %s\n", array.nbytes, (long long)report.nbytes_read,
           digest);

    free(memory);
    rsd_layout_free(layout);
    rsd_checkpoint_close(checkpoint);
    return fflush(stdout) != 0;
}
