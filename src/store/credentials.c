/* credentials.c - where credentials of S3 come from if the caller does not set them: variables, the shared
 * files, and the metadata services of containers and instances.
 */
#include "remote.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 1 << 20, MAX_METADATA = 1 << 16 };

/* ---- variables ---- */

static const char *find_variable(const char *const *environment, const char *name)
{
    size_t n = strlen(name);
    for (size_t i = 0; environment[i]; i++)
        if (strncmp(environment[i], name, n) == 0 && environment[i][n] == '=')
            return environment[i][n + 1] ? environment[i] + n + 1 : NULL;
    return NULL;
}

static const char *first_variable(const char *const *environment, const char *one,
                                  const char *other)
{
    const char *found = find_variable(environment, one);
    return found ? found : find_variable(environment, other);
}

/* Sets an option that is not set yet. */
static rsd_status fill_option(char **option, const char *value)
{
    return *option || !value || !*value
               ? RSD_OK
               : storage_set_option("a credential or setting", value, option);
}

/* ---- shared files ---- */

/* Reads a small file, with a zero behind it. ENOENT: it does not exist. */
static rsd_status load_text_file(const char *path, char **text)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return fail(errno == ENOENT || errno == ENOTDIR ? RSD_ENOENT : RSD_EIO, "%s: %s", path,
                    strerror(errno));
    char *bytes = mem_new(MAX_FILE + 1, 1);
    size_t n = 0;
    ssize_t some = 1;
    while (bytes && n < MAX_FILE && some > 0) {
        some = read(fd, bytes + n, MAX_FILE - n);
        n += some > 0 ? (size_t)some : 0;
    }
    int error = errno;
    close(fd);
    if (!bytes)
        return RSD_ENOMEM;
    if (some < 0 || n == MAX_FILE) {
        mem_free(bytes);
        return some < 0 ? fail(RSD_EIO, "%s: %s", path, strerror(error))
                        : fail(RSD_ELIMIT, "%s is longer than %d bytes", path, MAX_FILE - 1);
    }
    *text = bytes;
    return RSD_OK;
}

static char *trim_line(char *line)
{
    line += strspn(line, " \t");
    size_t n = strlen(line);
    while (n > 0 && strchr(" \t\r", line[n - 1]))
        line[--n] = '\0';
    return line;
}

/* Takes one "key = value" of the profile. */
static rsd_status take_setting(rsd_storage *storage, const char *path, const char *key,
                               const char *value, bool has_keys, bool *found)
{
    static const char *const unsupported[] = {"role_arn", "credential_process", "sso_session",
                                              "sso_start_url", "web_identity_token_file"};
    if (strcmp(key, "region") == 0)
        return fill_option(&storage->region, value);
    if (strcmp(key, "endpoint_url") == 0)
        return fill_option(&storage->endpoint, value);
    if (strcmp(key, "ca_bundle") == 0)
        return fill_option(&storage->ca_file, value);
    if (has_keys)
        return RSD_OK;
    *found = *found || strcmp(key, "aws_access_key_id") == 0;
    if (strcmp(key, "aws_access_key_id") == 0)
        return fill_option(&storage->access_key, value);
    if (strcmp(key, "aws_secret_access_key") == 0)
        return fill_option(&storage->secret_key, value);
    if (strcmp(key, "aws_session_token") == 0)
        return fill_option(&storage->session_token, value);
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++)
        if (strcmp(key, unsupported[i]) == 0 && !*found)
            return fail(RSD_EUNSUPPORTED,
                        "%s: the profile has %s, which is not supported; export its credentials "
                        "as AWS_... variables",
                        path, key);
    return RSD_OK;
}

