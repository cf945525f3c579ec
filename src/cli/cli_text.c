/* cli_text.c - parses and prints numbers, sizes, names and JSON. */
#include "cli.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool cli_parse_number(const char *text, long long least, long long most, long long *value)
{
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno || end == text || *end || number < least || number > most)
        return false;
    *value = number;
    return true;
}

const char *cli_size_text(int64_t nbytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    static char texts[4][32];
    static unsigned next;
    char *text = texts[next++ % 4];
    double value = (double)nbytes;
    int unit = 0;
    while (value >= 999.5 && unit < 6) {
        value /= 1000;
        unit++;
    }
    snprintf(text, sizeof texts[0], unit ? "%.3g %s" : "%.0f %s", value, units[unit]);
    return text;
}

const char *cli_tensor_text(rsd_dtype dtype, int32_t ndim, const int64_t *shape)
{
    static char texts[4][RSD_MAX_DIMS * 21 + 16];
    static unsigned next;
    char *text = texts[next++ % 4];
    size_t at = (size_t)snprintf(text, sizeof texts[0], "%s[", rsd_dtype_name(dtype));
    for (int32_t d = 0; d < ndim; d++)
        at += (size_t)snprintf(text + at, sizeof texts[0] - at, "%s%lld", d ? "," : "",
                               (long long)shape[d]);
    snprintf(text + at, sizeof texts[0] - at, "]");
    return text;
}

const char *cli_plain_text(const char *text)
{
    static char *texts[4];
    static unsigned next;
    uint32_t code;
    int32_t hidden = 0;
    for (const char *c = text; *c && !hidden;)
        c += rsd_text_char(c, &code, &hidden);
    if (!hidden)
        return text;
    char **out = &texts[next++ % 4], *end;
    *out = end = cli_need_memory(realloc(*out, 4 * strlen(text) + 1));
    while (*text) {
        int32_t n = rsd_text_char(text, &code, &hidden);
        for (n += !n; n > 0; n--, text++)
            if (hidden)
                end += sprintf(end, "\\x%02x", (unsigned char)*text);
            else
                *end++ = *text;
    }
    *end = '\0';
    return *out;
}

bool cli_has_suffix(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n > m && strcmp(text + n - m, suffix) == 0;
}

char *cli_parent_path(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    while (n > 1 && path[n - 1] == '/')
        n--;
    return n ? cli_text("%.*s", (int)n, path) : cli_text(".");
}

int cli_text_width(const char *text)
{
    int width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

void cli_print_padded(FILE *out, const char *text, int width)
{
    int blanks = width - cli_text_width(text);
    fprintf(out, "%s%*s", text, blanks > 0 ? blanks : 0, "");
}

/* Prints a character of a JSON string, and returns its length. What is hidden is escaped. */
static int print_json_char(FILE *out, const char *c)
{
    uint32_t code;
    int32_t hidden, n = rsd_text_char(c, &code, &hidden);
    if (n == 0)
        fputs("\\ufffd", out); /* a path may have any bytes, JSON may not */
    else if (!hidden)
        fwrite(c, 1, (size_t)n, out);
    else if (code < 0x10000)
        fprintf(out, "\\u%04x", (unsigned)code);
    else
        fprintf(out, "\\u%04x\\u%04x", 0xd7c0 + (unsigned)(code >> 10),
                0xdc00 + (unsigned)(code & 0x3ff));
    return n ? n : 1;
}

void cli_print_json_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (const char *c = text; *c;) {
        if (*c == '"' || *c == '\\')
            fputc('\\', out);
        c += print_json_char(out, c);
    }
    fputc('"', out);
}

void cli_print_json(FILE *out, const char *json)
{
    while (*json) /* line breaks are not inside of strings */
        json += print_json_char(out, (unsigned char)*json < ' ' ? " " : json);
}

void cli_print_json_list(FILE *out, int32_t n, const int64_t *values)
{
    fputc('[', out);
    for (int32_t i = 0; i < n; i++)
        fprintf(out, "%s%lld", i ? ", " : "", (long long)values[i]);
    fputc(']', out);
}

void name_sample_add(struct name_sample *sample, const char *name)
{
    enum { MOST_NAMES = 3 };
    if (sample->n++ > MOST_NAMES)
        return;
    sample->names = cli_text("%s%s%s", sample->names ? sample->names : "",
                             sample->names ? ", " : "", sample->n > MOST_NAMES ? "..." : name);
}

void *cli_need_memory(void *memory)
{
    if (memory)
        return memory;
    cli_fail(NULL, EXIT_IO, "out of memory");
    exit(EXIT_IO);
}

/* All texts of cli_text, the last one first. */
struct kept_text {
    struct kept_text *next;
    char chars[];
};
static _Atomic(struct kept_text *) kept_texts;

char *cli_text(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    struct kept_text *text = cli_need_memory(n < 0 ? NULL : malloc(sizeof *text + (size_t)n + 1));
    va_start(args, format);
    vsnprintf(text->chars, (size_t)n + 1, format, args);
    va_end(args);
    text->next = atomic_exchange(&kept_texts, text);
    return text->chars;
}

void cli_free_texts(void)
{
    struct kept_text *text = atomic_exchange(&kept_texts, NULL);
    while (text) {
        struct kept_text *next = text->next;
        free(text);
        text = next;
    }
}

long long cli_default_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t own; /* MPI binds each rank of a host to some of its cores */
    if (ranks_transport() && sched_getaffinity(0, sizeof own, &own) == 0 && CPU_COUNT(&own) < n)
        n = CPU_COUNT(&own);
    return n < 1 ? 1 : n > 16 ? 16 : n;
}

char *cli_box_text(const rsd_box *box)
{
    char *text = cli_text("[");
    for (int32_t d = 0; d < box->ndim; d++)
        text = cli_text("%s%s%lld:%lld", text, d ? ", " : "", (long long)box->lo[d],
                        (long long)(box->lo[d] + box->len[d]));
    return cli_text("%s]", text);
}
