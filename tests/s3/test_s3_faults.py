"""Every fault of a server ends in the right data, or in an error that names bucket, key and bytes."""
import base64
import hashlib
import os
import re
import unittest

import numpy

import reshard
import tap
from services import RCLONE, Bucket, Fault, Proxy

bucket = Bucket()
proxy = bucket.proxy
MB = 1 << 20


def storage(**options):
    given = dict(environment={}, endpoint=proxy.url, access_key="key", secret_key="secret", max_attempts=4, timeout=5)
    return reshard.Storage(**{**given, **options})


def state(nbytes=20 * MB):
    numbers = numpy.random.default_rng(1)
    return {"big": numbers.integers(0, 255, (nbytes >> 10, 1 << 10), dtype=numpy.uint8),
            "small": numbers.random(100)}


STATE = state()


def tensors(path, **options):
    with reshard.open(path, **options) as checkpoint:
        return {name: checkpoint[name][...] for name in checkpoint}


def nth(action, n=1, **wanted):
    """The action for the first n requests of their kind that match."""
    def fault(request):
        matches = all(value in getattr(request, name) for name, value in wanted.items())
        return action if matches and request.number <= n else None
    return fault


def ranged(fault):
    """Only requests for more than a few bytes of a data file."""
    def chosen(request):
        first, _, last = request.headers.get("range", "bytes=0-0")[6:].partition("-")
        return fault(request) if int(last) - int(first) > 100000 else None
    return chosen


