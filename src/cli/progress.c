/* progress.c - one line on the terminal that says how far it is, and Ctrl-C.
 *
 * The line is on standard error, and only if that is a terminal. An interrupt is noted and seen at the next
 * call, so that the library can stop in order; a second one ends the program at once.
 */
#include "cli.h"

#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t interrupted;

static void note_interrupt(int signal_number)
{
    interrupted = 1;
    signal(signal_number, SIG_DFL);
}

bool was_interrupted(void)
{
    return interrupted;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void progress_start(struct progress *progress, const char *doing, bool quiet)
{
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    *progress = (struct progress){
        .doing = doing, .shown = !quiet && isatty(STDERR_FILENO), .began = seconds()};
}

static int terminal_width(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

static void show(struct progress *progress, const rsd_progress *how_far, double now)
{
    char line[256], left[32] = "";
    double took = now - progress->began;
    double rate = took > 0 ? (double)how_far->nbytes_done / took : 0;
    double share =
        how_far->nbytes_total ? (double)how_far->nbytes_done / (double)how_far->nbytes_total : 1;
    if (rate > 0 && took > 0.5) {
        long rest = (long)((double)(how_far->nbytes_total - how_far->nbytes_done) / rate + 0.5);
        snprintf(left, sizeof left, "  %ld:%02ld left", rest / 60, rest % 60);
    }
    int n = snprintf(line, sizeof line, "%s  %3.0f%%  %s of %s  %s/s%s", progress->doing,
                     100 * share, size_text(how_far->nbytes_done), size_text(how_far->nbytes_total),
                     size_text((int64_t)rate), left);
    int most = terminal_width() - 1;
    n = n < most ? n : most;
    if (progress->width > most)
        progress->width = most; /* the terminal has become narrower: to clear more would wrap */
    fprintf(stderr, "\r%.*s%*s", n, line, progress->width > n ? progress->width - n : 0, "");
    fflush(stderr);
    progress->width = n;
}

int progress_tell(void *context, const rsd_progress *how_far)
{
    struct progress *progress = context;
    double now = seconds();
    if (progress->shown && now - progress->said >= 0.1) {
        progress->said = now;
        show(progress, how_far, now);
    }
    return interrupted;
}

void progress_end(struct progress *progress)
{
    int most = terminal_width() - 1;
    if (progress->shown && progress->width)
        fprintf(stderr, "\r%*s\r", progress->width < most ? progress->width : most, "");
    progress->width = 0;
}
