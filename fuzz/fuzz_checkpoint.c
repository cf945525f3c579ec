/* fuzz_checkpoint.c - any files as a checkpoint (packed.h), which is opened, verified, digested, compared with itself
 * and converted. What was converted without a cast must be equal to the input. An input that takes more than
 * MOST_SECONDS of CPU time ends the program.
 */
#include "opened.h"
#include "packed.h"
#include "pickle_mutator.h"

#include "../tests/alloc_faults.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t capacity, unsigned seed);

enum { MOST_SECONDS = 8, MOST_LENGTH = 1 << 19 };
enum option_bit {
    TAKE_RANK_0 = 1,
    MODEL_DTYPE = 2,
    UNSTACK = 4,
    AS_IS = 8,
    FEW_FILES = 16,
    CAST = 32,
    SPLIT = 64,
    PACK = 128,
    FROM_MESH = 256,     /* files of two ranks that do not say how tensors are cut */
    FROM_RULES = 512,    /* of Megatron */
    LITTLE_MEMORY = 1024 /* records are read in parts, and not kept */
};

static rsd_io io = {.struct_nbytes = sizeof(rsd_io)}; /* of all calls */

static char directory[64];

static void remove_directory(void)
{
    remove_tree(directory);
}

static void make_directory(void)
{
    make_input_directory(directory, sizeof directory);
    atexit(remove_directory);
}

