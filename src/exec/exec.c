/* exec.c - running a bound plan, whoever carries it. */
#include "exec.h"

rsd_status rsd_exec_run(rsd_exec *exec, const void *const *src, void *const *dst)
{
    if (exec->started)
        return fail(RSD_EINVAL, "the exec has a run in flight: rsd_exec_wait comes first");
    return exec->carrier->run(exec, src, dst);
}

rsd_status rsd_exec_start(rsd_exec *exec, const void *const *src, void *const *dst)
{
    if (exec->started)
        return fail(RSD_EINVAL, "the exec has a run in flight: rsd_exec_wait comes first");
    TRY(exec->carrier->start(exec, src, dst));
    exec->started = true;
    return RSD_OK;
}

rsd_status rsd_exec_wait(rsd_exec *exec)
{
    if (!exec->started)
        return fail(RSD_EINVAL, "nothing was started that could be waited for");
    exec->started = false;
    return exec->carrier->wait(exec);
}

rsd_status rsd_exec_progress(rsd_exec *exec)
{
    if (!exec->started)
        return fail(RSD_EINVAL, "nothing was started that could move on");
    if (exec->carrier->push)
        exec->carrier->push(exec);
    return RSD_OK;
}

void rsd_exec_free(rsd_exec *exec)
{
    if (!exec)
        return;
    if (exec->started)
        exec->carrier->wait(exec);
    exec->carrier->free(exec);
}

const char *rsd_exec_describe(const rsd_exec *exec)
{
    return exec->carrier->note ? exec->carrier->note(exec) : "";
}
