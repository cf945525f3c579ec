/* string_map.c - a hash table from names to numbers. It does not own its names. */
#include "base.h"

#include <string.h>

static uint64_t hash_name(struct slice name)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < name.nbytes; i++)
        hash = (hash ^ (unsigned char)name.bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

static bool names_equal(struct slice a, struct slice b)
{
    return a.nbytes == b.nbytes && memcmp(a.bytes, b.bytes, a.nbytes) == 0;
}

static size_t find_slot(const struct string_map_entry *slots, size_t capacity, struct slice name)
{
    size_t slot = hash_name(name) & (capacity - 1);
    while (slots[slot].name.bytes && !names_equal(slots[slot].name, name))
        slot = (slot + 1) & (capacity - 1);
    return slot;
}

static rsd_status grow_map(struct string_map *map)
{
    size_t capacity = map->capacity ? map->capacity * 2 : 64;
    struct string_map_entry *slots = mem_new(capacity, sizeof *slots);
    if (!slots)
        return RSD_ENOMEM;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->slots[i].name.bytes)
            slots[find_slot(slots, capacity, map->slots[i].name)] = map->slots[i];
    mem_free(map->slots);
    map->slots = slots;
    map->capacity = capacity;
    return RSD_OK;
}

bool string_map_find(const struct string_map *map, struct slice name, size_t *number)
{
    if (map->capacity == 0)
        return false;
    const struct string_map_entry *slot = &map->slots[find_slot(map->slots, map->capacity, name)];
    if (slot->name.bytes)
        *number = slot->number;
    return slot->name.bytes != NULL;
}

rsd_status string_map_add(struct string_map *map, struct slice name, size_t number)
{
    if (map->n * 2 >= map->capacity)
        TRY(grow_map(map));
    map->slots[find_slot(map->slots, map->capacity, name)] =
        (struct string_map_entry){name, number};
    map->n++;
    return RSD_OK;
}

void string_map_drop(struct string_map *map)
{
    mem_free(map->slots);
    *map = (struct string_map){0};
}
