"""A server that speaks the protocol of S3, and a proxy in front of it that records requests and injects faults.

    bucket = Bucket()                     one server for the whole test
    proxy = bucket.proxy                  proxy.fault = function of a Request that returns an action, or None
    Fault.status(503)                     answers without asking the server
"""
import atexit
import http.client
import logging
import os
import socket
import ssl
import struct
import subprocess
import tempfile
import threading
import time

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer


class Request:
    """What a client sent. `number` counts those that look the same, from 1 on."""

    def __init__(self, method, target, headers, body, number):
        self.method, self.target, self.headers, self.body, self.number = method, target, headers, body, number
        self.path, _, self.query = target.partition("?")

    def __repr__(self):
        return f"{self.method} {self.target} {self.headers.get('range', '')}"


class Answer:
    """The answer of the server; faults change it before it is sent."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body
        self.cut = None  # bytes of the body that are sent
        self.reset = False  # instead of closing
        self.delay = 0.0  # seconds between pieces of 1 kB

    def get(self, name):
        return next(value for key, value in self.headers if key.lower() == name.lower())

    def set(self, name, value):
        self.headers = [(key, old) for key, old in self.headers if key.lower() != name.lower()]
        self.headers.append((name, value))


class Fault:
    """Actions: functions of the request and of a function that asks the server."""

    @staticmethod
    def status(code, body=b"", **headers):
        return lambda request, ask: Answer(code, [(name.replace("_", "-"), value) for name, value in headers.items()],
                                           body)

    @staticmethod
    def error(status, code):
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
        return Fault.status(status, text.encode())

    @staticmethod
    def edited(edit):
        """Asks, and edits the body of the answer."""
        def change(answer):
            answer.body = edit(answer.body)
            answer.set("content-length", str(len(answer.body)))
        return Fault.changed(change)

    @staticmethod
    def changed(change):
        """Asks, and changes the answer."""
        def act(request, ask):
            answer = ask()
            change(answer)
            return answer
        return act


class Proxy:
    """Listens on a port of this machine. With `context` it speaks TLS."""

    def __init__(self, upstream, context=None):
        self.upstream, self.context = upstream, context
        self.fault, self.requests, self.counts = None, [], {}
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = self.listener.getsockname()[1]
        self.url = f"{'https' if context else 'http'}://localhost:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self, fault=None):
        with self.lock:
            self.fault, self.requests, self.counts = fault, [], {}

    def _accept(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.context:
                connection = self.context.wrap_socket(connection, server_side=True)
            stream = connection.makefile("rb")
            while self._serve_one(connection, stream):
                pass
        except (OSError, ssl.SSLError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    def _serve_one(self, connection, stream):
        line = stream.readline().decode("latin-1").split()
        if len(line) != 3:
            return False
        headers = {}
        while True:
            header = stream.readline().decode("latin-1").strip()
            if not header:
                break
            name, _, value = header.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = stream.read(int(headers.get("content-length", 0)))
        method, target = line[:2]
        with self.lock:
            key = (method, target, headers.get("range"))
            self.counts[key] = self.counts.get(key, 0) + 1
            request = Request(method, target, headers, body, self.counts[key])
            self.requests.append(request)
            fault = self.fault
        action = fault(request) if fault else None
        answer = action(request, lambda: self._ask(request)) if action else self._ask(request)
        return self._send(connection, method, answer)

    def _ask(self, request):
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        headers = {name: value for name, value in request.headers.items() if name not in ("connection", "expect")}
        upstream.request(request.method, request.target, request.body, headers)
        found = upstream.getresponse()
        answer = Answer(found.status, found.getheaders(), found.read())
        upstream.close()
        return answer

    def _send(self, connection, method, answer):
        if answer is None:  # closed without a word
            return False
        if isinstance(answer, bytes):
            connection.sendall(answer)
            return False
        names = [name.lower() for name, _ in answer.headers]
        headers = [(name, value) for name, value in answer.headers
                   if name.lower() not in ("connection", "transfer-encoding", "server")]
        if "content-length" not in names:
            headers.append(("content-length", str(len(answer.body))))
        head = f"HTTP/1.1 {answer.status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers)
        connection.sendall(head.encode("latin-1") + b"\r\n")
        body = b"" if method == "HEAD" else answer.body
        sent = body if answer.cut is None else body[:answer.cut]
        if answer.delay:
            for at in range(0, len(sent), 1000):
                connection.sendall(sent[at:at + 1000])
                time.sleep(answer.delay)
        else:
            connection.sendall(sent)
        if answer.reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return answer.cut is None and not answer.reset


def start_moto():
    """Returns the port of moto's server. It takes any signature."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server.get_host_and_port()[1]


ACCOUNTS = ("root,root", "key,secret", "k,s", "env,s", "file,s", "other,s", "role,a/b+c", "key2,s")


def start_rclone():
    """Returns the port of rclone's server, which keeps objects in files and checks signatures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tempfile.TemporaryDirectory()
    keys = [word for account in ACCOUNTS for word in ("--auth-key", account)]
    process = subprocess.Popen([os.environ["RCLONE"], "serve", "s3", *keys, "--addr", f"127.0.0.1:{port}",
                                "--config", os.devnull, folder.name], stderr=subprocess.DEVNULL)

    def stop():
        process.kill()
        process.wait()
        folder.cleanup()
    atexit.register(stop)
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except OSError:
            time.sleep(0.05)
    raise OSError("rclone does not start")


RCLONE = bool(os.environ.get("RCLONE"))


class Bucket:
    """A server with one bucket, and a proxy before it. The server is rclone's if $RCLONE names it, else moto's."""

    def __init__(self, name="bkt"):
        self.port = start_rclone() if RCLONE else start_moto()
        self.name = name
        self.proxy = Proxy(self.port)
        self.client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1", aws_access_key_id="root",
            aws_secret_access_key="root", config=Config(s3={"addressing_style": "path"}))
        self.client.create_bucket(Bucket=name)

    def put(self, key, data, **options):
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)

    def get(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def keys(self, prefix=""):
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix).get("Contents", [])
        return sorted(one["Key"] for one in found)

    def uploads(self, prefix=""):
        found = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [one["Key"] for one in found if one["Key"].startswith(prefix)]

    def parts(self, prefix):
        """The parts of uploads that were not ended: pairs of a path and a number."""
        found = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return {(f"/{self.name}/{one['Key']}", part["PartNumber"]) for one in found if one["Key"].startswith(prefix)
                for part in self.client.list_parts(Bucket=self.name, Key=one["Key"], UploadId=one["UploadId"])
                .get("Parts", [])}
