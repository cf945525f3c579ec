/* test_pickle.c - pickles as data: pickles of Python are read as their values, values that are not plain are opaque,
 * and hostile pickles are refused. */
#include "pickle.h"
#include "tap.h"

#include <stdlib.h>

#define BYTES(text)                                                                                \
    {                                                                                              \
        (text), sizeof(text) - 1                                                                   \
    }

/* Returns a pickle as JSON, which the caller frees, or NULL if the value is not plain. */
static rsd_status pickle_json(struct slice pickle, char **json)
{
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    TRY(pickle_read_memory(pickle.bytes, pickle.nbytes, &tree, &root, &used));
    CHECK(used <= pickle.nbytes);
    rsd_status status = pickle_to_json(&tree, root, json);
    pickle_tree_drop(&tree);
    return status;
}

/* Reads a value and pickles it again. */
static rsd_status pickle_again(struct slice pickle, struct bytes *out, bool *plain)
{
    struct pickle_tree tree;
    pickle_node root;
    uint64_t used;
    TRY(pickle_read_memory(pickle.bytes, pickle.nbytes, &tree, &root, &used));
    rsd_status status = pickle_to_plain_pickle(&tree, root, out, plain);
    pickle_tree_drop(&tree);
    return status;
}

/* Python's pickle of one dict, in the protocols that have the same opcodes for it. */
#define INTS                                                                                       \
    "K\x01K\xffM\x00\x01M\xff\xffJ\x00\x00\x01\x00J\xff\xff\xff\xffJ\x7f\xff\xff\xffJ\xff\xff\xff" \
    "\x7fJ\x00\x00\x00\x80\x8a\x05\x00\x00\x00\x80\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00@\x8a"   \
    "\x08\x00\x00\x00\x00\x00\x00\x00\x80"
#define FLOATS                                                                                     \
    "G\x3f\xf8\x00\x00\x00\x00\x00\x00G\x80\x00\x00\x00\x00\x00\x00\x00G~7\xe4<\x88\x00u\x9cG"     \
    "\x7f\xf0\x00\x00\x00\x00\x00\x00G\x7f\xf8\x00\x00\x00\x00\x00\x00"
#define LONGS                                                                                      \
    "\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xfe\x8a" \
    "\x0d\x00\x00\x00@\xea\xedtF\xd0\x9c,\x9f\x0c"
#define OLD                                                                                        \
    "}q\x00(X\x01\x00\x00\x00"                                                                     \
    "aq\x01]q\x02(" INTS "eX\x01\x00\x00\x00"                                                      \
    "bq\x03(" FLOATS "tq\x04X\x01\x00\x00\x00"                                                     \
    "cq\x05]q\x06(N\x88\x89)X\x01\x00\x00\x00xq\x07\x85q\x08K\x01K\x02\x86q\x09K\x01K\x02K\x03"    \
    "\x87q\x0a}q\x0b"                                                                              \
    "eX\x03\x00\x00\x00"                                                                           \
    "bigq\x0c]q\x0d(" LONGS "eX\x01\x00\x00\x00sq\x0eX\x08\x00\x00\x00h\xc3\xa9 \"q\"\nq\x0fu."
#define NEW                                                                                        \
    "\x95\xdf\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01"                                           \
    "a\x94]\x94(" INTS "e\x8c\x01"                                                                 \
    "b\x94(" FLOATS "t\x94\x8c\x01"                                                                \
    "c\x94]\x94(N\x88\x89)\x8c\x01x\x94\x85\x94K\x01K\x02\x86\x94K\x01K\x02K\x03\x87\x94}\x94"     \
    "e\x8c\x03"                                                                                    \
    "big\x94]\x94(" LONGS "e\x8c\x01s\x94\x8c\x08h\xc3\xa9 \"q\"\n\x94u."

static const char whole_dict[] =
    "{\"a\": [1, 255, 256, 65535, 65536, -1, -129, 2147483647, -2147483648, 2147483648, "
    "4611686018427387904, -9223372036854775808], \"b\": [1.5, -0.0, 1e+300, \"inf\", \"nan\"], "
    "\"c\": [null, true, false, [], [\"x\"], [1, 2], [1, 2, 3], {}], \"big\": "
    "[9223372036854775808, "
    "-36893488147419103232, 1000000000000000000000000000000], \"s\": \"h\xc3\xa9 "
    "\\\"q\\\"\\u000a\"}";

