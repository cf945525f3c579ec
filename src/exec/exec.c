/* exec.c - the public calls on an exec, which call its backend. */
#include "exec.h"
#include "reshard_cuda.h"

static rsd_status check_idle(const rsd_exec *exec, const char *call)
{
    return exec->started ? fail(RSD_EINVAL, "%s: a run is in progress: call rsd_exec_wait", call)
                         : RSD_OK;
}

static rsd_status check_started(const rsd_exec *exec, const char *call)
{
    return exec->started ? RSD_OK : fail(RSD_EINVAL, "%s: no run in progress", call);
}

rsd_status rsd_exec_run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    TRY(check_idle(exec, "rsd_exec_run"));
    return exec->backend->run(exec, src, dst);
}

rsd_status rsd_exec_start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    TRY(check_idle(exec, "rsd_exec_start"));
    TRY(exec->backend->start(exec, src, dst));
    exec->started = true;
    return RSD_OK;
}

rsd_status rsd_exec_wait(rsd_exec *exec)
{
    TRY(check_started(exec, "rsd_exec_wait"));
    exec->started = false;
    return exec->backend->wait(exec);
}

rsd_status rsd_exec_progress(rsd_exec *exec)
{
    TRY(check_started(exec, "rsd_exec_progress"));
    if (exec->backend->progress)
        exec->backend->progress(exec);
    return RSD_OK;
}

void rsd_exec_free(rsd_exec *exec)
{
    if (!exec)
        return;
    if (exec->started)
        exec->backend->wait(exec);
    exec->backend->free(exec);
}

rsd_status rsd_exec_set_stream(rsd_exec *exec, void *stream)
{
    TRY(check_idle(exec, "rsd_exec_set_stream"));
    exec->has_stream = true;
    exec->stream = stream;
    return RSD_OK;
}

const char *rsd_exec_describe(const rsd_exec *exec)
{
    return exec->backend->describe ? exec->backend->describe(exec) : "";
}
