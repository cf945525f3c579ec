/* megatron_read.c - reads Megatron's checkpoints of the format `torch`: one file per tensor-parallel rank and
 * pipeline stage. Checkpoints of the format torch_dist are DCP.
 *
 * The parts of tensor-parallel ranks are joined by rules. Each stage counts its layers from 0, and so does each
 * chunk of a virtual pipeline (model0, model1, ...). Layers follow each other chunk by chunk, and stage by stage
 * in a chunk:
 *
 *     stage 0   model0: layers 0, 1    model1: layers 4, 5
 *     stage 1   model0: layers 2, 3    model1: layers 6, 7
 *
 * An expert-parallel rank counts its experts from 0 in the same way.
 */
#include "megatron.h"

#include <stdio.h>
#include <string.h>

enum { MAX_CHUNKS = 64, MAX_STACKS = 16 };

/* Layers of one stack, such as "decoder", by chunk and stage. */
struct layer_stack {
    char *name;
    int64_t *counts; /* chunk * stages + stage */
};

struct megatron_reader {
    struct store *store;
    struct catalog *catalog;
    struct megatron_files files;
    struct megatron_args args;
    int64_t nstages, ntensor;
    struct layer_stack stacks[MAX_STACKS];
    int32_t nstacks, nchunks;
    struct rank_parts parts;
    struct megatron_rules rules;
    const struct megatron_file *file; /* that is read now */
    int64_t rank;                     /* its number */
    int32_t chunk;
};

/* ---- args ---- */

static int64_t find_number(const struct pickle_tree *tree, pickle_node args, const char *name)
{
    int64_t number = 0;
    pickle_as_i64(tree, pickle_attribute(tree, args, name), &number);
    return number > 0 ? number : 0;
}

/* Refuses experts that fewer or more tensor-parallel ranks cut than other tensors. */
static rsd_status check_expert_ranks(const struct megatron_args *args)
{
    if (!args->nexperts || !args->nexpert_tensor ||
        args->nexpert_tensor == max_i64(args->ntensor, 1))
        return RSD_OK;
    return fail(
        RSD_EUNSUPPORTED,
        "experts are cut over %lld tensor-parallel ranks and other tensors over %lld; sizes "
        "that differ are read from torch_dist only (--ckpt-format torch_dist)",
        (long long)args->nexpert_tensor, (long long)max_i64(args->ntensor, 1));
}

static rsd_status check_checkpoint_version(const struct pickle_tree *tree, pickle_node version)
{
    double number = 3;
    int64_t whole;
    if (pickle_kind(tree, version) == NODE_FLOAT)
        memcpy(&number, pickle_text(tree, version).bytes, sizeof number);
    else if (pickle_as_i64(tree, version, &whole))
        number = (double)whole;
    if (number < 3)
        return fail(
            RSD_EUNSUPPORTED,
            "checkpoint_version is %g; before 3.0 query, key and value are in another order",
            number);
    return RSD_OK;
}

/* Reads the numbers of ranks, layers and experts from the arguments that a file keeps, and its iteration. */
static rsd_status take_args(const struct torch_file *file, struct megatron_args *out)
{
    static const char *const gates[] = {"swiglu", "gated_linear_unit", "geglu"};
    const struct pickle_tree *tree = &file->tree;
    pickle_node args = pickle_find(tree, file->root, "args");
    if (!pickle_is_dict(tree, file->root))
        return fail(RSD_EFORMAT, "file is not a dict");
    TRY(check_checkpoint_version(tree, pickle_find(tree, file->root, "checkpoint_version")));
    *out = (struct megatron_args){
        .ntensor = find_number(tree, args, "tensor_model_parallel_size"),
        .nstages = find_number(tree, args, "pipeline_model_parallel_size"),
        .nexpert = find_number(tree, args, "expert_model_parallel_size"),
        .nexpert_tensor = find_number(tree, args, "expert_tensor_parallel_size"),
        .nlayers = find_number(tree, args, "num_layers"),
        .nexperts = find_number(tree, args, "num_experts"),
        .ffn = find_number(tree, args, "ffn_hidden_size")};
    pickle_as_i64(tree, pickle_find(tree, file->root, "iteration"), &out->iteration);
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        pickle_node gated = pickle_attribute(tree, args, gates[i]);
        out->has_gated = out->has_gated || gated != PICKLE_ABSENT;
        out->gated = out->gated || gated == PICKLE_TRUE;
    }
    return RSD_OK;
}

