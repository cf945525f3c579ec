/* pickle_read.c - reads pickles as data: nothing in them is called, imported or built.
 *
 * The machine pushes, pops and memoizes nodes, and the result is a tree of nodes (pickle_tree.c). A global,
 * a call or an object becomes a node with its parts. Readers know a closed list of globals and ignore all
 * others.
 *
 * Invariants:
 *   (1) An opcode adds a bounded number of words, or as many as it took bytes or stack entries. So memory
 *       is proportional to the stream.
 *   (2) A memo index is below the number of bytes read, so the memo is bounded likewise.
 */
#include "pickle.h"

#include <string.h>

struct pickle_machine {
    read_at *read;
    void *context;
    uint64_t total, at; /* of the stream */
    uint64_t window_at; /* offset of the bytes in the buffer */
    size_t window_nbytes;
    struct pickle_tree tree;
    pickle_node *stack;
    size_t depth, stack_capacity;
    size_t *marks; /* depths of the stack */
    size_t nmarks, marks_capacity;
    pickle_node *memo; /* PICKLE_ABSENT where it has no entry */
    size_t memo_capacity;
    uint64_t nmemoized; /* by MEMOIZE, which has no index */
    char buffer[1 << 15];
};

static rsd_status fail_pickle(const struct pickle_machine *p, const char *what)
{
    return fail(RSD_EFORMAT, "byte %llu of the pickle: %s", (unsigned long long)p->at, what);
}

/* ---- the stream ---- */

/* Reads the next bytes of the stream. Requires that all bytes of the buffer were taken. */
static rsd_status refill_buffer(struct pickle_machine *p)
{
    p->window_at += p->window_nbytes;
    p->window_nbytes = 0;
    uint64_t left = p->total - p->window_at;
    if (left == 0)
        return fail_pickle(p, "stream ends early");
    size_t n = left < sizeof p->buffer ? (size_t)left : sizeof p->buffer;
    TRY(p->read(p->context, p->window_at, p->buffer, n));
    p->window_nbytes = n;
    return RSD_OK;
}

/* Copies the next n bytes of the stream. */
static rsd_status take_bytes(struct pickle_machine *p, void *out, size_t n)
{
    char *to = out;
    while (n > 0) {
        size_t offset = (size_t)(p->at - p->window_at);
        if (offset == p->window_nbytes) {
            TRY(refill_buffer(p));
            offset = 0;
        }
        size_t take = p->window_nbytes - offset < n ? p->window_nbytes - offset : n;
        memcpy(to, p->buffer + offset, take);
        to += take;
        p->at += take;
        n -= take;
    }
    return RSD_OK;
}

static rsd_status take_u8(struct pickle_machine *p, uint8_t *out)
{
    size_t offset = (size_t)(p->at - p->window_at);
    if (offset < p->window_nbytes) {
        *out = (uint8_t)p->buffer[offset];
        p->at++;
        return RSD_OK;
    }
    return take_bytes(p, out, 1);
}

/* Takes a little-endian number of n bytes. */
static rsd_status take_number(struct pickle_machine *p, int n, uint64_t *out)
{
    uint8_t bytes[8];
    TRY(take_bytes(p, bytes, (size_t)n));
    *out = little_endian(bytes, n);
    return RSD_OK;
}

/* ---- the stack and the memo ---- */

static rsd_status push_node(struct pickle_machine *p, pickle_node c)
{
    if (p->depth == p->stack_capacity) {
        TRY(budget_use_memory(p->stack_capacity * sizeof *p->stack));
        TRY(GROW(p->stack, p->stack_capacity, p->depth + 1));
    }
    p->stack[p->depth++] = c;
    return RSD_OK;
}

static size_t floor_of(const struct pickle_machine *p)
{
    return p->nmarks ? p->marks[p->nmarks - 1] : 0;
}

static rsd_status pop_node(struct pickle_machine *p, pickle_node *out)
{
    if (p->depth <= floor_of(p))
        return fail_pickle(p, "stack is empty");
    *out = p->stack[--p->depth];
    return RSD_OK;
}

static rsd_status peek_node(struct pickle_machine *p, pickle_node *out)
{
    if (p->depth <= floor_of(p))
        return fail_pickle(p, "stack is empty");
    *out = p->stack[p->depth - 1];
    return RSD_OK;
}

static rsd_status push_mark(struct pickle_machine *p)
{
    if (p->nmarks == p->marks_capacity && !budget_take_memory(p->nmarks * sizeof *p->marks))
        return budget_fail();
    TRY(GROW(p->marks, p->marks_capacity, p->nmarks + 1));
    p->marks[p->nmarks++] = p->depth;
    return RSD_OK;
}

