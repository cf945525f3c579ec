/* ranks.c - one command in many processes: rank 0 prints, the other ranks are silent.
 *
 * The output of the other ranks is discarded, since rank 0 prints the same. An error that only one rank has
 * is kept, and that rank prints it when all ranks compare their exit codes.
 */
#include "cli.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const rsd_transport *transport; /* NULL: one process */
    FILE *error_stream;             /* the real standard error of a silent rank */
    char *error;                    /* the first error that was not printed */
    bool compared;                  /* the ranks have compared exit codes at least once */
    bool lost;
} ranks;

const rsd_transport *ranks_transport(void)
{
    return ranks.transport;
}

static bool is_silent_rank(void)
{
    return ranks.transport && ranks.transport->rank > 0;
}

/* Starts a command with one rank or many. Ranks other than 0 print to /dev/null, and keep their standard error for
 * an error that only they have. */
void ranks_start(const rsd_transport *transport)
{
    ranks.transport = transport && transport->nranks > 1 ? transport : NULL;
    if (!is_silent_rank())
        return;
    int error_fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    ranks.error_stream = error_fd < 0 ? NULL : fdopen(error_fd, "w");
    int null_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (null_fd < 0)
        return;
    dup2(null_fd, STDOUT_FILENO);
    dup2(null_fd, STDERR_FILENO);
    close(null_fd);
}

void ranks_end(void)
{
    if (ranks.error_stream)
        fclose(ranks.error_stream);
    ranks.error_stream = NULL;
    ranks.error = NULL;
    ranks.transport = NULL;
    ranks.compared = false;
}

void ranks_keep_error(const char *verb, const char *text)
{
    if (is_silent_rank() && !ranks.error)
        ranks.error = cli_text("reshard%s%s: rank %d: %s", verb ? " " : "", verb ? verb : "",
                               (int)ranks.transport->rank, text);
}

void ranks_note_lost(rsd_status status)
{
    ranks.lost = ranks.lost || status == RSD_EPEER || status == RSD_ETIMEOUT;
}

bool ranks_have_lost(void)
{
    return ranks.lost;
}

/* The exit code of a rank so far, and whether the rank has ended. */
struct rank_code {
    int32_t code, ended;
};

/* Returns the first rank that fails; -1: none. */
static int32_t find_failed_rank(const struct rank_code *codes, int32_t nranks)
{
    for (int32_t i = 0; i < nranks; i++)
        if (codes[i].code > EXIT_YES)
            return i;
    return -1;
}

/* Returns the first rank that has ended while this one has not, or the reverse; -1: none. */
static int32_t find_other_command(const struct rank_code *codes, int32_t nranks, int32_t ended)
{
    for (int32_t i = 0; i < nranks; i++)
        if (codes[i].ended != ended)
            return i;
    return -1;
}

/* Compares the exit codes of all ranks, and returns one for all. `ended`: this rank has done its command. */
static int compare_codes(const char *verb, int code, bool ended)
{
    const rsd_transport *t = ranks.transport;
    if (!t)
        return code;
    struct rank_code own = {code, ended};
    struct rank_code *codes = cli_need_memory(calloc((size_t)t->nranks, sizeof *codes));
    ranks.compared = true;
    rsd_status status = rsd_gather(t, &own, sizeof own, codes, 0);
    int32_t failed = status ? -1 : find_failed_rank(codes, t->nranks);
    int32_t other = status ? -1 : find_other_command(codes, t->nranks, own.ended);
    if (status)
        code = cli_fail_status(verb, status);
    else if (failed >= 0)
        code = codes[failed].code;
    else if (other >= 0)
        code = cli_fail(verb, EXIT_USAGE, "rank %d was started with a different command line",
                        (int)other);
    if (failed == t->rank && ranks.error_stream && ranks.error)
        fprintf(ranks.error_stream, "%s\n", ranks.error);
    free(codes);
    return code;
}

int ranks_agree(const char *verb, int code)
{
    return compare_codes(verb, code, false);
}

int ranks_exit(int code)
{
    return ranks.compared ? code : compare_codes(NULL, code, true);
}