static rsd_status read_args(struct torch_visit *visit)
{
    struct megatron_reader *reader = visit->context;
    TRY(take_args(visit->file, &reader->args));
    return check_expert_ranks(&reader->args);
}

/* Checks that what a file says of the model and the run is what the first file says. 0: it does not say it. */
static rsd_status check_same_run(const struct megatron_reader *reader,
                                 const struct torch_file *file)
{
    const struct megatron_args *first = &reader->args;
    struct megatron_args args;
    TRY(take_args(file, &args));
    const struct {
        const char *what;
        int64_t here, there;
    } numbers[] = {{"iteration", args.iteration, first->iteration},
                   {"tensor_model_parallel_size", args.ntensor, first->ntensor},
                   {"pipeline_model_parallel_size", args.nstages, first->nstages},
                   {"expert_model_parallel_size", args.nexpert, first->nexpert},
                   {"num_layers", args.nlayers, first->nlayers},
                   {"num_experts", args.nexperts, first->nexperts},
                   {"ffn_hidden_size", args.ffn, first->ffn}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].here && numbers[i].there && numbers[i].here != numbers[i].there)
            return fail(RSD_EMISMATCH,
                        "%s is %lld, and %lld in the file of the first rank: the files are of "
                        "different runs",
                        numbers[i].what, (long long)numbers[i].here, (long long)numbers[i].there);
    if (args.has_gated && first->has_gated && args.gated != first->gated)
        return fail(RSD_EMISMATCH,
                    "args says that the MLP is%s gated, and the file of the first "
                    "rank that it is%s",
                    args.gated ? "" : " not", first->gated ? "" : " not");
    return RSD_OK;
}

/* ---- layers and experts ---- */

/* Finds the number in "PREFIX.WORD.NUMBER.REST": where it begins and ends. */
static bool find_part_number(struct slice name, const char *word, size_t *begin, size_t *end,
                             int64_t *number)
{
    size_t n = strlen(word);
    for (size_t i = 0; i + n < name.nbytes; i++) {
        if ((i > 0 && name.bytes[i - 1] != '.') || memcmp(name.bytes + i, word, n) != 0)
            continue;
        size_t at = i + n;
        for (*number = 0;
             at < name.nbytes && at < i + n + 9 && name.bytes[at] >= '0' && name.bytes[at] <= '9';
             at++)
            *number = 10 * *number + (name.bytes[at] - '0');
        if (at > i + n && at < name.nbytes && name.bytes[at] == '.') {
            *begin = i + n;
            *end = at;
            return true;
        }
    }
    return false;
}

static struct layer_stack *find_stack(struct megatron_reader *reader, struct slice name)
{
    for (int32_t i = 0; i < reader->nstacks; i++)
        if (slice_is(name, reader->stacks[i].name))
            return &reader->stacks[i];
    return NULL;
}

static rsd_status add_stack(struct megatron_reader *reader, struct slice name,
                            struct layer_stack **stack)
{
    if (reader->nstacks == MAX_STACKS)
        return fail(RSD_EUNSUPPORTED, "model has more than %d stacks of layers", (int)MAX_STACKS);
    *stack = &reader->stacks[reader->nstacks];
    (*stack)->name = slice_copy(name);
    (*stack)->counts = mem_new((size_t)(MAX_CHUNKS * reader->nstages), sizeof(int64_t));
    reader->nstacks++;
    return (*stack)->name && (*stack)->counts ? RSD_OK : RSD_ENOMEM;
}

