/* fuzz_safetensors.c - any bytes as a file of safetensors or torch.save, which is opened, listed and loaded. The file
 * is in memory. */
#include "opened.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int fd = -1;
    char path[64];
    rsd_checkpoint *checkpoint;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, n, 0) != (ssize_t)n)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!rsd_checkpoint_open(path, NULL, &checkpoint)) {
        ask_everything(checkpoint);
        rsd_checkpoint_close(checkpoint);
    }
    return 0;
}
