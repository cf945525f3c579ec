/* tables.h - the shared part of the kernels as C: the structs of their tables and their arithmetic. */
#ifndef TABLES_H
#define TABLES_H

#include "cuda.h"

#define DEVICE    static inline __attribute__((unused))
#define CALLED    DEVICE
#define CODE(...) __VA_ARGS__
#include "index_code.h"
#include "value_code.h"

#include "sum_code.h"

#include "remainder_code.h"
#undef CODE
#undef CALLED
#undef DEVICE

#endif
