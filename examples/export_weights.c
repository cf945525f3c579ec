/* export_weights.c - writes the weights of a training checkpoint for a server with tensor parallelism: the model only, in
 * bf16, one safetensors file per rank.
 *
 *     build/examples/export_weights step-1000 served 4
 *
 * The input may have any format and layout, and any size: memory is limited. The output appears when it is complete and
 * verified. Introduces: rsd_rules, rsd_convert, rsd_check_output.
 */
#include "elements.h"

static rsd_status print_message(void *context, int32_t is_problem, const char *text)
{
    (void)context;
    fprintf(stderr, "%s: %s\n", is_problem ? "problem" : "note", text);
    return RSD_OK;
}

static rsd_status print_finding(void *context, const char *text)
{
    (void)context;
    fprintf(stderr, "damaged: %s\n", text);
    return RSD_OK;
}

/* Called with the output before it is at its path. */
static rsd_status check_output(void *context, rsd_checkpoint *output)
{
    int64_t nfindings;
    rsd_status status = rsd_verify(output, context, print_finding, NULL, &nfindings, NULL);
    return status      ? status
           : nfindings ? rsd_set_error(RSD_EFORMAT, "the output is damaged")
                       : RSD_OK;
}

/* The rules: the model without the trainer's names, in bf16, cut as a Llama with tensor parallelism. */
static rsd_rules *new_rules(rsd_checkpoint *checkpoint, const char *nranks)
{
    char text[64];
    rsd_rules *rules;
    rsd_mesh *mesh;
    int64_t nproblems;
    snprintf(text, sizeof text, "tp=%s", nranks);
    or_die(rsd_mesh_parse(text, &mesh));
    or_die(rsd_rules_new(NULL, &rules));
    or_die(rsd_rules_set_mesh(rules, mesh));
    or_die(rsd_rules_set_preset(rules, "llama-tp"));
    or_die(rsd_rules_add(rules, RSD_RULE_MODEL, ""));
    or_die(rsd_rules_add(rules, RSD_RULE_CAST, "bf16"));
    or_die(rsd_rules_check(rules, checkpoint, print_message, NULL, &nproblems));
    if (nproblems)
        exit(1);
    rsd_mesh_free(mesh);
    return rules;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: export_weights CHECKPOINT OUT RANKS\n");
        return 2;
    }
    rsd_checkpoint *checkpoint;
    rsd_pool *pool;
    rsd_io io = RSD_INIT(rsd_io);
    rsd_convert_options options = RSD_INIT(rsd_convert_options);
    rsd_report report = RSD_INIT(rsd_report);
    or_die(rsd_checkpoint_open(argv[1], NULL, &checkpoint));
    or_die(rsd_pool_new(4, &pool));
    io.pool = pool;
    io.max_nbytes = 64 << 20;
    options.io = &io;
    options.format = RSD_FORMAT_SAFETENSORS;
    options.every_replica = 1; /* a rank has all that it needs in its own file */
    options.map = rsd_rules_map;
    options.map_context = new_rules(checkpoint, argv[3]);
    options.check = check_output;
    options.check_context = &io;
    or_die(rsd_convert(checkpoint, argv[2], &options, &report));
    printf("%lld tensors, %lld bytes in %lld files, %lld left out\n", (long long)report.ntensors,
           (long long)report.nbytes_written, (long long)report.nfiles_written,
           (long long)report.nleft_out);
    rsd_rules_free(options.map_context);
    rsd_checkpoint_close(checkpoint);
    rsd_pool_free(pool);
    return fflush(stdout) != 0;
}
