/* crc.h - remainders of bytes, raw and linear. */
#ifndef CRC_H
#define CRC_H

#include "base.h"

/* ---- crc.c: remainders of bytes, raw and linear ---- */

enum crc_kind { CRC_ZIP, CRC_ECMA, CRC_JONES };

/* Goes on from a state; 0 to start with. */
uint64_t crc_update(enum crc_kind kind, uint64_t state, const void *data, size_t n);

/* The remainder of a string whose first part has this one, when nbytes zeros follow. */
uint64_t crc_shift(enum crc_kind kind, uint64_t state, uint64_t nbytes);

uint32_t crc32_of(const void *data, size_t n);          /* as zip wants it */
uint32_t crc32_from_raw(uint64_t raw, uint64_t nbytes); /* the same, from a raw remainder */

int crc_nlevels(void); /* for tests: ways to compute, best last */
uint64_t crc_at_level(int level, enum crc_kind kind, uint64_t state, const void *data, size_t n);

#endif
