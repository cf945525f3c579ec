#!/usr/bin/env python3
"""Runs the command on files that describe far more work than their size. It must end, without a signal, and
with no more memory than 256 MB. The limit of the CPU time is far above what is needed: it ends what hangs."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
COMMAND = os.environ.get("PLAIN_RESHARD") or os.environ["RESHARD"]
VERBS = ("inspect", "inspect --tree", "inspect --json", "verify", "digest", "diff", "merge -q", "extract")
MAX_SECONDS, MAX_MEGABYTES = 20, 256


def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))


def run(verb, path):
    """What is wrong with a run of the command; nothing if it is fine."""
    more = {"diff": [path], "merge": [path + ".out", "--force"], "extract": [path + ".out", "--only", "."]}
    more = more.get(verb.split()[0], [])
    with subprocess.Popen([COMMAND, *verb.split(), path, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          preexec_fn=limit) as process:
        output = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(path + ".out", ignore_errors=True)
    megabytes = used.ru_maxrss // 1024
    if process.returncode < 0 or process.returncode > 5:
        return f"ended with {process.returncode}: {output[-200:]!r}"
    return f"took {megabytes} MB" if megabytes > MAX_MEGABYTES else ""


def main():
    failed = n = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in ("make_costly.py", "make_costly_more.py", "make_costly_reads.py"):
            subprocess.run([sys.executable, os.path.join(HERE, script), folder], check=True)
        for name in sorted(os.listdir(folder)):
            wrong = [f"{verb}: {output}" for verb in VERBS if (output := run(verb, os.path.join(folder, name)))]
            n += 1
            failed += bool(wrong)
            print(f"{'not ' if wrong else ''}ok {n} - {name}")
            for line in wrong:
                print("#", line)
    print(f"1..{n}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
