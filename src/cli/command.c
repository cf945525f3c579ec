/* command.c - finds the verb and runs it; errors and exit codes of all verbs. */
#include "cli.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct command {
    const char *verb;
    int (*run)(int argc, char **argv);
    bool collective; /* many ranks may run it */
    const char *summary;
};

static const struct command commands[] = {
    {"inspect", command_inspect, false, "List the tensors and values of a checkpoint"},
    {"plan", command_plan, false, "Report what a move or a conversion would do"},
    {"convert", command_convert, true, "Write a checkpoint in another format or layout"},
    {"merge", command_merge, true, "Write whole tensors as safetensors that transformers loads"},
    {"split", command_split, true, "Write one safetensors file per rank"},
    {"verify", command_verify, true, "Read a checkpoint and report damaged or missing data"},
    {"diff", command_diff, true, "Compare the tensors of two checkpoints"},
    {"digest", command_digest, true, "Print a digest of each tensor"},
    {"extract", command_extract, false, "Write tensors, or slices of them, to files"},
    {"names", command_names, false, "Print the maps of tensor names that --names knows"},
    {"uploads", command_uploads, false,
     "List and remove uploads that killed runs left in a bucket"},
};

enum { NCOMMANDS = sizeof commands / sizeof *commands };

/* ---- errors ---- */

/* Prints "reshard VERB: LABELmessage" and returns the message, which is valid until the fourth call after. */
static const char *print_message(const char *verb, const char *label, const char *format,
                                 va_list args)
{
    static char *texts[4];
    static unsigned next;
    char **text = &texts[next++ % 4];
    free(*text);
    if (vasprintf(text, format, args) < 0)
        *text = NULL;
    const char *plain = *text ? cli_plain_text(*text) : format;
    fprintf(stderr, "reshard%s%s: %s%s\n", verb ? " " : "", verb ? verb : "", label, plain);
    return plain;
}

int cli_fail(const char *verb, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    ranks_keep_error(verb, print_message(verb, "", format, args));
    va_end(args);
    return code;
}

void cli_note(const char *verb, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_message(verb, "note: ", format, args);
    va_end(args);
}

static int exit_code_of(rsd_status status)
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

int cli_fail_status(const char *verb, rsd_status status)
{
    if (!status)
        return EXIT_YES;
    ranks_note_lost(status);
    return cli_fail(verb, exit_code_of(status), "%s", rsd_error());
}

/* ---- verbs ---- */

static int show_verbs(FILE *out, int code)
{
    fputs("usage: reshard VERB [options] ...\n\n"
          "Inspect, convert and verify checkpoints of sharded tensors.\n\n",
          out);
    for (size_t i = 0; i < NCOMMANDS; i++)
        if (commands[i].collective || !ranks_transport())
            fprintf(out, "  %-10s %s\n", commands[i].verb, commands[i].summary);
    fputs("\n"
          "A path may be s3://BUCKET/PREFIX, or https://HOST/PATH for reading. All verbs take "
          "then:\n\n",
          out);
    options_print_rows(out, urls_options, NULL, 22);
    fputs("\n"
          "Run 'reshard VERB --help' for the options of a verb, 'reshard --version' for the "
          "version.\n\n"
          "Exit status: 0 success; 1 damage or a difference found; 2 invalid command line;\n"
          "             3 cannot be done as requested; 4 an input is missing or not a checkpoint;\n"
          "             5 I/O error, out of memory or a lost rank; 130 interrupted\n",
          out);
    return code;
}

static int show_version(void)
{
    printf("reshard %s\n", rsd_version());
    return EXIT_YES;
}

/* Accepts --max_memory for --max-memory. */
static void replace_underscores(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strncmp(argv[i], "--", 2) == 0)
            for (char *c = argv[i]; *c && *c != '='; c++)
                if (*c == '_')
                    *c = '-';
}

/* Runs the verb of the command line. Returns the exit code. */
static int run_verb(int argc, char **argv)
{
    if (argc < 2) {
        ranks_keep_error(NULL, "a verb is needed");
        return show_verbs(stderr, EXIT_USAGE);
    }
    const char *verb = argv[1];
    if (strcmp(verb, "--help") == 0 || strcmp(verb, "-h") == 0)
        return show_verbs(stdout, EXIT_YES);
    if (strcmp(verb, "--version") == 0)
        return show_version();
    replace_underscores(argc, argv);
    for (const struct command *command = commands; command < commands + NCOMMANDS; command++) {
        if (strcmp(verb, command->verb) != 0)
            continue;
        if (argc > 2 && strcmp(argv[2], "--version") == 0)
            return show_version();
        if (ranks_transport() && !command->collective)
            return cli_fail(verb, EXIT_USAGE, "runs in one process only: use 'reshard %s'", verb);
        return command->run(argc - 1, argv + 1);
    }
    const char *verbs[NCOMMANDS];
    for (size_t i = 0; i < NCOMMANDS; i++)
        verbs[i] = commands[i].verb;
    const char *nearest = rsd_nearest_word(verb, NCOMMANDS, verbs);
    return nearest
               ? cli_fail(NULL, EXIT_USAGE, "unknown verb '%s'; did you mean '%s'?", verb, nearest)
               : cli_fail(NULL, EXIT_USAGE, "unknown verb '%s'; see reshard --help", verb);
}

int command_main(int argc, char **argv, const rsd_transport *transport)
{
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of its write */
    ranks_start(transport);
    int code = ranks_exit(run_verb(argc, argv));
    urls_end();
    if (fflush(stdout) != 0 || ferror(stdout)) {
        if (errno != EPIPE)
            cli_fail(NULL, EXIT_IO, "standard output: %s", strerror(errno));
        code = code == EXIT_YES ? EXIT_IO : code;
    }
    ranks_end();
    cli_free_texts();
    return code;
}
