/* test_base.c - the map of names: finding, replacing, growing, and names that were chosen to collide; numbers in text. */
#include "base.h"
#include "folder.h"
#include "json.h"
#include "tap.h"

#include <locale.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { NNAMES = 5000, NCHOSEN = 512 };

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

/* ---- locales ---- */

/* Makes a locale whose decimal point is a comma: the file LC_NUMERIC as localedef compiles it. */
static void make_comma_locale(const char *folder)
{
    static const char numeric[] =
        "\x14\x11\x03\x20\6\0\0\0\x20\0\0\0\x22\0\0\0\x24\0\0\0\x28\0\0\0\x2c\0\0\0\x30\0\0\0"
        ",\0.\0\3\3\0\0,\0\0\0.\0\0\0UTF-8";
    mkdir(path_in(folder, "comma"), 0777);
    FILE *file = fopen(path_in(folder, "comma/LC_NUMERIC"), "wb");
    CHECK(file && fwrite(numeric, sizeof numeric, 1, file) == 1);
    if (file)
        fclose(file);
    setenv("LOCPATH", folder, 1);
}

/* Saves a tensor of one element. */
static rsd_checkpoint *save_number(const char *path, double number)
{
    rsd_layout *layout = NULL;
    rsd_checkpoint *checkpoint = NULL;
    void *array = &number;
    rsd_tensor tensor = {.struct_nbytes = sizeof tensor, .name = "w", .arrays = &array};
    OK(rsd_layout_parse("f64[1] @ 1:R", &layout));
    tensor.layout = layout;
    OK(rsd_save(path, 1, &tensor, NULL, NULL));
    OK(rsd_checkpoint_open(path, NULL, &checkpoint));
    rsd_layout_free(layout);
    return checkpoint;
}

static rsd_status check_difference(void *context, const char *name, rsd_difference difference,
                                   const char *text)
{
    (void)context, (void)name, (void)difference;
    CHECK(strcmp(text, "element [0] is 0.5 and 0.25") == 0, "%s", text);
    return RSD_OK;
}

static void differences_in_locales(const char *folder)
{
    int64_t n = 0;
    CASE("numbers in messages have a decimal point in every locale of the program");
    rsd_checkpoint *a = save_number(path_in(folder, "a"), 0.5);
    rsd_checkpoint *b = save_number(path_in(folder, "b"), 0.25);
    OK(rsd_diff(a, b, NULL, check_difference, NULL, &n, NULL));
    CHECK(n == 1);
    rsd_checkpoint_close(a);
    rsd_checkpoint_close(b);
    error_set("after %g s", 0.5);
    error_add_context("%g: ", 1.5);
    CHECK(strcmp(rsd_error(), "1.5: after 0.5 s") == 0, "%s", rsd_error());
}

static void numbers_in_locales(void)
{
    const char *folder = folder_new("locale");
    struct text text = {0};
    struct json j;
    double value = 0;
    int64_t integer;
    bool whole;
    char *chars = NULL, printed[20];
    CASE("numbers in JSON have a decimal point in every locale of the program");
    make_comma_locale(folder);
    CHECK(setlocale(LC_NUMERIC, "comma"), "no such locale");
    snprintf(printed, sizeof printed, "%.2f", 1.25);
    CHECK(strcmp(printed, "1,25") == 0, "%s", printed);
    json_add_float(&text, 1.25);
    text_add(&text, " ");
    json_add_float(&text, 1e-5);
    text_add(&text, " ");
    json_add_float(&text, 3);
    OK(text_take(&text, &chars));
    CHECK(chars && strcmp(chars, "1.25 1e-05 3.0") == 0, "%s", chars);
    rsd_free(chars);
    json_start(&j, "1.25", 4);
    CHECK(json_number(&j, &value, &integer, &whole) == RSD_OK && !whole && value == 1.25);
    json_drop(&j);
    differences_in_locales(folder);
    setlocale(LC_NUMERIC, "C");
    folder_remove(folder);
}

int main(void)
{
    test_names();
    test_chosen_names();
    numbers_in_locales();
    return tap_end();
}
