/* driver.h - private to cuda: the functions of libcuda and NVRTC that are used, found at run time.
 *
 * Handles of the driver are pointers and device addresses are 64-bit numbers, so none of CUDA's own
 * headers is needed to build.
 */
#ifndef DRIVER_H
#define DRIVER_H

#include "base.h"

typedef int cu_result;
typedef int cu_device;
typedef uint64_t cu_address;
typedef void *cu_context, *cu_module, *cu_function, *cu_stream, *cu_event;

enum {
    CU_SUCCESS = 0,
    CU_OUT_OF_MEMORY = 2,
    CU_NOT_INITIALIZED = 3,
    CU_NOT_READY = 600,
    CU_PEER_ACCESS_ALREADY_ENABLED = 704
};

/* Attributes of addresses and devices. */
enum {
    CU_POINTER_MEMORY_TYPE = 2,
    CU_POINTER_BUFFER_ID = 7,
    CU_POINTER_IS_MANAGED = 8,
    CU_POINTER_DEVICE_ORDINAL = 9,
    CU_POINTER_HAS_IPC_HANDLE = 10, /* not if it is of the virtual memory interface, or of a pool */
    CU_MEMORY_TYPE_HOST = 1,
    CU_DEVICE_MULTIPROCESSORS = 16,
    CU_DEVICE_MAJOR = 75,
    CU_DEVICE_MINOR = 76
};

enum { CU_EVENT_DISABLE_TIMING = 2, CU_STREAM_NON_BLOCKING = 1 };
/* Handles that mean the default stream and that of the calling thread, in the current context. */
enum { CU_STREAM_LEGACY = 1, CU_STREAM_PER_THREAD = 2 };
enum { CU_IPC_LAZY_PEER_ACCESS = 1 };

struct cu_ipc_handle {
    char bytes[64];
};

/* Where an allocation of the virtual memory interface lies, and how a mapping may be used. */
struct cu_location {
    int type, id;
};

struct cu_access {
    struct cu_location location;
    int flags;
};

