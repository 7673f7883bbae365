"""Makes torchvision importable beside a torch for CPUs; to be imported before transformers and timm, which import it.

PyPI's torchvision is built for CUDA, and does not load its own library beside such a torch. Norms and MLPs need none of
its operations, only their declarations.
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
