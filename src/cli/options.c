/* options.c - the options of all verbs. A row of a table has all of an option: its name, its value, its help, the verbs
 * that take it, and where it is stored. getopt_long reads the command line. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_OPTIONS = 127, FIRST_ANSWER = 256 /* of getopt_long for a row; letters are below */ };

/* The rows of a verb, each name once: first those that the verb takes. */
struct option_list {
    const struct cli_option *rows[MOST_OPTIONS];
    struct option names[MOST_OPTIONS + 1]; /* as getopt_long wants them */
    char letters[MOST_OPTIONS + 2];
    int n, ntaken; /* the verb takes the first ntaken */
};

static const struct cli_option help_option[] = {
    {"help", NULL, "Print this help", NULL, 0, 0, 'h', NULL}, {0}};

/* ---- tables ---- */

static bool is_of_verb(const struct cli_option *row, const struct cli_verb *verb)
{
    return !row->verbs || row->verbs & verb->bit;
}

/* Whether an argument is the long option of a row, with a value behind it or not. */
static bool is_typed_name(const char *argument, const char *name)
{
    size_t n = strlen(name);
    return strncmp(argument, "--", 2) == 0 && strncmp(argument + 2, name, n) == 0 &&
           (!argument[2 + n] || argument[2 + n] == '=');
}

/* Finds the row of an argument in a table; NULL: it is none of them. */
static const struct cli_option *find_typed_row(const struct cli_option *rows, const char *argument)
{
    const struct cli_option *found = NULL;
    for (; (rows->name || rows->more) && !found; rows++)
        if (rows->more)
            found = find_typed_row(rows->more, argument);
        else if (is_typed_name(argument, rows->name))
            found = rows;
    return found;
}

bool options_take_value(const struct cli_verb *verb, const char *argument)
{
    const struct cli_option *row = find_typed_row(verb->options, argument);
    if (!row)
        row = find_typed_row(urls_options, argument);
    return row && row->value && !strchr(argument, '=');
}

static bool has_row(const struct option_list *list, const char *name)
{
    for (int i = 0; i < list->n; i++)
        if (strcmp(list->names[i].name, name) == 0)
            return true;
    return false;
}

/* Adds the rows of a table that the verb takes, or the others. */
static void add_option_rows(struct option_list *list, const struct cli_verb *verb,
                            const struct cli_option *rows, bool taken)
{
    for (; rows->name || rows->more; rows++) {
        if (rows->more)
            add_option_rows(list, verb, rows->more, taken);
        else if (is_of_verb(rows, verb) == taken && !has_row(list, rows->name) &&
                 list->n < MOST_OPTIONS) {
            list->names[list->n] =
                (struct option){rows->name, rows->value ? required_argument : no_argument, NULL,
                                FIRST_ANSWER + list->n};
            list->rows[list->n++] = rows;
            if (rows->letter)
                list->letters[strlen(list->letters)] = (char)rows->letter;
        }
    }
}

static void list_options(struct option_list *list, const struct cli_verb *verb)
{
    *list = (struct option_list){.letters = ":"};
    add_option_rows(list, verb, verb->options, true);
    add_option_rows(list, verb, help_option, true);
    add_option_rows(list, verb, urls_options, true);
    list->ntaken = list->n;
    add_option_rows(list, verb, verb->options, false);
}

/* ---- help ---- */

void options_print_rows(FILE *out, const struct cli_option *rows, const struct cli_verb *verb,
                        int column)
{
    for (; rows->name || rows->more; rows++) {
        if (rows->more)
            options_print_rows(out, rows->more, verb, column);
        if (!rows->help || (verb && !is_of_verb(rows, verb)))
            continue;
        char letter[] = {'-', (char)rows->letter, ',', ' ', '\0'};
        char *option = cli_text("%s--%s%s%s", rows->letter ? letter : "", rows->name,
                                rows->value ? " " : "", rows->value ? rows->value : "");
        fprintf(out, "  %-*s", column - 2, option);
        for (const char *c = rows->help; *c; c++)
            if (*c == '\n')
                fprintf(out, "\n%*s", column, "");
            else
                fputc(*c, out);
        fputc('\n', out);
    }
}

static void print_use(const struct cli_verb *verb)
{
    fputs(verb->help, stdout);
    options_print_rows(stdout, verb->options, verb, verb->help_column);
    options_print_rows(stdout, help_option, verb, verb->help_column);
}

/* Prints the help of a verb, or of both uses of it. */
static int print_help(const struct cli_verb *verb)
{
    const struct cli_verb *other = verb->other_use;
    print_use(other && verb->is_second_use ? other : verb);
    if (other) {
        putchar('\n');
        print_use(verb->is_second_use ? verb : other);
    }
    return EXIT_YES;
}

/* ---- errors ---- */

/* Fails for a long option that is unknown, or the start of several. */
static int fail_unknown_option(const struct cli_verb *verb, const char *argument,
                               const struct option_list *list)
{
    const char *words[MOST_OPTIONS + 1];
    size_t nwords = 0, n = 0;
    char *name = cli_text("%.*s", (int)strcspn(argument + 2, "="), argument + 2);
    const char *several = "";
    for (int i = 0; i < list->ntaken; i++)
        words[nwords++] = list->names[i].name;
    words[nwords++] = "version";
    const char *nearest = rsd_nearest_word(name, nwords, words);
    for (size_t i = 0; i < nwords; i++)
        if (strncmp(words[i], name, strlen(name)) == 0) {
            several = cli_text("%s%s--%s", several, n++ ? ", " : "", words[i]);
            nearest = words[i];
        }
    if (n > 1)
        return cli_fail(verb->name, EXIT_USAGE, "option --%s is ambiguous: %s", name, several);
    return nearest ? cli_fail(verb->name, EXIT_USAGE, "unknown option --%s; did you mean --%s?",
                              name, nearest)
                   : cli_fail(verb->name, EXIT_USAGE, "unknown option --%s; see reshard %s --help",
                              name, verb->name);
}

