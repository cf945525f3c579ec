/* make_checkpoint.c - saves a small Llama-like model with its optimizer, as a training run does.
 *
 *     build/examples/make_checkpoint ckpt                      as 8 FSDP ranks
 *     build/examples/make_checkpoint ckpt dp=2,tp=4 'S(0),R'   another mesh, one placement per axis
 *     build/examples/make_checkpoint --fused ckpt              with fused QKV and gate-up weights
 *
 * One process has the arrays of all ranks here. In a real run each rank saves its own arrays: the same call with
 * a transport in rsd_io. Introduces: rsd_layout_parse_on, rsd_reshard, rsd_save.
 */
#include "reshard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, HIDDEN = 128, KV = 64, MLP = 344, VOCAB = 1000, MOST = 256, TEXT = 160 };

struct model {
    rsd_mesh *mesh;
    const char *placements;
    int fused, optimizer;
    int64_t n;
    rsd_tensor locals[MOST];
    rsd_layout *layouts[MOST];
    char names[MOST][TEXT], paths[MOST][TEXT];
};

static void or_die(rsd_status status)
{
    if (status != RSD_OK) {
        fprintf(stderr, "%s: %s\n", rsd_status_name(status), rsd_error());
        exit(1);
    }
}

static void *memory(size_t nbytes)
{
    void *memory = calloc(nbytes ? nbytes : 1, 1);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", nbytes);
        exit(1);
    }
    return memory;
}

/* Fills an array with small finite numbers of both signs, which depend on the seed only. */
static void fill(rsd_dtype dtype, void *array, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t hash = (seed * 1000003 + i + 1) * 0x9e3779b97f4a7c15u;
        float value = (float)((int32_t)(hash >> 40) - (1 << 23)) / (float)(1 << 27);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16); /* a bf16 is the upper half of an f32 */
        if (dtype == RSD_BF16)
            memcpy((char *)array + 2 * i, &half, sizeof half);
        else
            memcpy((char *)array + 4 * i, &value, sizeof value);
    }
}

/* Returns R for every axis, for tensors without dims. */
static const char *replicated(const rsd_mesh *mesh)
{
    static const char text[] = "R,R,R,R,R,R,R,R,R,R,R,R,R,R,R,R";
    return text + 2 * (RSD_MAX_AXES - rsd_mesh_naxes(mesh));
}

/* Creates the whole tensor on one rank, and moves it to the layout. */
static void **cut(const rsd_layout *layout, uint64_t seed)
{
    rsd_dtype dtype = rsd_layout_dtype(layout);
    rsd_layout *whole;
    rsd_array one;
    int32_t rank = 0;
    int64_t lo[RSD_MAX_DIMS] = {0}, n = rsd_layout_narrays(layout);
    or_die(rsd_layout_new_boxes(dtype, rsd_layout_ndim(layout), rsd_layout_shape(layout), 1, &rank,
                                lo, rsd_layout_shape(layout), &whole));
    or_die(rsd_layout_array(whole, 0, &one));
    void *src = memory(one.nbytes), **dst = memory((size_t)n * sizeof *dst);
    fill(dtype, src, one.nbytes / rsd_dtype_nbytes(dtype), seed);
    for (int64_t i = 0; i < n; i++) {
        rsd_array array;
        or_die(rsd_layout_array(layout, i, &array));
        dst[i] = memory(array.nbytes);
    }
    const void *from[] = {src};
    or_die(rsd_reshard(whole, layout, from, dst));
    rsd_layout_free(whole);
    free(src);
    return dst;
}

/* Adds a tensor. Its path is its position in the nested state dict, which torch restores. */
static void add(struct model *model, const char *part, const char *name, const char *slot,
                rsd_dtype dtype, int32_t ndim, const int64_t *shape)
{
    int64_t i = model->n++;
    if (slot) {
        snprintf(model->names[i], TEXT, "%s.state.%s.%s", part, name, slot);
        snprintf(model->paths[i], TEXT, "[\"%s\", \"state\", \"%s\", \"%s\"]", part, name, slot);
    } else {
        snprintf(model->names[i], TEXT, "%s.%s", part, name);
        snprintf(model->paths[i], TEXT, "[\"%s\", \"%s\"]", part, name);
    }
    const char *placements = ndim == 0 ? replicated(model->mesh) : model->placements;
    or_die(rsd_layout_parse_on(dtype, ndim, shape, model->mesh, placements, &model->layouts[i]));
    model->locals[i] = (rsd_tensor){.struct_nbytes = sizeof(rsd_tensor),
                                    .name = model->names[i],
                                    .layout = model->layouts[i],
                                    .rank = RSD_EVERY_RANK,
                                    .arrays = cut(model->layouts[i], (uint64_t)i),
                                    .path = model->paths[i]};
}

