#!/usr/bin/env python3
"""The command at a terminal: the progress line, Ctrl-C and --resume, and pictures that others can read.

Runs $RESHARD on a pseudo-terminal of which it sees every byte. Where something has to happen in the middle
of a run, the run is stopped at its first sign of progress, so that nothing depends on how fast it is.
"""
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import xml.etree.ElementTree

RESHARD = os.environ["RESHARD"]
MB = 1000000
count = failed = 0


def check(fine, what, seen=None):
    global count, failed
    count += 1
    print("ok" if fine else "not ok", count, "-", what, flush=True)
    if not fine:
        failed += 1
        print("#", repr(seen)[:2000], flush=True)


def set_width(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read_all(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # what Linux says when the other end is closed
        return b""


class Run:
    """One run: stdin and stderr are a terminal, stdout is a file."""

    def __init__(self, *arguments, columns=80, env=None, on_progress=None):
        out = tempfile.TemporaryFile()
        gate, opened = os.pipe()
        self.child, terminal = pty.fork()
        if self.child == 0:
            os.dup2(out.fileno(), 1)
            os.environ.update(env or {})
            os.read(gate, 1)  # until the terminal has its width
            os.execv(RESHARD, ["reshard", *arguments])
        set_width(terminal, columns)
        os.close(gate)
        os.write(opened, b"!")
        os.close(opened)
        self.before = self.after = b""
        while chunk := read_all(terminal):
            if on_progress and not self.after and b"%" in chunk:
                os.kill(self.child, signal.SIGSTOP)
                os.waitpid(self.child, os.WUNTRACED)
                self.before += chunk
                os.set_blocking(terminal, False)
                try:
                    self.before += os.read(terminal, 65536)
                except BlockingIOError:
                    pass
                os.set_blocking(terminal, True)
                on_progress(terminal)
                on_progress = None
                os.kill(self.child, signal.SIGCONT)
            elif on_progress:
                self.before += chunk
            else:
                self.after += chunk
        status = os.waitpid(self.child, 0)[1]
        self.code = os.waitstatus_to_exitcode(status)
        self.screen = self.before + self.after
        os.close(terminal)
        out.seek(0)
        self.out = out.read()


def parts(screen):
    """What was written from the start of a line each time, without the blanks that clear it."""
    return re.split(rb"[\r\n]+", screen)


def write_checkpoint(path, names, nbytes):
    """A safetensors file with as many tensors, each of so many bytes."""
    header, at = {}, 0
    for name in names:
        header[name] = {"dtype": "F32", "shape": [nbytes // 400, 100], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    block = os.urandom(MB)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i in range(0, at, MB):
            file.write(block[: min(MB, at - i)])


def plain(*arguments):
    return subprocess.run([RESHARD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_progress():
    run = Run("convert", "big.safetensors", "a", "--format", "dcp", "--mesh", "4", "--preset", "fsdp",
              "--threads", "1", "--max-memory", "8MB", columns=50)
    check(run.code == 0, "a conversion at a terminal", run.screen)
    lines = [part for part in parts(run.screen) if b"%" in part]
    check(lines and all(line.startswith(b"convert ") for line in lines), "says how far it is", run.screen)
    check(max(map(len, parts(run.screen))) < 50, "on a line that fits", run.screen)
    check(b"\n" not in run.screen, "and no more than that line", run.screen)
    check(b"\x1b" not in run.screen + run.out, "without escape sequences", run.screen)
    check(run.out.startswith(b"from ") and b"%" not in run.out and b"\r" not in run.out,
          "the report is on standard output, and nothing else is", run.out)
    run = Run("verify", "a", "-q")
    check((run.code, run.screen, run.out) == (0, b"", b""), "--quiet is quiet", run.screen + run.out)
    run = Run("digest", "a", columns=20, env={"NO_COLOR": "1"})
    check(run.code == 0 and b"\x1b" not in run.screen + run.out, "NO_COLOR has no escape sequences", run.screen)
    check(max(map(len, parts(run.screen))) < 20, "a narrow terminal is kept to", run.screen)
    run = plain("diff", "a", "big.safetensors")
    check(run.returncode == 0 and b"%" not in run.stderr and b"\r" not in run.stderr,
          "no progress where there is no terminal", run.stderr)


def test_resize():
    run = Run("digest", "big.safetensors", "--threads", "1", "--max-memory", "4MB", columns=100,
              on_progress=lambda terminal: set_width(terminal, 24))
    check(run.code == 0 and run.before, "the terminal becomes narrower in the middle", run.screen)
    check(max(map(len, parts(run.after))) < 24, "and the line too", run.after)


def test_interrupt():
    arguments = ["convert", "big.safetensors", "b/", "--format", "dcp", "--mesh", "8", "--preset", "fsdp",
                 "--threads", "1", "--max-memory", "4MB"]
    run = Run(*arguments, on_progress=lambda terminal: os.write(terminal, b"\x03"))
    check(run.code == 130, "Ctrl-C exits with 130", (run.code, run.screen))
    check(b"--resume" in run.after and b" b.reshard-part;" in run.after, "and says how to go on", run.after)
    check(run.out == b"" and not os.path.exists("b"), "and there is no result", run.out)
    run = Run(*arguments)
    check(run.code == 3 and b"b.reshard-part" in run.screen, "to begin again is refused", run.screen)
    run = Run(*arguments, "--resume", "--verify")
    check(run.code == 0 and not os.path.exists("b.reshard-part"), "--resume finishes", run.screen)
    check(b"equal in both" in run.out, "and the result is the same", run.out)
    check(plain("diff", "big.safetensors", "b").returncode == 0, "for diff too")
    for verb in ["verify"], ["digest"], ["diff", "b"]:
        for _ in range(20):  # the read may be complete before the signal arrives
            run = Run(*verb, "big.safetensors", "--threads", "1", "--max-memory", "4MB",
                      on_progress=lambda terminal: os.write(terminal, b"\x03"))
            if run.code != 0:
                break
        check((run.code, run.out) == (130, b""), "Ctrl-C stops %s" % verb[0], (run.code, run.screen, run.out))


def catches_interrupts(child):
    """Whether a process has a handler of SIGINT."""
    with open("/proc/%d/status" % child) as status:
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", status.read())
    return bool(int(caught.group(1), 16) >> (signal.SIGINT - 1) & 1)


def test_interrupted_plan():
    write_checkpoint("rows.safetensors", ["w%d" % i for i in range(40)], 400 * 1000)
    run = subprocess.Popen([RESHARD, "split", "rows.safetensors", "c", "--mesh", "1000", "--preset", "fsdp"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while run.poll() is None and not catches_interrupts(run.pid):
        pass
    run.send_signal(signal.SIGINT)
    said = run.communicate()[1]
    check(run.returncode == 130 and b"interrupted" in said, "Ctrl-C stops a plan", (run.returncode, said))
    check(not os.path.exists("c") and not os.path.exists("c.reshard-part"), "and no file was made")


def test_columns():
    terminal, end = pty.openpty()
    subprocess.run([RESHARD, "inspect", "big.safetensors"], stdout=end)
    os.close(end)
    lines = [line.rstrip() for line in read_all(terminal).split(b"\r\n") if line.startswith((b"one", b"two"))]
    os.close(terminal)
    check(len(lines) == 2 and all(len(line) < 40 for line in lines), "a listing of short names is narrow", lines)
    listed = plain("inspect", "big.safetensors").stdout.splitlines()
    check(any(len(line) > 60 for line in listed), "columns are wider in a file", listed)


def test_pictures():
    hostile = 'a<b>&"\'\x1b[1m\u00e9]]>'
    write_checkpoint("odd & <name>.safetensors", [hostile, "plain"], 4000)
    problem = "f32[64,64] : 8x16:S0,S1 -> 128:S1"
    runs = [plain("inspect", "odd & <name>.safetensors", hostile, "--svg", "1.svg", "--html", "1.html"),
            plain("inspect", "b", "one", "--svg", "2.svg", "--html", "2.html"),
            plain("plan", problem, "--svg", "3.svg", "--html", "3.html"),
            plain("plan", "f32[8] : 4:S0 -> 2:R", "--svg", "4.svg", "--html", "4.html")]
    check(all(run.returncode == 0 for run in runs), "pictures are drawn", runs)
    for name in sorted(name for name in os.listdir(".") if name.endswith((".svg", ".html"))):
        try:
            root = xml.etree.ElementTree.parse(name).getroot()
            check(root.tag in ("{http://www.w3.org/2000/svg}svg", "html"), "%s is well formed" % name, root.tag)
        except xml.etree.ElementTree.ParseError as error:
            check(False, "%s is well formed" % name, error)
    text = "".join(xml.etree.ElementTree.parse("1.svg").getroot().itertext())
    check('a<b>&"\'' in text and "odd & <name>" in text, "names come through", text)
    check(not [name for name in os.listdir(".") if "reshard-part" in name], "nothing is left behind")


def main():
    directory = tempfile.mkdtemp()
    os.chdir(directory)
    try:
        write_checkpoint("big.safetensors", ["one", "two", "three", "four"], 24 * MB)
        test_progress()
        test_resize()
        test_interrupt()
        test_interrupted_plan()
        test_columns()
        test_pictures()
    finally:
        os.chdir("/")
        shutil.rmtree(directory)
    print("1..%d" % count)
    sys.exit(failed > 0)


main()