static const struct {
    struct slice pickle;
    const char *json; /* NULL: not plain */
} pickled[] = {
    {{"\x80\x02" OLD, sizeof "\x80\x02" OLD - 1}, whole_dict},
    {{"\x80\x03" OLD, sizeof "\x80\x03" OLD - 1}, whole_dict},
    {{"\x80\x04" NEW, sizeof "\x80\x04" NEW - 1}, whole_dict},
    {{"\x80\x05" NEW, sizeof "\x80\x05" NEW - 1}, whole_dict},
    {BYTES("\x80\x02"
           "c_codecs\nencode\nq\x00X\x04\x00\x00\x00\x00"
           "a\xc3\xbfq\x01X\x06\x00\x00\x00latin1q\x02\x86q\x03Rq\x04."),
     "{\"bytes\": \"0061ff\"}"},
    {BYTES("\x80\x03"
           "C\x03\x00"
           "a\xffq\x00."),
     "{\"bytes\": \"0061ff\"}"},
    {BYTES("\x80\x05\x95\x0d\x00\x00\x00\x00\x00\x00\x00\x96\x02\x00\x00\x00\x00\x00\x00\x00"
           "ab\x94."),
     "{\"bytes\": \"6162\"}"},
    {BYTES("\x80\x04\x95\x07\x00\x00\x00\x00\x00\x00\x00\x8f\x94(K\x01\x90."), "[1]"},
    {BYTES("\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00(K\x01\x91\x94."), "[1]"},
    {BYTES("\x80\x02"
           "ccollections\nOrderedDict\nq\x00)Rq\x01X\x01\x00\x00\x00kq\x02K\x01s."),
     "{\"k\": 1}"},
    {BYTES("\x80\x04\x95)\x00\x00\x00\x00\x00\x00\x00\x8c\x0b"
           "collections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94."),
     "{}"},
    {BYTES("\x80\x02}(K\x01K\x02NK\x03\x88K\x04G\x3f\xe0\x00\x00\x00\x00\x00\x00K\x05u."),
     "{\"1\": 2, \"null\": 3, \"true\": 4, \"0.5\": 5}"},
    {BYTES("\x80\x02X\x01\x00\x00\x00xq\x07h\x07\x86j\x07\x00\x00\x00\x86."),
     "[[\"x\", \"x\"], \"x\"]"},
    {BYTES("\x80\x04(K\x01K\x02K\x03\x31K\x04\x32\x86."), "[4, 4]"},
    {BYTES("\x80\x04K\x01K\x02\x30."), "1"},
    {BYTES("\x80\x02(t."), "[]"},
    {BYTES("\x80\x02\x8b\x02\x00\x00\x00\xff\xff."), "-1"},
    {BYTES("\x80\x02\x8a\x00."), "0"},
    {BYTES("\x80\x04\x8d\x01\x00\x00\x00\x00\x00\x00\x00z."), "\"z\""},
    {BYTES("\x80\x02"
           "ctorch\nSize\n(K\x02K\x03t\x85R."),
     "[2, 3]"},
    {BYTES("\x80\x02"
           "cos\nsystem\nX\x02\x00\x00\x00id\x85R."),
     NULL},
    {BYTES("\x80\x02"
           "cos\nsystem\n."),
     NULL},
    {BYTES("\x80\x02]q\x00(h\x00"
           "e."),
     NULL}, /* a list that holds itself */
    {BYTES("\x80\x02"
           "cnumpy\nscalar\n)\x81}(X\x01\x00\x00\x00vK\x01ub."),
     NULL},
    {BYTES("\x80\x02(X\x07\x00\x00\x00storageK\x01tQ."), NULL},
};

static void plain_values(void)
{
    CASE("pickles of every protocol become the same JSON");
    for (size_t i = 0; i < sizeof pickled / sizeof *pickled; i++) {
        char *json = NULL;
        const char *right = pickled[i].json ? pickled[i].json : "(opaque)";
        if (CHECK(pickle_json(pickled[i].pickle, &json) == RSD_OK, "%zu: %s", i, rsd_error()))
            CHECK(strcmp(json ? json : "(opaque)", right) == 0, "%zu: %s, not %s", i,
                  json ? json : "(opaque)", right);
        free(json);
    }
    CASE("a value that is pickled again is the same value");
    for (size_t i = 0; i < sizeof pickled / sizeof *pickled; i++) {
        struct bytes again = {0};
        char *json = NULL;
        bool plain = false;
        OK(pickle_again(pickled[i].pickle, &again, &plain));
        CHECK(plain == (pickled[i].json != NULL), "%zu", i);
        if (plain && OK(pickle_json((struct slice){(char *)again.data, again.n}, &json)))
            CHECK(json && strcmp(json, pickled[i].json) == 0, "%zu: %s", i, json);
        free(json);
        bytes_drop(&again);
    }
}

