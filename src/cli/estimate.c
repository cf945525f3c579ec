/* estimate.c - how long a conversion would take, from a short measurement of the source and of the target.
 *
 * Some megabytes of the largest file are read, past the page cache where the system allows it, and as many are
 * written beside the target and removed. A run reads and writes at the same time, unless both are on one device.
 */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK_NBYTES = 1 << 20 };
static const double most_seconds = 0.5;
static const int64_t most_nbytes = 256000000;

/* Returns the largest file of a checkpoint. */
static const char *find_largest_file(const char *path, const rsd_checkpoint *in)
{
    struct stat about;
    const char *largest = path;
    int64_t most = -1;
    bool directory = stat(path, &about) == 0 && S_ISDIR(about.st_mode);
    for (int64_t i = 0; directory && i < rsd_checkpoint_nfiles(in); i++) {
        const char *file = cli_text("%s/%s", path, rsd_checkpoint_file(in, i));
        if (stat(file, &about) == 0 && about.st_size > most) {
            largest = file;
            most = about.st_size;
        }
    }
    return largest;
}

/* Reads or writes blocks until the time or the bytes are used up. Returns bytes per second; 0: on failure, with
 * errno set. */
static double move_blocks(int fd, bool write_them, int64_t limit)
{
    char *block = cli_need_memory(calloc(1, BLOCK_NBYTES));
    double started = cli_seconds(), seconds = 0;
    int64_t done = 0;
    ssize_t n = 1;
    errno = 0;
    while (done < limit && seconds < most_seconds && n > 0) {
        n = write_them ? write(fd, block, BLOCK_NBYTES) : read(fd, block, BLOCK_NBYTES);
        done += n > 0 ? n : 0;
        seconds = cli_seconds() - started;
    }
    bool failed = n < 0 || (write_them && fsync(fd) != 0);
    seconds = cli_seconds() - started;
    free(block);
    return failed || done == 0 ? 0 : (double)done / (seconds > 1e-6 ? seconds : 1e-6);
}

static double measure_reading(const char *file)
{
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    double rate = move_blocks(fd, false, most_nbytes);
    close(fd);
    return rate;
}

/* Returns the bytes per second that a directory takes, or 0 with errno set. */
static double measure_writing(const char *directory)
{
    char *path = cli_text("%s/reshard-estimate.%ld", directory, (long)getpid());
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    double rate = fd < 0 ? 0 : move_blocks(fd, true, most_nbytes / 4);
    int error = errno;
    if (fd >= 0) {
        unlink(path);
        close(fd);
    }
    errno = error;
    return rate;
}

int estimate_print(const struct conversion *request, const rsd_checkpoint *in,
                   const rsd_report *report)
{
    struct stat source, target;
    if (urls_is_url(request->in) || urls_is_url(request->out))
        return cli_fail(request->verb, EXIT_CANNOT, "--estimate measures local paths only");
    const char *file = find_largest_file(request->in, in);
    char *directory = cli_parent_path(request->out);
    double reading = measure_reading(file), writing = 0;
    int code = EXIT_YES;
    if (reading <= 0)
        code = cli_fail(request->verb, EXIT_IO, "--estimate: %s: %s", file,
                        errno ? strerror(errno) : "the file is empty");
    if (!code)
        writing = measure_writing(directory);
    if (!code && writing <= 0)
        code = cli_fail(request->verb, EXIT_IO, "--estimate: %s: %s", directory, strerror(errno));
    if (!code) {
        double in_seconds = (double)report->nbytes_read / reading;
        double out_seconds = (double)report->nbytes_written / writing;
        bool same = stat(file, &source) == 0 && stat(directory, &target) == 0 &&
                    source.st_dev == target.st_dev;
        double seconds = same                       ? in_seconds + out_seconds
                         : in_seconds > out_seconds ? in_seconds
                                                    : out_seconds;
        if (request->json)
            printf(", \"estimate\": {\"seconds\": %.1f, \"read_rate\": %.0f, \"write_rate\": %.0f}",
                   seconds, reading, writing);
        else
            printf("%-8s %s %.0f s: %s is read at %s/s, and %s written at %s/s\n", "estimate",
                   seconds < 1 ? "less than" : "about", seconds < 1 ? 1 : seconds,
                   cli_plain_text(request->in), cli_size_text((int64_t)reading),
                   strcmp(directory, ".") == 0 ? "this directory" : cli_plain_text(directory),
                   cli_size_text((int64_t)writing));
    }
    return code;
}
