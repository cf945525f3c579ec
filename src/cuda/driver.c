/* driver.c - libcuda, opened at run time.
 *
 * A process that never touches CUDA never loads it: addresses are asked about only where somebody else
 * has loaded the driver already. CUDA does not work in the child of a fork once the parent has
 * initialised it; that is refused with words rather than left to fail call by call.
 */
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

static struct {
    pthread_mutex_t lock;
    _Atomic(const struct driver *) ready; /* NULL until everything below is set */
    struct driver table;
    pid_t pid;                          /* that initialised it */
    _Atomic unsigned long long nloaded; /* libraries when the driver was last searched */
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char library[] = "libcuda.so.1";

/* Fills the table. The name of a missing function into *missing. */
static bool find_functions(void *handle, struct driver *table, const char **missing)
{
#define FIND(name, symbol, parameters)                                                             \
    *(void **)(void *)&table->name = dlsym(handle, symbol);                                        \
    if (!table->name) {                                                                            \
        *missing = symbol;                                                                         \
        return false;                                                                              \
    }
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    return true;
}

/* Opens libcuda and finds its functions. EUNSUPPORTED: it is missing or too old. */
static rsd_status load_driver(int flags)
{
    const char *missing = NULL;
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | flags);
    if (!handle)
        return fail(RSD_EUNSUPPORTED, "CUDA is not available: %s cannot be loaded", library);
    if (!find_functions(handle, &process.table, &missing)) {
        dlclose(handle);
        return fail(RSD_EUNSUPPORTED, "CUDA driver too old: %s lacks %s", library, missing);
    }
    process.pid = getpid();
    process.ready = &process.table;
    return RSD_OK;
}

/* Sets *nloaded to the number of libraries that the process has loaded so far, and ends the walk. */
static int note_loads(struct dl_phdr_info *info, size_t nbytes, void *nloaded)
{
    (void)nbytes;
    *(unsigned long long *)nloaded = info->dlpi_adds;
    return 1;
}

/* A run asks each time, and dlopen searches the file system for a library that is not loaded. So it is called only
 * if the process has loaded a library since the last call. */
const struct driver *driver_if_loaded(void)
{
    unsigned long long nloaded = 0;
    if (process.ready)
        return process.ready;
    dl_iterate_phdr(note_loads, &nloaded);
    if (nloaded == process.nloaded)
        return NULL;
    pthread_mutex_lock(&process.lock);
    if (!process.ready) {
        void *loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
        if (loaded) {
            load_driver(0);
            dlclose(loaded);
        }
        process.nloaded = nloaded;
    }
    pthread_mutex_unlock(&process.lock);
    return process.ready;
}

bool driver_is_forked(void)
{
    return process.ready && process.pid != getpid();
}

rsd_status driver_open(const struct driver **driver)
{
    rsd_status status = RSD_OK;
    pthread_mutex_lock(&process.lock);
    if (!process.ready)
        status = load_driver(0);
    const struct driver *cu = process.ready;
    pthread_mutex_unlock(&process.lock);
    TRY(status);
    if (driver_is_forked())
        return fail(RSD_EUNSUPPORTED, "CUDA cannot be used in a forked process whose parent uses "
                                      "CUDA; start processes with exec or spawn");
    CU_TRY(cuInit, 0);
    *driver = cu;
    return RSD_OK;
}

rsd_status driver_check(cu_result result, const char *call)
{
    const char *name = "an unknown error", *text = "";
    if (result == CU_SUCCESS)
        return RSD_OK;
    const struct driver *cu = process.ready;
    if (cu->cuGetErrorName(result, &name) || cu->cuGetErrorString(result, &text))
        return fail(RSD_EIO, "%s: CUDA error %d", call, result);
    return fail(result == CU_OUT_OF_MEMORY ? RSD_ENOMEM : RSD_EIO, "%s: %s: %s", call, name, text);
}
