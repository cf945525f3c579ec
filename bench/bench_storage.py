"""Reading and writing through s3:// beside as many curls at once, against one server of this machine.

    make bench-s3

The server keeps the parts of objects in memory, as they were sent, and does no more than the protocol needs. It
receives and sends a body in one system call, without the lock of Python. It and its clients share the machine. curl
sends and receives the same bytes in as many connections, and neither signs nor hashes. A second row of writing has
curls that sign, and hash what they send, as reshard does.
"""
import http.server
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy

import reshard

TURNS = 5
OBJECTS, UPLOADS, FREE, LOCK = {}, {}, {}, threading.Lock()  # objects: lists of parts; FREE: buffers, by length


class Server(http.server.BaseHTTPRequestHandler):
    """Objects of one bucket."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def reply(self, code, body=(b"",), length=None, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(sum(map(len, body)) if length is None else length))
        self.end_headers()
        for part in body if self.command != "HEAD" else ():
            self.connection.sendall(part)

    def receive(self):
        """The body, in a buffer of an object that was removed if there is one of its length."""
        n = int(self.headers.get("Content-Length", 0))
        with LOCK:
            buffer = FREE[n].pop() if FREE.get(n) else bytearray(n)
        ahead = self.rfile.read1(min(n, 8192)) if n else b""
        buffer[:len(ahead)] = ahead
        at = len(ahead)
        while at < n:
            at += self.connection.recv_into(memoryview(buffer)[at:], n - at, socket.MSG_WAITALL)
        return buffer

    def store(self, path, parts):
        with LOCK:
            for old in OBJECTS.pop(path, ()):
                FREE.setdefault(len(old), []).append(old)
            if parts is not None:
                OBJECTS[path] = parts

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if "list-type" in query:
            prefix = re.search(r"prefix=([^&]*)", query).group(1).replace("%2F", "/")
            entry = "<Contents><Key>{}</Key><Size>{}</Size><ETag>x</ETag></Contents>"
            entries = "".join(entry.format(key, sum(map(len, OBJECTS["/b/" + key])))
                              for key in sorted(one[3:] for one in OBJECTS) if key.startswith(prefix))
            return self.reply(200, [f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}"
                                    "</ListBucketResult>".encode()])
        parts = OBJECTS.get(path)
        if parts is None:
            return self.reply(404)
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found:
            return self.reply(200, parts, ETag="x")
        first, end = int(found.group(1)), int(found.group(2)) + 1
        chosen, at = [], 0
        for part in parts:
            view = memoryview(part)[max(first - at, 0):max(end - at, 0)]
            chosen += [view] if len(view) else []
            at += len(part)
        self.reply(206, chosen, ETag="x", Content_Range=f"bytes {first}-{end - 1}/{at}")

    def do_HEAD(self):
        parts = OBJECTS.get(self.path)
        self.reply(404) if parts is None else self.reply(200, length=sum(map(len, parts)), ETag="x")

    def do_PUT(self):
        body = self.receive()
        path, _, query = self.path.partition("?")
        part = re.search(r"partNumber=(\d+)", query)
        if part:
            with LOCK:
                UPLOADS.setdefault(path, {})[int(part.group(1))] = body
        else:
            self.store(path, [body])
        self.reply(200, ETag="x")

    def do_POST(self):
        self.receive()
        path = self.path.partition("?")[0]
        if "uploads" in self.path:
            return self.reply(200, [b"<R><UploadId>u</UploadId></R>"])
        with LOCK:
            parts = UPLOADS.pop(path)
        self.store(path, [parts[number] for number in sorted(parts)])
        self.reply(200, [b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"])

    def do_DELETE(self):
        self.store(self.path, None)
        self.reply(204)

    def log_message(self, *_):
        pass


def compared(what, nbytes, peer, function):
    """The best of runs in turn, so that both meet the same neighbours, and the least CPU time of clients."""
    runs = [(measured(peer, resource.RUSAGE_CHILDREN), measured(function, resource.RUSAGE_SELF)) for _ in range(TURNS)]
    (limit, limit_cpu), (ours, ours_cpu) = (map(min, zip(*one)) for one in zip(*runs))
    print(f"{what:17}: as many curls {nbytes / limit / 1e9:5.2f} GB/s, reshard {nbytes / ours / 1e9:5.2f} GB/s, "
          f"{limit / ours:4.2f} x; seconds of CPU: curls {limit_cpu:4.2f}, reshard {ours_cpu:4.2f}")


def measured(function, whose):
    """Seconds that a function takes, and seconds of CPU of this process or of the children that it ran."""
    before, began = resource.getrusage(whose), time.monotonic()
    function()
    wall, after = time.monotonic() - began, resource.getrusage(whose)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def curls(arguments):
    running = [subprocess.Popen(["curl", "-sf", *one], stdout=subprocess.DEVNULL) for one in arguments]
    if any(child.wait() for child in running):
        sys.exit("curl failed")


def main():
    nbytes, njobs = int(sys.argv[1] if len(sys.argv) > 1 else 512) << 20, 8
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    child = os.fork()
    if child == 0:
        server.serve_forever()
    try:
        measure(f"http://127.0.0.1:{server.server_port}", nbytes, njobs)
    finally:
        os.kill(child, 9)


def measure(url, nbytes, njobs):
    state = {f"w{i}": numpy.ones(nbytes // 16, numpy.uint8) for i in range(16)}
    used = reshard.Storage(environment={}, endpoint=url, access_key="k", secret_key="s")
    with tempfile.TemporaryDirectory() as here:
        each = nbytes // njobs
        part = os.path.join(here, "part")
        with open(part, "wb") as file:
            file.write(bytes(each))
        urls = [f"{url}/b/curl?uploadId=u&partNumber={i + 1}" for i in range(njobs)]
        signing = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "k:s", "-X", "PUT", "--data-binary", "@" + part]

        def upload(options):
            curls([[*options, one] for one in urls])
            curls([["-d", "", f"{url}/b/curl?uploadId=u"]])

        def save():
            reshard.save("s3://b/x", state, storage=used, overwrite=True, pool=2)
        compared("write", nbytes, lambda: upload(["-T", part]), save)
        compared("write, curls sign", nbytes, lambda: upload(signing), save)
        gets = [["-r", f"{i * each}-{(i + 1) * each - 1}", "-o", "/dev/null", f"{url}/b/x/__0_0.distcp"]
                for i in range(njobs)]
        with reshard.open("s3://b/x", storage=used) as checkpoint:
            compared("read", nbytes, lambda: curls(gets), lambda: checkpoint.load(state, pool=2))
        print(used.traffic)


if __name__ == "__main__":
    main()
