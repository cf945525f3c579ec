/* compile_kernels.c - compiles the kernels for GPUs of several generations with the NVRTC that the loader finds. No GPU
 * is needed. Prints one line per kernel and generation, and exits 1 if one cannot be compiled. */
#include "driver.h"
#include "kernels.h"

#include <stdio.h>

int main(void)
{
    static const int generations[][2] = {{7, 5}, {9, 0}};
    int failed = 0;
    for (int id = 0; id < NKERNELS; id++)
        for (size_t i = 0; i < sizeof generations / sizeof *generations; i++) {
            void *image = NULL;
            int major = generations[i][0], minor = generations[i][1];
            rsd_status status = nvrtc_compile(kernels[id].source, major, minor, &image);
            printf("%s %d.%d: %s\n", kernels[id].name, major, minor,
                   status ? rsd_error() : "compiled");
            failed = failed || status;
            mem_free(image);
        }
    return failed;
}
