/* oracle.h - the expected result of a move, element by element.
 *
 * The oracle cuts lists of indices by the definition of each placement, one mesh axis after the other, and uses
 * no code of the library, except to convert an element to another dtype. The value of an element is a hash of its
 * global index, so one check serves every move.
 */
#ifndef ORACLE_H
#define ORACLE_H

#include "reshard.h"

#include <stdbool.h>

/* The global indices of an array along each dim, ascending. */
struct indices {
    int32_t ndim;
    int64_t n[RSD_MAX_DIMS];
    int64_t *list[RSD_MAX_DIMS];
    int64_t term; /* which partial value this is; 0 if none */
    int64_t nterms;
};

void oracle_indices(const rsd_layout *layout, int64_t array, struct indices *out);
void oracle_indices_free(struct indices *indices);

/* Arrays of a layout in memory, dense and row-major, or with strides (in elements) of any kind. */
struct memory {
    int64_t narrays;
    void **array;
    size_t *nbytes;
};

/* The memory of arrays: dense row-major, dense column-major, or with gaps in every dim. */
enum arrangement { ROWS, COLUMNS, PADDED };
int64_t *oracle_strides(const rsd_layout *layout, enum arrangement arrangement); /* NULL for ROWS */

/* Allocates all arrays, filled with 0xa5. */
struct memory oracle_memory(const rsd_layout *layout, const int64_t *strides);
void oracle_memory_free(struct memory *memory);

/* Writes the value of every element of the arrays. */
void oracle_fill(const rsd_layout *layout, const int64_t *strides, struct memory *memory);

/* Returns whether every array of dst has the expected values, if src was filled with oracle_fill, and gaps are
 * still 0xa5. Prints the first element that is wrong. With _of: the arrays of one rank. */
bool oracle_check(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                  const struct memory *memory);
bool oracle_check_of(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                     const struct memory *memory, int32_t rank);

#endif
