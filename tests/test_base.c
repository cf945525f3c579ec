/* test_base.c - the map of names: finding, replacing, growing, and names that were chosen to collide. */
#include "base.h"
#include "tap.h"

enum { NNAMES = 5000, NCHOSEN = 512 };

static struct slice slice_of(const char *text)
{
    return (struct slice){text, strlen(text)};
}

/* Returns the longest run of occupied slots: what a search may have to go through. */
static size_t longest_run(const struct string_map *map)
{
    size_t longest = 0, run = 0;
    for (size_t i = 0; i < 2 * map->capacity; i++) {
        run = map->slots[i % map->capacity].name.bytes ? run + 1 : 0;
        longest = run > longest ? run : longest;
    }
    return longest;
}

static void test_names(void)
{
    static char names[NNAMES][24];
    struct string_map map = {0};
    size_t number = 0;
    CASE("names are found, also after the map has grown");
    CHECK(!string_map_find(&map, slice_of("w"), &number));
    for (size_t i = 0; i < NNAMES; i++) {
        snprintf(names[i], sizeof names[i], "layers.%zu.weight", i);
        OK(string_map_add(&map, slice_of(names[i]), i));
    }
    for (size_t i = 0; i < NNAMES; i++)
        CHECK(string_map_find(&map, slice_of(names[i]), &number) && number == i, "%s", names[i]);
    CHECK(map.n == NNAMES);
    CHECK(!string_map_find(&map, slice_of("layers.5000.weight"), &number));
    CHECK(!string_map_find(&map, slice_of("layers.1.weigh"), &number));

    CASE("a name that is added again has its new number");
    OK(string_map_add(&map, slice_of("layers.7.weight"), 70));
    CHECK(string_map_find(&map, slice_of(names[7]), &number) && number == 70);
    CHECK(map.n == NNAMES);
    string_map_drop(&map);

    CASE("names of any length, with any bytes, and the empty name");
    static const char bytes[40] = {1, 0, 2, 0, 3};
    for (size_t n = 0; n < sizeof bytes; n++)
        OK(string_map_add(&map, (struct slice){bytes, n}, n));
    for (size_t n = 0; n < sizeof bytes; n++)
        CHECK(string_map_find(&map, (struct slice){bytes, n}, &number) && number == n);
    string_map_drop(&map);
}

/* A hash without a key, as the map had once. */
static uint64_t public_hash(struct slice name)
{
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < name.nbytes; i++)
        hash = (hash ^ (unsigned char)name.bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

static void test_chosen_names(void)
{
    static char names[NCHOSEN][24];
    struct string_map map = {0};
    CASE("names that collide under a hash without a key are distributed over the map");
    for (size_t n = 0, i = 0; n < NCHOSEN; i++) {
        snprintf(names[n], sizeof names[n], "w%zu", i);
        n += public_hash(slice_of(names[n])) % 2048 == 0;
    }
    for (size_t i = 0; i < NCHOSEN; i++)
        OK(string_map_add(&map, slice_of(names[i]), i));
    CHECK(longest_run(&map) < NCHOSEN / 4, "%zu occupied slots in a row", longest_run(&map));

    CASE("two maps have different keys");
    struct string_map other = {0};
    OK(string_map_add(&other, slice_of("w"), 0));
    CHECK(other.key[0] != map.key[0] || other.key[1] != map.key[1]);
    string_map_drop(&map);
    string_map_drop(&other);
}

int main(void)
{
    test_names();
    test_chosen_names();
    return tap_end();
}
