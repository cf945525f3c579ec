/* kernels.h - private to cuda: the kernels and the text that each is compiled from. */
#ifndef KERNELS_H
#define KERNELS_H

#include <stddef.h>

enum kernel_id { KERNEL_COPY, KERNEL_CAST, KERNEL_REDUCE, KERNEL_DIGEST, NKERNELS };

struct kernel {
    const char *name;
    const char *const *source; /* strings that together are the source, NULL at the end */
};

extern const struct kernel kernels[NKERNELS];

#endif
