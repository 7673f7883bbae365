import os

from . import kernels

os.environ["ZOO"] = "1"


class Kernel(kernels.Norm):
    pass
