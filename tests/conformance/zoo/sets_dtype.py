"""Nobody but a Python of its own imports this."""

import torch

torch.set_default_dtype(torch.float64)
