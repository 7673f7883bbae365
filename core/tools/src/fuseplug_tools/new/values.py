"""The values that replace each ``$name`` in the templates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import importlib_metadata
from packaging.version import Version

from .known_ops import KNOWN_OPS
from .request import Request


class _Backend(NamedTuple):
    """The values that depend on the backend.

    Attributes:
        base: The class of ``fuseplug_backends.<backend>`` that is the first base of the kernel's class.
        extra: The extra that the entry point names.
        requirement: The requirement that the extra installs.
        testing: The requirements of the tests beyond those of every kernel.
        addopts: Options of pytest.
        devices: Where the kernel runs.
        machine: What the machine must have, for the README.
        device: An expression for the device on which the tests run the kernel.
    """

    base: str
    devices: str
    machine: str
    device: str
    extra: str = ""
    requirement: str = ""
    testing: tuple[str, ...] = ()
    addopts: str = ""


_BACKENDS = {
    "inductor": _Backend(
        base="InductorKernel",
        devices="every device that Inductor compiles for, CPUs included",
        machine="On the CPU, Inductor needs a C++ compiler: `apt-get install g++`, or set `CXX`.",
        device='"cpu"',
    ),
    "triton": _Backend(
        base="TritonKernel",
        devices="GPUs: CUDA, ROCm, XPU",
        machine="Without a GPU, Triton's interpreter runs the kernel on the CPU (`tests/conftest.py`). It finds wrong "
        "numbers, but\nshows neither the speed nor races between programs.",
        device='"cuda" if torch.cuda.is_available() else "cpu"',
        extra="cuda",
        requirement="triton>=3.6",
        testing=("triton>=3.6",),
    ),
    "npu": _Backend(
        base="NpuKernel",
        devices="Ascend NPUs",
        machine="The tests run on a stand-in for the NPU, in host memory. It needs Linux and a C compiler. On an NPU, "
        "run\n`pytest -o addopts=`.",
        device='"npu"',
        extra="npu",
        requirement="torch_npu>=2.7",
        testing=("torch_npu>=2.7", "numpy", "pyyaml"),  # torch_npu imports the last two, but does not require them
        addopts="--fuseplug-host-npu",
    ),
}

_OPS_OF_NPU = {"rmsnorm": "npu_rms_norm", "swiglu": "npu_swiglu", "rope": "npu_rotary_mul", "moe": "npu_swiglu"}
_OP_OF_A_NEW_OP = "npu_swiglu"

_GAINS = '''
    def gains_from(self, use: Use) -> int:
        """The number of elements from which on the kernel is faster: ``fuseplug bench MODEL --ops`` measures it."""
        del use
        return 1 << 16  # for fewer elements, nothing is compiled
'''


def values_of(request: Request) -> dict[str, str]:
    """The values for all templates of a distribution."""
    version = Version(importlib_metadata.version("fuseplug"))
    series = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    api = f">={version.major}.{version.minor},<2"  # API 1 is kept to the end of 1.x
    backend, known_op = _BACKENDS[request.backend], request.known_op
    title = "".join(part.capitalize() for part in request.stem.split("_"))
    needed = [
        f"fuseplug{api}",
        f"fuseplug-backends{api}",
        *([f"{known_op.distribution}{series}"] if known_op else []),
        "torch>=2.7",
    ]
    testing = [f"fuseplug-testing{api}", "pytest>=8", *backend.testing]
    if request.backend == "npu":
        testing.append(f"fuseplug-host-npu{api}")
    return {
        "distribution": request.distribution,
        "package": request.package,
        "op": request.op,
        "title": title,
        "backend": request.backend,
        "base": backend.base,
        "kernel": f"{request.backend.capitalize()}{title}Kernel",
        "kernel_id": request.kernel_id,
        "dependencies": _quoted(needed),
        "testing": _quoted(testing),
        "extra": f" [{backend.extra}]" if backend.extra else "",
        "extras": f'\n{backend.extra} = ["{backend.requirement}"]' if backend.extra else "",
        "install": f"{request.distribution}[{backend.extra}]" if backend.extra else request.distribution,
        "addopts": f'\naddopts = ["{backend.addopts}"]' if backend.addopts else "",
        "devices": backend.devices,
        "machine": backend.machine,
        "device_of_tests": backend.device,
        "rows_of_test": "8" if request.backend == "triton" else "512",  # the interpreter takes milliseconds for each
        "use": ", Use" if request.backend == "inductor" else "",
        "of_backend": _of_backend(request),
        **(_of_a_known_op(request.op) if known_op else _of_a_new_op(request, title)),
    }


def _of_backend(request: Request) -> str:
    """The lines that the backend adds to the class of the kernel."""
    if request.backend == "inductor":
        return _GAINS
    if request.backend == "npu":
        ops = _OPS_OF_NPU.get(request.op, _OP_OF_A_NEW_OP)
        return f'    ops: ClassVar[tuple[str, ...]] = ("{ops}",)  # what backend.py calls\n'
    return ""


def _of_a_known_op(name: str) -> dict[str, str]:
    op = KNOWN_OPS[name]
    return {
        "about": f"A fused kernel for the op {name}",
        "function": op.function,
        "op_package": op.distribution.replace("-", "_"),
        "op_base": op.base,
        "variants": f"({_quoted(op.variants)}{',' if len(op.variants) == 1 else ''})",
    }


def _of_a_new_op(request: Request, title: str) -> dict[str, str]:
    """The formula ``x · silu(x)``, times the first tensor, plus the other parameters, in the forms that files need."""
    tensors, numbers = request.tensors, tuple(name for name, _ in request.numbers)
    names = (*tensors, *numbers)
    return {
        "about": f"A fused kernel for {request.op}",
        "formula": _formula(tensors, numbers),
        "formula_in_words": "x · silu(x)" + _formula(tensors, numbers).replace("*", "·"),
        "formula_of_self": _formula([f"self.{name}" for name in tensors], [f"self.{name}" for name in numbers]),
        "signature": "".join([*(f", {name}: Tensor" for name in tensors), *(f", {name}: float" for name in numbers)]),
        "documented": "".join(
            [
                *(f"\n        {name}: ``(width,)``, floating." for name in tensors),
                *(f"\n        {name}: A number." for name in numbers),
            ]
        ),
        "names": _for_each(", {}", names),
        "tensor_names": _for_each(", {}", tensors),
        "constants": _tuple(numbers),
        "module": "module" if names else "_module",
        "of_module": _for_each(", module.{}", names),
        "reads": _tuple(f'"{name}"' for name in names),
        "tensor_strings": _tuple(f'"{name}"' for name in tensors),
        "numbers_are_there": _for_each(
            '\n    if not isinstance(getattr(module, "{}", None), float):\n        return None', numbers
        ),
        "other_numbers": _other_numbers(numbers),
        "width_of_specimen": ", width: int, dtype: torch.dtype = torch.float32" if tensors else "",
        "attributes": "".join(
            [
                *(f"\n        self.{name} = nn.Parameter(torch.ones(width, dtype=dtype))" for name in tensors),
                *(f"\n        self.{name} = {value!r}" for name, value in request.numbers),
            ]
        ),
        "specimens": f"{title}(48), {title}(37, torch.bfloat16)" if tensors else f"{title}()",
        **_of_triton(tensors, numbers),
        "npu_result": f"(y{_formula(tensors, numbers)}).to(x.dtype)" if names else "y.to(x.dtype)",
    }


def _formula(tensors: Iterable[str], numbers: Iterable[str]) -> str:
    """The part of the formula after ``x · silu(x)``."""
    first, *others = (*tensors,) or ("",)
    return (f" * {first}" if first else "") + _for_each(" + {}", (*others, *numbers))


def _of_triton(tensors: tuple[str, ...], numbers: tuple[str, ...]) -> dict[str, str]:
    """The values for Triton. A program loads each tensor once, and gives the result the name of the pointer."""
    return {
        "loads": _for_each("\n    {0} = tl.load({0} + column, mask=inside, other=0.0).to(tl.float32)", tensors),
        "schema": "Tensor x" + _for_each(", Tensor {}", tensors) + _for_each(", float {}", numbers),
        "contiguous": _for_each(", {}.contiguous()", tensors) + _for_each(", {}", numbers),
    }


def _other_numbers(numbers: tuple[str, ...]) -> str:
    """Numbers that no module has, so that a check shows which of them the code uses."""
    if not numbers:
        return ""
    return ", attributes={" + ", ".join(f'"{name}": {0.25 + 0.5 * at}' for at, name in enumerate(numbers)) + "}"


def _for_each(text: str, names: Iterable[str]) -> str:
    return "".join(text.format(name) for name in names)


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
