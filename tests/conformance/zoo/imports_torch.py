import torch  # noqa: F401

from . import kernels


class Kernel(kernels.Norm):
    pass
