/* main.c - the entry point of the command in one process. */
#include "cli.h"

#include <fcntl.h>
#include <unistd.h>

/* Opens /dev/null for each standard stream that is closed. Otherwise the next file that is opened would take
 * its descriptor, and messages would be written into that file. */
static void open_standard_streams(void)
{
    for (int fd = open("/dev/null", O_RDONLY); fd >= 0; fd = open("/dev/null", O_RDONLY))
        if (fd > STDERR_FILENO) {
            close(fd);
            return;
        }
}

int main(int argc, char **argv)
{
    open_standard_streams();
    return command_main(argc, argv, NULL);
}
