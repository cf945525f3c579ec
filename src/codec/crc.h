/* crc.h - CRCs of bytes, raw and therefore linear. */
#ifndef CRC_H
#define CRC_H

#include "base.h"

enum crc_kind { CRC_ZIP, CRC_CASTAGNOLI, CRC_ECMA, CRC_JONES };

/* Continues from a state, which is 0 at first. */
uint64_t crc_update(enum crc_kind kind, uint64_t state, const void *data, size_t n);

/* Returns the state after nbytes zeros. */
uint64_t crc_shift(enum crc_kind kind, uint64_t state, uint64_t nbytes);

/* The CRC-32 of zip: of bytes, and from the raw state of nbytes. */
uint32_t crc32_of(const void *data, size_t n);
uint32_t crc32_from_raw(uint64_t raw, uint64_t nbytes);

uint32_t crc32c_of(const void *data, size_t n); /* of Castagnoli, as in iSCSI */

/* For tests: the number of implementations that run on this machine, the fastest last. */
int crc_nlevels(void);
uint64_t crc_at_level(int level, enum crc_kind kind, uint64_t state, const void *data, size_t n);

#endif
