/* nvrtc.c - kernels compiled for the GPU at hand by NVRTC, opened at run time.
 *
 * NVRTC comes with the CUDA toolkit, and with the packages that PyTorch's wheels depend on. It is
 * searched for where the loader looks, then beside the libraries that this process has loaded, since
 * a Python environment has it in nvidia/.../lib next to torch. Any version from 12 on will do.
 */
#include "driver.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>

typedef void *nvrtc_program;

struct nvrtc {
    void *handle;
    int (*version)(int *major, int *minor);
    int (*create)(nvrtc_program *program, const char *source, const char *name, int nheaders,
                  const char *const *headers, const char *const *names);
    int (*destroy)(nvrtc_program *program);
    int (*compile)(nvrtc_program program, int noptions, const char *const *options);
    int (*log_nbytes)(nvrtc_program program, size_t *nbytes);
    int (*log)(nvrtc_program program, char *log);
    int (*cubin_nbytes)(nvrtc_program program, size_t *nbytes);
    int (*cubin)(nvrtc_program program, char *cubin);
    int (*ptx_nbytes)(nvrtc_program program, size_t *nbytes);
    int (*ptx)(nvrtc_program program, char *ptx);
    int (*narchs)(int *count);
    int (*archs)(int *archs);
    const char *(*error_text)(int result);
};

/* ---- finding it ---- */

static const char *const sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

/* Where wheels and toolkits keep it, relative to the directory of a loaded library. */
static const char *const beside[] = {
    ".", "../../nvidia/cu*/lib",   /* torch/lib -> nvidia/cu13/lib */
    "../../nvidia/cuda_nvrtc/lib", /* torch/lib -> nvidia/cuda_nvrtc/lib */
    "../../cuda_nvrtc/lib",        /* nvidia/cuda_runtime/lib -> nvidia/cuda_nvrtc/lib */
};

/* Opens the newest library that a pattern of paths names. NULL: none can be opened. */
static void *open_matching(const char *pattern)
{
    glob_t found;
    void *handle = NULL;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = found.gl_pathc; i-- > 0 && !handle;) /* the newest last */
            handle = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&found);
    return handle;
}

/* Opens NVRTC in a directory, or in one of the directories beside it where packages put it. */
static void *open_in(const char *directory, size_t nchars)
{
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++) {
        char pattern[4096];
        int n = snprintf(pattern, sizeof pattern, "%.*s/%s/libnvrtc.so.1[0-9]", (int)nchars,
                         directory, beside[i]);
        void *handle = n > 0 && (size_t)n < sizeof pattern ? open_matching(pattern) : NULL;
        if (handle)
            return handle;
    }
    return NULL;
}

struct directories {
    struct text list; /* each ends in a newline */
};

static int note_directory(struct dl_phdr_info *info, size_t nbytes, void *context)
{
    struct directories *directories = context;
    const char *slash = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
    (void)nbytes;
    if (slash && (strstr(info->dlpi_name, "cud") || strstr(info->dlpi_name, "torch")))
        text_add(&directories->list, "%.*s\n", (int)(slash - info->dlpi_name), info->dlpi_name);
    return 0;
}

/* dlopen is not allowed while the list is walked, so it is copied first. */
static void *open_beside_loaded(void)
{
    struct directories directories = {0};
    void *handle = NULL;
    dl_iterate_phdr(note_directory, &directories);
    for (const char *at = directories.list.chars; at && *at && !handle;) {
        const char *end = strchr(at, '\n');
        handle = open_in(at, (size_t)(end - at));
        at = end + 1;
    }
    text_drop(&directories.list);
    return handle;
}

static void *open_nvrtc(void)
{
    void *handle = NULL;
    for (size_t i = 0; i < sizeof sonames / sizeof *sonames && !handle; i++)
        handle = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        handle = open_beside_loaded();
    return handle ? handle : open_matching("/usr/local/cuda*/lib64/libnvrtc.so.1[0-9]");
}

