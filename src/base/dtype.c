/* dtype.c - the element types: names, sizes, and which reductions each one has. */
#include "base.h"

#include <string.h>

enum class { OPAQUE, FLOATING, INTEGER, LOGICAL, COMPLEX };

static const struct {
    const char *name;
    size_t nbytes;
    enum class class;
} dtypes[] = {
    [RSD_F64] = {"f64", 8, FLOATING},
    [RSD_F32] = {"f32", 4, FLOATING},
    [RSD_F16] = {"f16", 2, FLOATING},
    [RSD_BF16] = {"bf16", 2, FLOATING},
    [RSD_F8E4M3] = {"f8e4m3", 1, OPAQUE},
    [RSD_F8E5M2] = {"f8e5m2", 1, OPAQUE},
    [RSD_I64] = {"i64", 8, INTEGER},
    [RSD_I32] = {"i32", 4, INTEGER},
    [RSD_I16] = {"i16", 2, INTEGER},
    [RSD_I8] = {"i8", 1, INTEGER},
    [RSD_U64] = {"u64", 8, INTEGER},
    [RSD_U32] = {"u32", 4, INTEGER},
    [RSD_U16] = {"u16", 2, INTEGER},
    [RSD_U8] = {"u8", 1, INTEGER},
    [RSD_BOOL] = {"bool", 1, LOGICAL},
    [RSD_C64] = {"c64", 8, COMPLEX},
    [RSD_C128] = {"c128", 16, COMPLEX},
    [RSD_F8E4M3FNUZ] = {"f8e4m3fnuz", 1, OPAQUE},
    [RSD_F8E5M2FNUZ] = {"f8e5m2fnuz", 1, OPAQUE},
    [RSD_F8E8M0] = {"f8e8m0", 1, OPAQUE},
    [RSD_F4X2] = {"f4x2", 1, OPAQUE},
    [RSD_C32] = {"c32", 4, OPAQUE},
};

enum { NDTYPES = sizeof dtypes / sizeof *dtypes };

static bool is_dtype(rsd_dtype dtype)
{
    return (size_t)dtype < NDTYPES && dtypes[dtype].name;
}

const char *rsd_dtype_name(rsd_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : NULL;
}

size_t rsd_dtype_nbytes(rsd_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].nbytes : 0;
}

rsd_status rsd_dtype_parse(const char *name, rsd_dtype *dtype)
{
    for (size_t i = 0; i < NDTYPES; i++)
        if (dtypes[i].name && strcmp(name, dtypes[i].name) == 0) {
            *dtype = (rsd_dtype)i;
            return RSD_OK;
        }
    return fail(RSD_EINVAL, "unknown dtype '%.40s'", name);
}

const char *rsd_reduce_name(rsd_reduce reduce)
{
    static const char *const names[] = {"sum",     "avg",  "min", "max",
                                        "product", "band", "bor", "bxor"};
    return (size_t)reduce < sizeof names / sizeof *names ? names[reduce] : NULL;
}

bool dtype_reduces(rsd_dtype dtype, rsd_reduce reduce)
{
    bool bitwise =
        reduce == RSD_REDUCE_BAND || reduce == RSD_REDUCE_BOR || reduce == RSD_REDUCE_BXOR;
    switch (is_dtype(dtype) ? dtypes[dtype].class : OPAQUE) {
    case FLOATING:
        return !bitwise;
    case INTEGER:
        return true;
    case LOGICAL:
        return reduce != RSD_REDUCE_AVG;
    case COMPLEX:
        return reduce == RSD_REDUCE_SUM || reduce == RSD_REDUCE_AVG || reduce == RSD_REDUCE_PRODUCT;
    case OPAQUE:
        break;
    }
    return false;
}
