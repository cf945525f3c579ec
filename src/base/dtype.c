/* dtype.c - the element types: names, sizes, and which reductions and casts each one has. */
#include "base.h"

#include <string.h>

static const struct {
    const char *name, *torch; /* NumPy has the names of torch too */
    size_t nbytes;
    enum dtype_class class;
} dtypes[] = {
    [RSD_F64] = {"f64", "float64", 8, CLASS_FLOAT},
    [RSD_F32] = {"f32", "float32", 4, CLASS_FLOAT},
    [RSD_F16] = {"f16", "float16", 2, CLASS_FLOAT},
    [RSD_BF16] = {"bf16", "bfloat16", 2, CLASS_FLOAT},
    [RSD_F8E4M3] = {"f8e4m3", "float8_e4m3fn", 1, CLASS_OPAQUE},
    [RSD_F8E5M2] = {"f8e5m2", "float8_e5m2", 1, CLASS_OPAQUE},
    [RSD_I64] = {"i64", "int64", 8, CLASS_SIGNED},
    [RSD_I32] = {"i32", "int32", 4, CLASS_SIGNED},
    [RSD_I16] = {"i16", "int16", 2, CLASS_SIGNED},
    [RSD_I8] = {"i8", "int8", 1, CLASS_SIGNED},
    [RSD_U64] = {"u64", "uint64", 8, CLASS_UNSIGNED},
    [RSD_U32] = {"u32", "uint32", 4, CLASS_UNSIGNED},
    [RSD_U16] = {"u16", "uint16", 2, CLASS_UNSIGNED},
    [RSD_U8] = {"u8", "uint8", 1, CLASS_UNSIGNED},
    [RSD_BOOL] = {"bool", "bool", 1, CLASS_BOOL},
    [RSD_C64] = {"c64", "complex64", 8, CLASS_COMPLEX},
    [RSD_C128] = {"c128", "complex128", 16, CLASS_COMPLEX},
    [RSD_F8E4M3FNUZ] = {"f8e4m3fnuz", "float8_e4m3fnuz", 1, CLASS_OPAQUE},
    [RSD_F8E5M2FNUZ] = {"f8e5m2fnuz", "float8_e5m2fnuz", 1, CLASS_OPAQUE},
    [RSD_F8E8M0] = {"f8e8m0", "float8_e8m0fnu", 1, CLASS_OPAQUE},
    [RSD_F4X2] = {"f4x2", "float4_e2m1fn_x2", 1, CLASS_OPAQUE},
    [RSD_C32] = {"c32", "complex32", 4, CLASS_OPAQUE},
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

const char *dtype_to_torch(rsd_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].torch : NULL;
}

rsd_dtype dtype_from_torch(struct slice name)
{
    for (size_t i = 0; i < NDTYPES; i++)
        if (dtypes[i].name && slice_is(name, dtypes[i].torch))
            return (rsd_dtype)i;
    return (rsd_dtype)0;
}

rsd_status rsd_dtype_parse(const char *name, rsd_dtype *dtype)
{
    static const char *const modules[] = {"torch.", "numpy.", "np."};
    const char *words[2 * NDTYPES];
    size_t nwords = 0;
    const char *word = name;
    for (size_t i = 0; i < sizeof modules / sizeof *modules && word == name; i++)
        if (strncmp(name, modules[i], strlen(modules[i])) == 0)
            word = name + strlen(modules[i]);
    for (size_t i = 0; i < NDTYPES; i++) {
        if (!dtypes[i].name)
            continue;
        if (strcmp(word, dtypes[i].torch) == 0 || strcmp(name, dtypes[i].name) == 0) {
            *dtype = (rsd_dtype)i;
            return RSD_OK;
        }
        words[nwords++] = dtypes[i].name;
    }
    for (size_t i = 0; i < NDTYPES; i++)
        if (dtypes[i].name && strcmp(dtypes[i].name, dtypes[i].torch) != 0)
            words[nwords++] = dtypes[i].torch;
    return text_unknown("dtype", name, nwords, words);
}

static const char *const reductions[] = {"sum",     "avg",  "min", "max",
                                         "product", "band", "bor", "bxor"};

enum { NREDUCTIONS = sizeof reductions / sizeof *reductions };

const char *rsd_reduce_name(rsd_reduce reduce)
{
    return (size_t)reduce < NREDUCTIONS ? reductions[reduce] : NULL;
}

rsd_status rsd_reduce_parse(const char *name, rsd_reduce *reduce)
{
    const char *word = name;
    if (strcmp(name, "mean") == 0) /* NumPy's words */
        word = "avg";
    else if (strcmp(name, "prod") == 0)
        word = "product";
    for (size_t i = 0; i < NREDUCTIONS; i++)
        if (strcmp(word, reductions[i]) == 0) {
            *reduce = (rsd_reduce)i;
            return RSD_OK;
        }
    const char *words[NREDUCTIONS + 2];
    memcpy(words, reductions, sizeof reductions);
    words[NREDUCTIONS] = "mean";
    words[NREDUCTIONS + 1] = "prod";
    return text_unknown("reduction", name, NREDUCTIONS + 2, words);
}

enum dtype_class dtype_class(rsd_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].class : CLASS_OPAQUE;
}

bool dtype_casts(rsd_dtype from, rsd_dtype to)
{
    enum dtype_class a = dtype_class(from), b = dtype_class(to);
    return from == to ||
           (a != CLASS_OPAQUE && b != CLASS_OPAQUE && (a == CLASS_COMPLEX) == (b == CLASS_COMPLEX));
}

bool dtype_reduces(rsd_dtype dtype, rsd_reduce reduce)
{
    bool bitwise =
        reduce == RSD_REDUCE_BAND || reduce == RSD_REDUCE_BOR || reduce == RSD_REDUCE_BXOR;
    switch (dtype_class(dtype)) {
    case CLASS_FLOAT:
        return !bitwise;
    case CLASS_SIGNED:
    case CLASS_UNSIGNED:
        return true;
    case CLASS_BOOL:
        return reduce != RSD_REDUCE_AVG;
    case CLASS_COMPLEX:
        return reduce == RSD_REDUCE_SUM || reduce == RSD_REDUCE_AVG || reduce == RSD_REDUCE_PRODUCT;
    case CLASS_OPAQUE:
        break;
    }
    return false;
}
