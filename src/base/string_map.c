/* string_map.c - a hash table from names to numbers. It does not own its names.
 *
 * Names come from files, so an attacker may choose them. The hash is SipHash-1-3 under a random key of each
 * map: without the key, names that collide cannot be found.
 */
#include "base.h"

#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* ---- SipHash ---- */

static uint64_t rotate_left(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

/* One round of SipHash over its state. */
static void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotate_left(v[1], 13) ^ v[0];
    v[3] = rotate_left(v[3], 16) ^ v[2];
    v[0] = rotate_left(v[0], 32) + v[3];
    v[2] += v[1];
    v[3] = rotate_left(v[3], 21) ^ v[0];
    v[1] = rotate_left(v[1], 17) ^ v[2];
    v[2] = rotate_left(v[2], 32);
}

/* Returns the SipHash-1-3 of a name. */
static uint64_t hash_name(const uint64_t key[2], struct slice name)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du,
                     key[0] ^ 0x6c7967656e657261u, key[1] ^ 0x7465646279746573u};
    uint64_t word;
    size_t nwords = name.nbytes / 8, rest = name.nbytes % 8;
    for (size_t i = 0; i <= nwords; i++) {
        word =
            i < nwords ? 0 : (uint64_t)name.nbytes << 56; /* the last word holds the length too */
        if (i < nwords || rest)
            memcpy(&word, name.bytes + 8 * i, i < nwords ? 8 : rest);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* Chooses a random key. If the kernel has no random bytes yet, takes addresses and the clock. */
static void choose_key(struct string_map *map)
{
    if (getrandom(map->key, sizeof map->key, GRND_NONBLOCK) == (ssize_t)sizeof map->key)
        return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    map->key[0] = (uint64_t)(uintptr_t)map ^ (uint64_t)now.tv_nsec << 32;
    map->key[1] = (uint64_t)(uintptr_t)&now ^ (uint64_t)now.tv_sec << 20 ^ (uint64_t)getpid();
}

/* ---- the table ---- */

enum { LOOKUP_STEPS = 4 };

static bool is_entry_of(const struct string_map_entry *entry, struct slice name, uint64_t hash)
{
    return entry->hash == hash && entry->name.nbytes == name.nbytes &&
           memcmp(entry->name.bytes, name.bytes, name.nbytes) == 0;
}

/* Returns the slot that holds the name, or the free slot where it belongs. */
static size_t find_slot(const struct string_map_entry *slots, size_t capacity, struct slice name,
                        uint64_t hash)
{
    size_t slot = hash & (capacity - 1);
    while (slots[slot].name.bytes && !is_entry_of(&slots[slot], name, hash))
        slot = (slot + 1) & (capacity - 1);
    return slot;
}

/* Doubles the capacity of the table. The first call chooses the key. */
static rsd_status grow_map(struct string_map *map)
{
    size_t capacity = map->capacity ? map->capacity * 2 : 64;
    struct string_map_entry *slots = mem_new(capacity, sizeof *slots);
    if (!slots)
        return RSD_ENOMEM;
    if (!map->capacity)
        choose_key(map);
    for (size_t i = 0; i < map->capacity; i++) {
        const struct string_map_entry *entry = &map->slots[i];
        if (entry->name.bytes)
            slots[find_slot(slots, capacity, entry->name, entry->hash)] = *entry;
    }
    mem_free(map->slots);
    map->slots = slots;
    map->capacity = capacity;
    return RSD_OK;
}

bool string_map_find(const struct string_map *map, struct slice name, size_t *number)
{
    if (map->capacity == 0 || !budget_take(LOOKUP_STEPS + name.nbytes / STEP_NBYTES))
        return false;
    size_t slot = find_slot(map->slots, map->capacity, name, hash_name(map->key, name));
    if (map->slots[slot].name.bytes)
        *number = map->slots[slot].number;
    return map->slots[slot].name.bytes != NULL;
}

rsd_status string_map_add(struct string_map *map, struct slice name, size_t number)
{
    if (!budget_take_text(name.nbytes))
        return budget_fail();
    if (map->n * 2 >= map->capacity)
        TRY(grow_map(map));
    uint64_t hash = hash_name(map->key, name);
    struct string_map_entry *slot = &map->slots[find_slot(map->slots, map->capacity, name, hash)];
    if (!slot->name.bytes) {
        *slot = (struct string_map_entry){.name = name, .hash = hash};
        map->n++;
    }
    slot->number = number;
    return RSD_OK;
}

void string_map_drop(struct string_map *map)
{
    mem_free(map->slots);
    *map = (struct string_map){0};
}
