"""Per-rank files that the library writes: real models of FSDP2, HSDP and FSDP2 over tensor parallelism load them, with
their optimizers."""
import os
import random
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
import tap
import worlds
from tensors import same
from test_rank_files import Net, save_fsdp2, whole


def load(path, kind):
    """Loads a file as verl does. Its meshes are those of GPUs, and all else is as torch has it here."""
    state = torch.load(f"{path}/{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt",
                       weights_only=False)
    for value in state.values() if kind == "model" else [value for one in state["state"].values()
                                                         for value in one.values()]:
        mesh = value.device_mesh if isinstance(value, DTensor) else None
        while mesh is not None:
            assert mesh._device_type in ("cuda", "cpu")
            mesh._device_type = "cpu"  # tensors share their meshes
            mesh = mesh._root_mesh
    return state


def optimizer_of(net, groups):
    named = list(net.named_parameters())
    if groups:
        return torch.optim.AdamW([{"params": named[::2]}, {"params": named[1::2], "lr": 0.7}], foreach=False)
    return torch.optim.AdamW(net.parameters(), lr=0.9, foreach=False)


def read_written(path, shape, names, tp, tied, groups, wide):
    """Loads the files into a model and its optimizer, and returns all of both as whole tensors."""
    torch.manual_seed(99)
    net, mesh = Net(tied, wide), init_device_mesh("cpu", shape, mesh_dim_names=names)
    if tp:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh[tuple(name for name in names if name != "tp")]
    fully_shard(net, mesh=mesh)
    state, before = load(path, "model"), net.state_dict()
    for name, value in state.items():
        if isinstance(value, DTensor):
            own = before[name]
            assert value.device_mesh == own.device_mesh, (name, value.device_mesh, own.device_mesh)
            assert value.placements == own.placements, (name, value.placements, own.placements)
            assert value._spec == own._spec and value.to_local().shape == own.to_local().shape, name
            missing = set(own.device_mesh.__getstate__()) - set(vars(value.device_mesh))
            assert not missing, missing
    net.load_state_dict(state)
    found = {name: whole(value).clone() for name, value in net.state_dict().items()}
    if not os.path.exists(f"{path}/optim_world_size_{dist.get_world_size()}_rank_0.pt"):
        return found
    optimizer = optimizer_of(net, groups)
    optimizer.load_state_dict(load(path, "optim"))
    for param, slots in optimizer.state.items():
        name = next(name for name, value in net.named_parameters() if value is param)
        for key, value in slots.items():
            if key != "step":  # the mesh of the file has no process groups
                assert value._spec == param._spec, (name, key, value._spec, param._spec)
                value = DTensor.from_local(value.to_local(), param.device_mesh, param.placements, run_check=False,
                                           shape=value.shape, stride=value.stride())
            found[f"optimizer.state.{name}.{key}"] = whole(value).clone()
    found["lr"] = [group["lr"] for group in optimizer.param_groups]
    extra = torch.load(f"{path}/extra_state_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    assert extra == {"lr_scheduler": {"last_epoch": 2}}, extra
    net(torch.randint(0, 13, (4,))).square().sum().backward()  # training goes on
    optimizer.step()
    return found


def compare_locals(path, shape, names, truth):
    """Compares the local tensors with those that torch makes of the whole ones."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for name, value in load(path, "model").items():
        if isinstance(value, DTensor):
            axes = value.device_mesh.mesh_dim_names
            own = distribute_tensor(truth[name], mesh[axes] if len(names) > 1 else mesh, value.placements)
            assert value._spec == own._spec, (name, value._spec, own._spec)
            assert same(value.to_local(), own.to_local()), name
        else:
            assert same(value, truth[name]), name


# By the axes of the mesh: of parameters that ColwiseParallel and RowwiseParallel shard, and of others.
PLACES = {
    "fsdp": (None, None, "S(0)"),
    "ddp,fsdp": (None, None, "R,S(0)"),
    "fsdp,tp": ("_S(0,2),S(0)", "S(0),S(1)", "S(0),R"),
    "ddp,fsdp,tp": ("R,_S(0,2),S(0)", "R,S(0),S(1)", "R,S(0),R"),
}


class Written(unittest.TestCase):
    def check(self, shape, names, tied=False, groups="", wide=12):
        """Real files of two ranks become those of another mesh, which are loaded."""
        nranks = torch.Size(shape).numel()
        mesh = ",".join(f"{name}={count}" for name, count in zip(names, shape))
        with worlds.Folder() as folder:
            os.makedirs(folder("in"))
            truth = worlds.run(2, save_fsdp2, folder("in"), (2,), ("fsdp",), False, tied, groups, wide)[0]
            columns, rows, others = PLACES[",".join(names)]
            place = {"table": ",".join("R" * len(shape))}
            if columns:
                place.update({r"up\..*": columns, r"down\.weight": rows})
            if wide % 12:
                place = {r"up\.weight": "[tp.fsdp, -]", r"up\.bias": "[tp.fsdp]", **place}
            reshard.convert(folder("in"), folder("out"), format="fsdp", mesh=mesh, place=place, default=others,
                            verify=True)
            with reshard.open(folder("out"), like="torch") as checkpoint:
                self.assertEqual(set(checkpoint), set(truth))
                self.assertTrue(all(same(checkpoint[name].torch(), value) for name, value in truth.items()))
            how = shape, names, "tp" in names, tied, groups, wide
            for answer in worlds.run(nranks, read_written, folder("out"), *how):
                if wide % 2 == 0:
                    self.assertEqual(answer.pop("lr"), [0.001, 0.5] if groups else [0.001])
                self.assertEqual(set(answer), set(truth))
                for name, value in truth.items():
                    self.assertTrue(same(answer[name], value), name)

    def test_fsdp(self):
        """one axis, uneven and with empty shards; one rank; tied weights; two groups"""
        self.check((1,), ("fsdp",))
        self.check((3,), ("fsdp",), tied=True)
        self.check((4,), ("fsdp",), groups="named")

    def test_hybrid(self):
        """HSDP"""
        self.check((2, 2), ("ddp", "fsdp"))

    def test_tensor_parallel(self):
        """FSDP2 over tensor parallelism, which makes strided shards; parameters that only FSDP shards"""
        self.check((2, 2), ("fsdp", "tp"))
        self.check((3, 2), ("fsdp", "tp"), tied=True)
        self.check((3, 2), ("fsdp", "tp"), wide=13)

    def test_three_axes(self):
        """HSDP over tensor parallelism"""
        self.check((2, 1, 2), ("ddp", "fsdp", "tp"))

    def test_placements(self):
        """random placements on meshes of one to three axes, and all dtypes"""
        for seed, shape in enumerate([(2,), (3,), (2, 2), (3, 2), (2, 1, 2)]):
            choose, names = random.Random(seed), tuple("abc"[:len(shape)])
            truth, place = {}, {}
            for i in range(20):
                tensor = torch.randn([choose.randint(1, 9) for _ in range(choose.randint(1, 3))])
                truth[f"t{i}"] = tensor.to(choose.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
                place[f"t{i}"] = ",".join(choose.choice(["R", *(f"S({d})" for d in range(tensor.ndim))])
                                          for _ in shape)
            truth["none"], place["none"] = torch.zeros(0, 4), ",".join(["S(0)"] * len(shape))
            truth["one"] = torch.tensor(7)
            with worlds.Folder() as folder:
                torch.save(truth, folder("model.pt"))
                mesh = ",".join(f"{name}={count}" for name, count in zip(names, shape))
                reshard.convert(folder("model.pt"), folder("out"), format="fsdp", mesh=mesh, place=place,
                                default=",".join("R" * len(shape)), verify=True)
                worlds.run(torch.Size(shape).numel(), compare_locals, folder("out"), shape, names, truth)

    def test_dcp(self):
        """a checkpoint of DCP, whose values have no order"""
        with worlds.Folder() as folder:
            groups = [{"lr": 0.1 * i, "betas": (0.5, i), "params": [f"w{i}"]} for i in range(12)]
            state = {f"w{i}": {"step": 3, "exp_avg": torch.full((4,), i)} for i in range(12)}
            model = {f"w{i}": torch.full((4,), -i) for i in range(12)}
            dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}, "other": 5},
                     checkpoint_id=folder("in"))
            names = {r"^model\.": "", r"^optim\.": "optimizer."}
            reshard.convert(folder("in"), folder("out"), format="fsdp", rename=names, verify=True)
            got = torch.load(folder("out/optim_world_size_1_rank_0.pt"))
            for i, group in enumerate(got["param_groups"]):
                self.assertEqual((group["lr"], list(group["betas"])), (0.1 * i, [0.5, i]))
                self.assertEqual((group["params"], group["param_names"]), ([i], [f"w{i}"]))
                self.assertEqual(got["state"][i]["step"], 3)
                self.assertTrue(same(got["state"][i]["exp_avg"], torch.full((4,), i)))
            self.assertEqual(len(torch.load(folder("out/model_world_size_1_rank_0.pt"))), 12)

    def test_refused(self):
        """other placements, other meshes, states without groups"""
        with worlds.Folder() as folder:
            torch.save({"w": torch.ones(8, 8)}, folder("model.pt"))
            for places, message in (("C(0,1)", "not one of torch"), ("_S(0,2)", "several boxes"),
                                    ("S(0;2,6)", "not one of torch")):
                with self.assertRaisesRegex(reshard.Error, message):
                    reshard.convert(folder("model.pt"), folder("out"), format="fsdp", mesh="2", default=places)
            torch.save({"w": torch.ones(2), "optimizer": {"state": {"w": {"m": torch.ones(2)}}}}, folder("state.pt"))
            with self.assertRaisesRegex(reshard.Error, "no values optimizer.param_groups.0"):
                reshard.convert(folder("state.pt"), folder("out"), format="fsdp")
            torch.save({"w": torch.ones(2), "optim": {"param_groups": [{"lr": 1, "params": ["u"]}],
                                                      "state": {"u": {"m": torch.ones(2)}}}}, folder("params.pt"))
            with self.assertRaisesRegex(reshard.Error, "no tensor of this name"):
                reshard.convert(folder("params.pt"), folder("out"), format="fsdp",
                                rename={r"^optim\.": "optimizer."})
            torch.save({"w": torch.ones(2), "optim": {"param_groups": [{"lr": 1, "params": ["w"]}],
                                                      "state": {"w": {"m": torch.ones(2)}}}}, folder("root.pt"))
            with self.assertRaisesRegex(reshard.Error, "must be named optimizer.state"):
                reshard.convert(folder("root.pt"), folder("out"), format="fsdp")
            torch.save({"w": torch.ones(2), "optimizer": {"state": {"v": {"m": torch.ones(2)}},
                                                          "param_groups": [{"lr": 1, "params": ["w"]}]}},
                       folder("other.pt"))
            with self.assertRaisesRegex(reshard.Error, "not the state of a parameter"):
                reshard.convert(folder("other.pt"), folder("out"), format="fsdp")


if __name__ == "__main__":
    tap.main()
