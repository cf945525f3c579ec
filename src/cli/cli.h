/* cli.h - the command. It uses the public headers only. */
#ifndef CLI_H
#define CLI_H

#include "reshard.h"

#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>

enum exit_code {
    EXIT_YES = 0,
    EXIT_NO = 1,         /* damage or a difference was found */
    EXIT_USAGE = 2,      /* an invalid command line, or a text that cannot be parsed */
    EXIT_CANNOT = 3,     /* valid, but it cannot be done as requested */
    EXIT_UNREADABLE = 4, /* an input does not exist or cannot be read as a checkpoint */
    EXIT_IO = 5,         /* I/O error, out of memory, or a lost rank */
    EXIT_INTERRUPTED = 130
};

enum { GO_ON = -1 }; /* in place of an exit code: continue */

/* ---- command.c ---- */

/* Runs the command and returns its exit code. With a transport, this process is one rank of several that run
 * one command: all ranks return the same code, and rank 0 prints. */
int command_main(int argc, char **argv, const rsd_transport *transport);

/* Prints "reshard VERB: message" to standard error and returns the code. verb may be NULL. */
int cli_fail(const char *verb, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Prints "reshard VERB: note: message" to standard error. */
void cli_note(const char *verb, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the last error of the library and returns the exit code of the status; EXIT_YES for RSD_OK. */
int cli_fail_status(const char *verb, rsd_status status);

/* ---- options.c: the options of all verbs ---- */

/* An option on the command line. */
struct given_option {
    const char *verb, *name;
    const char *value; /* NULL: it takes none */
    void *request;     /* that options_read was called with */
    size_t number;     /* of its row */
};

/* Stores the value of an option. Returns GO_ON, or an exit code after a message. */
typedef int cli_take_option(const struct given_option *given);

/* A row of a table of options. The last row is {0}. */
struct cli_option {
    const char *name;
    const char *value; /* as the help calls it; NULL: it takes none */
    const char *help;  /* NULL: another word for an option, which the help does not list */
    cli_take_option *take;
    size_t number;                 /* for `take`: the offset of a field of the request, or other */
    unsigned verbs;                /* that take it, as bits; 0: all verbs that have the table */
    int letter;                    /* 0: none */
    const struct cli_option *more; /* in place of an option: another table */
};
#define OPTION(name, value, help, take, number, verbs)                                             \
    {                                                                                              \
        name, value, help, take, number, verbs, 0, NULL                                            \
    }
#define OPTION_TABLE(table)                                                                        \
    {                                                                                              \
        NULL, NULL, NULL, NULL, 0, 0, 0, table                                                     \
    }

struct cli_verb {
    const char *name;
    const char *help; /* what is in front of the options */
    int help_column;  /* where the help of an option begins */
    unsigned bit;     /* in cli_option.verbs */
    const struct cli_option *options;
    /* The other use of a verb that has two, and what the options of that need. */
    const struct cli_verb *other_use;
    const char *other_needs;
    bool is_second_use; /* its help comes after that of the other */
};

/* Reads the options of a command line into a request. The arguments begin at argv[optind] then. All verbs have --help
 * and the options for URLs. Returns GO_ON or an exit code. */
int options_read(const struct cli_verb *verb, int argc, char **argv, void *request);

/* Returns whether an argument is an option whose value is the next argument. */
bool options_take_value(const struct cli_verb *verb, const char *argument);

/* Prints the help of the rows that a verb takes (NULL: of all), which begins in a column. */
void options_print_rows(FILE *out, const struct cli_option *rows, const struct cli_verb *verb,
                        int column);

/* Returns the field of the request that the number of a row is the offset of. */
void *options_field(const struct given_option *given);

/* Functions for rows: set a bool, set an int32_t to 1, and store a text, a number of threads (long long), or a size such
 * as 256MB, 5GB, 1GiB or 1000 (int64_t). A small number without a unit is refused: more is meant. */
cli_take_option options_set_flag, options_set_one, options_set_text, options_set_threads,
    options_set_size;

/* ---- ranks.c: one command, many processes ---- */

const rsd_transport *ranks_transport(void); /* NULL: one process */
void ranks_start(const rsd_transport *transport);
void ranks_end(void);

/* Collective. Returns the code of the first rank that fails, else that of this rank. */
int ranks_agree(const char *verb, int code);

/* Returns the exit code. A rank that ends before the first ranks_agree takes part in it here. */
int ranks_exit(int code);

/* Keeps an error of a rank that does not print, until ranks_agree. */
void ranks_keep_error(const char *verb, const char *text);

/* Record and return whether a rank was lost, so that no further communication is possible. */
void ranks_note_lost(rsd_status status);
bool ranks_have_lost(void);

/* ---- input.c: checkpoints that are read ---- */

/* The options of all verbs that read a checkpoint. */
extern const struct cli_option input_option_rows[];

/* Returns whether links may lead out of a checkpoint. */
bool input_follows_links(void);

/* Returns the text of --heads, for rules; NULL: it was not given. Without this call it needs --names. */
const char *input_use_heads(void);

/* Opens a checkpoint, and prints the notes about it unless `quiet`. Returns EXIT_YES or an exit code. */
int input_open(const char *verb, const char *path, bool quiet, rsd_checkpoint **checkpoint);

/* Checks before the work starts that files exist: all, or those with an extent for which needs(context, ...)
 * returns true. Returns EXIT_YES or an exit code. */
typedef bool input_needs(const void *context, const rsd_tensor_info *tensor,
                         const rsd_extent *extent);
int input_check_files(const char *verb, const char *path, const rsd_checkpoint *checkpoint,
                      input_needs *needs, const void *context);

/* Return a tensor of a checkpoint, and a stored box of one. The numbers must be valid. */
rsd_tensor_info input_tensor(const rsd_checkpoint *checkpoint, int64_t index);
rsd_extent input_extent(const rsd_checkpoint *checkpoint, int64_t tensor, int64_t box);

/* ---- urls.c: paths that are URLs ---- */

bool urls_is_url(const char *path);
bool urls_is_listed(const char *path); /* a URL whose files can be listed */
bool urls_is_root(const char *path);   /* a URL that is a bucket or a host */

/* The options that all verbs have for URLs. */
extern const struct cli_option urls_options[];

/* If one of two paths is a URL, half of the memory is for data in transit. Returns the other half. */
int64_t urls_limit_memory(const char *one, const char *other, int64_t max_nbytes);

/* The storage for a path; NULL: it is a local one, and no other was a URL. */
rsd_status urls_open_storage(const char *path, rsd_storage **storage);

/* Whether something went over the network, and what. */
bool urls_have_traffic(rsd_traffic *traffic);
void urls_end(void);

/* ---- name_filter.c: --only and --rename ---- */

/* The tensors that --only selects, and their new names. Starts as {0}, which selects all. */
struct name_filter {
    rsd_rules *rules; /* NULL: neither option was passed */
    const char *text; /* of the last --only; NULL: none */
};

/* Functions for rows of options: add a rule to the filter that their number is the offset of. */
cli_take_option name_filter_add_only, name_filter_add_rename;
bool name_filter_selects(const struct name_filter *filter, const char *name);

/* Writes the numbers of the selected tensors to `tensors`, which may be NULL, and returns how many they are. */
int64_t name_filter_list(const struct name_filter *filter, const rsd_checkpoint *checkpoint,
                         int64_t *tensors);

/* Says that nothing is selected. Returns the exit code. */
int name_filter_fail(const struct name_filter *filter, const char *verb);
void name_filter_drop(struct name_filter *filter);

/* ---- out_file.c: files that are written ---- */

struct out_file {
    FILE *stream;
    int directory_fd;
    char *name, *staged; /* in the directory: its last name, and its name until it is complete */
    bool replace;
};

/* Returns the free space of the file system that a path is or will be on. */
int64_t out_file_space(const char *path);

/* Opens a file for writing. Returns false and sets errno on failure; out_file_close is called in any case. */
bool out_file_open(struct out_file *file, const char *path, bool replace);
/* The same in a directory, whose descriptor is closed with the file. -1: it could not be opened, and errno says why. */
bool out_file_open_in(struct out_file *file, int directory_fd, const char *name, bool replace);

/* Returns the text of errno after a failure of these functions. */
const char *out_file_error(void);

/* Opens a directory, which may not be a link. Returns -1 and sets errno on failure. */
int out_file_open_directory(const char *path);

/* Closes the file: puts it at its path if it is complete, else removes it. Returns false and sets errno if it is
 * not at its path. */
bool out_file_close(struct out_file *file, bool complete);

/* ---- slice.c ---- */

/* A slice of a tensor. */
struct tensor_slice {
    const char *name; /* of the checkpoint */
    rsd_dtype dtype;  /* of the result */
    rsd_box box;
    int32_t ndim; /* of the result, which lacks the dims of which one index is selected */
    int64_t shape[RSD_MAX_DIMS];
};

/* Parses a slice of a tensor. Returns NULL, or what is wrong with the text. */
const char *slice_parse(const char *text, const rsd_tensor_info *tensor,
                        struct tensor_slice *slice);

/* ---- npz.c: files of NumPy ---- */

enum { NPY_HEADER_NBYTES = RSD_MAX_DIMS * 22 + 256 };

struct npy_array {
    rsd_dtype dtype; /* one that npy_dtype has */
    int32_t ndim;
    int64_t shape[RSD_MAX_DIMS];
    void *bytes; /* dense and row-major */
    size_t nbytes;
};

const char *npy_dtype(rsd_dtype dtype); /* NULL: NumPy does not have it */
bool npy_write(FILE *out, const struct npy_array *array);

/* An archive that is being written. Starts as {0}. */
struct npz {
    struct npz_member {
        char *name;
        uint64_t offset, nbytes;
        uint32_t crc;
    } * members;
    size_t n;
    uint64_t nbytes; /* of what was written */
};
bool npz_add(struct npz *npz, FILE *out, const char *name, const struct npy_array *array);
void npz_finish(struct npz *npz, FILE *out); /* errors are those of the stream */
void npz_drop(struct npz *npz);

/* ---- cli_text.c: numbers and texts ---- */

/* Parses an integer in [least, most]. */
bool cli_parse_number(const char *text, long long least, long long most, long long *value);

/* Each of these three returns a text that is valid until the fourth call after it. */
const char *cli_size_text(int64_t nbytes);                                        /* "1.93 GB" */
const char *cli_tensor_text(rsd_dtype dtype, int32_t ndim, const int64_t *shape); /* "f32[4,8]" */
const char *cli_plain_text(const char *text); /* without control characters and invalid UTF-8 */

/* Returns whether a text ends in a suffix and is longer than it. */
bool cli_has_suffix(const char *text, const char *suffix);

/* Returns the directory that a path is in. */
char *cli_parent_path(const char *path);

/* Prints a plain text, and blanks up to a width in characters. */
void cli_print_padded(FILE *out, const char *text, int width);
int cli_text_width(const char *text); /* of a plain text, in characters */

/* The first names of a list, for one message about all of them: "a, b, c, ...". Starts as {0}. */
struct name_sample {
    int64_t n;   /* names in all */
    char *names; /* NULL: none */
};
void name_sample_add(struct name_sample *sample, const char *name);

void cli_print_json_string(FILE *out, const char *text); /* with its quotes */
void cli_print_json(FILE *out,
                    const char *json); /* of one line; escapes what is hidden in its strings */
void cli_print_json_list(FILE *out, int32_t n, const int64_t *values);

/* One thread per core, at most 16: more do not make a disk faster. */
long long cli_default_threads(void);

/* Ends the process if memory is NULL. */
void *cli_need_memory(void *memory);

/* Return a text that exists until the command ends, which calls cli_free_texts. Any thread. */
char *cli_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
char *cli_box_text(const rsd_box *box); /* "[0:4, 8:16]" */
void cli_free_texts(void);

/* ---- progress.c ---- */

/* The time of a clock that is never set back. */
double cli_seconds(void);

struct progress_line {
    const char *label;
    bool shown; /* standard error is a terminal, and --quiet was not passed */
    double started, printed;
    int width; /* of the line on the terminal now */
};

/* Starts to catch SIGINT and SIGTERM. */
void progress_start(struct progress_line *progress, const char *label, bool quiet);
int progress_report(void *progress, const rsd_progress *done); /* an rsd_on_progress */
void progress_end(struct progress_line *progress);

/* ---- draw.c: pictures in the terminal ---- */

/* The files that are shown, in the order of the numbers in their names. */
struct file_list {
    const rsd_checkpoint *checkpoint;
    struct listed_file {
        const char *name;
        int64_t file, nbytes, nboxes;
    } * list;
    size_t n;
    int64_t *position; /* in the list, by file */
    int64_t nbytes;    /* of all files */
};

/* Lists the files that have boxes of one tensor, or of all (-1). */
void draw_list_files(struct file_list *files, const rsd_checkpoint *checkpoint, int64_t tensor);
void draw_drop_files(struct file_list *files);

/* The file of each box of a stored tensor, in two of its dims. */
void draw_boxes(FILE *out, const rsd_checkpoint *checkpoint, int64_t tensor);

/* Chooses the two dims of a stored tensor that a picture shows; -1: the tensor has fewer. */
void draw_choose_dims(const rsd_checkpoint *checkpoint, int64_t tensor, int32_t *down,
                      int32_t *across);

/* The bytes from ranks or files to ranks, as a matrix: rows send, columns receive. If there are too many, a row
 * or column stands for a group. */
struct traffic {
    int64_t nsenders, row_group, nrows;
    int64_t nreceivers, column_group, ncolumns;
    double *moved, *kept;              /* by row and column; bytes that stay on a rank are kept */
    double most;                       /* the most that one square moves */
    const struct file_list *row_files; /* NULL: rows are ranks */
};

/* Allocates a matrix for at most so many rows and columns. */
void draw_open_traffic(struct traffic *traffic, int64_t nsenders, int64_t nreceivers,
                       int64_t most_rows);
void draw_add_traffic(struct traffic *traffic, int64_t from, int64_t to, double nbytes, bool kept);
rsd_status draw_count_traffic(const rsd_plan *plan, int64_t most_rows, struct traffic *traffic);
void draw_free_traffic(struct traffic *traffic);
rsd_status draw_traffic(FILE *out, const rsd_plan *plan);

/* ---- conversion.c: convert, merge, split and plan of a checkpoint ---- */

/* The files that a picture is written to; NULL: none. */
struct page_paths {
    const char *svg, *html;
};

enum conversion_kind { CONVERT, MERGE, SPLIT, PLAN };

struct conversion {
    enum conversion_kind kind;
    const char *verb;
    const char *in, *out;
    rsd_rules *rules;
    bool has_mesh, has_preset;
    const char *needs_mesh; /* the name of an option that needs --mesh; NULL: none */
    rsd_convert_options convert;
    rsd_io io;      /* of convert and of --verify */
    rsd_dtype cast; /* 0: none */
    const char *config_from;
    struct page_paths pages; /* PLAN */
    bool ranks;              /* PLAN: what each rank holds and reads */
    bool estimate;           /* PLAN and --dry-run: measure, and estimate the time */
    bool all, json, quiet, verify;
    long long threads;
    int64_t nverified;
    rsd_checkpoint *input;
    int verify_code; /* of a verification that failed; 0: none did */
    char **side_files;
    size_t nside_files;
};

int conversion_run(struct conversion *conversion); /* returns the exit code */

/* ---- rank_loads.c ---- */

/* What the ranks of a target layout hold, and read of the files of a checkpoint. Starts as {0}. */
struct rank_loads {
    int64_t nranks;
    struct rank_load {
        int64_t ntensors, nmemory, nread, nfiles;
    } * list;
    unsigned char *marks; /* one bit per rank and file: the rank reads the file */
    struct file_list files;
    struct traffic traffic;
};

/* Returns EXIT_YES or an exit code. rank_loads_draw writes the pictures that were requested. */
int rank_loads_count(struct rank_loads *loads, const struct conversion *request,
                     const rsd_checkpoint *in);
void rank_loads_draw(const struct rank_loads *loads, const struct conversion *request);
void rank_loads_print(const struct rank_loads *loads, bool json);
void rank_loads_drop(struct rank_loads *loads);

/* ---- report.c ---- */

/* Notes on standard error which tensors and values the output does not have, and which were not cast. */
void report_notes(const struct conversion *request, const rsd_checkpoint *in);

/* Prints the report as text or JSON, unless --quiet was passed. Returns EXIT_YES or an exit code. */
int report_print(const struct conversion *request, const rsd_checkpoint *in,
                 const rsd_report *report, const struct rank_loads *loads);

/* After a dry run: EXIT_CANNOT if the output is known to need more space than there is. */
int report_check_space(const struct conversion *request, const rsd_report *report);

/* ---- estimate.c ---- */

/* Measures the source and the target for about a second, and prints how long a run would take. */
int estimate_print(const struct conversion *request, const rsd_checkpoint *in,
                   const rsd_report *report);

/* ---- side_files.c ---- */

/* Finds the configs and tokenizers that are copied along. Returns GO_ON or an exit code. */
int side_files_find(struct conversion *request, const rsd_checkpoint *in);

/* Returns the path of the config.json of the model, or its text if that is a URL; NULL: none is found. */
char *side_files_find_config(const struct conversion *request);

/* Notes what transformers will miss in the output of merge. */
void side_files_note_missing(const struct conversion *request);

/* Copies those in subdirectories of --config-from, when the output is in its place. Returns the exit code. */
int side_files_copy_below(const struct conversion *request);

/* ---- one file per command ---- */

int command_plan(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_convert(int argc, char **argv);
int command_merge(int argc, char **argv);
int command_split(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_diff(int argc, char **argv);
int command_digest(int argc, char **argv);
int command_extract(int argc, char **argv);
int command_names(int argc, char **argv);
int command_uploads(int argc, char **argv);

/* Both uses of plan: of a PROBLEM, and of a checkpoint. */
extern const struct cli_verb plan_of_problem, plan_of_checkpoint;
int command_plan_checkpoint(int argc, char **argv);

/* ---- page_traffic.c, page_boxes.c: pictures as files ---- */

/* Each ends the process if it cannot write a file. */
rsd_status page_write_traffic(const struct page_paths *paths, const rsd_plan *plan);

/* What ranks read of the files of a checkpoint. */
void page_write_reads(const struct page_paths *paths, const struct traffic *traffic,
                      const char *checkpoint, const char *totals);

/* The file of each box of a tensor, and what each file contains. */
void page_write_boxes(const struct page_paths *paths, const char *checkpoint_path,
                      const rsd_checkpoint *checkpoint, int64_t tensor);
void page_write_checkpoint(const struct page_paths *paths, const char *checkpoint_path,
                           const rsd_checkpoint *checkpoint);

#endif