class Reading(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        proxy.reset()
        reshard.save("s3://bkt/read", STATE, storage=storage(), overwrite=True)

    def read(self, fault, **options):
        proxy.reset(fault)
        used = storage(**options)
        try:
            return tensors("s3://bkt/read", storage=used), used.traffic
        finally:
            proxy.reset()

    def right(self, fault, retries=1, **options):
        found, traffic = self.read(fault, **options)
        for name, expected in STATE.items():
            numpy.testing.assert_array_equal(found[name], expected)
        self.assertGreaterEqual(traffic.nretries, retries)

    def wrong(self, fault, *words, kind=reshard.FileError, **options):
        with self.assertRaises(kind) as caught:
            self.read(fault, **options)
        for word in ("s3://bkt/read", *words):
            self.assertIn(word, str(caught.exception))

    def test_no_fault(self):
        """what is needed is read once"""
        found, traffic = self.read(None)
        needed = sum(one.nbytes for one in STATE.values())
        self.assertEqual(traffic.nretries, 0)
        self.assertLess(traffic.nbytes_received, needed + 200000)

    def test_passing_statuses(self):
        """500, 502, 503, 504 and 429 are tried again"""
        for code in (500, 502, 503, 504, 429):
            with self.subTest(code=code):
                self.right(nth(Fault.status(code, retry_after="0")))

    def test_lasting_status(self):
        """a status that does not pass names bucket, key, bytes and attempts"""
        self.wrong(ranged(nth(Fault.error(503, "SlowDown"), 100)), "__0_0.distcp", "bytes ", "503 SlowDown",
                   "4 attempts")

    def test_reset(self):
        """a connection reset in the middle of an answer"""
        def change(answer):
            answer.cut, answer.reset = len(answer.body) // 2, True
        self.right(ranged(nth(Fault.changed(change))))

    def test_short_body(self):
        """an answer that ends early, with or without an honest length"""
        def cut(answer):
            answer.cut = len(answer.body) - 1000

        def lie(answer):
            answer.body = answer.body[:-1000]
            answer.set("content-length", str(len(answer.body)))
        for change in (cut, lie):
            self.right(ranged(nth(Fault.changed(change))))
            self.wrong(ranged(nth(Fault.changed(change), 100)), "__0_0.distcp", "bytes ")

    def test_long_body(self):
        """an answer that is longer than its range"""
        self.right(ranged(nth(Fault.edited(lambda body: body + b"more"))))

    def test_wrong_range(self):
        """an answer with another range"""
        def change(answer):
            answer.set("content-range", "bytes 0-99/" + answer.get("content-range").split("/")[1])
        self.right(ranged(nth(Fault.changed(change))))
        self.wrong(ranged(nth(Fault.changed(change), 100)), "__0_0.distcp", "bytes ", "instead")

    def test_range_status(self):
        """a range that comes as 200, and a 206 that does not say which range it is"""
        def as_200(answer):
            answer.status = 200

        def unnamed(answer):
            answer.status = 206
            answer.headers = [one for one in answer.headers if one[0].lower() != "content-range"]
        self.right(ranged(nth(Fault.changed(as_200), 100)), retries=0)
        self.right(ranged(nth(Fault.changed(unnamed))))
        self.wrong(ranged(nth(Fault.changed(unnamed), 100)), "__0_0.distcp", "bytes ", "Content-Range")

    def test_no_ranges(self):
        """a server that ignores ranges and sends the whole file"""
        def act(request, ask):
            del request.headers["range"]
            return ask()
        self.wrong(ranged(nth(act, 100)), "ignores Range")

    def test_wrong_etag(self):
        """a file that changes while it is read"""
        self.wrong(ranged(nth(Fault.changed(lambda answer: answer.set("etag", '"other"')), 100)), "changed")

    def test_unquoted_etag(self):
        """a listing whose ETags have no quotes"""
        bare = Fault.edited(lambda body: re.sub(
            rb"<ETag>(.*?)</ETag>", lambda found: b"<ETag>" + re.sub(rb'"|&quot;|&#34;', b"", found[1]) + b"</ETag>",
            body))
        self.right(nth(bare, 100, query="list-type=2"), retries=0)

    def test_replaced(self):
        """a file that is replaced while it is read"""
        def fault(request):
            if request.method == "GET" and "range" in request.headers and "distcp" in request.path:
                bucket.put("replaced/__0_0.distcp", os.urandom(21 * MB))
        reshard.save("s3://bkt/replaced", STATE, storage=storage(), overwrite=True)
        proxy.reset(fault)
        with self.assertRaises(reshard.FileError) as caught:
            tensors("s3://bkt/replaced", storage=storage())
        proxy.reset()
        self.assertIn("changed", str(caught.exception))

    def test_slow_bytes(self):
        """an answer that trickles is dropped and asked for again"""
        def change(answer):
            answer.delay = 2.5
        self.right(ranged(nth(Fault.changed(change))), timeout=2)

    def test_silence(self):
        """a server that closes without a word"""
        self.right(nth(lambda request, ask: None))

    def test_garbage(self):
        """an answer that is not HTTP"""
        self.wrong(nth(lambda request, ask: b"\x00" * 100, 100))

    def test_truncated_listing(self):
        """a listing that is cut off, or says that it goes on and not how"""
        cut = Fault.edited(lambda body: body[:len(body) // 2])
        more = Fault.edited(lambda body: body.replace(b"<IsTruncated>false", b"<IsTruncated>true"))
        self.right(nth(cut, query="list-type=2"), retries=0)
        self.wrong(nth(cut, 100, query="list-type=2"), "cut off")
        self.wrong(nth(more, 100, query="list-type=2"), "continuation token")

    def test_endless_listing(self):
        """a listing that repeats a page for ever"""
        if RCLONE:
            self.skipTest("rclone checks the signature of what the proxy changes")
        again = Fault.edited(lambda body: body.replace(
            b"<IsTruncated>false</IsTruncated>",
            b"<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"))

        def act(request, ask):
            request.target = request.target.replace("continuation-token=x&", "")
            return again(request, ask)
        self.wrong(nth(act, 10000, query="list-type=2"), "repeats a page")

    def test_xml_bomb(self):
        """a listing with entities of its own is refused"""
        bomb = (b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
                b"<ListBucketResult><Name>&b;</Name></ListBucketResult>")
        self.wrong(nth(Fault.status(200, bomb), 100, query="list-type=2"), "not XML")
        self.wrong(nth(Fault.status(200, b"<?" * 1000000), 100, query="list-type=2"), "not XML")
        self.wrong(nth(Fault.status(200, b"<html><body>hello</body></html>"), 100, query="list-type=2"), "<html>")
        self.wrong(nth(Fault.status(200, b"<a>" * 100000), 100, query="list-type=2"), "instead of")

    def test_huge_listing(self):
        """a listing that is too long is not kept"""
        page = b"<ListBucketResult>" + b"<Contents><Key>read/x</Key></Contents>" * 600000 + b"</ListBucketResult>"
        self.wrong(nth(Fault.status(200, page), 100, query="list-type=2"), "longer than")

    def test_hostile_names(self):
        """keys that lead out of the prefix are left out of the listing"""
        entry = b"<Contents><Key>%s</Key><Size>4</Size><ETag>x</ETag></Contents>"
        more = b"".join(entry % key for key in (b"../../etc/passwd", b"read/../x", b"elsewhere/.metadata"))
        added = Fault.edited(lambda body: body.replace(b"</ListBucketResult>", more + b"</ListBucketResult>"))
        self.right(nth(added, 100, query="list-type=2"), retries=0)

    def test_sizes(self):
        """listed sizes that make no sense"""
        wide = Fault.edited(lambda body: body.replace(b"<Size>", b"<Size>99999999999999999999"))
        self.wrong(nth(wide, 100, query="list-type=2"), "invalid size")

    def test_redirect(self):
        """a redirect is not followed, so no other host learns a signature"""
        other = Proxy(bucket.port)
        self.wrong(nth(Fault.status(307, location=other.url + "/bkt/read/.metadata"), 100, method="GET"), "307")
        self.assertEqual(other.requests, [])

    def test_region(self):
        """the region of the bucket is named"""
        self.wrong(nth(Fault.status(301, x_amz_bucket_region="eu-west-7"), 100), "eu-west-7")

    def test_expired_token(self):
        """credentials that expired are loaded again; fixed ones are an error"""
        calls = []

        def load():
            calls.append(1)
            return dict(access_key=f"key{len(calls)}", secret_key="s", session_token="t")

        def fault(request):
            if "Credential=key1/" in request.headers.get("authorization", ""):
                return Fault.error(400, "ExpiredToken")
        self.right(fault, access_key=None, secret_key=None, credentials=load)
        self.assertEqual(len(calls), 2)
        self.wrong(nth(Fault.error(400, "ExpiredToken"), 100), "ExpiredToken")

    def test_clock_skew(self):
        """a clock that is wrong is corrected for"""
        if RCLONE:
            self.skipTest("rclone has the right time")
        def fault(request):
            if not request.headers["x-amz-date"].startswith("2031"):
                return Fault.status(403, b"<Error><Code>RequestTimeTooSkewed</Code></Error>",
                                    date="Mon, 03 Nov 2031 10:00:00 GMT")
        self.right(fault)

    def test_denied(self):
        """what is denied is named"""
        self.wrong(nth(Fault.error(403, "AccessDenied"), 100), "AccessDenied")


class Writing(unittest.TestCase):
    number = 0

    def write(self, fault, **options):
        Writing.number += 1
        path = f"s3://bkt/write{Writing.number}"
        proxy.reset(fault)
        used = storage(**options)
        try:
            reshard.save(path, STATE, storage=used)
        finally:
            proxy.reset()
        return path, used

    def right(self, fault, retries=1, **options):
        path, used = self.write(fault, **options)
        self.assertGreaterEqual(used.traffic.nretries, retries)
        for name, found in tensors(path, storage=storage()).items():
            numpy.testing.assert_array_equal(found, STATE[name])
        self.assertEqual(bucket.keys(path[9:]), [path[9:] + "/.metadata", path[9:] + "/__0_0.distcp"])
        self.assertEqual(bucket.uploads(path[9:]), [])

    def wrong(self, fault, *words, **options):
        with self.assertRaises(reshard.Error) as caught:
            self.write(fault, **options)
        for word in words:
            self.assertIn(word, str(caught.exception))
        path = f"s3://bkt/write{Writing.number}"
        with self.assertRaises(reshard.Error):  # nothing that looks like a checkpoint
            tensors(path, storage=storage())
        self.assertNotIn(path[9:] + "/.metadata", bucket.keys(path[9:]))

    def test_no_fault(self):
        """a save leaves a checkpoint, and no upload or journal"""
        self.right(None, retries=0)

    def test_parts(self):
        """parts that fail are sent again"""
        for action in (Fault.status(500), Fault.status(503), Fault.status(429), lambda request, ask: None,
                       Fault.error(400, "RequestTimeout"), Fault.error(400, "BadDigest")):
            self.right(nth(action, query="partNumber"))

    def test_part_fails(self):
        """a part that fails for good names the file and the bytes, and leaves nothing"""
        self.wrong(nth(Fault.status(500), 100, query="partNumber=2"), "s3://bkt/write", "__0_0.distcp",
                   "bytes 8388608 to 16777216", "500")
        self.assertEqual(bucket.uploads(f"write{Writing.number}/"), [])

    def test_every_step(self):
        """each step that fails once, or for good"""
        for wanted in (dict(method="POST", query="uploads="), dict(method="POST", query="uploadId"),
                       dict(method="PUT", path=".metadata"), dict(method="PUT", path="reshard-journal"),
                       dict(method="HEAD", path="distcp"), dict(method="DELETE", path="reshard-journal")):
            with self.subTest(wanted=wanted):
                self.right(nth(Fault.status(503), **wanted))
                if wanted["method"] != "DELETE":
                    self.wrong(nth(Fault.status(503), 100, **wanted), "503")

    def test_lost_answer(self):
        """the answer to the end of an upload is lost: the object is there, and is found"""
        def act(request, ask):
            ask()
        self.right(nth(act, method="POST", query="uploadId"), retries=0)  # libcurl may repeat it by itself

    def test_lost_beginning(self):
        """the answer to the beginning of an upload is lost: the upload is removed at the end"""
        def act(request, ask):
            ask()
        self.right(nth(act, method="POST", query="uploads="), retries=0)
        self.wrong(nth(act, 100, method="POST", query="uploads="), max_attempts=2)
        self.assertEqual(bucket.uploads(f"write{Writing.number}/"), [])

    def test_no_list_of_uploads(self):
        """a service that does not list uploads takes a checkpoint all the same"""
        self.right(nth(Fault.error(501, "NotImplemented"), 100, method="GET", query="uploads="), retries=0)

    def test_late_error(self):
        """an upload that is refused with the status 200"""
        self.right(nth(Fault.error(200, "InternalError"), method="POST", query="uploadId"), retries=0)
        self.wrong(nth(Fault.error(200, "InternalError"), 100, method="POST", query="uploadId"), "Error")

    def test_lost_part(self):
        """a service that has lost a part says so at the end"""
        self.wrong(nth(Fault.error(400, "InvalidPart"), 100, method="POST", query="uploadId"), "InvalidPart",
                   "__0_0.distcp")
        self.assertEqual(bucket.keys(f"write{Writing.number}/"), [])

    def test_expired_token(self):
        """credentials that expire between two parts are loaded again"""
        calls = []

        def load():
            calls.append(1)
            return dict(access_key="key" if len(calls) == 1 else "key2", session_token="t",
                        secret_key="secret" if len(calls) == 1 else "s")

        def fault(request):
            if "partNumber=2" in request.query and "Credential=key/" in request.headers["authorization"]:
                return Fault.error(400, "ExpiredToken")
        self.right(fault, access_key=None, secret_key=None, credentials=load)
        self.assertEqual(len(calls), 2)

    def test_wrong_checksum(self):
        """a service that received other bytes"""
        def change(answer):
            answer.set("x-amz-checksum-sha256", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
        self.wrong(nth(Fault.changed(change), 100, query="partNumber"), "other bytes")

    def test_altered_on_the_way(self):
        """the checksum of a part is that of its bytes"""
        proxy.reset()
        Writing.number += 1
        reshard.save(f"s3://bkt/write{Writing.number}", STATE, storage=storage())
        parts = [one for one in proxy.requests if "partNumber" in one.query]
        self.assertEqual(len(parts), 3)
        for part in parts:
            digest = hashlib.sha256(part.body)
            self.assertEqual(part.headers["x-amz-content-sha256"], digest.hexdigest())
            self.assertEqual(base64.b64decode(part.headers["x-amz-checksum-sha256"]), digest.digest())

    def test_no_etag(self):
        """a part without an ETag"""
        def change(answer):
            answer.headers = [one for one in answer.headers if one[0].lower() != "etag"]
        self.wrong(nth(Fault.changed(change), 100, query="partNumber"), "ETag")

    def test_hostile_identifier(self):
        """an identifier of an upload that would break lines or queries"""
        broken = Fault.edited(lambda body: b"<R><UploadId>a&#10;b</UploadId></R>")
        self.wrong(nth(broken, 100, query="uploads="), "identifier")

    def test_lost_object(self):
        """an object that is not what was sent"""
        def change(answer):
            answer.set("content-length", "5")
        self.wrong(nth(Fault.changed(change), 100, method="HEAD", path="distcp"), "5 bytes")


if __name__ == "__main__":
    tap.main()
