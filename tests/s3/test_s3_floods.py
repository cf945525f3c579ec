"""Servers that send without end, and addresses that lead elsewhere: the command ends, soon and with an error that names
the file, and nothing is sent to another host."""
import os
import resource
import socket
import subprocess
import threading
import unittest

import reshard
import tap

COMMAND = os.environ["RESHARD"]
BLOCK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n\r\n"
RANGE = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-8/100000"


class Server:
    """Answers HEAD for a file of 100,000 bytes, and other requests with `start` and then `unit` until it is closed."""

    def __init__(self, start, unit):
        self.start, self.unit = start, unit
        self.nrequests = 0
        self.closed = False
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while not self.closed:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        received = b""
        try:
            while more := client.recv(1 << 16):
                received += more
                while b"\r\n\r\n" in received:
                    head, _, received = received.partition(b"\r\n\r\n")
                    self.nrequests += 1
                    self.answer(client, head)
        except OSError:
            pass  # the client had enough
        client.close()

    def answer(self, client, head):
        if head.startswith(b"HEAD"):
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nETag: \"x\"\r\n\r\n")
            return
        client.sendall(self.start)
        while self.unit and not self.closed:
            client.sendall(self.unit)

    def close(self):
        self.closed = True
        self.socket.close()


def limit():
    resource.setrlimit(resource.RLIMIT_CPU, (20, 21))  # far above what is needed: it ends what does not end


def inspect(path, **variables):
    """The exit code, and what was printed."""
    done = subprocess.run([COMMAND, "inspect", path], capture_output=True, text=True, preexec_fn=limit, check=False,
                          env={**os.environ, **variables})
    return done.returncode, done.stderr


class Floods(unittest.TestCase):
    def refused(self, start, unit, *words):
        server = Server(start, unit)
        try:
            path = f"http://127.0.0.1:{server.port}/a/model.safetensors"
            code, printed = inspect(path)
        finally:
            server.close()
        self.assertEqual(code, 5, printed)
        for word in (path, *words):
            self.assertIn(word, printed)
        self.assertLess(server.nrequests, 4, "it is not tried again")

    def test_errors(self):
        """an error, and one that may pass, whose bodies do not end"""
        for status in (b"403 No", b"503 Later"):
            self.refused(b"HTTP/1.1 " + status + CHUNKED, BLOCK, "far more than was requested")

    def test_redirect(self):
        """a redirect whose body does not end"""
        self.refused(b"HTTP/1.1 302 Found\r\nLocation: /b/model.safetensors" + CHUNKED, BLOCK,
                     "far more than was requested")

    def test_trailers(self):
        """headers behind a body that do not end"""
        self.refused(RANGE + CHUNKED + b"9\r\n123456789\r\n0\r\n", b"X: " + b"y" * 1000 + b"\r\n",
                     "far more than was requested")

    def test_other_protocols(self):
        """redirects to files and to other protocols"""
        for place in (b"file:///etc/passwd", b"ftp://127.0.0.1/x", b"gopher://127.0.0.1/x"):
            self.refused(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + place + b"\r\n\r\n", b"",
                         "not supported or disabled")


class Listing(Server):
    """A service whose listings have a page for each number that `pages` yields: its entries, and the token of the next
    page."""

    def __init__(self, root, pages):
        super().__init__(b"", b"")
        self.root, self.pages = root, pages

    def answer(self, client, head):
        status, body = b"404 No", b""
        if head.startswith(b"GET"):
            entries, token = self.pages(self.nrequests)
            status, body = b"200 OK", f"<{self.root}>{entries}<IsTruncated>{'true' if token else 'false'}</IsTruncated>"
            body = f"{body}<NextContinuationToken>{token or ''}</NextContinuationToken>".encode()
            body += f"<NextKeyMarker>{token or ''}</NextKeyMarker></{self.root}>".encode()
        client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def objects(*names):
    return "".join(f"<Contents><Key>a/{name}</Key><Size>4</Size><ETag>x</ETag></Contents>" for name in names)


