#!/usr/bin/env python3
"""Runs the command on files that describe far more work than their size. It must end, without a signal, and
with no more memory than 256 MB. The limit of the CPU time is far above what is needed: it ends what hangs.

costly.txt has what `verify` says of each file, so that a file is refused for what it costs, and not for another
mistake in it."""

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


def read_expectations():
    with open(os.path.join(HERE, "costly.txt"), encoding="utf-8") as file:
        return dict(line.rstrip("\n").split(None, 1) for line in file)


def run(verb, path, expected):
    """What is wrong with a run of the command; nothing if it is fine."""
    more = {"diff": [path], "merge": [path + ".out", "--force"], "extract": [path + ".out", "--only", "."]}
    more = more.get(verb.split()[0], [])
    output, found = b"", verb != "verify"
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) if found else dict(
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen([COMMAND, *verb.split(), path, *more], preexec_fn=limit, **streams) as process:
        for some in iter(lambda: (process.stdout or process.stderr).read(1 << 16), b""):
            output = output[-1000:] + some
            found = found or expected.encode() in output
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(path + ".out", ignore_errors=True)
    megabytes = used.ru_maxrss // 1024
    if process.returncode < 0 or process.returncode > 5:
        return f"ended with {process.returncode}: {output[-200:]!r}"
    if not found:
        return f"does not say '{expected}': {output[-200:]!r}"
    if verb == "extract":  # has a whole tensor in memory
        return ""
    return f"took {megabytes} MB" if megabytes > MAX_MEGABYTES else ""


def main():
    failed = n = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in ("make_costly.py", "make_costly_more.py", "make_costly_reads.py"):
            subprocess.run([sys.executable, os.path.join(HERE, script), folder], check=True)
        expected = read_expectations()
        for name in sorted(set(os.listdir(folder)) | set(expected)):
            wrong = [f"{verb}: {output}" for verb in VERBS
                     if (output := run(verb, os.path.join(folder, name), expected.get(name, "")))]
            if name not in expected:
                wrong.append("costly.txt does not have this file")
            n += 1
            failed += bool(wrong)
            print(f"{'not ' if wrong else ''}ok {n} - {name}")
            for line in wrong:
                print("#", line)
    print(f"1..{n}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