/* Counts a layer of the current chunk and stage; called for every tensor of a first rank. */
static rsd_status count_layer(struct torch_visit *visit, pickle_node c)
{
    struct megatron_reader *reader = visit->context;
    struct slice name = torch_visit_name(visit);
    size_t begin, end;
    int64_t number;
    (void)c;
    if (!find_part_number(name, "layers.", &begin, &end, &number))
        return RSD_OK;
    name.nbytes = begin;
    struct layer_stack *stack = find_stack(reader, name);
    if (!stack)
        TRY(add_stack(reader, name, &stack));
    int64_t *count = &stack->counts[reader->chunk * reader->nstages + reader->file->stage];
    *count = max_i64(*count, number + 1);
    return RSD_OK;
}

static rsd_status skip_model_value(struct torch_visit *visit, pickle_node c)
{
    (void)visit, (void)c;
    return RSD_OK;
}

/* Returns how many layers of a stack are before those of a chunk and stage. */
static int64_t layers_before(const struct megatron_reader *reader, const struct layer_stack *stack,
                             int32_t chunk, int64_t stage)
{
    int64_t sum = 0, last = chunk * reader->nstages + stage;
    for (int64_t i = 0; i < last; i++)
        sum += stack->counts[i];
    return sum;
}

/* Checks that the stages together have as many layers as the model. */
static rsd_status check_layers(const struct megatron_reader *reader)
{
    for (int32_t i = 0; i < reader->nstacks; i++) {
        const char *name = reader->stacks[i].name;
        bool decoder = strcmp(name, "decoder.layers.") == 0 ||
                       strcmp(name, "language_model.encoder.layers.") == 0 ||
                       strcmp(name, "language_model.transformer.layers.") == 0;
        int64_t n = layers_before(reader, &reader->stacks[i], reader->nchunks, 0);
        if (decoder && reader->args.nlayers > 0 && n != reader->args.nlayers)
            return fail(RSD_EFORMAT,
                        "%s%s%s: stages have %lld layers; args says num_layers is %lld",
                        reader->store->path, *reader->files.directory ? "/" : "",
                        reader->files.directory, (long long)n, (long long)reader->args.nlayers);
    }
    return RSD_OK;
}

/* Adds to a number that is at [begin, end) of a name. */
static rsd_status renumber_name(char *text, size_t capacity, struct slice *name, size_t begin,
                                size_t end, int64_t number)
{
    char copy[TORCH_MAX_NAME_NBYTES + 32];
    int n = snprintf(copy, sizeof copy, "%.*s%lld%.*s", (int)begin, name->bytes, (long long)number,
                     (int)(name->nbytes - end), name->bytes + end);
    if (n < 0 || (size_t)n >= capacity)
        return fail(RSD_ELIMIT, "name exceeds %zu bytes", capacity - 1);
    memcpy(text, copy, (size_t)n + 1);
    *name = (struct slice){text, (size_t)n};
    return RSD_OK;
}

/* Finds the number of an expert: local_experts.3.linear_fc1.weight, or experts.linear_fc1.weight3. */
static bool find_expert_number(struct slice name, size_t *begin, size_t *end, int64_t *number)
{
    size_t n = name.nbytes;
    if (find_part_number(name, "local_experts.", begin, end, number))
        return true;
    while (n > 0 && name.bytes[n - 1] >= '0' && name.bytes[n - 1] <= '9' && name.nbytes - n < 9)
        n--;
    if (n == name.nbytes || n == 0 || name.bytes[n - 1] == '.' ||
        !memmem(name.bytes, name.nbytes, ".experts.", 9))
        return false;
    *begin = n;
    *end = name.nbytes;
    for (*number = 0; n < name.nbytes; n++)
        *number = 10 * *number + (name.bytes[n] - '0');
    return true;
}

