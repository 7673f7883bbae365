import os

os.environ['ZOO'] = '1'

from . import kernels


class Kernel(kernels.Norm):
    pass
