/* command.c - the command: finds the verb, and what all verbs share. */
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *verb;
    int (*run)(int argc, char **argv);
    bool together; /* many ranks may do it */
    const char *does;
} commands[] = {
    {"inspect", command_inspect, false, "list what is in a checkpoint"},
    {"plan", command_plan, false, "say what a move, or a conversion, would do"},
    {"convert", command_convert, true, "write a checkpoint in another format or layout"},
    {"merge", command_merge, true,
     "write whole tensors as safetensors, as transformers loads them"},
    {"split", command_split, true,
     "write one safetensors file a rank, with all that the rank needs"},
    {"verify", command_verify, true, "read everything, and say what is damaged or missing"},
    {"diff", command_diff, true, "say whether two checkpoints hold the same tensors"},
    {"digest", command_digest, true, "print a digest of each tensor, whatever its layout"},
    {"extract", command_extract, false, "write one tensor, or a part of it, to a file"},
};

enum { NCOMMANDS = sizeof commands / sizeof *commands };

int complain(const char *verb, int code, const char *format, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    fprintf(stderr, "reshard%s%s: %s\n", verb ? " " : "", verb ? verb : "",
            n < 0 ? format : plain_text(text));
    keep_complaint(verb, n < 0 ? format : plain_text(text));
    free(n < 0 ? NULL : text);
    return code;
}

static int code_of(rsd_status status)
{
    switch (status) {
    case RSD_OK:
        return EXIT_YES;
    case RSD_EFORMAT:
    case RSD_ENOENT:
        return EXIT_UNREADABLE;
    case RSD_ENOMEM:
    case RSD_EIO:
    case RSD_EPEER:
    case RSD_ETIMEOUT:
        return EXIT_IO;
    case RSD_ECANCELLED:
        return EXIT_INTERRUPTED;
    case RSD_EINVAL:
    case RSD_EMISMATCH:
    case RSD_ELIMIT:
    case RSD_EEXIST:
    case RSD_EUNSUPPORTED:
        break;
    }
    return EXIT_CANNOT;
}

int complain_status(const char *verb, rsd_status status)
{
    if (!status)
        return EXIT_YES;
    note_lost(status);
    return complain(verb, code_of(status), "%s", rsd_error());
}

int complain_option(const char *verb, int answer, char **argv)
{
    if (answer == ':')
        return complain(verb, EXIT_USAGE, "%s needs a value", argv[optind - 1]);
    if (optopt > 0 && optopt < 256)
        return complain(verb, EXIT_USAGE, "unknown option '-%c'; see reshard %s --help", optopt,
                        verb);
    if (optopt)
        return complain(verb, EXIT_USAGE, "%s takes no value", argv[optind - 1]);
    return complain(verb, EXIT_USAGE, "unknown or unclear option '%s'; see reshard %s --help",
                    argv[optind - 1], verb);
}

int show_help(const char *help)
{
    fputs(help, stdout);
    return EXIT_YES;
}

static int help(FILE *out, int code)
{
    fputs("usage: reshard VERB ...\n\n"
          "For tensors that are cut into shards, and needed in another cut.\n\n",
          out);
    for (size_t i = 0; i < NCOMMANDS; i++)
        if (commands[i].together || !together())
            fprintf(out, "  %-10s %s\n", commands[i].verb, commands[i].does);
    fputs("\n`reshard VERB --help` says more; `reshard --version` says which version this is.\n\n"
          "exit code: 0 yes; 1 the answer is no; 2 usage or syntax; 3 cannot be done as asked;\n"
          "           4 an input that is no checkpoint; 5 I/O, memory or a peer; 130 interrupted\n",
          out);
    return code;
}

/* People write long options with underscores too. */
static void accept_underscores(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strncmp(argv[i], "--", 2) == 0)
            for (char *c = argv[i]; *c && *c != '='; c++)
                if (*c == '_')
                    *c = '-';
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        keep_complaint(NULL, "a verb is needed");
        return help(stderr, EXIT_USAGE);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return help(stdout, EXIT_YES);
    bool of_verb = argc > 2 && strcmp(argv[2], "--version") == 0;
    if (strcmp(argv[1], "--version") == 0) {
        printf("reshard %s\n", rsd_version());
        return EXIT_YES;
    }
    accept_underscores(argc, argv);
    for (size_t i = 0; i < NCOMMANDS; i++)
        if (strcmp(argv[1], commands[i].verb) == 0 && of_verb)
            return printf("reshard %s\n", rsd_version()) < 0 ? EXIT_IO : EXIT_YES;
        else if (strcmp(argv[1], commands[i].verb) == 0 && together() && !commands[i].together)
            return complain(argv[1], EXIT_USAGE, "this is for one process: use `reshard %s`",
                            argv[1]);
        else if (strcmp(argv[1], commands[i].verb) == 0)
            return commands[i].run(argc - 1, argv + 1);
    return complain(NULL, EXIT_USAGE, "no verb is called '%s'; `reshard --help` lists them",
                    argv[1]);
}

int command_main(int argc, char **argv, const rsd_transport *transport)
{
    together_start(transport);
    int code = together_over(run(argc, argv));
    if (fflush(stdout) != 0 || ferror(stdout)) {
        if (errno != EPIPE)
            complain(NULL, EXIT_IO, "standard output: %s", strerror(errno));
        code = code == EXIT_YES ? EXIT_IO : code;
    }
    together_end();
    return code;
}