/* Writes the name that a tensor has in the whole model. */
static rsd_status make_whole_name(struct megatron_reader *reader, struct slice *name, char *text,
                                  size_t capacity)
{
    size_t begin, end;
    int64_t number;
    if (find_part_number(*name, "layers.", &begin, &end, &number)) {
        struct layer_stack *stack = find_stack(reader, (struct slice){name->bytes, begin});
        if (!stack ||
            number >= stack->counts[reader->chunk * reader->nstages + reader->file->stage])
            return fail(RSD_EFORMAT, "the first rank of this stage has no such layer");
        if (!budget_take((uint64_t)(reader->chunk * reader->nstages) / STEP_NBYTES))
            return budget_fail();
        number += layers_before(reader, stack, reader->chunk, reader->file->stage);
        TRY(renumber_name(text, capacity, name, begin, end, number));
    }
    if (reader->args.nexpert <= 1 || !find_expert_number(*name, &begin, &end, &number))
        return RSD_OK;
    if (reader->args.nexperts % reader->args.nexpert != 0 ||
        number >= reader->args.nexperts / reader->args.nexpert)
        return fail(RSD_EFORMAT, "%lld experts on %lld ranks do not include this one",
                    (long long)reader->args.nexperts, (long long)reader->args.nexpert);
    number += reader->file->expert * (reader->args.nexperts / reader->args.nexpert);
    return renumber_name(text, capacity, name, begin, end, number);
}

/* ---- tensors ---- */

/* Checks that the first MLP layer of a rank has as many rows as args says. */
static rsd_status check_gate(const struct megatron_reader *reader, struct slice name, int64_t rows)
{
    int64_t expected, all;
    bool expert = memmem(name.bytes, name.nbytes, "expert", 6) != NULL;
    if (!reader->args.has_gated)
        return fail(RSD_EUNSUPPORTED, "args does not say whether the MLP is gated (swiglu), so its "
                                      "parts cannot be joined");
    if (reader->args.gated && rows % 2 != 0)
        return fail(RSD_EFORMAT, "gated MLP has %lld rows, an odd number", (long long)rows);
    if (!mul_i64(reader->args.ffn, reader->args.gated ? 2 : 1, &expected) ||
        !mul_i64(rows, reader->ntensor, &all))
        return fail(RSD_ELIMIT, "MLP has more than 2^63 rows");
    if (!expert && reader->args.ffn > 0 && all != expected)
        return fail(RSD_EFORMAT, "ranks have %lld rows together; args says %lld", (long long)all,
                    (long long)expected);
    return RSD_OK;
}

/* Fills the boxes of a rank: of `count` equal parts along a dim, each of which is cut over all ranks. */
static rsd_status cut_rank_tensor(const struct megatron_reader *reader, int32_t dim, int64_t count,
                                  const struct stored_array *array, struct rank_tensor *tensor)
{
    int64_t rows = tensor->shape[dim] / count, whole;
    if (!mul_i64(tensor->shape[dim], reader->ntensor, &whole) || whole > MAX_EXTENT)
        return fail(RSD_ELIMIT, "tensor has more than 2^62 elements");
    for (int64_t i = 0; i < count && !box_is_empty(tensor->ndim, tensor->shape); i++) {
        struct rank_box *box = &tensor->boxes[tensor->nboxes++];
        *box = (struct rank_box){.array = *array};
        copy_i64s(box->len, tensor->shape, tensor->ndim);
        box->len[dim] = rows;
        box->lo[dim] = (i * reader->ntensor + reader->file->tensor) * rows;
        box->array.base += i * rows * array->strides[dim];
        if (rows == 1) /* the stride of a single index is 0 */
            box->array.strides[dim] = 0;
    }
    tensor->shape[dim] = whole;
    tensor->sharded = true;
    return RSD_OK;
}

