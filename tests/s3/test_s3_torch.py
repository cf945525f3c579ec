"""Reader and Writer of reshard.torch take URLs: dcp.save and dcp.load with a bucket, in the environment of torch."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import reshard
import tap
from services import Bucket, Fault

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "golden"
TORCH = os.environ.get("TORCH_PYTHON", "")
torch = None  # the Worker
bucket = Bucket()
proxy = bucket.proxy
ACCOUNT = {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
           "AWS_EC2_METADATA_DISABLED": "true"}


class Worker:
    """A process in the environment of torch, which starts in seconds and so is started once."""

    def __init__(self):
        self.process = subprocess.Popen([TORCH, str(HERE / "torch_worker.py")], env={**os.environ, **ACCOUNT},
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, name, *args):
        print(json.dumps([name, *map(str, args)]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise AssertionError(f"{name} {args} ended with {self.process.wait()}")
        return json.loads(answer)


@unittest.skipUnless(os.path.exists(TORCH), "make test-torch makes the environment of torch")
class Torch(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        global torch
        torch = Worker()
        cls.addClassCleanup(lambda: torch.process.communicate())

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        proxy.reset()

    def fetched(self, prefix):
        """A directory with the objects below a prefix."""
        path = os.path.join(self.folder.name, prefix)
        os.makedirs(path)
        for key in bucket.keys(prefix + "/"):
            with open(os.path.join(path, key.rpartition("/")[2]), "wb") as file:
                file.write(bucket.get(key))
        return path

    def test_saved(self):
        """a save on two ranks has the bytes of a local one, is loaded on three, and read by torch"""
        url, local = "s3://bkt/saved", os.path.join(self.folder.name, "local")
        self.assertEqual(torch("save", url, 2, 1), "")
        self.assertEqual(bucket.keys("saved/"), ["saved/.metadata", "saved/__0_0.distcp", "saved/__1_0.distcp"])
        self.assertEqual(bucket.uploads("saved/"), [])
        torch("save", local, 2, 1)
        for name in ("__0_0.distcp", "__1_0.distcp"):
            with open(os.path.join(local, name), "rb") as file:
                self.assertEqual(bucket.get(f"saved/{name}"), file.read())
        self.assertTrue(torch("load", url, 3, 1))
        self.assertTrue(torch("load_torch", self.fetched("saved"), 1))
        storage = reshard.Storage(environment=ACCOUNT)
        self.assertEqual(reshard.verify(url, storage=storage), [])

    def test_replaced(self):
        """another save replaces .metadata after all data, then removes the old objects"""
        url = "s3://bkt/twice"
        self.assertEqual(torch("save", url, 3, 1), "")
        proxy.reset()
        self.assertEqual(torch("save", url, 2, 2, '{"compress": "zstd"}'), "")
        written = [one for one in proxy.requests if one.method in ("PUT", "POST", "DELETE")]
        last = max(i for i, one in enumerate(written) if one.path.endswith("/.metadata"))
        self.assertTrue(all(one.method == "DELETE" for one in written[last + 1:]))
        self.assertFalse(any(one.method == "DELETE" for one in written[:last]))
        self.assertEqual(bucket.keys("twice/"), ["twice/.metadata", "twice/__0_1-0.distcp", "twice/__1_1-0.distcp"])
        self.assertTrue(torch("load", url, 1, 2))
        self.assertEqual(torch("save", url, 1, 3, '{"safetensors": true}'), "")
        self.assertEqual(bucket.keys("twice/"), ["twice/.metadata", "twice/__0_2-0.distcp"])
        self.assertTrue(torch("load", url, 2, 3))

    def test_failed(self):
        """a save that fails names the object, and the older checkpoint stays"""
        url = "s3://bkt/failed"
        self.assertEqual(torch("save", url, 2, 1), "")
        for name in ("__1_1-0.distcp", ".metadata"):
            proxy.reset(lambda request, name=name: Fault.error(403, "AccessDenied")
                        if request.method in ("PUT", "POST") and request.path.endswith(name) else None)
            said = torch("save", url, 2, 2)
            self.assertIn(name, said)
            proxy.reset()
            self.assertTrue(torch("load", url, 2, 1))

    def test_hugging_face(self):
        """the Hugging Face reader takes URLs, and its writer says that it does not"""
        source = GOLDEN / "hf_sharded/ckpt"
        for path in source.iterdir():
            bucket.put(f"hf/{path.name}", path.read_bytes())
        self.assertTrue(torch("load_hf", "s3://bkt/hf", source))
        self.assertEqual(torch("save", "s3://bkt/old", 1, 1), "")
        said = torch("refused", "s3://bkt/old")
        self.assertIn("directories only", said[0])
        self.assertIn("already exists", said[1])

    def test_moved(self):
        """checkpoint_id may change between directories and URLs"""
        self.assertEqual(torch("moved", "s3://bkt/moved", os.path.join(self.folder.name, "m")), [True, False, True])


if __name__ == "__main__":
    tap.main()
