/* torch_saved.h - files of torch.save that are written tensor by tensor. Private to format. */
#ifndef TORCH_SAVED_H
#define TORCH_SAVED_H

#include "rows.h"
#include "torch_archive.h"

/* ---- torch_item_write.c ---- */

/* Write a tuple of numbers; the strides of a row-major tensor; and the call that makes a tensor of a whole storage.
 * Strides are in elements; NULL: row-major. `memo` counts the entries of a memo, and the opcodes are those of
 * torch.save: every value is stored, and short tuples have no mark. NULL: nothing is stored. */
void saved_put_tuple(struct bytes *out, int32_t n, const int64_t *values, uint32_t *memo);
void saved_put_strides(struct bytes *out, int32_t ndim, const int64_t *shape, uint32_t *memo);
void saved_put_tensor(struct bytes *out, rsd_dtype dtype, int32_t ndim, const int64_t *shape,
                      const int64_t *strides, const char *key, uint32_t *memo);

/* ---- torch_save_write.c ---- */

/* Of both writers of such files. The last one writes the ends of all files. */
rsd_status saved_place_files(struct manifest *manifest);
rsd_status saved_frame(const struct manifest *manifest, size_t tensor, size_t box,
                       struct bytes *head, struct bytes *tail);
rsd_status saved_finish_files(const struct manifest *manifest, struct store *store);

/* ---- dtensor_write.c ---- */

/* Write the pickle of one rank's file; and the record with the ranks of its mesh. */
rsd_status dtensor_put_dict(const struct manifest *manifest, size_t file, struct bytes *out);
rsd_status dtensor_add_mesh(const struct manifest *manifest, struct archive_writer *archive);

#endif