/* Prints what is wrong with the option that getopt_long has just refused; answer is '?' or ':'. */
static int fail_refused_option(const struct cli_verb *verb, const struct option_list *list,
                               int answer, const char *argument)
{
    if (answer == ':')
        return cli_fail(verb->name, EXIT_USAGE, "option %s needs a value", argument);
    if (optopt > 0 && optopt < FIRST_ANSWER)
        return cli_fail(verb->name, EXIT_USAGE, "unknown option -%c; see reshard %s --help", optopt,
                        verb->name);
    if (optopt)
        return cli_fail(verb->name, EXIT_USAGE, "option %s takes no value", argument);
    return fail_unknown_option(verb, argument, list);
}

/* ---- reading ---- */

/* Returns the number of the row that getopt_long has found; -1: none. */
static int find_answer(const struct option_list *list, int answer)
{
    for (int i = 0; i < list->n; i++)
        if (answer == FIRST_ANSWER + i || answer == list->rows[i]->letter)
            return i;
    return -1;
}

/* Stores the option that getopt_long has found, or prints what is wrong with it. Returns GO_ON or an exit code. */
static int take_answer(const struct cli_verb *verb, const struct option_list *list, int answer,
                       char **argv, void *request)
{
    const char *argument = argv[optind - 1 - (optarg && optarg == argv[optind - 1])];
    int found = find_answer(list, answer);
    bool own = find_typed_row(verb->options, argument);
    if (!own && verb->other_use && find_typed_row(verb->other_use->options, argument))
        return cli_fail(verb->name, EXIT_USAGE, "option %s needs %s", argument, verb->other_needs);
    if (found < 0)
        return fail_refused_option(verb, list, answer, argument);
    const struct cli_option *row = list->rows[found];
    if (found >= list->ntaken)
        return cli_fail(verb->name, EXIT_USAGE,
                        "option --%s is not valid for '%s'; see reshard %s --help", row->name,
                        verb->name, verb->name);
    if (row == help_option)
        return print_help(verb);
    struct given_option given = {.verb = verb->name,
                                 .name = row->name,
                                 .value = optarg,
                                 .request = request,
                                 .number = row->number};
    return row->take(&given);
}

int options_read(const struct cli_verb *verb, int argc, char **argv, void *request)
{
    struct option_list list;
    list_options(&list, verb);
    opterr = 0;
    for (int answer; (answer = getopt_long(argc, argv, list.letters, list.names, NULL)) != -1;) {
        int code = take_answer(verb, &list, answer, argv, request);
        if (code != GO_ON)
            return code;
    }
    return GO_ON;
}

/* ---- values ---- */

void *options_field(const struct given_option *given)
{
    return (char *)given->request + given->number;
}

int options_set_flag(const struct given_option *given)
{
    *(bool *)options_field(given) = true;
    return GO_ON;
}

int options_set_one(const struct given_option *given)
{
    *(int32_t *)options_field(given) = 1;
    return GO_ON;
}

int options_set_text(const struct given_option *given)
{
    *(const char **)options_field(given) = given->value;
    return GO_ON;
}

int options_set_threads(const struct given_option *given)
{
    return cli_parse_number(given->value, 1, 4096, options_field(given))
               ? GO_ON
               : cli_fail(given->verb, EXIT_USAGE, "--threads %s must be from 1 to 4096",
                          given->value);
}

/* Parses a size of at least one byte. */
static bool parse_size(const char *text, int64_t *nbytes)
{
    static const struct {
        const char *name;
        double factor;
    } units[] = {{"", 1},         {"B", 1},        {"K", 1e3},      {"KB", 1e3},    {"M", 1e6},
                 {"MB", 1e6},     {"G", 1e9},      {"GB", 1e9},     {"T", 1e12},    {"TB", 1e12},
                 {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    char *end;
    double number = strtod(text, &end);
    if (end == text || text[0] < '0' || text[0] > '9' || strcspn(text, "xX") < (size_t)(end - text))
        return false; /* not hexadecimal */
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcasecmp(end, units[i].name) == 0) {
            double value = number * units[i].factor;
            if (value < 1 || value > 9e18)
                return false;
            *nbytes = (int64_t)value;
            return true;
        }
    return false;
}

int options_set_size(const struct given_option *given)
{
    long long number;
    const char *text = given->value;
    if (cli_parse_number(text, 1, 999, &number)) /* more is meant */
        return cli_fail(given->verb, EXIT_USAGE,
                        "--%s %s means %lld byte%s; add a unit: %sGB, or %sB if that is meant",
                        given->name, text, number, number == 1 ? "" : "s", text, text);
    return parse_size(text, options_field(given))
               ? GO_ON
               : cli_fail(given->verb, EXIT_USAGE, "--%s %s must be a size such as 5GB or 256MB",
                          given->name, text);
}