/* Adds a weight in bf16, or its AdamW state in f32. A state dict has all weights first, then all states. */
static void add_weight(struct model *model, const char *name, int64_t rows, int64_t columns)
{
    int64_t shape[] = {rows, columns};
    int32_t ndim = columns ? 2 : 1;
    if (!model->optimizer) {
        add(model, "model", name, NULL, RSD_BF16, ndim, shape);
        return;
    }
    add(model, "optimizer", name, "step", RSD_F32, 0, NULL);
    add(model, "optimizer", name, "exp_avg", RSD_F32, ndim, shape);
    add(model, "optimizer", name, "exp_avg_sq", RSD_F32, ndim, shape);
}

static void add_layer(struct model *model, int layer)
{
    static const struct {
        const char *name;
        int64_t rows, columns;
        int when_fused; /* 1: only with --fused, 0: only without, -1: always */
    } weights[] = {
        {"input_layernorm", HIDDEN, 0, -1},
        {"self_attn.qkv_proj", HIDDEN + 2 * KV, HIDDEN, 1},
        {"self_attn.q_proj", HIDDEN, HIDDEN, 0},
        {"self_attn.k_proj", KV, HIDDEN, 0},
        {"self_attn.v_proj", KV, HIDDEN, 0},
        {"self_attn.o_proj", HIDDEN, HIDDEN, -1},
        {"post_attention_layernorm", HIDDEN, 0, -1},
        {"mlp.gate_up_proj", 2 * MLP, HIDDEN, 1},
        {"mlp.gate_proj", MLP, HIDDEN, 0},
        {"mlp.up_proj", MLP, HIDDEN, 0},
        {"mlp.down_proj", HIDDEN, MLP, -1},
    };
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        char name[TEXT / 2];
        if (weights[i].when_fused == !model->fused)
            continue;
        snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, weights[i].name);
        add_weight(model, name, weights[i].rows, weights[i].columns);
    }
}

static void add_all(struct model *model, int optimizer)
{
    model->optimizer = optimizer;
    add_weight(model, "model.embed_tokens.weight", VOCAB, HIDDEN);
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(model, layer);
    add_weight(model, "model.norm.weight", HIDDEN, 0);
    add_weight(model, "lm_head.weight", VOCAB, HIDDEN);
}

static void free_model(struct model *model)
{
    for (int64_t i = 0; i < model->n; i++) {
        for (int64_t k = 0; k < rsd_layout_narrays(model->layouts[i]); k++)
            free(model->locals[i].arrays[k]);
        free((void *)(uintptr_t)model->locals[i].arrays);
        rsd_layout_free(model->layouts[i]);
    }
    rsd_mesh_free(model->mesh);
}

int main(int argc, char **argv)
{
    static struct model model;
    model.fused = argc > 1 && strcmp(argv[1], "--fused") == 0;
    argc -= model.fused;
    argv += model.fused;
    if (argc < 2 || argc > 4 || argv[1][0] == '-') {
        fprintf(stderr, "usage: make_checkpoint [--fused] PATH [MESH [PLACEMENTS]]\n");
        return 2;
    }
    or_die(rsd_mesh_parse(argc > 2 ? argv[2] : "dp=8", &model.mesh));
    model.placements = argc > 3 ? argv[3] : "S(0)";
    add_all(&model, 0);
    add_all(&model, 1);

    rsd_value values[] = {
        {.struct_nbytes = sizeof(rsd_value),
         .name = "train.step",
         .json = "1000",
         .path = "[\"train\", \"step\"]"},
        {.struct_nbytes = sizeof(rsd_value),
         .name = "train.lr",
         .json = "0.0003",
         .path = "[\"train\", \"lr\"]"},
    };
    rsd_save_options options = {.struct_nbytes = sizeof options, .nvalues = 2, .values = values};
    rsd_report report = {.struct_nbytes = sizeof report};
    or_die(rsd_save(argv[1], model.n, model.locals, &options, &report));
    printf("%s: %lld tensors, %lld bytes in %lld files of %lld ranks\n", argv[1],
           (long long)report.ntensors, (long long)report.nbytes_written,
           (long long)report.nfiles_written, (long long)rsd_mesh_nranks(model.mesh));
    free_model(&model);
    return fflush(stdout) != 0;
}