/* Each function under its own name, the symbol that has its current version, and its parameters. */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(cuInit, "cuInit", (unsigned flags))                                                          \
    X(cuGetErrorName, "cuGetErrorName", (cu_result error, const char **name))                      \
    X(cuGetErrorString, "cuGetErrorString", (cu_result error, const char **text))                  \
    X(cuDeviceGet, "cuDeviceGet", (cu_device * device, int ordinal))                               \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device)) \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, cu_device from, cu_device to))    \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                                        \
      (cu_context * context, cu_device device))                                                    \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (cu_context context))                               \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (cu_context * context))                               \
    X(cuCtxGetDevice, "cuCtxGetDevice", (cu_device * device))                                      \
    X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", (cu_context peer, unsigned flags))           \
    X(cuPointerGetAttributes, "cuPointerGetAttributes",                                            \
      (unsigned n, int *attributes, void **values, cu_address address))                            \
    X(cuMemAlloc, "cuMemAlloc_v2", (cu_address * address, size_t nbytes))                          \
    X(cuMemFree, "cuMemFree_v2", (cu_address address))                                             \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **address, size_t nbytes, unsigned flags))           \
    X(cuMemFreeHost, "cuMemFreeHost", (void *address))                                             \
    X(cuMemHostRegister, "cuMemHostRegister_v2", (void *address, size_t nbytes, unsigned flags))   \
    X(cuMemHostUnregister, "cuMemHostUnregister", (void *address))                                 \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *to, cu_address from, size_t nbytes))                 \
    X(cuMemsetD8Async, "cuMemsetD8Async",                                                          \
      (cu_address to, unsigned char value, size_t nbytes, cu_stream stream))                       \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (cu_function function, int attribute, int value))  \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (cu_address to, const void *from, size_t nbytes))           \
    X(cuMemGetAddressRange, "cuMemGetAddressRange_v2",                                             \
      (cu_address * begin, size_t * nbytes, cu_address address))                                   \
    X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (struct cu_ipc_handle * handle, cu_address address)) \
    X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2",                                                 \
      (cu_address * address, struct cu_ipc_handle handle, unsigned flags))                         \
    X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (cu_address address))                            \
    X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle",                                  \
      (uint64_t * handle, void *address))                                                          \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                \
      (void *shareable, uint64_t handle, int type, uint64_t flags))                                \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                            \
      (uint64_t * handle, void *shareable, int type))                                              \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                  \
      (cu_address * address, size_t nbytes, size_t alignment, cu_address hint, uint64_t flags))    \
    X(cuMemAddressFree, "cuMemAddressFree", (cu_address address, size_t nbytes))                   \
    X(cuMemMap, "cuMemMap",                                                                        \
      (cu_address address, size_t nbytes, size_t offset, uint64_t handle, uint64_t flags))         \
    X(cuMemUnmap, "cuMemUnmap", (cu_address address, size_t nbytes))                               \
    X(cuMemSetAccess, "cuMemSetAccess",                                                            \
      (cu_address address, size_t nbytes, const struct cu_access *access, size_t naccess))         \
    X(cuMemGetAccess, "cuMemGetAccess",                                                            \
      (uint64_t * flags, const struct cu_location *location, cu_address address))                  \
    X(cuMemRelease, "cuMemRelease", (uint64_t handle))                                             \
    X(cuStreamCreate, "cuStreamCreate", (cu_stream * stream, unsigned flags))                      \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (cu_stream stream))                                   \
    X(cuStreamSynchronize, "cuStreamSynchronize", (cu_stream stream))                              \
    X(cuStreamQuery, "cuStreamQuery", (cu_stream stream))                                          \
    X(cuStreamGetCtx, "cuStreamGetCtx", (cu_stream stream, cu_context * context))                  \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned flags))  \
    X(cuEventCreate, "cuEventCreate", (cu_event * event, unsigned flags))                          \
    X(cuEventDestroy, "cuEventDestroy_v2", (cu_event event))                                       \
    X(cuEventRecord, "cuEventRecord", (cu_event event, cu_stream stream))                          \
    X(cuEventQuery, "cuEventQuery", (cu_event event))                                              \
    X(cuEventSynchronize, "cuEventSynchronize", (cu_event event))                                  \
    X(cuModuleLoadData, "cuModuleLoadData", (cu_module * module, const void *image))               \
    X(cuModuleGetFunction, "cuModuleGetFunction",                                                  \
      (cu_function * function, cu_module module, const char *name))                                \
    X(cuLaunchKernel, "cuLaunchKernel",                                                            \
      (cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
       unsigned block_y, unsigned block_z, unsigned shared_nbytes, cu_stream stream,               \
       void **parameters, void **extra))

struct driver {
#define DRIVER_MEMBER(name, symbol, parameters) cu_result(*name) parameters;
    DRIVER_FUNCTIONS(DRIVER_MEMBER)
#undef DRIVER_MEMBER
};

/* The driver, if this process has loaded it; NULL otherwise. Never loads it: an address can be CUDA's
 * only if somebody in this process uses CUDA. */
const struct driver *driver_if_loaded(void);

/* Whether this is the child of a process that had loaded the driver: CUDA does not work here. */
bool driver_is_forked(void);

/* EUNSUPPORTED: libcuda is missing, too old, or was initialised before a fork. */
rsd_status driver_open(const struct driver **driver);

/* Turns the result of a call into a status: ENOMEM or EIO, with the call and CUDA's own words. */
rsd_status driver_check(cu_result result, const char *call);

/* Calls a function of the driver `cu`, and returns a failure with its name. */
#define CU_TRY(function, ...) TRY(driver_check(cu->function(__VA_ARGS__), #function))

/* Compiles strings that together are a source for a GPU of compute capability major.minor. The image
 * is freed with mem_free. EUNSUPPORTED: NVRTC is missing or refuses, with its log. */
rsd_status nvrtc_compile(const char *const *source, int major, int minor, void **image);

#endif