/* Pops everything above the last mark. The nodes stay readable at p->stack + *first. */
static rsd_status pop_to_mark(struct pickle_machine *p, size_t *first, size_t *n)
{
    if (p->nmarks == 0)
        return fail_pickle(p, "stack has no mark");
    *first = p->marks[--p->nmarks];
    *n = p->depth - *first;
    p->depth = *first;
    return RSD_OK;
}

/* Stores the top of the stack in the memo. */
static rsd_status set_memo(struct pickle_machine *p, uint64_t index)
{
    pickle_node c;
    TRY(peek_node(p, &c));
    if (index >= p->at)
        return fail_pickle(p, "memo index exceeds the number of bytes read");
    if (index >= p->memo_capacity) {
        size_t known = p->memo_capacity;
        TRY(GROW(p->memo, p->memo_capacity, (size_t)index + 1));
        TRY(budget_use_memory((p->memo_capacity - known) * sizeof *p->memo));
        for (size_t i = known; i < p->memo_capacity; i++)
            p->memo[i] = PICKLE_ABSENT;
    }
    p->memo[index] = c;
    return RSD_OK;
}

static rsd_status push_memo(struct pickle_machine *p, uint64_t index)
{
    if (index >= p->memo_capacity || p->memo[index] == PICKLE_ABSENT)
        return fail_pickle(p, "memo entry does not exist");
    return push_node(p, p->memo[index]);
}

/* ---- values ---- */

static rsd_status push_i64(struct pickle_machine *p, int64_t value)
{
    pickle_node c;
    TRY(pickle_add_i64(&p->tree, value, &c));
    return push_node(p, c);
}

/* Pushes a string, bytes or a large integer of n bytes, which follow in the stream. */
static rsd_status push_bytes(struct pickle_machine *p, enum pickle_kind kind, uint64_t n)
{
    pickle_node c;
    void *bytes;
    if (n > p->total - p->at)
        return fail_pickle(p, kind == NODE_INT ? "number is longer than the stream"
                                               : "string is longer than the stream");
    TRY(pickle_add_bytes(&p->tree, kind, n, &c, &bytes));
    TRY(take_bytes(p, bytes, (size_t)n));
    if (kind == NODE_STRING && !json_is_utf8(bytes, (size_t)n))
        return fail_pickle(p, "string is not UTF-8");
    return push_node(p, c);
}

/* Pushes a number of n bytes, two's complement. */
static rsd_status push_long(struct pickle_machine *p, uint64_t n)
{
    if (n > 8)
        return push_bytes(p, NODE_INT, n);
    uint64_t value = 0;
    TRY(take_number(p, (int)n, &value));
    if (n > 0 && n < 8 && value >> (8 * n - 1))
        value |= ~(uint64_t)0 << (8 * n);
    return push_i64(p, (int64_t)value);
}

static rsd_status push_float(struct pickle_machine *p)
{
    uint8_t big[8];
    uint64_t bits = 0;
    pickle_node c;
    void *bytes;
    TRY(take_bytes(p, big, sizeof big));
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | big[i];
    TRY(pickle_add_bytes(&p->tree, NODE_FLOAT, sizeof bits, &c, &bytes));
    memcpy(bytes, &bits, sizeof bits);
    return push_node(p, c);
}

static rsd_status push_tuple(struct pickle_machine *p, size_t first, size_t n)
{
    pickle_node c;
    TRY(pickle_add_tuple(&p->tree, p->stack + first, n, &c));
    p->depth = first;
    return push_node(p, c);
}

/* Replaces the last n nodes by a tuple of them. */
static rsd_status push_fixed_tuple(struct pickle_machine *p, size_t n)
{
    if (p->depth - floor_of(p) < n)
        return fail_pickle(p, "stack is empty");
    return push_tuple(p, p->depth - n, n);
}

static rsd_status push_container(struct pickle_machine *p, enum pickle_kind kind)
{
    pickle_node c;
    TRY(pickle_add_container(&p->tree, kind, &c));
    return push_node(p, c);
}

/* Adds entries to a list or dict, or to the items of an object that behaves like one. */
static rsd_status add_entries(struct pickle_machine *p, enum pickle_kind kind, size_t first,
                              size_t n)
{
    p->depth = first;
    pickle_node target;
    TRY(peek_node(p, &target));
    if (kind == NODE_DICT && n % 2)
        return fail_pickle(p, "key has no value");
    if (pickle_kind(&p->tree, target) == kind)
        return pickle_append(&p->tree, target, p->stack + first, n);
    if (!pickle_is_built(&p->tree, target))
        return fail_pickle(p, kind == NODE_DICT ? "target of SETITEMS is not a dict"
                                                : "target of APPENDS is not a list");
    pickle_node items = pickle_part(&p->tree, target, NODE_ITEMS);
    if (items == PICKLE_ABSENT) {
        TRY(pickle_add_container(&p->tree, kind, &items));
        pickle_set_part(&p->tree, target, NODE_ITEMS, items);
    }
    if (pickle_kind(&p->tree, items) != kind)
        return fail_pickle(p, "object has both list items and dict items");
    return pickle_append(&p->tree, items, p->stack + first, n);
}

