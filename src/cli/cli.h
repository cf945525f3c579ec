/* cli.h - the door of cli: talks to people, through the public headers only. */
#ifndef CLI_H
#define CLI_H

#include "reshard.h"

#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>

/* What the command answers with. */
enum exit_code {
    EXIT_YES = 0,
    EXIT_NO = 1,         /* the answer is no: damage found, a difference found */
    EXIT_USAGE = 2,      /* a command line or a text that cannot be understood */
    EXIT_CANNOT = 3,     /* understood, but it cannot be done as asked */
    EXIT_UNREADABLE = 4, /* an input that does not exist or cannot be read as a checkpoint */
    EXIT_IO = 5,         /* the machine or a peer failed */
    EXIT_INTERRUPTED = 130
};

enum { GO_ON = -1 }; /* instead of a code to exit with */

/* ---- command.c ---- */

/* All of it: the code to exit with. With a transport, this is one of several processes that do it together:
 * all exit with the same code, and rank 0 says what is to be said. */
int command_main(int argc, char **argv, const rsd_transport *transport);

/* Says "reshard VERB: message" and returns the code. */
int complain(const char *verb, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Says the library's last error, and returns the code that its status stands for; 0 for RSD_OK. */
int complain_status(const char *verb, rsd_status status);

/* Says what getopt_long did not like: its answer '?' or ':', and argv. */
int complain_option(const char *verb, int answer, char **argv);

/* Prints what `help` says to stdout. */
int show_help(const char *help);

/* ---- ranks.c: one command, many processes ---- */

const rsd_transport *together(void); /* NULL: this process alone */
void together_start(const rsd_transport *transport);
void together_end(void);

/* Where ranks compare how it went so far: the code of the first that has to give up, else this one's. */
int together_code(const char *verb, int code);

/* The code to exit with. Who ends before the first comparison, for a command line or a file that is only its
 * own, takes part in it here, or the others would wait for it. */
int together_over(int code);

/* What complain says, kept if nobody sees it. */
void keep_complaint(const char *verb, const char *text);

/* Whether some rank was lost, so that nobody can be talked to. */
void note_lost(rsd_status status);
bool together_lost(void);

/* ---- opening.c ---- */

/* 0, or the code to exit with: what is not there cannot be read as a checkpoint either. */
int open_checkpoint(const char *verb, const char *path, rsd_checkpoint **checkpoint);

/* Says which files are not there, since to learn of it in the middle of the work is too late: of all (NULL),
 * or of those that have an extent that is needed. 0, or the code to exit with. */
typedef bool is_needed(const void *context, const rsd_tensor_info *tensor,
                       const rsd_extent *extent);
bool every_tensor(const void *context, const rsd_tensor_info *tensor, const rsd_extent *extent);
int need_files(const char *verb, const char *path, const rsd_checkpoint *checkpoint,
               is_needed *needed, const void *context);

/* ---- words.c: numbers and texts, in and out ---- */

/* A whole number from text; false if it is none, or not in [least, most]. */
bool parse_number(const char *text, long long least, long long most, long long *value);

/* A size such as 256MB, 5GB, 1GiB or 1000; at least 1. */
bool parse_size(const char *text, int64_t *nbytes);

/* "1.93 GB". Valid until the fourth call after. */
const char *size_text(int64_t nbytes);

/* "f32[4,8]". Valid until the fourth call after. */
const char *tensor_text(rsd_dtype dtype, int32_t ndim, const int64_t *shape);

/* Text from a checkpoint, as a terminal may have it: what would move its cursor, or is no UTF-8, is
 * spelled \xNN. Valid until the fourth call after. */
const char *plain_text(const char *text);

/* A JSON string, with its quotes. */
void print_json_string(FILE *out, const char *text);
void print_json_list(FILE *out, int32_t n, const int64_t *values);

/* As many as there are cores, at most 16: more do not make a disk faster. */
long long default_threads(void);

/* Memory or the end: a command has nothing to fall back on. */
void *need_memory(void *memory);
char *need_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- progress.c: how far it is, and how to stop it ---- */

struct progress {
    const char *doing;
    bool shown; /* on a terminal */
    double began, said;
    int width; /* of what is on the line now */
};

/* Starts to listen for Ctrl-C, and to show a line if standard error is a terminal. */
void progress_start(struct progress *progress, const char *doing, bool quiet);
int progress_tell(void *progress, const rsd_progress *how_far); /* rsd_on_progress */
void progress_end(struct progress *progress);
bool was_interrupted(void);

/* ---- conversion.c: what convert, merge, split and plan have in common ---- */

enum conversion_verb { CONVERT, MERGE, SPLIT, PLAN };

struct conversion {
    enum conversion_verb kind;
    const char *verb;
    const char *in, *out;
    rsd_rules *rules;
    bool has_mesh;
    const char *needs_mesh; /* an option that was given and needs --mesh; NULL: none */
    rsd_convert_options convert;
    const char *config_from;
    bool all, json, quiet, verify;
    long long threads;
    int64_t nverified;
    char **side_files;
    size_t nside_files;
};

int conversion_run(struct conversion *conversion); /* the code to exit with */

/* ---- one file a command ---- */

int command_plan(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_convert(int argc, char **argv);
int command_merge(int argc, char **argv);
int command_split(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_diff(int argc, char **argv);
int command_digest(int argc, char **argv);
int command_extract(int argc, char **argv);

/* `plan CKPT ...`: what a conversion would do. */
int command_plan_checkpoint(int argc, char **argv);

/* ---- draw.c: pictures in the terminal ---- */

/* Who sends how much to whom, as a shaded square. */
rsd_status draw_traffic(FILE *out, const rsd_plan *plan);

/* The boxes of a stored tensor: which file has which part of its first two dims. */
rsd_status draw_boxes(FILE *out, const rsd_checkpoint *checkpoint, int64_t tensor);

/* Which two dims of a stored tensor a picture shows; -1: there are not so many. */
rsd_status picture_dims(const rsd_checkpoint *checkpoint, int64_t tensor, int32_t *down,
                        int32_t *across);

/* ---- page.c: the same as files ---- */

rsd_status page_traffic(const char *path, bool html, const rsd_plan *plan);
rsd_status page_boxes(const char *path, bool html, const rsd_checkpoint *checkpoint,
                      int64_t tensor);

#endif
