/* main.c - where the command of one process begins. */
#include "cli.h"

#include <fcntl.h>
#include <unistd.h>

/* A standard stream that is closed would give its number to the next file that is opened, and what is
 * said on it would go into that file. */
static void hold_standard_streams(void)
{
    for (int fd = open("/dev/null", O_RDONLY); fd >= 0; fd = open("/dev/null", O_RDONLY))
        if (fd > STDERR_FILENO) {
            close(fd);
            return;
        }
}

int main(int argc, char **argv)
{
    hold_standard_streams();
    return command_main(argc, argv, NULL);
}
