/* intern.c - names to numbers: a hash table that does not own its names. */
#include "base.h"

#include <string.h>

static uint64_t hash_name(struct slice name)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < name.nbytes; i++)
        hash = (hash ^ (unsigned char)name.bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

static bool same_name(struct slice a, struct slice b)
{
    return a.nbytes == b.nbytes && memcmp(a.bytes, b.bytes, a.nbytes) == 0;
}

static size_t slot_of(const struct string_map_entry *slots, size_t capacity, struct slice name)
{
    size_t slot = hash_name(name) & (capacity - 1);
    while (slots[slot].name.bytes && !same_name(slots[slot].name, name))
        slot = (slot + 1) & (capacity - 1);
    return slot;
}

static rsd_status grow(struct string_map *intern)
{
    size_t capacity = intern->capacity ? intern->capacity * 2 : 64;
    struct string_map_entry *slots = mem_new(capacity, sizeof *slots);
    if (!slots)
        return RSD_ENOMEM;
    for (size_t i = 0; i < intern->capacity; i++)
        if (intern->slots[i].name.bytes)
            slots[slot_of(slots, capacity, intern->slots[i].name)] = intern->slots[i];
    mem_free(intern->slots);
    intern->slots = slots;
    intern->capacity = capacity;
    return RSD_OK;
}

bool string_map_find(const struct string_map *intern, struct slice name, size_t *number)
{
    if (intern->capacity == 0)
        return false;
    const struct string_map_entry *slot =
        &intern->slots[slot_of(intern->slots, intern->capacity, name)];
    if (slot->name.bytes)
        *number = slot->number;
    return slot->name.bytes != NULL;
}

rsd_status string_map_add(struct string_map *intern, struct slice name, size_t number)
{
    if (intern->n * 2 >= intern->capacity)
        TRY(grow(intern));
    intern->slots[slot_of(intern->slots, intern->capacity, name)] =
        (struct string_map_entry){name, number};
    intern->n++;
    return RSD_OK;
}

void string_map_drop(struct string_map *intern)
{
    mem_free(intern->slots);
    *intern = (struct string_map){0};
}