/* ---- invalid pickles ---- */

static const struct {
    struct slice pickle;
    const char *message;
} wrong[] = {
    {BYTES(""), "byte 0 of the pickle: stream ends early"},
    {BYTES("\x80"), "stream ends early"},
    {BYTES("\x80\x02"), "byte 2 of the pickle: stream ends early"},
    {BYTES("(dp0\nVa\np1\nI1\ns."), "stream does not begin with a protocol"},
    {BYTES("}q\x00X\x01\x00\x00\x00"
           "aq\x01K\x01s."),
     "stream does not begin with a protocol"},
    {BYTES("\x80\x06N."), "protocol 6"},
    {BYTES("\x80\x01N."), "protocol 1"},
    {BYTES("\x80\x02."), "stack is empty"},
    {BYTES("\x80\x02NN."), "stack is not empty at the end"},
    {BYTES("\x80\x02(N."), "stack is not empty at the end"},
    {BYTES("\x80\x02N(t"), "stream ends early"},
    {BYTES("\x80\x02t."), "stack has no mark"},
    {BYTES("\x80\x02u."), "stack has no mark"},
    {BYTES("\x80\x02N(\x86."), "stack is empty"},
    {BYTES("\x80\x02](0."), "stack is empty"},
    {BYTES("\x80\x02]NNs."), "target of SETITEMS is not a dict"},
    {BYTES("\x80\x02}Na."), "target of APPENDS is not a list"},
    {BYTES("\x80\x02}(Nu."), "key has no value"},
    {BYTES("\x80\x02K\x01(Ne."), "target of APPENDS is not a list"},
    {BYTES("\x80\x02)(NNu."), "target of SETITEMS is not a dict"},
    {BYTES("\x80\x02"
           "ca\nb\n)R(NNu(Ne."),
     "both list items and dict items"},
    {BYTES("\x80\x02"
           "ca\nb\nNR."),
     "arguments are not a tuple"},
    {BYTES("\x80\x02]}b."), "target of BUILD is not an object"},
    {BYTES("\x80\x02h\x00."), "memo entry does not exist"},
    {BYTES("\x80\x02j\xff\xff\xff\xff."), "memo entry does not exist"},
    {BYTES("\x80\x02Nr\xff\xff\xff\x7f."), "memo index exceeds the number of bytes read"},
    {BYTES("\x80\x02X\xff\xff\xff\xffx."), "string is longer than the stream"},
    {BYTES("\x80\x04\x8d\x00\x00\x00\x00\x00\x01\x00\x00x."), "string is longer than the stream"},
    {BYTES("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffx."), "string is longer than the stream"},
    {BYTES("\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x80x."), "string is longer than the stream"},
    {BYTES("\x80\x02T\xff\xff\xff\xffx."), "string is longer than the stream"},
    {BYTES("\x80\x02\x8b\xff\xff\xff\xff\x01."), "number is longer than the stream"},
    {BYTES("\x80\x02\x8a\xff\x01."), "number is longer than the stream"},
    {BYTES("\x80\x02X\x02\x00\x00\x00\xc0\x80."), "string is not UTF-8"},
    {BYTES("\x80\x02"
           "c\xff\nb\n."),
     "name of a global is not UTF-8"},
    {BYTES("\x80\x02"
           "cos\nsystem"),
     "stream ends early"},
    {BYTES("\x80\x04K\x01\x8c\x01x\x93."), "name of a global is not a string"},
    {BYTES("\x80\x02\x82\x01."), "opcode 82"},             /* EXT1 */
    {BYTES("\x80\x02\x83\x01\x00."), "opcode 83"},         /* EXT2 */
    {BYTES("\x80\x02\x84\x01\x00\x00\x00."), "opcode 84"}, /* EXT4 */
    {BYTES("\x80\x02(ios\nsystem\n."), "opcode 69"},       /* INST */
    {BYTES("\x80\x02("
           "cos\nsystem\nX\x02\x00\x00\x00ido."),
     "opcode 6f"},                                               /* OBJ */
    {BYTES("\x80\x02P0\n."), "opcode 50"},                       /* PERSID */
    {BYTES("\x80\x05\x97."), "opcode 97"},                       /* NEXT_BUFFER */
    {BYTES("\x80\x05N\x98."), "opcode 98"},                      /* READONLY_BUFFER */
    {BYTES("\x80\x02\x80\x02N."), "opcode 80"},                  /* PROTO again */
    {BYTES("\x80\x02I1\n."), "byte 2 of the pickle: opcode 49"}, /* INT, of protocol 0 */
};

