/* progress.c - the progress line on a terminal, and interrupts.
 *
 * The line is printed to standard error, only if that is a terminal. The first interrupt is noted and stops
 * the work at its next report of progress. The second one ends the process at once. So does the first one before any
 * report: to plan a large conversion takes minutes, and nothing is complete then that could be kept. Ranks end together:
 * mpirun interrupts those that are left when one has failed, and the error is printed by then.
 */
#include "cli.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t interrupted, ends_at_once;

static void note_interrupt(int signal_number)
{
    static const char text[] = "reshard: interrupted\n";
    interrupted = 1;
    signal(signal_number, SIG_DFL);
    if (ends_at_once)
        _exit(write(STDERR_FILENO, text, sizeof text - 1) < 0 ? EXIT_IO : EXIT_INTERRUPTED);
}

double cli_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_start(struct progress_line *progress, const char *label, bool quiet)
{
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    ends_at_once = ranks_transport() == NULL;
    *progress = (struct progress_line){
        .label = label, .shown = !quiet && isatty(STDERR_FILENO), .started = cli_seconds()};
}

static int terminal_width(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

static void print_progress(struct progress_line *progress, const rsd_progress *done, double now)
{
    char line[256], left[32] = "";
    double seconds = now - progress->started;
    double rate = seconds > 0 ? (double)done->nbytes_done / seconds : 0;
    double fraction =
        done->nbytes_total ? (double)done->nbytes_done / (double)done->nbytes_total : 1;
    if (rate > 0 && seconds > 0.5) {
        long rest = (long)((double)(done->nbytes_total - done->nbytes_done) / rate + 0.5);
        snprintf(left, sizeof left, "  %ld:%02ld left", rest / 60, rest % 60);
    }
    int n = snprintf(line, sizeof line, "%s  %3.0f%%  %s of %s  %s/s%s", progress->label,
                     100 * fraction, cli_size_text(done->nbytes_done),
                     cli_size_text(done->nbytes_total), cli_size_text((int64_t)rate), left);
    int most = terminal_width() - 1;
    n = n < most ? n : most;
    if (progress->width > most)
        progress->width = most; /* The terminal became narrower: more blanks would wrap. */
    fprintf(stderr, "\r%.*s%*s", n, line, progress->width > n ? progress->width - n : 0, "");
    fflush(stderr);
    progress->width = n;
}

int progress_report(void *context, const rsd_progress *done)
{
    struct progress_line *progress = context;
    double now = cli_seconds();
    ends_at_once = 0;
    if (progress->shown && now - progress->printed >= 0.1) {
        progress->printed = now;
        print_progress(progress, done, now);
    }
    return interrupted;
}

void progress_end(struct progress_line *progress)
{
    int most = terminal_width() - 1;
    if (progress->shown && progress->width)
        fprintf(stderr, "\r%*s\r", progress->width < most ? progress->width : most, "");
    progress->width = 0;
}
