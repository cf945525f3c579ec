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

static size_t slot_of(const struct interned *slots, size_t room, struct slice name)
{
    size_t slot = hash_name(name) & (room - 1);
    while (slots[slot].name.bytes && !same_name(slots[slot].name, name))
        slot = (slot + 1) & (room - 1);
    return slot;
}

static rsd_status grow(struct intern *intern)
{
    size_t room = intern->room ? intern->room * 2 : 64;
    struct interned *slots = mem_new(room, sizeof *slots);
    if (!slots)
        return RSD_ENOMEM;
    for (size_t i = 0; i < intern->room; i++)
        if (intern->slots[i].name.bytes)
            slots[slot_of(slots, room, intern->slots[i].name)] = intern->slots[i];
    mem_free(intern->slots);
    intern->slots = slots;
    intern->room = room;
    return RSD_OK;
}

bool intern_find(const struct intern *intern, struct slice name, size_t *number)
{
    if (intern->room == 0)
        return false;
    const struct interned *slot = &intern->slots[slot_of(intern->slots, intern->room, name)];
    if (slot->name.bytes)
        *number = slot->number;
    return slot->name.bytes != NULL;
}

rsd_status intern_add(struct intern *intern, struct slice name, size_t number)
{
    if (intern->n * 2 >= intern->room)
        TRY(grow(intern));
    intern->slots[slot_of(intern->slots, intern->room, name)] = (struct interned){name, number};
    intern->n++;
    return RSD_OK;
}

void intern_drop(struct intern *intern)
{
    mem_free(intern->slots);
    *intern = (struct intern){0};
}
