/* oracle.h - the truth, element by element.
 *
 * The oracle knows where elements live from lists of indices that it cuts as the notation's words
 * say, one mesh axis after the other; it shares no code with the library. Every element's value is
 * a hash of its own global index, so one check serves every move.
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

/* How arrays lie: dense rows, dense columns, or padded with gaps everywhere. */
enum arrangement { ROWS, COLUMNS, PADDED };
int64_t *oracle_strides(const rsd_layout *layout, enum arrangement arrangement); /* NULL for ROWS */

/* Memory for all arrays, filled with 0xa5. */
struct memory oracle_memory(const rsd_layout *layout, const int64_t *strides);
void oracle_memory_free(struct memory *memory);

/* Writes the value of every element that an array holds. */
void oracle_fill(const rsd_layout *layout, const int64_t *strides, struct memory *memory);

/* Whether every array of dst holds what it should, given what was filled into src, and gaps still
 * hold 0xa5. Says the first element that does not on a line of its own. With _of: one rank's arrays. */
bool oracle_check(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                  const struct memory *memory);
bool oracle_check_of(const rsd_layout *src, const rsd_layout *dst, const int64_t *strides,
                     const struct memory *memory, int32_t rank);

#endif
