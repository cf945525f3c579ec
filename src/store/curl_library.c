/* curl_library.c - libcurl, opened when the first URL needs it: nothing else of the library depends on it. */
#include "remote.h"

#include <dlfcn.h>

static struct curl_library curl;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *missing; /* what could not be found; NULL: nothing */

/* Where each function is kept. */
static const struct {
    const char *name;
    size_t place;
} functions[] = {{"curl_global_init", offsetof(struct curl_library, global_init)},
                 {"curl_easy_init", offsetof(struct curl_library, easy_init)},
                 {"curl_easy_setopt", offsetof(struct curl_library, easy_setopt)},
                 {"curl_easy_getinfo", offsetof(struct curl_library, easy_getinfo)},
                 {"curl_easy_perform", offsetof(struct curl_library, easy_perform)},
                 {"curl_easy_reset", offsetof(struct curl_library, easy_reset)},
                 {"curl_easy_cleanup", offsetof(struct curl_library, easy_cleanup)},
                 {"curl_easy_strerror", offsetof(struct curl_library, easy_strerror)},
                 {"curl_slist_append", offsetof(struct curl_library, slist_append)},
                 {"curl_slist_free_all", offsetof(struct curl_library, slist_free_all)},
                 {"curl_multi_init", offsetof(struct curl_library, multi_init)},
                 {"curl_multi_setopt", offsetof(struct curl_library, multi_setopt)},
                 {"curl_multi_add_handle", offsetof(struct curl_library, multi_add_handle)},
                 {"curl_multi_remove_handle", offsetof(struct curl_library, multi_remove_handle)},
                 {"curl_multi_perform", offsetof(struct curl_library, multi_perform)},
                 {"curl_multi_poll", offsetof(struct curl_library, multi_poll)},
                 {"curl_multi_wakeup", offsetof(struct curl_library, multi_wakeup)},
                 {"curl_multi_info_read", offsetof(struct curl_library, multi_info_read)},
                 {"curl_multi_cleanup", offsetof(struct curl_library, multi_cleanup)}};

/* Loads libcurl and its functions. On failure `missing` says why. */
static void load_curl(void)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl.so"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        missing = "it is not installed";
        return;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(library, functions[i].name);
        if (!found) {
            missing = "the one that is installed is older than 7.68";
            return;
        }
        memcpy((char *)&curl + functions[i].place, &found, sizeof found);
    }
    if (curl.global_init(3) != 0) /* CURL_GLOBAL_DEFAULT */
        missing = "it cannot be initialized";
}

rsd_status curl_library_open(const struct curl_library **library)
{
    pthread_once(&once, load_curl);
    if (missing)
        return fail(RSD_EUNSUPPORTED, "URLs need libcurl (libcurl.so.4), and %s", missing);
    *library = &curl;
    return RSD_OK;
}