static rsd_status make_call(struct pickle_machine *p, enum pickle_kind kind)
{
    pickle_node what, args, c;
    TRY(pop_node(p, &args));
    TRY(pop_node(p, &what));
    if (pickle_kind(&p->tree, args) != NODE_TUPLE)
        return fail_pickle(p, "arguments are not a tuple");
    TRY(pickle_add_call(&p->tree, kind, what, args, &c));
    return push_node(p, c);
}

static rsd_status set_state(struct pickle_machine *p)
{
    pickle_node state, target;
    TRY(pop_node(p, &state));
    TRY(peek_node(p, &target));
    if (!pickle_is_built(&p->tree, target))
        return fail_pickle(p, "target of BUILD is not an object");
    pickle_set_part(&p->tree, target, NODE_STATE, state);
    return RSD_OK;
}

/* ---- globals ---- */

/* Takes a line that ends with a newline, which is how protocol 2 names globals. */
static rsd_status take_line(struct pickle_machine *p, pickle_node *out)
{
    char line[1024];
    size_t n = 0;
    for (;; n++) {
        uint8_t c;
        TRY(take_u8(p, &c));
        if (c == '\n')
            break;
        if (n == sizeof line)
            return fail_pickle(p, "name of a global exceeds 1024 bytes");
        line[n] = (char)c;
    }
    if (!json_is_utf8(line, n))
        return fail_pickle(p, "name of a global is not UTF-8");
    void *bytes;
    TRY(pickle_add_bytes(&p->tree, NODE_STRING, n, out, &bytes));
    memcpy(bytes, line, n);
    return RSD_OK;
}

/* Pushes a global whose module and name follow as lines, or are on the stack. */
static rsd_status push_global(struct pickle_machine *p, bool on_stack)
{
    pickle_node module, name, c;
    if (on_stack) {
        TRY(pop_node(p, &name));
        TRY(pop_node(p, &module));
    } else {
        TRY(take_line(p, &module));
        TRY(take_line(p, &name));
    }
    if (pickle_kind(&p->tree, module) != NODE_STRING || pickle_kind(&p->tree, name) != NODE_STRING)
        return fail_pickle(p, "name of a global is not a string");
    TRY(pickle_add_global(&p->tree, module, name, &c));
    return push_node(p, c);
}

/* ---- opcodes ---- */

static rsd_status do_persistent(struct pickle_machine *p)
{
    pickle_node id, c;
    TRY(pop_node(p, &id));
    TRY(pickle_add_persistent(&p->tree, id, &c));
    return push_node(p, c);
}

/* cls.__new__(cls, *args, **kwargs): the keyword arguments become a last argument. */
static rsd_status do_newobj_ex(struct pickle_machine *p)
{
    TRY(push_fixed_tuple(p, 2));
    return make_call(p, NODE_OBJECT);
}

static rsd_status add_one_entry(struct pickle_machine *p, enum pickle_kind kind, size_t n)
{
    if (p->depth - floor_of(p) < n + 1)
        return fail_pickle(p, "stack is empty");
    return add_entries(p, kind, p->depth - n, n);
}

/* Executes an opcode that uses all nodes above the last mark. */
static rsd_status do_marked(struct pickle_machine *p, uint8_t opcode)
{
    size_t first = 0, n = 0;
    TRY(pop_to_mark(p, &first, &n));
    switch (opcode) {
    case 't':
    case 0x91: /* FROZENSET, as a tuple */
        return push_tuple(p, first, n);
    case 'e':
    case 0x90: /* ADDITEMS: a set is read as a list */
        return add_entries(p, NODE_LIST, first, n);
    case 'u':
        return add_entries(p, NODE_DICT, first, n);
    default: /* '1', POP_MARK */
        return RSD_OK;
    }
}

/* Executes an opcode that is followed by a number of nbytes bytes. */
static rsd_status do_numbered(struct pickle_machine *p, uint8_t opcode, int nbytes)
{
    uint64_t n;
    TRY(take_number(p, nbytes, &n));
    switch (opcode) {
    case 'K':
    case 'M':
        return push_i64(p, (int64_t)n);
    case 'J':
        return push_i64(p, (int32_t)(uint32_t)n);
    case 0x8a:
    case 0x8b:
        return push_long(p, n);
    case 'X':
    case 0x8c:
    case 0x8d:
        return push_bytes(p, NODE_STRING, n);
    case 'q':
    case 'r':
        return set_memo(p, n);
    case 'h':
    case 'j':
        return push_memo(p, n);
    case 0x95: /* FRAME: its length is not needed */
        return RSD_OK;
    default: /* U T B C 0x8e 0x96: bytes of all kinds */
        return push_bytes(p, NODE_BYTES, n);
    }
}

