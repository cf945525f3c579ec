"""Real worlds of torch ranks: processes forked from this one, joined by gloo.

Forking costs a few milliseconds where starting Python with torch costs seconds, so a test makes as many
worlds, of as many ranks, as it likes. Nothing may have started threads here before: torch works with
one, and the library starts none unless told.
"""
import logging
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings

# What torch would import when it is first used is imported here: once, before the forks.
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

torch.set_num_threads(1)
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

PATIENCE = 120


def live(rank, nranks, folder, work, args):
    """What one forked rank does; it never returns."""
    code = 1
    try:
        store = dist.FileStore(os.path.join(folder, "store"), nranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks)
        answer = work(*args)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        answer = traceback.format_exc()
    with open(os.path.join(folder, f"answer{rank}"), "wb") as file:
        pickle.dump(answer, file)
    os._exit(code)


def run(nranks, work, *args):
    """Calls work(*args) on every rank of a world and returns the list of their answers."""
    folder = tempfile.mkdtemp(prefix="world")
    running, failed = {}, []
    try:
        for rank in range(nranks):
            pid = os.fork()
            if not pid:
                live(rank, nranks, folder, work, args)
            running[pid] = rank
        until = time.monotonic() + PATIENCE
        while running and not failed and time.monotonic() < until:
            for pid in list(running):
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    rank = running.pop(pid)
                    if code:
                        failed.append(rank)
            time.sleep(0.002)
        late = sorted(running.values())
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told = [os.path.join(folder, f"answer{rank}") for rank in range(nranks)]
        if failed:
            path = told[failed[0]]
            why = pickle.load(open(path, "rb")) if os.path.exists(path) else "it was killed"
            raise AssertionError(f"rank {failed[0]} of {nranks}: {why}")
        if late:
            raise AssertionError(f"ranks {late} of {nranks} did not end")
        return [pickle.load(open(path, "rb")) for path in told]
    finally:
        shutil.rmtree(folder)


class Folder:
    """Returns a directory for the checkpoints of a test, removed at its end."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="torch")
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path)

    def __call__(self, *names):
        return os.path.join(self.path, *names)
