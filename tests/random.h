/* random.h - small random layouts of every kind as text, from a seed. */
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

/* Writes one side of a problem, such as "2x3 ranks=4-9 : S(0),C(1,2)". `partial` is the reduction of partial
 * axes; NULL: no axis is partial. */
void random_side(struct random *random, const struct random_tensor *tensor, const char *partial,
                 char *text, size_t capacity);

/* Returns a tensor of a checkpoint, for random_side. */
struct random_tensor known_tensor(const rsd_tensor_info *tensor);

/* An rsd_map_tensor for rsd_convert: chooses a random layout that covers the tensor. */
rsd_status random_choice(void *random, const rsd_tensor_info *tensor, rsd_tensor_target *choice);

#endif