static const char *path_in(const char *name)
{
    static char paths[4][128];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

/* ---- what is done with a checkpoint ---- */

/* Casts floats, and cuts tensors over two ranks. */
static rsd_status map_tensor(void *context, const rsd_tensor_info *tensor,
                             rsd_tensor_target *target)
{
    const int *options = context;
    const rsd_placement shard = {.kind = RSD_SHARD, .dim = 0};
    const int64_t count = 2;
    rsd_mesh *mesh = NULL;
    if (*options & CAST && (tensor->dtype == RSD_F32 || tensor->dtype == RSD_F64))
        target->dtype = tensor->dtype == RSD_F32 ? RSD_BF16 : RSD_F32;
    if (!(*options & SPLIT) || tensor->ndim == 0)
        return RSD_OK;
    rsd_status status = rsd_mesh_new(1, &count, NULL, NULL, &mesh);
    if (!status)
        status = rsd_layout_new(tensor->dtype, tensor->ndim, tensor->shape, mesh, &shard,
                                &target->layout);
    rsd_mesh_free(mesh);
    return status;
}

static int64_t diff_checkpoints(rsd_checkpoint *a, rsd_checkpoint *b)
{
    const rsd_diff_options options = {.struct_nbytes = sizeof options, .io = &io};
    int64_t ndiffer = 0;
    return rsd_diff(a, b, &options, NULL, NULL, &ndiffer, NULL) ? 0 : ndiffer;
}

/* Converts, and compares the output with the input. */
static void convert_checkpoint(rsd_checkpoint *checkpoint, rsd_format format, int options)
{
    const char *out = path_in(format == RSD_FORMAT_TORCH_SAVE ? "out.pt" : "out");
    rsd_checkpoint *written;
    rsd_convert_options convert = {.struct_nbytes = sizeof convert,
                                   .format = format,
                                   .map = format == RSD_FORMAT_TORCH_SAVE ? NULL : map_tensor,
                                   .map_context = &options,
                                   .io = &io,
                                   .compress = format == RSD_FORMAT_DCP && options & PACK ? 3 : 0};
    rsd_status status = rsd_convert(checkpoint, out, &convert, NULL);
    if (!status && !failed && !rsd_checkpoint_open(out, NULL, &written)) {
        if (!(options & CAST) && diff_checkpoints(checkpoint, written) != 0)
            abort();
        rsd_checkpoint_close(written);
    }
    remove_tree(path_in("out"));
    remove_tree(path_in("out.pt"));
    remove_tree(path_in("out.reshard-part"));
    remove_tree(path_in("out.pt.reshard-part"));
}

static void digest_checkpoint(rsd_checkpoint *checkpoint)
{
    int64_t n = rsd_checkpoint_ntensors(checkpoint);
    char(*digests)[RSD_DIGEST_NCHARS] = malloc((size_t)n * sizeof *digests + 1);
    if (digests)
        rsd_digest(checkpoint, 0, NULL, &io, digests, NULL);
    free(digests);
}

static void use_checkpoint(rsd_checkpoint *checkpoint, const rsd_open_options *open, int options)
{
    rsd_checkpoint *again;
    int64_t nfindings;
    if (!failed && until_failure < 0)
        ask_everything(checkpoint);
    rsd_verify(checkpoint, &io, NULL, NULL, &nfindings, NULL);
    digest_checkpoint(checkpoint);
    if (!rsd_checkpoint_open(path_in("in"), open, &again)) {
        if (diff_checkpoints(checkpoint, again) != 0 && !failed)
            abort();
        rsd_checkpoint_close(again);
    }
    convert_checkpoint(checkpoint, RSD_FORMAT_DCP, options);
    convert_checkpoint(checkpoint, RSD_FORMAT_SAFETENSORS, options);
    convert_checkpoint(checkpoint, RSD_FORMAT_TORCH_SAVE, options & ~CAST);
}

/* ---- one input ---- */

static void limit_files(rlim_t most)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = most < limit.rlim_max ? most : limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static void end_slow_input(int signal)
{
    static const char text[] = "the input takes too much CPU time\n";
    (void)signal;
    if (write(2, text, sizeof text - 1) > 0)
        abort();
}

static void limit_seconds(int seconds)
{
    const struct itimerval timer = {.it_value.tv_sec = seconds};
    signal(SIGPROF, end_slow_input);
    setitimer(ITIMER_PROF, &timer, NULL);
}

/* Makes rules for files that two ranks wrote. */
static rsd_rules *make_rules(void)
{
    const int64_t count = 2;
    rsd_mesh *mesh = NULL;
    rsd_rules *rules = NULL;
    if (rsd_mesh_new(1, &count, NULL, NULL, &mesh) || rsd_rules_new(NULL, &rules) ||
        rsd_rules_set_mesh(rules, mesh) || rsd_rules_add(rules, RSD_RULE_PLACE, "w=S(0)") ||
        rsd_rules_add(rules, RSD_RULE_DEFAULT, "R"))
        abort();
    rsd_mesh_free(mesh);
    return rules;
}

/* Returns whether an allocation failed. */
static bool try_input(int options, long failing)
{
    static const char *const from_rules[] = {"alpha=S(0)", ".*fc1.*=gated", "b.*=R"};
    static rsd_rules *rules;
    rsd_checkpoint *checkpoint;
    if (!rules)
        rules = make_rules();
    rsd_open_options open = {.struct_nbytes = sizeof open,
                             .take_rank_0 = options & TAKE_RANK_0,
                             .model_dtype = options & MODEL_DTYPE ? 1 : 0,
                             .unstack = options & UNSTACK ? 1 : 0,
                             .vocab_size = options & UNSTACK ? 2 : 0,
                             .as_is = options & AS_IS ? 1 : 0,
                             .nfrom_rules = options & FROM_RULES ? 3 : 0,
                             .from_rules = from_rules,
                             .from = options & FROM_MESH ? rules : NULL};
    limit_seconds(MOST_SECONDS);
    failed = false;
    until_failure = failing - 1;
    if (!rsd_checkpoint_open(path_in("in"), &open, &checkpoint)) {
        use_checkpoint(checkpoint, &open, options);
        rsd_checkpoint_close(checkpoint);
    }
    until_failure = -1;
    limit_seconds(0);
    return failed;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct packed_file file;
    size_t at = PACKED_HEAD;
    if (n < PACKED_HEAD || n > MOST_LENGTH)
        return 0;
    if (!*directory)
        make_directory();
    mkdir(path_in("in"), 0700);
    while (next_file(data, n, &at, &file))
        write_packed(path_in("in"), file);
    const int options = data[0] | data[1] << 8;
    limit_files(options & FEW_FILES ? 24 : 1024);
    io.max_nbytes = options & LITTLE_MEMORY ? 1 << 16 : 0;
    long failing = data[2];
    try_input(options, failing);
    const char *every = getenv("FUZZ_FAULTS"); /* each n-th allocation fails in turn */
    for (long step = every ? atol(every) : 0; step > 0 && try_input(options, failing + 1);)
        failing += step;
    remove_tree(path_in("in"));
    return 0;
}

/* ---- mutations ---- */

/* Mutates the pickle in an archive of records, or all of it if there is none. */
static size_t mutate_archive(uint8_t *data, size_t n, size_t capacity, unsigned seed)
{
    size_t at = 0;
    while (n - at >= 3 && seed % 4) {
        size_t nname = data[at], length = data[at + 1] | (size_t)data[at + 2] << 8;
        size_t begin = at + 3 + nname;
        if (begin > n || length > n - begin)
            break;
        if (nname >= 8 && memcmp(data + begin - 8, "data.pkl", 8) == 0) {
            uint8_t *copy = malloc(capacity);
            size_t room = capacity - n + length, more = 0;
            if (!copy)
                break;
            memcpy(copy, data + begin, length);
            more = mutate_pickle(copy, length, room < 60000 ? room : 60000, seed / 4);
            n = splice_bytes(data, n, capacity, begin, begin + length, copy, more);
            data[at + 1] = (uint8_t)more;
            data[at + 2] = (uint8_t)(more >> 8);
            free(copy);
            return n;
        }
        at = begin + length;
    }
    return LLVMFuzzerMutate(data, n, capacity);
}

static size_t mutate_content(const struct packed_file *file, uint8_t *copy, size_t capacity,
                             unsigned seed)
{
    memcpy(copy, file->data, file->n);
    if (file->form == FORM_ARCHIVE)
        return mutate_archive(copy, file->n, capacity, seed);
    if (file->form == FORM_RAW && file->name < 3 && seed % 8)
        return mutate_pickle(copy, file->n, capacity, seed / 8);
    return LLVMFuzzerMutate(copy, file->n, capacity);
}

/* Changes one file of the input, or the bytes in front of all. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t capacity, unsigned seed)
{
    struct packed_file file, chosen;
    size_t at = PACKED_HEAD;
    unsigned nfiles = 0;
    while (next_file(data, n, &at, &file))
        nfiles++;
    unsigned which = next_random(&seed) % (nfiles + 1);
    if (nfiles == 0 || which == nfiles || n < PACKED_HEAD)
        return LLVMFuzzerMutate(data, n, capacity);
    at = PACKED_HEAD;
    for (unsigned i = 0; i <= which; i++)
        next_file(data, n, &at, &chosen);
    unsigned how = next_random(&seed) % 16;
    if (how == 0) /* leave it out */
        return splice_bytes(data, n, capacity, chosen.begin, at, NULL, 0);
    if (how == 1)
        data[chosen.begin] = (uint8_t)next_random(&seed);
    if (how == 2)
        data[chosen.begin + 1] = (uint8_t)next_random(&seed);
    size_t room = capacity - n + chosen.n;
    if (how < 3 || room > 65535)
        room = room > 65535 ? 65535 : room;
    uint8_t *copy = malloc(room + 1);
    if (!copy || chosen.n > room) {
        free(copy);
        return n;
    }
    size_t length = mutate_content(&chosen, copy, room, next_random(&seed));
    n = splice_bytes(data, n, capacity, chosen.begin + FILE_HEAD, at, copy, length);
    data[chosen.begin + 2] = (uint8_t)length;
    data[chosen.begin + 3] = (uint8_t)(length >> 8);
    free(copy);
    return n;
}
