"""Reading and writing through s3:// beside as many curls at once, against one server of this machine.

    make bench-s3

The server keeps objects in memory and does no more than the protocol needs; it and its clients share the machine.
"""
import http.server
import os
import re
import subprocess
import sys
import tempfile
import threading
import time

import numpy

import reshard

OBJECTS, UPLOADS, LOCK = {}, {}, threading.Lock()


class Server(http.server.BaseHTTPRequestHandler):
    """Objects of one bucket."""

    protocol_version = "HTTP/1.1"

    def reply(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if "list-type" in query:
            prefix = re.search(r"prefix=([^&]*)", query).group(1).replace("%2F", "/")
            entry = "<Contents><Key>{}</Key><Size>{}</Size><ETag>x</ETag></Contents>"
            entries = "".join(entry.format(key, len(OBJECTS["/b/" + key]))
                              for key in sorted(one[3:] for one in OBJECTS) if key.startswith(prefix))
            return self.reply(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}"
                                   "</ListBucketResult>".encode())
        data = OBJECTS.get(path)
        if data is None:
            return self.reply(404)
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not found:
            return self.reply(200, data, ETag="x")
        first, last = int(found.group(1)), int(found.group(2))
        self.reply(206, memoryview(data)[first:last + 1], ETag="x", Content_Range=f"bytes {first}-{last}/{len(data)}")

    def do_HEAD(self):
        data = OBJECTS.get(self.path)
        self.reply(404) if data is None else self.reply(200, ETag="x", Content_Length=str(len(data)))

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, _, query = self.path.partition("?")
        part = re.search(r"partNumber=(\d+)", query)
        with LOCK:
            if part:
                UPLOADS.setdefault(path, {})[int(part.group(1))] = body
            else:
                OBJECTS[path] = body
        self.reply(200, ETag="x")

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if "uploads" in self.path:
            return self.reply(200, b"<R><UploadId>u</UploadId></R>")
        with LOCK:
            parts = UPLOADS.pop(path)
            OBJECTS[path] = b"".join(parts[number] for number in sorted(parts))
        self.reply(200, b"<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")

    def do_DELETE(self):
        OBJECTS.pop(self.path, None)
        self.reply(204)

    def log_message(self, *_):
        pass


def timed(what, nbytes, function):
    best = min(timeit(function) for _ in range(3))
    print(f"{what:28} {nbytes / best / 1e9:6.2f} GB/s")
    return best


def timeit(function):
    began = time.monotonic()
    function()
    return time.monotonic() - began


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
        puts = [["-T", part, f"{url}/b/curl?uploadId=u&partNumber={i + 1}"] for i in range(njobs)]

        def upload():
            curls(puts)
            curls([["-d", "", f"{url}/b/curl?uploadId=u"]])
        limit = timed(f"write: {njobs} curls", nbytes, upload)
        ours = timed("write: rsd_save", nbytes, lambda: reshard.save(
            "s3://b/x", state, storage=used, overwrite=True, pool=2))
        print(f"{'':28} {limit / ours:6.2f} x\n")
        gets = [["-r", f"{i * each}-{(i + 1) * each - 1}", "-o", "/dev/null", f"{url}/b/x/__0_0.distcp"]
                for i in range(njobs)]
        limit = timed(f"read: {njobs} curls", nbytes, lambda: curls(gets))
        with reshard.open("s3://b/x", storage=used) as checkpoint:
            ours = timed("read: rsd_load", nbytes, lambda: checkpoint.load(state, pool=2))
        print(f"{'':28} {limit / ours:6.2f} x")
        print(used.traffic)


if __name__ == "__main__":
    main()
