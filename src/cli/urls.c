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

static int set_url_text(const struct given_option *given)
{
    memcpy((char *)&urls.options + given->number, &given->value, sizeof given->value);
    return GO_ON;
}

static int set_anonymous(const struct given_option *given)
{
    (void)given;
    urls.options.anonymous = 1;
    return GO_ON;
}

/* They have the names of the aws command. */
const struct cli_option urls_options[] = {
    OPTION("endpoint-url", "URL", "The S3 service. Default: AWS_ENDPOINT_URL, or Amazon's",
           set_url_text, offsetof(rsd_storage_options, endpoint), 0),
    OPTION("region", "REGION", "Default: AWS_REGION, or that of the profile", set_url_text,
           offsetof(rsd_storage_options, region), 0),
    OPTION("profile", "PROFILE", "Of the shared credentials file. Default: AWS_PROFILE",
           set_url_text, offsetof(rsd_storage_options, profile), 0),
    OPTION("ca-bundle", "FILE", "Trust the certificates in FILE. Default: AWS_CA_BUNDLE",
           set_url_text, offsetof(rsd_storage_options, ca_file), 0),
    OPTION("no-sign-request", NULL, "Read without credentials", set_anonymous, 0, 0),
    {0},
};

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
