/* random.h - random layouts as text, from a seed: small, but of every kind. */
#ifndef RANDOM_H
#define RANDOM_H

#include "reshard.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct random {
    uint64_t state;
};

uint64_t random_next(struct random *random);
int64_t random_below(struct random *random, int64_t limit); /* 0 .. limit - 1 */

/* A tensor: its text, such as "f32[4,0,7]", and its shape. */
struct random_tensor {
    char text[128];
    int32_t ndim;
    int64_t shape[8];
};
struct random_tensor random_tensor(struct random *random, const char *dtype);

/* One side of a problem for it, such as "2x3 ranks=4-9 : S(0),C(1,2)". Partial axes only with
 * `partial`, all by the reduction that it names. */
void random_side(struct random *random, const struct random_tensor *tensor, const char *partial,
                 char *text, size_t room);

/* One that is known, as random_side wants it. */
struct random_tensor known_tensor(const rsd_tensor_info *tensor);

/* For rsd_convert's choose: any layout that covers the tensor. The context is a struct random. */
rsd_status random_choice(void *random, const rsd_tensor_info *tensor, rsd_tensor_target *choice);

#endif
