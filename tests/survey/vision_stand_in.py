"""Imported before transformers and timm, which import torchvision: PyPI's is built for CUDA, and does not load its own
library beside a torch for CPUs. Norms and MLPs need none of its operations, only that they are declared.
"""

import importlib.util

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