/* Takes the settings of a profile: [NAME], or [profile NAME] in the config file. */
static rsd_status read_profile(rsd_storage *storage, const char *path, const char *profile,
                               bool has_keys, bool *found)
{
    char *text, *save = NULL;
    rsd_status status = load_text_file(path, &text);
    if (status == RSD_ENOENT)
        return RSD_OK;
    TRY(status);
    bool inside = false;
    for (char *line = strtok_r(text, "\n", &save); line && !status;
         line = strtok_r(NULL, "\n", &save)) {
        bool nested =
            *line == ' ' || *line == '\t'; /* settings of one service, which are not read */
        line = trim_line(line);
        if (*line == '[') {
            char *name = line + 1;
            name[strcspn(name, "]")] = '\0';
            if (strncmp(name, "profile ", 8) == 0)
                name += 8;
            inside = strcmp(trim_line(name), profile) == 0;
            continue;
        }
        char *value = strchr(line, '=');
        if (!inside || nested || *line == '#' || *line == ';' || !value)
            continue;
        *value++ = '\0';
        status = take_setting(storage, path, trim_line(line), trim_line(value), has_keys, found);
    }
    mem_free(text);
    return status;
}

/* Reads a profile from a file in ~/.aws, or from the file that a variable names. A missing file has none. */
static rsd_status read_shared_file(rsd_storage *storage, const char *const *environment,
                                   const char *variable, const char *name, const char *profile,
                                   bool has_keys, bool *found)
{
    const char *path = find_variable(environment, variable),
               *home = find_variable(environment, "HOME");
    char joined[4096];
    if (!path && !home)
        return RSD_OK;
    if (!path) {
        int n = snprintf(joined, sizeof joined, "%s/.aws/%s", home, name);
        if (n < 0 || (size_t)n >= sizeof joined)
            return RSD_OK;
        path = joined;
    }
    return read_profile(storage, path, profile, has_keys, found);
}

/* ---- metadata services ---- */

/* Returns whether a URL ends here, or goes on with a port or a path, and with no host behind an @. */
static bool ends_host(const char *at)
{
    if (*at == ':')
        at += 1 + strspn(at + 1, "0123456789");
    return *at == '\0' || *at == '/';
}

/* A URL that may be asked for credentials: encrypted, or of this machine or its host. */
static bool is_metadata_url(const char *url)
{
    static const char *const hosts[] = {"http://127.0.0.1", "http://localhost", "http://[::1]",
                                        "http://169.254.170.2", "http://169.254.170.23"};
    if (strncmp(url, "https://", 8) == 0)
        return true;
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        size_t n = strlen(hosts[i]);
        if (strncmp(url, hosts[i], n) == 0 && ends_host(url + n))
            return true;
    }
    return false;
}

