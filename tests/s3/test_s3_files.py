"""Checkpoints in a bucket and behind URLs are those of a directory, with whatever credentials."""
import datetime
import http.server
import io
import ipaddress
import json
import os
import pathlib
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import unittest

import numpy
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import reshard
import tap
from services import Bucket, Fault, Proxy

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CHECKPOINTS = sorted(path.parent for path in GOLDEN.glob("*/*/.metadata")) + [GOLDEN / "hf_sharded/ckpt"]
COMMAND = os.environ["RESHARD"]
bucket = Bucket()
proxy = bucket.proxy
here = pathlib.Path(tempfile.mkdtemp())
PLAIN = {"PATH": os.environ["PATH"], "HOME": str(here), "AWS_EC2_METADATA_DISABLED": "true"}
ACCOUNT = {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def run(*args, code=0, **variables):
    """What the command prints; for another code than 0, its errors."""
    done = subprocess.run([COMMAND, *map(str, args)], env={**PLAIN, **ACCOUNT, **variables}, capture_output=True,
                          text=True, timeout=300)
    if done.returncode != code:
        raise AssertionError(f"{args} ends with {done.returncode}: {done.stderr}")
    return done.stderr if code else done.stdout


def upload(source, prefix, **options):
    for path in source.rglob("*"):
        if path.is_file():
            bucket.put(f"{prefix}/{path.relative_to(source)}", path.read_bytes(), **options)


def same_as_local(test, prefix, directory):
    """The objects below a prefix are the files of a directory, byte by byte."""
    local = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    test.assertEqual([key[len(prefix) + 1:] for key in bucket.keys(prefix + "/")], sorted(local))
    for name, expected in local.items():
        test.assertEqual(bucket.get(f"{prefix}/{name}"), expected, name)
    test.assertEqual(bucket.uploads(prefix), [])


def big(name="big", nbytes=48 << 20):
    """A checkpoint of several tensors and parts."""
    path = here / name
    if not path.exists():
        numbers = numpy.random.default_rng(2)
        reshard.save(path, {f"w{i}": numbers.integers(0, 255, (1024, nbytes >> 13), dtype=numpy.uint8)
                            for i in range(8)})
    return path


class Reading(unittest.TestCase):
    def test_golden(self):
        """every golden checkpoint has the same digests in a bucket and behind a URL"""
        for path in CHECKPOINTS:
            with self.subTest(path=path):
                prefix = f"golden/{path.relative_to(GOLDEN)}"
                upload(path, prefix)
                expected = reshard.digest(path)
                used = reshard.Storage(environment={}, endpoint=proxy.url, access_key="key", secret_key="secret")
                with reshard.open(f"s3://bkt/{prefix}", storage=used) as checkpoint:
                    self.assertEqual(reshard.digest(checkpoint), expected)
                    self.assertEqual(reshard.verify(checkpoint), reshard.verify(path))

    def test_commands(self):
        """inspect, verify, diff, digest and extract take URLs"""
        path = GOLDEN / "fsdp2_adamw/ckpt"
        upload(path, "ckpt")
        for verb in ("inspect", "verify", "digest"):
            self.assertEqual(run(verb, "s3://bkt/ckpt").replace("s3://bkt/ckpt", "X"),
                             run(verb, path).replace(str(path), "X"))
        run("diff", "s3://bkt/ckpt", path)
        run("extract", "s3://bkt/ckpt", "model.up.weight", here / "a.npy")
        run("extract", path, "model.up.weight", here / "b.npy")
        self.assertEqual((here / "a.npy").read_bytes(), (here / "b.npy").read_bytes())

    def test_missing(self):
        """what does not exist is an input that does not exist"""
        self.assertIn("s3://bkt/nowhere", run("inspect", "s3://bkt/nowhere", code=4))
        self.assertIn("NoSuchBucket", run("inspect", "s3://no-such-bucket/x", code=4))

    def test_names(self):
        """keys with all kinds of characters are read, and signed as botocore signs them"""
        source = GOLDEN / "fsdp2_adamw/ckpt"
        prefix = "a b+c%20d&e=f/ü'(x)*!~$,;:@/=?#"
        upload(source, prefix)
        proxy.reset()
        self.assertEqual(run("digest", f"s3://bkt/{prefix}"), run("digest", source))
        self.assertGreater(len(proxy.requests), 3)
        for request in proxy.requests:
            self.check_signature(request)

    def check_signature(self, request):
        stated = request.headers["authorization"]
        signed = stated.split("SignedHeaders=")[1].split(",")[0].split(";")
        auth = S3SigV4Auth(Credentials("key", "secret"), "s3", "us-east-1")
        again = AWSRequest(request.method, f"http://{request.headers['host']}{request.target}",
                           {name: request.headers[name] for name in signed})
        again.context["timestamp"] = request.headers["x-amz-date"]
        auth_text = auth.canonical_request(again)
        self.assertEqual(stated.split("Signature=")[1], auth.signature(auth.string_to_sign(again, auth_text), again))

    def test_signed_writes(self):
        """requests that write are signed as botocore signs them"""
        proxy.reset()
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/signed é", "--quiet")
        for request in proxy.requests:
            self.check_signature(request)

    def test_injection(self):
        """line breaks in a path do not end a header"""
        proxy.reset()
        run("inspect", "s3://bkt/x\r\nx-evil: 1\r\n", code=4)
        run("inspect", "s3://b\r\nkt/x", code=3)
        run("inspect", proxy.url + "/x\r\nx-evil: 1", code=3)
        self.assertFalse(any("x-evil" in request.headers for request in proxy.requests))

    def test_each_byte_once(self):
        """a part of a tensor is read as a few ranges"""
        source = big()
        upload(source, "ranges")
        proxy.reset()
        used = reshard.Storage(environment={}, endpoint=proxy.url, access_key="key", secret_key="secret")
        with reshard.open("s3://bkt/ranges", storage=used) as checkpoint:
            before = used.traffic
            with reshard.open(source) as local:
                numpy.testing.assert_array_equal(checkpoint["w3"][100:110], local["w3"][100:110])
                numpy.testing.assert_array_equal(checkpoint["w4"][:, 5:9], local["w4"][:, 5:9])
        self.assertLess(used.traffic.nbytes_received - before.nbytes_received, 8 << 20)
        self.assertLess(used.traffic.nrequests - before.nrequests, 20)


class Writing(unittest.TestCase):
    def convert(self, *options, source=GOLDEN / "fsdp2_adamw/ckpt", verb="convert"):
        """The same in a bucket and in a directory."""
        local = here / "local"
        shutil.rmtree(local, ignore_errors=True)
        run(verb, source, local, *options, "--quiet")
        run(verb, source, "s3://bkt/out", *options, "--quiet", "--force")
        same_as_local(self, "out", local)

    def test_formats(self):
        """outputs are those of a directory, byte by byte, in every format"""
        self.convert()
        self.convert("--mesh", "4", "--preset", "fsdp")
        self.convert("--mesh", "12", "--preset", "fsdp")  # more files than are written at a time
        self.convert("--compress", "zstd", "--mesh", "2", "--preset", "fsdp")
        self.convert(verb="merge")
        self.convert("--max-shard-size", "8kB", verb="merge")
        self.convert("--mesh", "3", "--preset", "fsdp", verb="split")
        self.convert("--mesh", "3", "--preset", "fsdp", source=big())
        self.convert(source=big(), verb="merge")

    def test_one_file(self):
        """an output that is one file"""
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", here / "one.safetensors", "--quiet")
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/one.safetensors", "--quiet")
        self.assertEqual(bucket.get("one.safetensors"), (here / "one.safetensors").read_bytes())
        self.assertIn("already exists", run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/one.safetensors", code=3))
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/one.safetensors", "--quiet", "--force")
        self.assertEqual(bucket.keys("one.safetensors"), ["one.safetensors"])

    def test_replaced(self):
        """an old checkpoint is replaced, other files stay; other files are not replaced"""
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/old", "--mesh", "8", "--preset", "fsdp", "--quiet")
        bucket.put("old/notes.txt", b"mine")
        self.assertIn("already exists", run("convert", GOLDEN / "rows_1d/ckpt", "s3://bkt/old", code=3))
        run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/old", "--quiet", "--force")
        self.assertEqual(bucket.keys("old/"), ["old/.metadata", "old/__0_0.distcp", "old/notes.txt"])
        run("diff", "s3://bkt/old", GOLDEN / "fsdp2_adamw/ckpt")
        bucket.put("mine/notes.txt", b"mine")
        self.assertIn("not a checkpoint", run("convert", GOLDEN / "rows_1d/ckpt", "s3://bkt/mine", "--force", code=3))
        self.assertEqual(bucket.keys("mine/"), ["mine/notes.txt"])

    def test_configs(self):
        """configs and tokenizers are found in a bucket and behind a URL as in a directory"""
        account = reshard.Storage(environment=ACCOUNT)
        config = json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2})
        upload(GOLDEN / "fsdp2_adamw/ckpt", "run/ckpt")
        for place in ("run/ckpt/huggingface/", "run/ckpt/", "run/", "run/huggingface/"):
            with self.subTest(place=place):
                for name, text in (("config.json", config), ("tokenizer.model", "t"), ("notes.md", "mine")):
                    bucket.put(place + name, text.encode())
                run("merge", "s3://bkt/run/ckpt", "s3://bkt/merged", "--quiet", "--force")
                names = ["config.json", "model.safetensors", "tokenizer.model"]
                self.assertEqual(bucket.keys("merged/"), ["merged/" + name for name in names])
                self.assertEqual(bucket.get("merged/config.json").decode(), config)
                if place.startswith("run/ckpt/"):
                    shutil.rmtree(here / "merged", ignore_errors=True)
                    reshard.merge("s3://bkt/run/ckpt", here / "merged", storage=account)
                    self.assertEqual(sorted(os.listdir(here / "merged")), names)
                for key in bucket.keys(place):
                    if not key.endswith((".distcp", ".metadata")):
                        bucket.client.delete_object(Bucket="bkt", Key=key)
        self.assertIn("has no config.json", subprocess.run(
            [COMMAND, "merge", "s3://bkt/run/ckpt", "s3://bkt/merged", "--force"], env={**PLAIN, **ACCOUNT},
            capture_output=True, text=True, check=True).stderr)

    def test_config_from(self):
        """--config-from takes a URL, also when nothing else is one; one that does not exist is an error"""
        bucket.put("model/config.json", b"{}")
        run("merge", GOLDEN / "fsdp2_adamw/ckpt", here / "from", "--config-from", "s3://bkt/model", "--quiet")
        self.assertEqual((here / "from/config.json").read_text(), "{}")
        self.assertIn("s3://bkt/none", run("merge", GOLDEN / "fsdp2_adamw/ckpt", here / "from2", "--config-from",
                                           "s3://bkt/none", code=2))
        account = reshard.Storage(environment=ACCOUNT)
        reshard.merge(GOLDEN / "fsdp2_adamw/ckpt", here / "from3", config_from="s3://bkt/model", storage=account)
        self.assertEqual((here / "from3/config.json").read_text(), "{}")

    def test_verify(self):
        """--verify reads back what was written"""
        self.assertIn("equal in both", run("convert", GOLDEN / "fsdp2_adamw/ckpt", "s3://bkt/verified", "--verify"))

    def test_bucket_to_bucket(self):
        """from a bucket to a bucket within a memory limit"""
        upload(big(), "source")
        report = json.loads(run("convert", "s3://bkt/source", "s3://bkt/target", "--mesh", "4", "--preset", "fsdp",
                                "--max-memory", "64MiB", "--json"))
        self.assertGreater(report["network"]["sent"], 48 << 20)
        run("diff", "s3://bkt/source", "s3://bkt/target")

    def start_and_kill(self, path, nparts, *options):
        """Kills a run when so many parts are uploaded."""
        done = threading.Event()
        count = [0]

        def act(request, ask):
            answer = ask()
            count[0] += answer.status == 200
            if count[0] >= nparts:
                done.set()
                time.sleep(0.3)
            return answer
        proxy.reset(lambda request: act if "partNumber" in request.query else None)
        child = subprocess.Popen([COMMAND, "convert", str(big()), path, *options], env={**PLAIN, **ACCOUNT},
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertTrue(done.wait(120))
        child.send_signal(signal.SIGKILL)
        child.wait()
        proxy.reset()

    def test_killed(self):
        """a killed run leaves nothing that looks finished, and goes on with the parts that are there"""
        options = ("--mesh", "2", "--preset", "fsdp", "--max-memory", "64MiB")
        local = here / "whole"
        run("convert", big(), local, *options, "--quiet")
        self.start_and_kill("s3://bkt/killed", 4, *options)
        self.assertIn("not finished", run("inspect", "s3://bkt/killed", code=4))
        self.assertIn("resume", run("convert", big(), "s3://bkt/killed", *options, code=3))
        self.assertEqual(bucket.keys("killed/"), ["killed/reshard-journal"])
        self.assertIn("2 uploads", run("uploads", "s3://bkt/killed"))
        time.sleep(1)  # what the killed run had sent arrives
        there = bucket.parts("killed/")
        self.assertGreaterEqual(len(there), 4)
        proxy.reset()
        run("convert", big(), "s3://bkt/killed", *options, "--quiet", "--resume")
        sent = {(one.path, int(one.query.split("partNumber=")[1].split("&")[0])) for one in proxy.requests
                if "partNumber" in one.query}
        self.assertEqual(sent & there, set())
        same_as_local(self, "killed", local)

    def test_killed_anywhere(self):
        """a run that is killed at any step of an output is resumed, and ends with the same bytes"""
        source, local = GOLDEN / "fsdp2_adamw/ckpt", here / "steps"
        options = ("--mesh", "2", "--preset", "fsdp", "--quiet")
        run("convert", source, local, *options)
        steps = [("PUT", "reshard-journal", ""), ("POST", "__0_0.distcp", "uploads="), ("PUT", "__1_0.distcp", "part"),
                 ("POST", "__0_0.distcp", "uploadId"), ("POST", "__1_0.distcp", "uploadId"),
                 ("HEAD", "__1_0.distcp", ""), ("PUT", ".metadata", ""), ("DELETE", "reshard-journal", "")]
        for number, (method, name, query) in enumerate(steps):
            for is_done in (False, True):
                with self.subTest(method=method, name=name, query=query, is_done=is_done):
                    prefix = f"step{number}{is_done}"
                    self.kill_at(f"s3://bkt/{prefix}", source, options, is_done,
                                 lambda one: one.method == method and one.path.endswith(name) and query in one.query)
                    finished = (method, is_done) == ("DELETE", True)
                    begun = bucket.keys(prefix + "/") != []
                    if not finished:
                        run("inspect", f"s3://bkt/{prefix}", code=4)
                    run("convert", source, f"s3://bkt/{prefix}", *options, *(["--resume"] if begun else []),
                        *(["--force"] if finished else []))
                    same_as_local(self, prefix, local)
                    self.assertEqual(bucket.uploads(prefix + "/"), [])  # also none that the killed run did not learn of

    def kill_at(self, path, source, options, is_done, matches):
        """Kills a run at a request, whose answer it does not get."""
        arrived, killed = threading.Event(), threading.Event()

        def act(request, ask):
            if is_done:
                ask()
            arrived.set()
            killed.wait(60)
        proxy.reset(lambda request: act if matches(request) else None)
        child = subprocess.Popen([COMMAND, "convert", str(source), path, *options], env={**PLAIN, **ACCOUNT},
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertTrue(arrived.wait(60))
        child.kill()
        child.wait()
        killed.set()
        proxy.reset()

    def test_killed_otherwise(self):
        """a killed run whose source changed is not resumed; its uploads can be removed"""
        self.start_and_kill("s3://bkt/dead", 2)
        other = here / "other"
        shutil.copytree(big(), other)
        os.utime(other / "__0_0.distcp")
        self.assertIn("read other files", run("convert", other, "s3://bkt/dead", "--resume", code=3))
        self.assertIn("1 upload removed", run("uploads", "--remove", "s3://bkt/dead"))
        self.assertEqual(bucket.uploads("dead"), [])
        reshard.save("s3://bkt/dead", {"x": numpy.zeros(3)}, overwrite=True,
                     storage=reshard.Storage(environment=ACCOUNT))
        self.assertEqual(bucket.keys("dead/"), ["dead/.metadata", "dead/__0_0.distcp"])

    def test_commit_fails(self):
        """a run that fails while its objects appear can be resumed"""
        out, local = "s3://bkt/commit", here / "commit"
        run("merge", GOLDEN / "fsdp2_adamw/ckpt", local, "--max-shard-size", "8kB", "--quiet")
        proxy.reset(lambda request: Fault.error(400, "Nope") if "index.json" in request.path else None)
        self.assertIn("Nope", run("merge", GOLDEN / "fsdp2_adamw/ckpt", out, "--max-shard-size", "8kB", code=5))
        proxy.reset()
        self.assertIn("not finished", run("inspect", out, code=4))
        run("merge", GOLDEN / "fsdp2_adamw/ckpt", out, "--max-shard-size", "8kB", "--resume", "--quiet")
        same_as_local(self, "commit", local)

    def test_ranks(self):
        """several processes write one checkpoint"""
        command = os.environ.get("RESHARD_MPI", "")
        if not shutil.which("mpirun") or not os.path.exists(command):
            self.skipTest("MPI is not installed")
        local = here / "ranks"
        run("convert", big(), local, "--mesh", "4", "--preset", "fsdp", "--quiet")
        done = subprocess.run(
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", command, "convert", str(big()),
             "s3://bkt/ranks", "--mesh", "4", "--preset", "fsdp", "--quiet"],
            env={**PLAIN, **ACCOUNT}, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        same_as_local(self, "ranks", local)

    def test_http(self):
        """an output behind a plain URL is refused"""
        self.assertIn("reading only", run("convert", GOLDEN / "rows_1d/ckpt", proxy.url + "/out", code=3))


def make_certificates():
    """A private authority, and a certificate of localhost."""
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name, key, issuer, issuer_key, is_authority):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        day = datetime.timedelta(days=1)
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    def called(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = certificate(called("private"), authority_key, called("private"), authority_key, True)
    own = certificate(called("localhost"), key, called("private"), authority_key, False)
    pem = serialization.Encoding.PEM
    (here / "ca.pem").write_bytes(authority.public_bytes(pem))
    (here / "own.pem").write_bytes(own.public_bytes(pem) + key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))


class Files(http.server.SimpleHTTPRequestHandler):
    """Files of a directory, with ranges."""

    asked = []
    moved_to = ""

    def send_head(self):
        Files.asked.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        name = self.path.split("?")[0].lstrip("/")
        path = str(GOLDEN / name if (GOLDEN / name).exists() else here / name)
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", Files.moved_to + self.path[6:])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if not os.path.isfile(path):
            self.send_error(404)
            return None
        data = pathlib.Path(path).read_bytes()
        first, last = 0, len(data) - 1
        wanted = self.headers.get("Range")
        if wanted:
            first, last = (int(one) for one in wanted[6:].split("-"))
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        return io.BytesIO(data[first:last + 1])

    def log_message(self, *_):
        pass


class Plain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        make_certificates()
        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        cls.url = f"http://127.0.0.1:{cls.server.server_port}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(here / "own.pem")
        cls.secure = Proxy(cls.server.server_port, context)
        cls.secure_bucket = Proxy(bucket.port, context)
        Files.moved_to = cls.url

    def test_directories(self):
        """DCP, an index of safetensors, and a file"""
        for path in ("fsdp2_adamw/ckpt", "mesh_2d/ckpt"):
            self.assertEqual(reshard.digest(f"{self.url}/{path}"), reshard.digest(GOLDEN / path))
        reshard.merge(GOLDEN / "fsdp2_adamw/ckpt", here / "indexed", max_shard_size="8kB")
        self.assertTrue((here / "indexed/model.safetensors.index.json").exists())
        self.assertEqual(reshard.digest(self.url + "/indexed"), reshard.digest(here / "indexed"))
        one = next(GOLDEN.glob("*/truth.safetensors"))
        name = one.relative_to(GOLDEN)
        self.assertEqual(reshard.digest(f"{self.url}/{name}"), reshard.digest(one))
        self.assertEqual(reshard.digest(f"{self.url}/{name}?signature=1"), reshard.digest(one))

    def test_configs(self):
        """configs beside a checkpoint behind a URL are copied"""
        shutil.copytree(GOLDEN / "fsdp2_adamw/ckpt", here / "web")
        (here / "web/config.json").write_text("{}")
        (here / "web/vocab.txt").write_text("a b")
        run("merge", self.url + "/web", here / "from_web", "--quiet")
        self.assertEqual(sorted(os.listdir(here / "from_web")), ["config.json", "model.safetensors", "vocab.txt"])

    def test_unknown(self):
        """a directory without a well-known file"""
        self.assertIn("does not list", run("inspect", self.url + "/tensors", code=4))

    def test_tls(self):
        """a private authority is trusted if it is named, and else not"""
        path = self.secure.url + "/fsdp2_adamw/ckpt"
        self.assertIn("certificate", run("inspect", path, code=5))
        self.assertEqual(run("digest", path, "--ca-bundle", here / "ca.pem"),
                         run("digest", GOLDEN / "fsdp2_adamw/ckpt"))
        upload(GOLDEN / "fsdp2_adamw/ckpt", "tls")
        self.assertEqual(run("digest", "s3://bkt/tls", AWS_ENDPOINT_URL=self.secure_bucket.url,
                             AWS_CA_BUNDLE=str(here / "ca.pem")), run("digest", GOLDEN / "fsdp2_adamw/ckpt"))
        self.assertIn("certificate", run("digest", "s3://bkt/tls", AWS_ENDPOINT_URL=self.secure_bucket.url, code=5))

    def test_redirect(self):
        """a redirect is followed, and another host gets no token"""
        used = reshard.Storage(environment={}, bearer_token="sesame", ca_file=here / "ca.pem")
        Files.asked.clear()
        with reshard.open(self.url + "/moved/fsdp2_adamw/ckpt", storage=used) as checkpoint:
            self.assertEqual(reshard.digest(checkpoint), reshard.digest(GOLDEN / "fsdp2_adamw/ckpt"))
        Files.moved_to = f"http://localhost:{self.server.server_port}"
        Files.asked.clear()
        with reshard.open(self.url + "/moved/fsdp2_adamw/ckpt", storage=used):
            pass
        Files.moved_to = self.url
        for _, path, _, token in Files.asked:
            self.assertEqual(token, "Bearer sesame" if path.startswith("/moved/") else None)

    def test_downgrade(self):
        """https does not redirect to http"""
        used = reshard.Storage(environment={}, ca_file=here / "ca.pem", max_attempts=1)
        with self.assertRaises(reshard.Error):
            reshard.open(self.secure.url + "/moved/fsdp2_adamw/ckpt", storage=used)

    def test_credentials_in_url(self):
        """credentials in a URL are refused"""
        self.assertIn("not taken", run("inspect", "https://user:pw@localhost/x.safetensors", code=3))


if __name__ == "__main__":
    try:
        tap.main()
    finally:
        shutil.rmtree(here, ignore_errors=True)
