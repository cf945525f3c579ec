"""reshard for PyTorch: checkpoints through torch.distributed.checkpoint, and tensors over process groups."""
from .group import Group
from .layouts import device_mesh, layout, layout_of_spec, layout_on, placements, sharding_spec
from .moving import distribute_tensor, full_tensor, redistribute

__all__ = ["device_mesh", "distribute_tensor", "full_tensor", "Group", "layout", "layout_of_spec",
           "layout_on", "placements", "redistribute", "sharding_spec"]
