/* truth.h - the golden checkpoints, which torch wrote, and the expected bytes of their tensors. */
#ifndef TRUTH_H
#define TRUTH_H

#include "reshard.h"

/* Directories in tests/golden with ckpt and truth.safetensors; NULL after the last. */
extern const char *const golden[];

/* "tests/golden/NAME/ckpt" and the like, valid until the next call but three. */
const char *golden_path(const char *name, const char *what);

/* Returns the expected bytes of a tensor, dense and row-major, which the caller frees. They are read from the file by
 * offset, without rsd_load. */
void *truth_bytes(rsd_checkpoint *truth, const char *truth_path, const char *tensor,
                  rsd_tensor_info *about);

/* Copies the elements that each rank holds from a whole tensor into arrays, element by element. */
void truth_cut(const rsd_layout *layout, const void *whole, void *const *arrays);

#endif
