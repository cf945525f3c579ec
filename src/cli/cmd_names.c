/* cmd_names.c - the verb names: prints the built-in maps of tensor names, for a user who wants to change one. */
#include "cli.h"

#include <string.h>

static const char names_help[] = "usage: reshard names [MAP]\n"
                                 "\n"
                                 "List the built-in maps of tensor names, or print one. --names of "
                                 "other verbs takes the name of\n"
                                 "a map, or a file with the text of one.\n"
                                 "\n"
                                 "  reshard names megatron-llama > mine.names\n"
                                 "  reshard merge iter_0000500 hf/ --names mine.names\n"
                                 "\n";

static const struct cli_option names_options[] = {{0}};
static const struct cli_verb names_verb = {
    .name = "names", .help = names_help, .help_column = 24, .options = names_options};

int command_names(int argc, char **argv)
{
    const char *name, *text = NULL;
    int code = options_read(&names_verb, argc, argv, NULL);
    if (code != GO_ON)
        return code;
    if (argc - optind > 1)
        return cli_fail("names", EXIT_USAGE,
                        "at most one MAP is allowed; see reshard names --help");
    for (int64_t i = 0; (name = rsd_name_map(i, &text)); i++) {
        if (optind == argc)
            puts(name);
        else if (strcmp(name, argv[optind]) == 0)
            return fputs(text, stdout) < 0 ? EXIT_IO : EXIT_YES;
    }
    return optind == argc
               ? EXIT_YES
               : cli_fail("names", EXIT_USAGE, "unknown map '%s'; 'reshard names' lists the maps",
                          argv[optind]);
}
