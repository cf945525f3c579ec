/* torch_names.c - the names of dtypes in files (those of torch's storage classes, and safetensors'), and what
 * wrappers add to the names of parameters. */
#include "torch_item.h"

#include <string.h>

static const struct {
    rsd_dtype dtype;
    const char *storage, *safetensors; /* NULL: torch or safetensors lacks the dtype */
} names[] = {
    {RSD_F64, "DoubleStorage", "F64"},
    {RSD_F32, "FloatStorage", "F32"},
    {RSD_F16, "HalfStorage", "F16"},
    {RSD_BF16, "BFloat16Storage", "BF16"},
    {RSD_F8E4M3, NULL, "F8_E4M3"},
    {RSD_F8E5M2, NULL, "F8_E5M2"},
    {RSD_I64, "LongStorage", "I64"},
    {RSD_I32, "IntStorage", "I32"},
    {RSD_I16, "ShortStorage", "I16"},
    {RSD_I8, "CharStorage", "I8"},
    {RSD_U64, NULL, "U64"},
    {RSD_U32, NULL, "U32"},
    {RSD_U16, NULL, "U16"},
    {RSD_U8, "ByteStorage", "U8"},
    {RSD_BOOL, "BoolStorage", "BOOL"},
    {RSD_C64, "ComplexFloatStorage", "C64"},
    {RSD_C128, "ComplexDoubleStorage", NULL},
    {RSD_F8E4M3FNUZ, NULL, "F8_E4M3FNUZ"},
    {RSD_F8E5M2FNUZ, NULL, "F8_E5M2FNUZ"},
    {RSD_F8E8M0, NULL, "F8_E8M0"},
    {RSD_F4X2, NULL, "F4"},
    {RSD_C32, NULL, NULL},
};

enum { NNAMES = sizeof names / sizeof *names };

rsd_dtype dtype_from_storage(struct slice name)
{
    for (size_t i = 0; i < NNAMES; i++)
        if (names[i].storage && slice_is(name, names[i].storage))
            return names[i].dtype;
    return (rsd_dtype)0;
}

rsd_dtype dtype_from_safetensors(struct slice name)
{
    for (size_t i = 0; i < NNAMES; i++)
        if (names[i].safetensors && slice_is(name, names[i].safetensors))
            return names[i].dtype;
    return (rsd_dtype)0;
}

const char *dtype_to_storage(rsd_dtype dtype)
{
    return names[dtype - 1].storage;
}

const char *dtype_to_safetensors(rsd_dtype dtype)
{
    return names[dtype - 1].safetensors;
}

void torch_strip_wrappers(char *name)
{
    static const char *const wrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.",
                                           "_checkpoint_wrapped_module.", NULL};
    char *out = name;
    for (const char *at = name; *at;) {
        const char *const *wrapper = wrappers;
        bool first = at == name || at[-1] == '.';
        while (first && *wrapper && strncmp(at, *wrapper, strlen(*wrapper)) != 0)
            wrapper++;
        size_t n = first && *wrapper ? strlen(*wrapper) : 0;
        if (n && at[n])
            at += n;
        else
            *out++ = *at++;
    }
    *out = '\0';
}