static void wrong_pickles(void)
{
    CASE("invalid pickles are refused, and the error names the byte");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *json = NULL;
        rsd_status status = pickle_json(wrong[i].pickle, &json);
        CHECK((status == RSD_EFORMAT || status == RSD_EUNSUPPORTED) &&
                  strstr(rsd_error(), wrong[i].message) && strstr(rsd_error(), "of the pickle: "),
              "%zu: %s: '%s' is not in '%s'", i, rsd_status_name(status), wrong[i].message,
              rsd_error());
        free(json);
    }
    CASE("a pickle that is truncated anywhere is refused");
    struct slice whole = pickled[0].pickle;
    for (size_t n = 0; n < whole.nbytes; n++) {
        char *exact = malloc(n ? n : 1),
             *json = NULL; /* so that the address sanitizer detects a read past the end */
        memcpy(exact, whole.bytes, n);
        CHECK(pickle_json((struct slice){exact, n}, &json) == RSD_EFORMAT, "%zu bytes", n);
        free(exact);
    }
}

/* ---- small pickles of large values ---- */

/* A pickle with a text or list that is used again and again. */
static struct bytes shared_text(size_t nbytes, size_t nuses)
{
    struct bytes p = {0};
    bytes_put(&p, "\x80\x02X", 3);
    for (int i = 0; i < 4; i++)
        bytes_put(&p, &(unsigned char){(unsigned char)(nbytes >> 8 * i)}, 1);
    for (size_t i = 0; i < nbytes; i++)
        bytes_put(&p, "x", 1);
    bytes_put(&p,
              "q\x00"
              "0](",
              5);
    for (size_t i = 0; i < nuses; i++)
        bytes_put(&p, "h\x00", 2);
    bytes_put(&p, "e.", 2);
    return p;
}

static struct bytes doubled_list(int ntimes)
{
    struct bytes p = {0};
    bytes_put(&p, "\x80\x02]", 3);
    for (int i = 0; i < ntimes; i++) /* a tuple of it, twice */
        bytes_put(&p, "2\x86", 2);
    bytes_put(&p, ".", 1);
    return p;
}

static struct bytes deep_list(int depth)
{
    struct bytes p = {0};
    bytes_put(&p, "\x80\x02)", 3);
    for (int i = 0; i < depth; i++)
        bytes_put(&p, "\x85", 1);
    bytes_put(&p, ".", 1);
    return p;
}

static void bombs(void)
{
    static const struct {
        const char *what;
        size_t text, uses;
        int doublings, depth;
        bool plain;
    } bombs[] = {
        {"a text of 60 used 1000 times", 60, 1000, 0, 0, true},
        {"a text of 50000 used 25000 times", 50000, 25000, 0, 0, false},
        {"a list doubled 6 times", 0, 0, 6, 0, true},
        {"a list doubled 40 times", 0, 0, 40, 0, false},
        {"tuples 60 deep", 0, 0, 0, 60, true},
        {"tuples 100000 deep", 0, 0, 0, 100000, false},
    };
    for (size_t i = 0; i < sizeof bombs / sizeof *bombs; i++) {
        CASE("%s: %s", bombs[i].what, bombs[i].plain ? "plain" : "opaque, with little memory");
        struct bytes p = bombs[i].text        ? shared_text(bombs[i].text, bombs[i].uses)
                         : bombs[i].doublings ? doubled_list(bombs[i].doublings)
                                              : deep_list(bombs[i].depth);
        struct bytes again = {0};
        char *json = NULL;
        bool plain;
        OK(pickle_json((struct slice){(char *)p.data, p.n}, &json));
        OK(pickle_again((struct slice){(char *)p.data, p.n}, &again, &plain));
        CHECK((json != NULL) == bombs[i].plain && plain == bombs[i].plain);
        CHECK(again.n < 512 * p.n + (1 << 17), "%zu bytes of %zu", again.n, p.n);
        free(json);
        bytes_drop(&again);
        bytes_drop(&p);
    }
}

int main(void)
{
    plain_values();
    wrong_pickles();
    bombs();
    return tap_end();
}