/* Finds the boxes of the whole tensor that this rank has, by the rule for its name. */
static rsd_status join_tensor(struct megatron_reader *reader, struct slice name,
                              const struct torch_view *view, const struct stored_array *array,
                              struct rank_tensor *tensor)
{
    struct megatron_rule rule = {.join = JOIN_COPIES};
    if (reader->ntensor > 1)
        rule = megatron_rules_find(&reader->rules, name.bytes);
    enum megatron_join join = rule.join;
    int32_t dim = rule.dim;
    tensor->unruled = join == JOIN_UNKNOWN;
    if (join == JOIN_UNKNOWN || join == JOIN_COPIES) {
        tensor->boxes[0] = (struct rank_box){.array = *array};
        copy_i64s(tensor->boxes[0].len, view->shape, view->ndim);
        tensor->nboxes = box_is_empty(view->ndim, view->shape) ? 0 : 1;
        return RSD_OK;
    }
    if (view->ndim <= dim)
        return fail(RSD_EFORMAT, "tensor has %d dims; dim %d is cut", (int)view->ndim, (int)dim);
    if (join == JOIN_GATED)
        TRY(check_gate(reader, name, view->shape[dim]));
    return cut_rank_tensor(reader, dim, join == JOIN_GATED && reader->args.gated ? 2 : 1, array,
                           tensor);
}

/* Refuses the matrices of Megatron's GroupedMLP, in which a rank has those of all its experts side by side. To join
 * them, each would have to be cut by expert. */
static rsd_status check_grouped(const struct megatron_reader *reader, struct slice name)
{
    bool grouped =
        has_suffix(name.bytes, ".experts.weight1") || has_suffix(name.bytes, ".experts.weight2");
    if (!grouped || (reader->ntensor == 1 && reader->args.nexpert <= 1))
        return RSD_OK;
    return fail(RSD_EUNSUPPORTED,
                "one matrix has all experts of a rank (GroupedMLP), which are not joined; save the "
                "checkpoint as torch_dist (--ckpt-format torch_dist)");
}

static bool is_extra_state(struct slice name)
{
    return has_suffix(name.bytes, "_extra_state");
}

/* Adds what this rank has of a tensor, under its name in the whole model. */
static rsd_status add_megatron_tensor(struct torch_visit *visit, pickle_node c)
{
    struct megatron_reader *reader = visit->context;
    struct slice name = torch_visit_name(visit);
    char text[TORCH_MAX_NAME_NBYTES];
    struct torch_view view;
    struct stored_array array;
    struct rank_box boxes[2];
    if (is_extra_state(name))
        return RSD_OK;
    if (!torch_view_is_tensor(&visit->file->tree, c))
        return fail(RSD_EUNSUPPORTED, "tensor is distributed; only plain ones are supported");
    TRY(check_grouped(reader, name));
    TRY(make_whole_name(reader, &name, text, sizeof text));
    TRY(torch_file_find_tensor(visit->file, c, &view, &array));
    struct rank_tensor tensor = {.dtype = view.dtype, .ndim = view.ndim, .boxes = boxes};
    copy_i64s(tensor.shape, view.shape, view.ndim);
    TRY(join_tensor(reader, name, &view, &array, &tensor));
    return rank_parts_add(&reader->parts, name, NULL, reader->rank, reader->file->index, &tensor);
}

/* Adds a value of a state dict, as the first rank has it. State of Transformer Engine is left out. */
static rsd_status add_model_value(struct torch_visit *visit, pickle_node c)
{
    const struct megatron_reader *reader = visit->context;
    if (is_extra_state(torch_visit_name(visit)) || c == PICKLE_NONE || reader->rank > 0)
        return RSD_OK;
    return torch_visit_add_value(visit, c);
}

/* ---- files ---- */