class Listings(unittest.TestCase):
    def listed(self, pages, most):
        """What the command prints. It requests at most so many pages."""
        server = Listing("ListBucketResult", pages)
        code, printed = inspect("s3://bucket/a", AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.port}",
                                AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
        server.close()
        self.assertNotEqual(code, 0)
        self.assertIn("s3://bucket/a", printed)
        self.assertLess(server.nrequests, most)
        return printed

    def test_endless(self):
        """pages whose tokens alternate or are always new, with the same objects, or with none"""
        for pages in (lambda n: (objects("b"), "xy"[n % 2]), lambda n: (objects("b"), f"x{n}"), lambda n: ("", f"x{n}"),
                      lambda n: (f"<CommonPrefixes><Prefix>a/{n % 9}/</Prefix></CommonPrefixes>", f"x{n}")):
            self.assertIn("repeats a page", self.listed(pages, 200))

    def test_long(self):
        """a listing of many objects is read, and objects that it repeats are there once"""
        def pages(n):
            return objects(*(f"{n // 2}-{i}.pt" for i in range(3000))), f"x{n}" if n < 43 else None
        self.assertIn("found 63000 torch.save files", self.listed(pages, 200))

    def test_uploads(self):
        """uploads that are listed again and again"""
        upload = "<Upload><Key>a/b</Key><UploadId>1</UploadId><Initiated>2026-01-01</Initiated></Upload>"
        for pages in (lambda n: (upload, f"x{n}"), lambda n: ("", "xy"[n % 2])):
            server = Listing("ListMultipartUploadsResult", pages)
            storage = reshard.Storage(environment={}, endpoint=f"http://127.0.0.1:{server.port}", access_key="key",
                                      secret_key="secret")
            with self.assertRaisesRegex(reshard.FileError, "s3://bucket/a.*repeats a page"):
                storage.uploads("s3://bucket/a")
            server.close()
            self.assertLess(server.nrequests, 200)


class Addresses(unittest.TestCase):
    def refused(self, words, **variables):
        """A setting that leads elsewhere is refused before anything is sent."""
        other = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"")
        code, printed = inspect("s3://bucket/a", **{name: value.replace("PORT", str(other.port))
                                                    for name, value in variables.items()})
        other.close()
        self.assertNotEqual(code, 0)
        self.assertIn(words, printed)
        self.assertEqual(other.nrequests, 0)

    def test_metadata(self):
        """a service of credentials that looks like one of this machine"""
        none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nonexistent",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN": "secret"}
        for url in ("http://127.0.0.1:x@localhost:PORT/", "http://localhost:80@127.0.0.1:PORT/",
                    "http://localhost?@127.0.0.1:PORT/", "http://127.0.0.1.localhost:PORT/"):
            self.refused("_FULL_URI must be https", AWS_CONTAINER_CREDENTIALS_FULL_URI=url, **none)
        self.refused("_FULL_URI must be", AWS_CONTAINER_CREDENTIALS_FULL_URI="http://localhost:PORT/" + "a" * 3000,
                     **none)
        self.refused("_RELATIVE_URI must be", AWS_CONTAINER_CREDENTIALS_RELATIVE_URI=":x@127.0.0.1:PORT/", **none)

    def test_region(self):
        """a region that would be another host"""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        for region, character in (("x@127.0.0.1:PORT/", "@"), ("127.0.0.1:PORT/", ":"), ("a b", " ")):
            self.refused(f"has the character '{character}'", AWS_REGION=region, **keys)

    def test_endpoint(self):
        """endpoints with a user, a path or a space, and keys with line breaks"""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        for url in ("http://a:b@127.0.0.1:PORT", "http://127.0.0.1:PORT/a?b", "http://127.0.0.1:PORT /"):
            self.refused("must be a host and perhaps a port", AWS_ENDPOINT_URL=url, **keys)
        self.refused("control character", AWS_ENDPOINT_URL="http://127.0.0.1:PORT",
                     **{**keys, "AWS_ACCESS_KEY_ID": "key\r\nX-Other: 1"})


if __name__ == "__main__":
    tap.main()