/* Runs one opcode. EFORMAT: it is not among those that checkpoints need. */
static rsd_status do_opcode(struct pickle_machine *p, uint8_t opcode)
{
    pickle_node c;
    switch (opcode) {
    case '(':
        return push_mark(p);
    case 'N':
        return push_node(p, PICKLE_NONE);
    case 0x88:
        return push_node(p, PICKLE_TRUE);
    case 0x89:
        return push_node(p, PICKLE_FALSE);
    case ')':
        return push_node(p, PICKLE_EMPTY_TUPLE);
    case ']':
    case 0x8f: /* EMPTY_SET */
        return push_container(p, NODE_LIST);
    case '}':
        return push_container(p, NODE_DICT);
    case 'K':
    case 0x8c:
    case 'U':
    case 'C':
    case 0x8a:
    case 'q':
    case 'h':
        return do_numbered(p, opcode, 1);
    case 'M':
        return do_numbered(p, opcode, 2);
    case 'J':
    case 'X':
    case 'T':
    case 'B':
    case 0x8b:
    case 'r':
    case 'j':
        return do_numbered(p, opcode, 4);
    case 0x8d:
    case 0x8e:
    case 0x95:
    case 0x96:
        return do_numbered(p, opcode, 8);
    case 'G':
        return push_float(p);
    case 0x94:
        return set_memo(p, p->nmemoized++);
    case 0x85:
    case 0x86:
    case 0x87:
        return push_fixed_tuple(p, opcode - 0x84u);
    case 'a':
        return add_one_entry(p, NODE_LIST, 1);
    case 's':
        return add_one_entry(p, NODE_DICT, 2);
    case 't':
    case 'e':
    case 'u':
    case '1':
    case 0x90:
    case 0x91:
        return do_marked(p, opcode);
    case 'c':
        return push_global(p, false);
    case 0x93:
        return push_global(p, true);
    case 'R':
        return make_call(p, NODE_CALL);
    case 0x81:
        return make_call(p, NODE_OBJECT);
    case 0x92:
        return do_newobj_ex(p);
    case 'b':
        return set_state(p);
    case 'Q':
        return do_persistent(p);
    case '0':
        return pop_node(p, &c);
    case '2':
        TRY(peek_node(p, &c));
        return push_node(p, c);
    default:
        return fail(RSD_EFORMAT,
                    "byte %llu of the pickle: opcode %02x is not allowed in checkpoints",
                    (unsigned long long)p->at - 1, opcode);
    }
}

/* Runs the whole stream: the protocol, then opcodes up to the stop. *root is the value that is left. */
static rsd_status run_opcodes(struct pickle_machine *p, pickle_node *root)
{
    uint8_t opcode, protocol;
    TRY(take_u8(p, &opcode));
    if (opcode != 0x80)
        return fail_pickle(p, "stream does not begin with a protocol");
    TRY(take_u8(p, &protocol));
    if (protocol < 2 || protocol > 5)
        return fail(RSD_EUNSUPPORTED, "byte 1 of the pickle: protocol %d is not supported (2 to 5)",
                    protocol);
    for (;;) {
        TRY(take_u8(p, &opcode));
        if (opcode == '.')
            break;
        TRY(do_opcode(p, opcode));
    }
    TRY(pop_node(p, root));
    if (p->depth != 0 || p->nmarks != 0)
        return fail_pickle(p, "stack is not empty at the end");
    return RSD_OK;
}

rsd_status pickle_read(read_at *read, void *context, uint64_t nbytes, struct pickle_tree *tree,
                       pickle_node *root, uint64_t *used)
{
    struct pickle_machine *p = mem_new(1, sizeof *p);
    if (!p)
        return RSD_ENOMEM;
    p->read = read;
    p->context = context;
    p->total = nbytes;
    pickle_tree_start(&p->tree, nbytes);
    /* Opcodes take pointers into the stack, also when it is empty. */
    rsd_status status = GROW(p->stack, p->stack_capacity, 1);
    if (!status)
        status = run_opcodes(p, root);
    mem_free(p->stack);
    mem_free(p->marks);
    mem_free(p->memo);
    if (status) {
        pickle_tree_drop(&p->tree);
    } else {
        *tree = p->tree;
        *used = p->at;
    }
    mem_free(p);
    return status;
}

static rsd_status copy_memory(void *context, uint64_t at, void *out, size_t n)
{
    memcpy(out, (const char *)context + at, n);
    return RSD_OK;
}

rsd_status pickle_read_memory(const void *bytes, size_t nbytes, struct pickle_tree *tree,
                              pickle_node *root, uint64_t *used)
{
    return pickle_read(copy_memory, without_const(bytes), nbytes, tree, root, used);
}
