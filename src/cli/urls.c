/* urls.c - paths that are URLs: the options and variables that their storage is made of. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One storage serves all paths of a command. It is made when the first URL is opened. */
static struct {
    rsd_storage_options options;
    rsd_storage *storage;
} urls;

/* The options of all verbs, with the names of the aws command. */
static const struct url_option {
    const char *name;
    size_t field; /* a text in rsd_storage_options */
    bool is_flag;
} url_options[] = {{"--endpoint-url", offsetof(rsd_storage_options, endpoint), false},
                   {"--region", offsetof(rsd_storage_options, region), false},
                   {"--profile", offsetof(rsd_storage_options, profile), false},
                   {"--ca-bundle", offsetof(rsd_storage_options, ca_file), false},
                   {"--no-sign-request", 0, true}};

enum { NOPTIONS = sizeof url_options / sizeof *url_options };

const char *urls_option_name(size_t index)
{
    return index < NOPTIONS ? url_options[index].name : NULL;
}

bool urls_is_url(const char *path)
{
    return strncmp(path, "s3://", 5) == 0 || strncmp(path, "https://", 8) == 0 ||
           strncmp(path, "http://", 7) == 0;
}

bool urls_is_listed(const char *path)
{
    return strncmp(path, "s3://", 5) == 0;
}

bool urls_is_root(const char *path)
{
    const char *host = urls_is_url(path) ? strstr(path, "://") + 3 : NULL;
    const char *slash = host ? strchr(host, '/') : NULL;
    return host && (!slash || !slash[1]);
}

/* Takes an option for URLs. Returns how many arguments it takes, itself included: 0 if it is another one, -1 after a
 * message. */
static int take_url_option(const char *verb, char **argv, int left)
{
    for (const struct url_option *option = url_options; option < url_options + NOPTIONS; option++) {
        size_t n = strlen(option->name);
        if (strncmp(argv[0], option->name, n) != 0 || (argv[0][n] && argv[0][n] != '='))
            continue;
        bool joined = argv[0][n] == '=';
        bool missing = !option->is_flag && !joined && left < 2;
        if (missing || (option->is_flag && joined)) {
            cli_fail(verb, EXIT_USAGE, "option %s %s", option->name,
                     missing ? "needs a value" : "takes no value");
            return -1;
        }
        const char *value = joined ? argv[0] + n + 1 : argv[1];
        if (option->is_flag)
            urls.options.anonymous = 1;
        else
            memcpy((char *)&urls.options + option->field, &value, sizeof value);
        return option->is_flag || joined ? 1 : 2;
    }
    return 0;
}

int urls_take_options(const char *verb, int *argc, char **argv)
{
    int kept = 1;
    bool rest = false; /* behind --, nothing is an option */
    for (int i = 1; i < *argc;) {
        rest = rest || strcmp(argv[i], "--") == 0;
        int n = rest ? 0 : take_url_option(verb, argv + i, *argc - i);
        if (n < 0)
            return EXIT_USAGE;
        if (n == 0)
            argv[kept++] = argv[i++];
        i += n;
    }
    *argc = kept;
    argv[kept] = NULL;
    return GO_ON;
}

int64_t urls_limit_memory(const char *one, const char *other, int64_t max_nbytes)
{
    if (!urls_is_url(one) && !urls_is_url(other))
        return max_nbytes;
    int64_t half = (max_nbytes > 0 ? max_nbytes : (int64_t)256 << 20) / 2;
    urls.options.max_nbytes = half;
    return half;
}

rsd_status urls_open_storage(const char *path, rsd_storage **storage)
{
    *storage = urls.storage;
    if (!urls_is_url(path) || urls.storage)
        return RSD_OK;
    urls.options.struct_nbytes = sizeof urls.options;
    urls.options.environment = (const char *const *)environ;
    rsd_status status = rsd_storage_new(&urls.options, &urls.storage);
    *storage = urls.storage;
    return status;
}

bool urls_have_traffic(rsd_traffic *traffic)
{
    *traffic = (rsd_traffic){.struct_nbytes = sizeof *traffic};
    return urls.storage && rsd_storage_traffic(urls.storage, traffic) == RSD_OK &&
           traffic->nrequests > 0;
}

void urls_end(void)
{
    rsd_storage_free(urls.storage);
    urls.storage = NULL;
}
