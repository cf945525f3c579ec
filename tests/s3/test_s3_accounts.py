"""Credentials from each of the usual places, and where the name of the bucket is."""
import http.server
import json
import shutil
import threading
import unittest

import reshard
import tap
from services import RCLONE
from test_s3_files import GOLDEN, bucket, here, proxy, run, upload


class Metadata(http.server.BaseHTTPRequestHandler):
    """The services of containers and instances that tell credentials."""

    answer = json.dumps({"AccessKeyId": "role", "SecretAccessKey": "a/b+c", "Token": "token=/", "Expiration":
                         "2099-01-01T00:00:00Z"})
    asked = []

    def reply(self, text):
        Metadata.asked.append((self.command, self.path, dict(self.headers)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self):
        self.reply("session")

    def do_GET(self):
        self.reply("my-role\n" if self.path.endswith("security-credentials/") else self.answer)

    def log_message(self, *_):
        pass


class Accounts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not RCLONE:
            bucket.client.put_bucket_acl(Bucket="bkt", ACL="public-read")
        upload(GOLDEN / "rows_1d/ckpt", "account", **({} if RCLONE else {"ACL": "public-read"}))
        cls.metadata = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
        threading.Thread(target=cls.metadata.serve_forever, daemon=True).start()

    def used_by(self, *options, **variables):
        """The access key that signs, and the token."""
        proxy.reset()
        run("inspect", "s3://bkt/account", *options,
            **{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", **variables})
        headers = proxy.requests[-1].headers
        stated = headers.get("authorization", "")
        self.region = stated.split("/")[2] if stated else None
        key = stated.split("Credential=")[-1].split("/")[0] if stated else None
        return key, headers.get("x-amz-security-token")

    def test_environment(self):
        """variables"""
        self.assertEqual(self.used_by(AWS_ACCESS_KEY_ID="env", AWS_SECRET_ACCESS_KEY="s", AWS_SESSION_TOKEN="t"),
                         ("env", "t"))

    def test_files(self):
        """the shared files, and profiles"""
        credentials, config = here / "credentials", here / "config"
        credentials.write_text("[default]\naws_access_key_id = file\naws_secret_access_key=s\n"
                               "# note\n[other]\naws_access_key_id=other\naws_secret_access_key=s\n"
                               "aws_session_token = tok\n")
        config.write_text("[default]\nregion = eu-north-1\n[profile other]\nregion=ap-south-1\ns3 =\n  max = 3\n"
                          "[profile role]\nrole_arn = arn:x\n")
        files = dict(AWS_SHARED_CREDENTIALS_FILE=str(credentials), AWS_CONFIG_FILE=str(config))
        self.assertEqual(self.used_by(**files), ("file", None))
        self.assertEqual(self.region, "eu-north-1")
        self.assertEqual(self.used_by(AWS_PROFILE="other", **files), ("other", "tok"))
        self.assertEqual(self.used_by("--profile", "other", AWS_ACCESS_KEY_ID="env", AWS_SECRET_ACCESS_KEY="s",
                                      **files),
                         ("other", "tok"))
        self.assertEqual(self.region, "ap-south-1")
        self.assertEqual(self.used_by("--region=sa-east-1", **files), ("file", None))
        self.assertEqual(self.region, "sa-east-1")
        self.assertIn("role_arn", run("inspect", "s3://bkt/account", "--profile", "role", code=3, **files))

    def test_container(self):
        """the service of a container"""
        url = f"http://127.0.0.1:{self.metadata.server_port}/creds"
        self.assertEqual(self.used_by(AWS_CONTAINER_CREDENTIALS_FULL_URI=url,
                                      AWS_CONTAINER_AUTHORIZATION_TOKEN="sesame"),
                         ("role", "token=/"))
        self.assertEqual(Metadata.asked[-1][2]["Authorization"], "sesame")
        self.assertIn("must be https", run("inspect", "s3://bkt/account", code=3, AWS_ACCESS_KEY_ID="",
                                           AWS_CONTAINER_CREDENTIALS_FULL_URI="http://example.com/creds"))

    def test_instance(self):
        """the service of an instance"""
        self.assertEqual(self.used_by(AWS_EC2_METADATA_DISABLED="", AWS_EC2_METADATA_SERVICE_ENDPOINT=
                                      f"http://127.0.0.1:{self.metadata.server_port}"), ("role", "token=/"))
        self.assertIn(("PUT", "/latest/api/token"), [one[:2] for one in Metadata.asked])
        self.assertTrue(Metadata.asked[-1][1].endswith("/my-role"))

    def test_anonymous(self):
        """no signature"""
        if RCLONE:
            self.skipTest("rclone wants a signature")
        self.assertEqual(self.used_by("--no-sign-request", AWS_ACCESS_KEY_ID="env", AWS_SECRET_ACCESS_KEY="s"),
                         (None, None))

    def test_styles(self):
        """the bucket in the host name"""
        proxy.reset()
        used = reshard.Storage(environment={}, endpoint=proxy.url, access_key="key", secret_key="secret", style="host",
                               max_attempts=1)
        try:
            reshard.open("s3://bkt/account", storage=used)
        except reshard.Error:
            pass  # moto does not know this host
        if not proxy.requests:
            self.skipTest("bkt.localhost does not resolve here")
        self.assertEqual(proxy.requests[0].headers["host"], f"bkt.localhost:{proxy.port}")
        self.assertEqual(proxy.requests[0].path, "/account")


if __name__ == "__main__":
    try:
        tap.main()
    finally:
        shutil.rmtree(here, ignore_errors=True)
