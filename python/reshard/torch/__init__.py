"""reshard for PyTorch: checkpoints through torch.distributed.checkpoint, and tensors over process groups."""
from .bound import release
from .group import Group
from .hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from .layouts import device_mesh, layout, layout_of_spec, layout_on, placements, sharding_spec
from .moving import distribute_tensor, full_tensor, redistribute
from .planner import LoadPlanner, SavePlanner
from .quantized import QuantizedHuggingFaceStorageReader
from .reader import Reader
from .sharded import reshard
from .stashing import Stashed, input_reshard, stashed
from .universal import write_universal
from .weight_names import Fuse
from .weight_sync import WeightSync
from .writer import Writer

__all__ = ["device_mesh", "distribute_tensor", "full_tensor", "Fuse", "Group", "HuggingFaceStorageReader",
           "HuggingFaceStorageWriter", "input_reshard", "layout", "layout_of_spec", "layout_on", "LoadPlanner",
           "placements", "QuantizedHuggingFaceStorageReader", "Reader", "redistribute", "release", "reshard",
           "SavePlanner", "sharding_spec", "Stashed", "stashed", "WeightSync", "write_universal", "Writer"]
