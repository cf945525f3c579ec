/* replay.c - runs a fuzz target over the files of directories, without a fuzzer. Reports as TAP. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return;
    size_t capacity = 1 << 20;
    uint8_t *data = malloc(capacity);
    size_t n = data ? fread(data, 1, capacity, file) : 0;
    fclose(file);
    uint8_t *exact =
        malloc(n ? n : 1); /* so that the address sanitizer detects a read beyond the end */
    for (size_t i = 0; exact && i < n; i++)
        exact[i] = data[i];
    if (exact)
        LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    free(data);
}

static int run_directory(const char *path)
{
    int nfiles = 0;
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char name[1024];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        run_file(name);
        nfiles++;
    }
    if (directory)
        closedir(directory);
    return nfiles;
}

/* The program is called replay_NAME, its corpus fuzz/corpus/NAME. Arguments name other directories. */
int main(int argc, char **argv)
{
    int nfiles = 0;
    char corpus[512];
    const char *name = argc > 0 ? strstr(argv[0], "replay_") : NULL;
    snprintf(corpus, sizeof corpus, "fuzz/corpus/%s", name ? name + strlen("replay_") : "");
    for (int i = 1; i < argc; i++)
        nfiles += run_directory(argv[i]);
    if (argc < 2)
        nfiles = run_directory(corpus);
    printf("1..1\n%sok 1 - %d files of %s\n", nfiles ? "" : "not ", nfiles, corpus);
    return nfiles ? 0 : 1;
}