/* Finds the service that hands out credentials, of a container or of an instance. None: no source is set. */
static rsd_status find_metadata(rsd_storage *storage, const char *const *environment)
{
    const char *relative = find_variable(environment, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = find_variable(environment, "AWS_CONTAINER_CREDENTIALS_FULL_URI");
    const char *disabled = find_variable(environment, "AWS_EC2_METADATA_DISABLED");
    char url[2048];
    if (relative || full) {
        int n = snprintf(url, sizeof url, "%s%s", relative ? "http://169.254.170.2" : "",
                         relative ? relative : full);
        if (n < 0 || (size_t)n >= sizeof url || !is_metadata_url(url))
            return fail(RSD_EINVAL,
                        "AWS_CONTAINER_CREDENTIALS_%s_URI must be https, or of this machine",
                        relative ? "RELATIVE" : "FULL");
        storage->source = CREDENTIALS_CONTAINER;
        TRY(fill_option(&storage->metadata_token_file,
                        find_variable(environment, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")));
        TRY(fill_option(&storage->metadata_token,
                        find_variable(environment, "AWS_CONTAINER_AUTHORIZATION_TOKEN")));
        return fill_option(&storage->metadata_url, url);
    }
    if (disabled && strcasecmp(disabled, "true") == 0)
        return RSD_OK;
    const char *endpoint = find_variable(environment, "AWS_EC2_METADATA_SERVICE_ENDPOINT");
    storage->source = CREDENTIALS_INSTANCE;
    return fill_option(&storage->metadata_url, endpoint ? endpoint : "http://169.254.169.254");
}

struct metadata_body {
    char text[MAX_METADATA];
    size_t n;
};

static size_t take_metadata_body(char *data, size_t one, size_t n, void *context)
{
    struct metadata_body *body = context;
    (void)one;
    if (n >= sizeof body->text - body->n)
        return 0;
    memcpy(body->text + body->n, data, n);
    body->n += n;
    body->text[body->n] = '\0';
    return n;
}

/* One request to a metadata service, which is close by and quick or not there. */
static rsd_status ask_metadata(const char *method, const char *url, const char *header,
                               struct metadata_body *body)
{
    const struct curl_library *curl;
    TRY(curl_library_open(&curl));
    void *easy = curl->easy_init();
    void *list = header ? curl->slist_append(NULL, header) : NULL;
    long code = 0;
    int failed = easy == NULL || (header && !list);
    body->n = 0;
    body->text[0] = '\0';
    if (!failed) {
        curl->easy_setopt(easy, CURL_URL, url);
        curl->easy_setopt(easy, CURL_CUSTOMREQUEST, method);
        curl->easy_setopt(easy, CURL_HTTPHEADER, list);
        curl->easy_setopt(easy, CURL_PROXY, "");
        curl->easy_setopt(easy, CURL_NOSIGNAL, 1L);
        curl->easy_setopt(easy, CURL_PROTOCOLS, (long)(CURL_PROTOCOL_HTTP | CURL_PROTOCOL_HTTPS));
        curl->easy_setopt(easy, CURL_CONNECTTIMEOUT_MS, 1000L);
        curl->easy_setopt(easy, CURL_TIMEOUT_MS, 5000L);
        curl->easy_setopt(easy, CURL_WRITEFUNCTION, take_metadata_body);
        curl->easy_setopt(easy, CURL_WRITEDATA, body);
        failed = curl->easy_perform(easy);
        curl->easy_getinfo(easy, CURL_INFO_RESPONSE_CODE, &code);
    }
    curl->slist_free_all(list);
    if (easy)
        curl->easy_cleanup(easy);
    if (failed || code != 200)
        return fail(RSD_EIO,
                    "no credentials: set AWS_ACCESS_KEY_ID or a profile, or read without a "
                    "signature; %s: %s %ld",
                    url, failed ? curl->easy_strerror(failed) : "HTTP status", code);
    return RSD_OK;
}

/* The text of a key in an object of JSON; false: it is not there. */
static bool find_json_text(const char *json, const char *key, char *out, size_t out_nbytes)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    const char *at = strstr(json, quoted);
    if (!at)
        return false;
    at += strlen(quoted);
    at += strspn(at, " \t\r\n");
    if (*at++ != ':')
        return false;
    at += strspn(at, " \t\r\n");
    if (*at++ != '"')
        return false;
    size_t n = 0;
    for (; *at && *at != '"' && n + 1 < out_nbytes; at++) {
        if (*at == '\\' && !*++at)
            return false;
        out[n++] = *at;
    }
    out[n] = '\0';
    return *at == '"' && n > 0;
}

/* Takes the keys of an answer of the service, and when they expire. */
static rsd_status take_credentials(rsd_storage *storage, const char *json)
{
    char access[256], secret[256], expires[64], *token = mem_new(MAX_METADATA, 1);
    if (!token)
        return RSD_ENOMEM;
    rsd_status status = RSD_OK;
    if (!find_json_text(json, "AccessKeyId", access, sizeof access) ||
        !find_json_text(json, "SecretAccessKey", secret, sizeof secret) ||
        !find_json_text(json, "Token", token, MAX_METADATA))
        status = fail(RSD_EIO, "%s: the answer has no credentials", storage->metadata_url);
    storage->expires = 0;
    if (find_json_text(json, "Expiration", expires, sizeof expires))
        storage->expires = time_read_iso(expires);
    if (!status)
        status = storage_set_option("AccessKeyId", access, &storage->access_key);
    if (!status)
        status = storage_set_option("SecretAccessKey", secret, &storage->secret_key);
    if (!status)
        status = storage_set_option("Token", token, &storage->session_token);
    mem_free(token);
    return status;
}

/* Requests credentials from the service of a container, with its token. */
static rsd_status load_from_container(rsd_storage *storage, struct metadata_body *body)
{
    char header[5000] = "", *token = NULL;
    if (storage->metadata_token_file)
        TRY(load_text_file(storage->metadata_token_file, &token));
    const char *value = token ? trim_line(token) : storage->metadata_token;
    if (value) {
        char line[4096];
        snprintf(line, sizeof line, "%s", value);
        line[strcspn(line, "\r\n")] = '\0';
        snprintf(header, sizeof header, "Authorization: %s", line);
    }
    mem_free(token);
    return ask_metadata("GET", storage->metadata_url, *header ? header : NULL, body);
}

/* Version 2 of the instance's service: a token first, then the name of the role, then its credentials. */
static rsd_status load_from_instance(rsd_storage *storage, struct metadata_body *body)
{
    static const char roles[] = "latest/meta-data/iam/security-credentials/";
    size_t n = strlen(storage->metadata_url);
    const char *slash = n > 0 && storage->metadata_url[n - 1] == '/' ? "" : "/";
    char url[2600], header[600], role[256];
    snprintf(url, sizeof url, "%.2000s%slatest/api/token", storage->metadata_url, slash);
    TRY(ask_metadata("PUT", url, "X-aws-ec2-metadata-token-ttl-seconds: 21600", body));
    body->text[strcspn(body->text, "\r\n")] = '\0';
    snprintf(header, sizeof header, "X-aws-ec2-metadata-token: %.500s", body->text);
    snprintf(url, sizeof url, "%.2000s%s%s", storage->metadata_url, slash, roles);
    TRY(ask_metadata("GET", url, header, body));
    body->text[strcspn(body->text, "\r\n")] = '\0';
    snprintf(role, sizeof role, "%.200s", body->text);
    struct text encoded = {0};
    char *name;
    url_add_encoded(&encoded, role, strlen(role), false);
    TRY(text_take(&encoded, &name));
    snprintf(url, sizeof url, "%.1500s%s%s%.600s", storage->metadata_url, slash, roles, name);
    rsd_free(name);
    return ask_metadata("GET", url, header, body);
}

rsd_status credentials_load_metadata(rsd_storage *storage)
{
    struct metadata_body *body = mem_new(1, sizeof *body);
    if (!body)
        return RSD_ENOMEM;
    rsd_status status = storage->source == CREDENTIALS_CONTAINER
                            ? load_from_container(storage, body)
                            : load_from_instance(storage, body);
    if (!status)
        status = take_credentials(storage, body->text);
    mem_free(body);
    return status;
}

/* ---- all places, in order ---- */

static rsd_status find_proxies(rsd_storage *storage, const char *const *environment)
{
    TRY(fill_option(&storage->proxies[0], find_variable(environment, "http_proxy")));
    TRY(fill_option(&storage->proxies[1],
                    first_variable(environment, "https_proxy", "HTTPS_PROXY")));
    return fill_option(&storage->no_proxy, first_variable(environment, "no_proxy", "NO_PROXY"));
}

rsd_status credentials_find(rsd_storage *storage, const rsd_storage_options *options)
{
    const char *const *environment = options->environment;
    const char *profile =
        options->profile ? options->profile : find_variable(environment, "AWS_PROFILE");
    bool fixed = storage->access_key || storage->load || storage->anonymous, found = false;
    TRY(find_proxies(storage, environment));
    TRY(fill_option(&storage->endpoint,
                    first_variable(environment, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")));
    TRY(fill_option(&storage->region,
                    first_variable(environment, "AWS_REGION", "AWS_DEFAULT_REGION")));
    TRY(fill_option(&storage->ca_file, find_variable(environment, "AWS_CA_BUNDLE")));
    const char *access = find_variable(environment, "AWS_ACCESS_KEY_ID");
    const char *secret = find_variable(environment, "AWS_SECRET_ACCESS_KEY");
    if (!fixed && !options->profile && access &&
        secret) { /* a profile that was asked for comes first */
        TRY(fill_option(&storage->access_key, access));
        TRY(fill_option(&storage->secret_key, secret));
        TRY(fill_option(&storage->session_token, find_variable(environment, "AWS_SESSION_TOKEN")));
        fixed = true;
    }
    const char *name = profile ? profile : "default";
    TRY(read_shared_file(storage, environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials", name,
                         fixed, &found));
    TRY(read_shared_file(storage, environment, "AWS_CONFIG_FILE", "config", name, fixed || found,
                         &found));
    if (options->profile && !fixed && !found)
        return fail(RSD_EINVAL, "the shared files have no keys in profile '%s'", options->profile);
    return fixed || found ? RSD_OK : find_metadata(storage, environment);
}