/* Opens NVRTC and finds its functions. EUNSUPPORTED: it is missing or too old. */
static rsd_status find_nvrtc(struct nvrtc *nvrtc)
{
    *nvrtc = (struct nvrtc){.handle = open_nvrtc()};
    if (!nvrtc->handle)
        return fail(RSD_EUNSUPPORTED,
                    "tensors in CUDA memory need NVRTC, and libnvrtc.so.12 or .13 "
                    "was not found; install nvidia-cuda-nvrtc or the CUDA toolkit");
    static const struct {
        const char *symbol;
        size_t member;
    } functions[] = {{"nvrtcVersion", offsetof(struct nvrtc, version)},
                     {"nvrtcCreateProgram", offsetof(struct nvrtc, create)},
                     {"nvrtcDestroyProgram", offsetof(struct nvrtc, destroy)},
                     {"nvrtcCompileProgram", offsetof(struct nvrtc, compile)},
                     {"nvrtcGetProgramLogSize", offsetof(struct nvrtc, log_nbytes)},
                     {"nvrtcGetProgramLog", offsetof(struct nvrtc, log)},
                     {"nvrtcGetCUBINSize", offsetof(struct nvrtc, cubin_nbytes)},
                     {"nvrtcGetCUBIN", offsetof(struct nvrtc, cubin)},
                     {"nvrtcGetPTXSize", offsetof(struct nvrtc, ptx_nbytes)},
                     {"nvrtcGetPTX", offsetof(struct nvrtc, ptx)},
                     {"nvrtcGetNumSupportedArchs", offsetof(struct nvrtc, narchs)},
                     {"nvrtcGetSupportedArchs", offsetof(struct nvrtc, archs)},
                     {"nvrtcGetErrorString", offsetof(struct nvrtc, error_text)}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(nvrtc->handle, functions[i].symbol);
        if (!found) {
            dlclose(nvrtc->handle);
            return fail(RSD_EUNSUPPORTED, "NVRTC too old: it lacks %s", functions[i].symbol);
        }
        memcpy((char *)nvrtc + functions[i].member, &found, sizeof found);
    }
    return RSD_OK;
}

/* ---- compiling ---- */

/* The newest architecture that NVRTC knows and the GPU runs; 0: none. */
static int choose_arch(const struct nvrtc *nvrtc, int wanted)
{
    int archs[256], count = 0, best = 0;
    if (nvrtc->narchs(&count) || count > 256 || nvrtc->archs(archs))
        return 0;
    for (int i = 0; i < count; i++)
        if (archs[i] <= wanted && archs[i] > best)
            best = archs[i];
    return best;
}

/* Returns EUNSUPPORTED, with the start of the log of the compiler. */
static rsd_status report_failure(const struct nvrtc *nvrtc, nvrtc_program program, int result)
{
    size_t n = 0;
    char *log = NULL;
    if (nvrtc->log_nbytes(program, &n) == 0 && (log = mem_new(n + 1, 1)) != NULL)
        nvrtc->log(program, log);
    rsd_status status = fail(RSD_EUNSUPPORTED, "NVRTC cannot compile the kernels: %s: %.300s",
                             nvrtc->error_text(result), log ? log : "");
    mem_free(log);
    return status;
}

/* A cubin where NVRTC knows the GPU, else PTX of an older one, which the driver compiles. */
static rsd_status take_image(const struct nvrtc *nvrtc, nvrtc_program program, bool cubin,
                             void **image)
{
    size_t n = 0;
    int result = (cubin ? nvrtc->cubin_nbytes : nvrtc->ptx_nbytes)(program, &n);
    char *made = result ? NULL : mem_new(n + 1, 1);
    if (!result && !made)
        return RSD_ENOMEM;
    if (!result)
        result = (cubin ? nvrtc->cubin : nvrtc->ptx)(program, made);
    if (result) {
        mem_free(made);
        return report_failure(nvrtc, program, result);
    }
    *image = made;
    return RSD_OK;
}

/* Compiles a source for a compute capability; for a newer one than NVRTC knows, into PTX. */
static rsd_status compile_text(const struct nvrtc *nvrtc, const char *text, int wanted,
                               void **image)
{
    nvrtc_program program;
    char arch[48];
    int best = choose_arch(nvrtc, wanted);
    if (!best)
        return fail(RSD_EUNSUPPORTED, "NVRTC does not support compute capability %d.%d",
                    wanted / 10, wanted % 10);
    snprintf(arch, sizeof arch, "--gpu-architecture=%s_%d", best == wanted ? "sm" : "compute",
             best);
    const char *const options[] = {arch, "--fmad=false", "--std=c++17"};
    int result = nvrtc->create(&program, text, "reshard.cu", 0, NULL, NULL);
    if (result)
        return fail(RSD_EUNSUPPORTED, "NVRTC: %s", nvrtc->error_text(result));
    result = nvrtc->compile(program, 3, options);
    rsd_status status = result ? report_failure(nvrtc, program, result)
                               : take_image(nvrtc, program, best == wanted, image);
    nvrtc->destroy(&program);
    return status;
}

rsd_status nvrtc_compile(const char *const *source, int major, int minor, void **image)
{
    struct nvrtc nvrtc;
    struct text text = {0};
    char *chars = NULL;
    TRY(find_nvrtc(&nvrtc));
    for (size_t i = 0; source[i]; i++)
        text_add(&text, "%s", source[i]);
    rsd_status status = text_take(&text, &chars);
    if (!status)
        status = compile_text(&nvrtc, chars, 10 * major + minor, image);
    rsd_free(chars);
    dlclose(nvrtc.handle);
    return status;
}
