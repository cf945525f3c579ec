/* cli.h - the door of cli: talks to people, through the public headers only. */
#ifndef CLI_H
#define CLI_H

#include "reshard.h"

#include <stdbool.h>
#include <stdio.h>

/* What the command answers with. */
enum exit_code {
    EXIT_YES = 0,
    EXIT_NO = 1,         /* the answer is no: damage found, a difference found */
    EXIT_USAGE = 2,      /* a command line or a text that cannot be understood */
    EXIT_CANNOT = 3,     /* understood, but it cannot be done as asked */
    EXIT_UNREADABLE = 4, /* an input that cannot be read as a checkpoint */
    EXIT_IO = 5,         /* the machine or a peer failed */
    EXIT_INTERRUPTED = 130
};

/* ---- main.c ---- */

/* Says "reshard VERB: message" and returns the code. */
int complain(const char *verb, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Says the library's last error, and returns the code that its status stands for; 0 for RSD_OK. */
int complain_status(const char *verb, rsd_status status);

/* Says what getopt_long did not like: its answer '?' or ':', and argv. */
int complain_option(const char *verb, int answer, char **argv);

/* Prints what `help` says to stdout. */
int show_help(const char *help);

/* A whole number from text; false if it is none, or not in [least, most]. */
bool parse_number(const char *text, long long least, long long most, long long *value);

/* ---- one file a command ---- */

int command_plan(int argc, char **argv);

/* ---- draw.c: pictures in the terminal ---- */

/* Who sends how much to whom, as a shaded square. */
rsd_status draw_traffic(FILE *out, const rsd_plan *plan);

#endif
