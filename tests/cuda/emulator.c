/* emulator.c - devices of the emulator, and NVRTC. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t emulator_lock = PTHREAD_MUTEX_INITIALIZER;
cu_result emulator_failed;
pid_t emulator_process;

/* ---- devices ---- */

EXPORT cu_result cuInit(unsigned flags)
{
    (void)flags;
    if (!emulator_process)
        emulator_process = getpid();
    return emulator_process == getpid() ? CU_SUCCESS : CU_NOT_INITIALIZED;
}

EXPORT cu_result cuGetErrorName(cu_result error, const char **name)
{
    *name = error == ILLEGAL_ADDRESS    ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : error == CU_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                        : "CUDA_ERROR_OF_THE_EMULATOR";
    return CU_SUCCESS;
}

EXPORT cu_result cuGetErrorString(cu_result error, const char **text)
{
    (void)error;
    *text = "an emulated error";
    return CU_SUCCESS;
}

static struct context contexts[NDEVICES] = {{0, 1}, {1, 2}, {2, 4}};
static _Thread_local struct context *stack[16];
static _Thread_local int depth;

struct context *context_current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

struct context *context_of(int device)
{
    return &contexts[device];
}

bool devices_are_peers(int from, int to)
{
    return from / 2 == to / 2;
}

EXPORT cu_result cuDeviceGetCount(int *count)
{
    *count = NDEVICES;
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceGet(cu_device *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < NDEVICES ? CU_SUCCESS : INVALID_DEVICE;
}

EXPORT cu_result cuDeviceGetAttribute(int *value, int attribute, cu_device device)
{
    (void)device;
    *value = attribute == CU_DEVICE_MAJOR ? 9 : attribute == CU_DEVICE_MINOR ? 0 : 4;
    return CU_SUCCESS;
}

EXPORT cu_result cuDeviceCanAccessPeer(int *can, cu_device from, cu_device to)
{
    *can = from != to && devices_are_peers(from, to);
    return CU_SUCCESS;
}

EXPORT cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    *context = &contexts[device];
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxPushCurrent_v2(cu_context context)
{
    if (depth == (int)(sizeof stack / sizeof *stack))
        abort();
    stack[depth++] = context;
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxPopCurrent_v2(cu_context *context)
{
    if (!depth)
        return INVALID_CONTEXT;
    *context = stack[--depth];
    return CU_SUCCESS;
}

EXPORT cu_result cuCtxGetDevice(cu_device *device)
{
    ENTER_CONTEXT;
    if (!result)
        *device = context->device;
    LEAVE;
}

EXPORT cu_result cuCtxEnablePeerAccess(cu_context peer, unsigned flags)
{
    ENTER_CONTEXT;
    int other = ((struct context *)peer)->device;
    (void)flags;
    if (!result && (other == context->device || !devices_are_peers(context->device, other)))
        result = PEER_ACCESS_UNSUPPORTED;
    if (!result && context->peers >> other & 1)
        result = CU_PEER_ACCESS_ALREADY_ENABLED;
    if (!result)
        context->peers |= 1u << other;
    LEAVE;
}

/* ---- NVRTC: it takes any source ---- */

static int program_of_nvrtc;

EXPORT int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int nheaders,
                              const char *const *headers, const char *const *names)
{
    (void)source;
    (void)name;
    (void)nheaders;
    (void)headers;
    (void)names;
    *program = &program_of_nvrtc;
    return 0;
}

EXPORT int nvrtcDestroyProgram(void **program)
{
    *program = NULL;
    return 0;
}

EXPORT int nvrtcCompileProgram(void *program, int noptions, const char *const *options)
{
    (void)program;
    (void)noptions;
    (void)options;
    return getenv("EMULATED_NVRTC_FAILS") ? 6 : 0;
}

#define NVRTC_TEXT(size_name, name, text)                                                          \
    EXPORT int size_name(void *program, size_t *nbytes)                                            \
    {                                                                                              \
        (void)program;                                                                             \
        *nbytes = sizeof text;                                                                     \
        return 0;                                                                                  \
    }                                                                                              \
    EXPORT int name(void *program, char *out)                                                      \
    {                                                                                              \
        (void)program;                                                                             \
        memcpy(out, text, sizeof text);                                                            \
        return 0;                                                                                  \
    }
NVRTC_TEXT(nvrtcGetProgramLogSize, nvrtcGetProgramLog, "a log of the emulator")
NVRTC_TEXT(nvrtcGetCUBINSize, nvrtcGetCUBIN, "cubin")
NVRTC_TEXT(nvrtcGetPTXSize, nvrtcGetPTX, "ptx")

EXPORT int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 1;
    return 0;
}

EXPORT int nvrtcGetSupportedArchs(int *archs)
{
    archs[0] = 90;
    return 0;
}

EXPORT const char *nvrtcGetErrorString(int result)
{
    return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS";
}
