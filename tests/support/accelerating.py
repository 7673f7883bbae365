"""Makes accelerate do on CPUs what it does on accelerators."""

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


def shard_on_cpus():
    """Make accelerate keep the FSDP that it is asked for: on CPUs, its state drops FSDP and wraps copies instead."""
    made = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            self.device = torch.device("cpu")  # without an index, as FSDP1 requires

    if made.__qualname__ != init.__qualname__:
        AcceleratorState.__init__ = init
