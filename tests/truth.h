/* truth.h - the golden checkpoints: what real torch wrote, and every tensor of it in full beside. */
#ifndef TRUTH_H
#define TRUTH_H

#include "reshard.h"

/* Folders in tests/golden that hold a ckpt and a truth.safetensors; NULL after the last. */
extern const char *const golden[];

/* "tests/golden/NAME/ckpt" and the like, valid until the next call but three. */
const char *golden_path(const char *name, const char *what);

/* The bytes of a tensor of a truth, dense and row-major, to be freed. They are taken from the file by
 * offsets, without the library's loading. */
void *truth_bytes(rsd_checkpoint *truth, const char *truth_path, const char *tensor,
                  rsd_tensor_info *about);

/* What a rank holds of a tensor, cut from all of it element by element, into arrays. */
void truth_cut(const rsd_layout *layout, const void *whole, void *const *arrays);

#endif