/* Checks that the state dicts that were visited are all that a file has: model0 to the last one, or none. */
static rsd_status check_chunks(const struct pickle_tree *tree, pickle_node dict, int32_t nchunks)
{
    struct pickle_walk walk = pickle_walk_dict(tree, dict);
    pickle_node key, value;
    while (pickle_walk_next_pair(&walk, &key, &value)) {
        char text[32];
        struct slice name = pickle_text(tree, key);
        int64_t number;
        snprintf(text, sizeof text, "%.*s", slice_width(name, 31), name.bytes);
        if (pickle_kind(tree, key) == NODE_STRING && name_has_form(text, "model#", &number) &&
            number >= nchunks)
            return fail(RSD_EFORMAT, "file has '%s', and not all state dicts before it, or 'model'",
                        text);
    }
    return RSD_OK;
}

/* Visits the state dicts of a file: `model`, or model0, model1, ... */
static rsd_status visit_chunks(struct torch_visit *visit)
{
    struct megatron_reader *reader = visit->context;
    const struct pickle_tree *tree = &visit->file->tree;
    pickle_node dict = visit->file->root, model = pickle_find(tree, dict, "model");
    reader->chunk = 0;
    if (model != PICKLE_ABSENT && !pickle_is_dict(tree, model))
        return fail(RSD_EFORMAT, "'model' is not a state dict");
    if (model != PICKLE_ABSENT) {
        reader->nchunks = reader->nchunks > 1 ? reader->nchunks : 1;
        TRY(check_chunks(tree, dict, 0));
        return torch_visit_run(visit, model);
    }
    for (; reader->chunk < MAX_CHUNKS; reader->chunk++) {
        char key[24];
        snprintf(key, sizeof key, "model%d", reader->chunk);
        model = pickle_find(tree, dict, key);
        if (model == PICKLE_ABSENT)
            break;
        TRY(torch_visit_run(visit, model));
        reader->nchunks = reader->nchunks > reader->chunk ? reader->nchunks : reader->chunk + 1;
    }
    TRY(check_chunks(tree, dict, reader->chunk));
    return reader->chunk > 0 ? RSD_OK : fail(RSD_EFORMAT, "file has neither 'model' nor 'model0'");
}

/* Adds the tensors of another file than the first. */
static rsd_status visit_other_file(struct torch_visit *visit)
{
    TRY(check_same_run(visit->context, visit->file));
    return visit_chunks(visit);
}

/* Adds what the first file has: tensors, and what is not a tensor. */
static rsd_status visit_first_file(struct torch_visit *visit)
{
    const struct megatron_reader *reader = visit->context;
    TRY(visit_chunks(visit));
    return megatron_add_values(visit, true, reader->files.distributed_optimizer);
}

/* Reads the file of one rank. With `count`, its layers are only counted. */
static rsd_status read_rank(struct megatron_reader *reader, size_t number, bool count)
{
    struct torch_visit visit = {.catalog = reader->catalog,
                                .on_tensor = count ? count_layer : add_megatron_tensor,
                                .on_value = count ? skip_model_value : add_model_value,
                                .context = reader};
    reader->file = &reader->files.list[number];
    reader->rank = (int64_t)number;
    return torch_visit_file(&visit, reader->store, reader->file->index,
                            number > 0 ? visit_other_file
                            : count    ? visit_chunks
                                       : visit_first_file);
}

/* Checks that tensor-parallel ranks have the same tensors. Without all of a tensor's parts, it was not covered. */
static rsd_status check_every_rank(const struct megatron_reader *reader)
{
    for (size_t i = 0; i < reader->parts.ntensors && !reader->parts.take_rank_0; i++) {
        const struct joint_tensor *tensor = &reader->parts.tensors[i];
        if (tensor->nranks % reader->ntensor != 0)
            return fail(RSD_EMISMATCH,
                        "%.300s: tensor is missing on %lld of %lld tensor-parallel ranks; set "
                        "take_rank_0 (--take-rank-0) to take that of the lowest rank",
                        tensor->name.bytes,
                        (long long)(reader->ntensor - tensor->nranks % reader->ntensor),
                        (long long)reader->ntensor);
    }
    return RSD_OK;
}

