/* test_ranges.c - ranges of elements in row-major order become boxes: of any shape and range, each element is in
 * one box, in order, and the boxes are as few as they can be stated to be. */
#include "layout.h"
#include "random.h"
#include "tap.h"

enum { NROUNDS = 20000, MAX_DIMS = 5 };

/* Returns the place of an element of a box in the tensor, in row-major order. */
static int64_t place_of(int32_t ndim, const int64_t *shape, const int64_t *lo, const int64_t *len,
                        int64_t element)
{
    int64_t index[MAX_DIMS], place = 0;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        index[d] = lo[d] + element % len[d];
        element /= len[d];
    }
    for (int32_t d = 0; d < ndim; d++)
        place = place * shape[d] + index[d];
    return place;
}

static void check_range(int32_t ndim, const int64_t *shape, int64_t begin, int64_t end)
{
    int64_t lo[MAX_DIMS], len[MAX_DIMS], at = begin;
    int nboxes = 0;
    while (at < end) {
        int64_t n = box_of_range(ndim, shape, at, end, lo, len);
        if (!CHECK(n > 0 && n <= end - at && n == box_volume(ndim, len), "%lld elements at %lld",
                   (long long)n, (long long)at))
            return;
        for (int32_t d = 0; d < ndim; d++)
            CHECK(lo[d] >= 0 && len[d] > 0 && lo[d] + len[d] <= shape[d], "dim %d", (int)d);
        for (int64_t i = 0; i < n; i++)
            CHECK(place_of(ndim, shape, lo, len, i) == at + i, "element %lld of box %d",
                  (long long)i, nboxes);
        at += n;
        nboxes++;
    }
    CHECK(nboxes <= (ndim > 1 ? 2 * ndim - 1 : 1), "%d boxes of %d dims", nboxes, (int)ndim);
}

int main(void)
{
    struct random random = {1};
    CASE("ranges of random shapes");
    for (int round = 0; round < NROUNDS; round++) {
        int32_t ndim = (int32_t)random_below(&random, MAX_DIMS + 1);
        int64_t shape[MAX_DIMS], volume = 1;
        for (int32_t d = 0; d < ndim; d++) {
            shape[d] = 1 + random_below(&random, 5);
            volume *= shape[d];
        }
        int64_t begin = random_below(&random, volume);
        check_range(ndim, shape, begin, begin + 1 + random_below(&random, volume - begin));
    }
    CASE("a whole tensor is one box, however large");
    const int64_t shape[] = {(int64_t)1 << 20, (int64_t)1 << 20, (int64_t)1 << 20};
    int64_t lo[3], len[3], whole = (int64_t)1 << 60;
    CHECK(box_of_range(3, shape, 0, whole, lo, len) == whole);
    CHECK(box_of_range(3, shape, 1, whole, lo, len) == ((int64_t)1 << 20) - 1);
    CHECK(box_of_range(3, shape, whole - 1, whole, lo, len) == 1 && lo[0] == shape[0] - 1);
    return tap_end();
}
