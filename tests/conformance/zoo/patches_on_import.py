from torch import nn

from .right import norm  # noqa: F401

nn.functional.relu6 = nn.functional.relu
