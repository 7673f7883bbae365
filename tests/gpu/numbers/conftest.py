"""Where Triton's kernels are run: on a GPU if there is one, else by the interpreter, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from fuseplug.triton.kernel import interpreted


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if not interpreted():
        pytest.exit("there is no GPU here: set TRITON_INTERPRET=1", returncode=4)
    return "cpu"


@pytest.fixture(scope="session", autouse=True)
def _rounding_to_nearest():
    """The interpreter cuts off what does not fit into bfloat16, where a GPU rounds: in sums over rows that adds up."""
    if not interpreted():
        yield
        return
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


@pytest.fixture
def poisoned():
    """Memory that is not written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
