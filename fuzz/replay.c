/* replay.c - runs a fuzz target over the files of its corpus, without a fuzzer. Reports as TAP. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* The program is called replay_NAME, its corpus fuzz/corpus/NAME. */
int main(int argc, char **argv)
{
    int nfiles = 0;
    char corpus[512];
    const char *name = argc > 0 ? strstr(argv[0], "replay_") : NULL;
    snprintf(corpus, sizeof corpus, "fuzz/corpus/%s", name ? name + strlen("replay_") : "");
    DIR *folder = opendir(corpus);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[1024];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", corpus, entry->d_name);
        FILE *file = fopen(path, "rb");
        if (!file)
            continue;
        size_t room = 1 << 20;
        uint8_t *data = malloc(room);
        size_t n = data ? fread(data, 1, room, file) : 0;
        fclose(file);
        uint8_t *exact =
            malloc(n ? n : 1); /* so that the address sanitizer detects a read beyond the end */
        for (size_t i = 0; exact && i < n; i++)
            exact[i] = data[i];
        if (exact)
            LLVMFuzzerTestOneInput(exact, n);
        free(exact);
        free(data);
        nfiles++;
    }
    if (folder)
        closedir(folder);
    printf("1..1\n%sok 1 - %d files of %s\n", nfiles ? "" : "not ", nfiles, corpus);
    return nfiles ? 0 : 1;
}
