/* fuzz_dcp.c - any bytes as the metadata of a distributed checkpoint, beside two files that do not change:
 *
 *     __0_0.distcp   a tensor f32 [2, 4] as torch.save writes it, then the number 1
 *     __1_0.distcp   the same two as zstd frames of one raw block, so that their lengths never change
 */
#include "crc.h"
#include "opened.h"
#include "pickle_mutator.h"
#include "torch_item.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t capacity, unsigned seed);

static char folder[64];

static void write_file(const char *name, const void *data, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n || close(fd) != 0)
        abort();
}

static void remove_folder(void)
{
    static const char *const names[] = {".metadata", "__0_0.distcp", "__1_0.distcp"};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

static void put_frame(struct bytes *out, const struct bytes *item)
{
    const size_t block = item->n << 3 | 1; /* the last one */
    const unsigned char head[9] = {0x28,
                                   0xb5,
                                   0x2f,
                                   0xfd,
                                   0,
                                   0x38,
                                   (unsigned char)block,
                                   (unsigned char)(block >> 8),
                                   (unsigned char)(block >> 16)};
    bytes_put(out, head, sizeof head);
    bytes_put(out, item->data, item->n);
}

static void make_items(struct bytes *tensor, struct bytes *one)
{
    static const int64_t shape[] = {2, 4};
    static const float values[] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct bytes tail = {0}, pickle = {0};
    bytes_put(&pickle, "\x80\x02K\x01.", 5);
    if (torch_item_frame(RSD_F32, 2, shape, NULL, crc32_of(values, sizeof values),
                         (const unsigned char *)values, tensor, &tail) ||
        torch_item_from_pickle(&pickle, one))
        abort();
    bytes_put(tensor, values, sizeof values);
    bytes_put(tensor, tail.data, tail.n);
    bytes_drop(&tail);
    bytes_drop(&pickle);
}

static void make_folder(void)
{
    struct bytes tensor = {0}, one = {0}, packed = {0};
    make_input_directory(folder, sizeof folder);
    make_items(&tensor, &one);
    put_frame(&packed, &tensor);
    put_frame(&packed, &one);
    bytes_put(&tensor, one.data, one.n);
    write_file("__0_0.distcp", tensor.data, tensor.n);
    write_file("__1_0.distcp", packed.data, packed.n);
    bytes_drop(&tensor);
    bytes_drop(&one);
    bytes_drop(&packed);
    atexit(remove_folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    rsd_checkpoint *checkpoint;
    if (!*folder)
        make_folder();
    write_file(".metadata", data, n);
    if (!rsd_checkpoint_open(folder, NULL, &checkpoint)) {
        ask_everything(checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t capacity, unsigned seed)
{
    return seed % 8 ? mutate_pickle(data, n, capacity, seed / 8)
                    : LLVMFuzzerMutate(data, n, capacity);
}
