"""reshard for PyTorch: checkpoints through torch.distributed.checkpoint, and tensors over process groups."""
