/* slice.c - slices of tensors as NumPy writes them: '[0:10, -1]', '[..., 3:]'.
 *
 * Ranges are cut off at the ends of a dim. A dim with an index is not in the shape of the result.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct slice_reader {
    const char *at;
    const rsd_tensor_info *tensor;
    const char *problem; /* NULL: none */
};

/* Reads a number if there is one. Numbers that do not fit are as far out as possible. */
static bool read_slice_number(struct slice_reader *reader, int64_t *value)
{
    char *end;
    reader->at += strspn(reader->at, " ");
    errno = 0;
    long long number = strtoll(reader->at, &end, 10);
    bool found = end != reader->at;
    if (found)
        *value = number;
    reader->at = end + strspn(end, " ");
    return found;
}

/* Returns the index that a number of a range stands for, within the dim. */
static int64_t clip_index(int64_t index, int64_t extent)
{
    if (index < 0)
        index = index < -extent ? 0 : index + extent;
    return index > extent ? extent : index;
}

/* Reads the range or index of one dim. */
static void read_slice_dim(struct slice_reader *reader, int32_t dim, struct tensor_slice *slice)
{
    int64_t extent = reader->tensor->shape[dim], first = 0, end = extent;
    bool has_first = read_slice_number(reader, &first);
    if (*reader->at == ':') {
        reader->at++;
        read_slice_number(reader, &end);
        if (*reader->at == ':')
            reader->problem = "steps are not supported; select the range without a step";
        first = clip_index(first, extent);
        end = clip_index(end, extent);
        slice->box.lo[dim] = first;
        slice->box.len[dim] = end > first ? end - first : 0;
        slice->shape[slice->ndim++] = slice->box.len[dim];
        return;
    }
    if (!has_first)
        reader->problem = "a range such as 0:10, an index, or ... is needed for each dim";
    else if (first >= extent || first < -extent)
        reader->problem = "the index is outside of the dim";
    slice->box.lo[dim] = first < 0 ? first + extent : first;
    slice->box.len[dim] = 1;
}

static void select_whole_dims(struct slice_reader *reader, int32_t from, int32_t to,
                              struct tensor_slice *slice)
{
    for (int32_t d = from; d < to; d++) {
        slice->box.lo[d] = 0;
        slice->box.len[d] = reader->tensor->shape[d];
        slice->shape[slice->ndim++] = reader->tensor->shape[d];
    }
}

/* Counts the dims that a slice names from here on, without "...". */
static int32_t count_named_dims(const char *text)
{
    int32_t n = 1;
    for (; *text && *text != ']'; text++)
        n += *text == ',';
    return n;
}

const char *slice_parse(const char *text, const rsd_tensor_info *tensor, struct tensor_slice *slice)
{
    struct slice_reader reader = {.at = text + strspn(text, " "), .tensor = tensor};
    bool bracket = *reader.at == '[', dots = false;
    int32_t dim = 0;
    reader.at += bracket;
    reader.at += strspn(reader.at, " ");
    *slice = (struct tensor_slice){
        .name = tensor->name, .dtype = tensor->dtype, .box.ndim = tensor->ndim};
    bool more = *reader.at && *reader.at != ']';
    while (more && !reader.problem) {
        reader.at += strspn(reader.at, " ");
        if (strncmp(reader.at, "...", 3) == 0) {
            int32_t after = count_named_dims(reader.at) - 1;
            if (dots)
                return "... may occur once";
            if (after > tensor->ndim - dim)
                return "the slice has more dims than the tensor";
            dots = true;
            select_whole_dims(&reader, dim, tensor->ndim - after, slice);
            dim = tensor->ndim - after;
            reader.at += 3 + strspn(reader.at + 3, " ");
        } else if (dim == tensor->ndim) {
            return "the slice has more dims than the tensor";
        } else {
            read_slice_dim(&reader, dim++, slice);
        }
        more = *reader.at == ',';
        reader.at += more;
        reader.at += strspn(reader.at, " ");
        more = more && *reader.at && *reader.at != ']';
    }
    select_whole_dims(&reader, dim, tensor->ndim, slice);
    if (bracket && *reader.at == ']')
        reader.at++;
    else if (bracket && !reader.problem)
        reader.problem = "a ] is missing, or a range is not valid";
    if (*reader.at && !reader.problem)
        reader.problem = "a range is not valid";
    return reader.problem;
}