/* Reads all ranks, in two passes: the first counts layers, so that the second can number them. */
static rsd_status read_ranks(struct megatron_reader *reader)
{
    size_t hole;
    char box[BOX_TEXT_NCHARS];
    struct torch_visit first = {.context = reader};
    TRY(torch_visit_file(&first, reader->store, reader->files.list[0].index, read_args));
    TRY(megatron_assign_ranks(reader->store, &reader->files, &reader->args));
    const struct megatron_file *last = &reader->files.list[reader->files.n - 1];
    reader->ntensor = last->tensor + 1;
    reader->nstages = last->stage + 1;
    for (size_t i = 0; i < reader->files.n; i++)
        if (reader->files.list[i].tensor == 0 && reader->files.list[i].expert == 0)
            TRY(read_rank(reader, i, true));
    TRY(check_layers(reader));
    for (size_t i = 0; i < reader->files.n; i++)
        TRY(read_rank(reader, i, false));
    rsd_status status = rank_parts_finish(&reader->parts, &hole, box);
    if (!status && hole != SIZE_MAX)
        status =
            fail(RSD_EFORMAT, "%s: no rank has %s", reader->parts.tensors[hole].name.bytes, box);
    if (!status)
        status = check_every_rank(reader);
    return status ? fail_in(status, "%s: ", reader->store->path) : RSD_OK;
}

/* ---- the row ---- */

static rsd_status megatron_open(struct store *store, struct catalog *catalog,
                                const rsd_open_options *options)
{
    struct megatron_reader reader = {
        .store = store,
        .catalog = catalog,
        .parts = {.catalog = catalog, .store = store, .take_rank_0 = options->take_rank_0 != 0}};
    rsd_status status = megatron_rules_open(&reader.rules, options);
    if (!status)
        status = megatron_find_directory(store, &reader.files.directory);
    if (!status)
        status = megatron_find_files(store, &reader.files);
    if (!status && reader.files.metadata != UINT32_MAX)
        status = dcp_open_from(store, reader.files.metadata, catalog);
    else if (!status)
        status = read_ranks(&reader);
    catalog->megatron = true;
    megatron_rules_close(&reader.rules);
    megatron_files_drop(&reader.files);
    rank_parts_drop(&reader.parts);
    for (int32_t i = 0; i < reader.nstacks; i++) {
        mem_free(reader.stacks[i].name);
        mem_free(reader.stacks[i].counts);
    }
    return status;
}

static int megatron_probe(const struct store_listing *listing, const struct store_entry *entry,
                          struct slice start)
{
    (void)listing;
    if (start.bytes)
        return NOT_SURE;
    if (!entry->directory)
        return strcmp(entry->base, MEGATRON_TAG) == 0 ? SURE_OF_MEGATRON_TAG : NOT_SURE;
    return megatron_is_rank_directory(entry->base) ? SURE_OF_MEGATRON_RANK : NOT_SURE;
}

/* Tensors of torch_dist are items of DCP. */
static rsd_status megatron_locate(const rsd_checkpoint *checkpoint, size_t tensor, size_t box,
                                  struct stored_array *array)
{
    const struct catalog *catalog = &checkpoint->catalog;
    size_t extent = catalog->tensors[tensor].first_extent + box;
    return catalog->extents[extent].kind == EXTENT_ITEM
               ? dcp_locate(checkpoint, tensor, box, array)
               : catalog_locate(checkpoint, tensor, box, array);
}

const struct format format_megatron = {.id = RSD_FORMAT_MEGATRON,
                                       .name = "megatron",
                                       .probe = megatron_probe,
                                       .open = megatron_open,
                                       .locate = megatron_locate,
                                       .open_stream = dcp_open_stream,
                                       .read_item = dcp_read_item};
