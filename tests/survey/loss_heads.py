"""Calls each language model of transformers with labels, to see whether its loss is computed without the logits.

    python -m survey.loss_heads [classes]

prints a row for each class, then how many classes have each status. The kernel is the reference, or the kernel that
``LOSS_KERNEL`` names: the question is how models and kernel fit together, not what a backend computes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from fuseplug import KernelManager

from . import pool
from .build import of_class
from .candidates import Inputs, candidates
from .checking import said
from .labels import labelled
from .submodule import Submodule

KIND = re.compile(r"^class (\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))\(", re.MULTILINE)
"""The classes that are trained with tokens as labels, by the names that transformers gives them."""

LIMIT = 300.0
"""The most seconds that a class may take."""

LOSS, GRADIENT = 1e-5, 1e-4
"""How far the loss and a gradient may be from the unfused ones, as shares of their size: the order of sums differs."""

_TRIES = 120


class Class(NamedTuple):
    """A class by where it is: ``transformers.models.<folder>.<module>``."""

    folder: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"


def classes() -> list[Class]:
    """All such classes of the installed transformers, found without importing them."""
    models = Path(transformers.__file__).with_name("models")
    return [
        Class(path.parent.name, path.stem, name)
        for path in sorted(models.glob("*/modeling_*.py"))
        if path.parent.name != "auto" and not path.stem.startswith(("modeling_tf_", "modeling_flax_"))
        for name in KIND.findall(path.read_text(encoding="utf-8"))
    ]


def check(manager: KernelManager, each: Class) -> dict[str, Any]:
    """The record of one class: plain data.

    Its status is ``"fused"``, if nothing needed the logits before they were read; ``"made real"``, if something did,
    and ``"why"`` says what; ``"declined"``, with the reason; ``"no head"``, if no kernel answers; ``"not fused"``, if
    the head was not called in the scope; ``"mismatch"``; ``"not built"``; or ``"not run"``.
    """
    try:
        model = of_class(_find(each))
    except Exception as error:
        return {"status": "not built", "why": said(error)}
    try:
        inputs = with_labels(model)
    except RuntimeError as error:
        return {"status": "not run", "why": str(error)}
    return compared(manager, model, inputs)


def compared(manager: KernelManager, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The record of *model*, called with *inputs*."""
    try:
        before = step(model, inputs)
        again = step(model, inputs)
    except Exception as error:
        return {"status": "not run", "why": f"{said(error)}, when called again"}
    forwards = _forwards(model)
    # What a kernel computes is judged elsewhere, at sizes that take seconds.
    applied = manager.apply_all(model, allow="lazy_logits", verify=False, every_size=True)
    try:
        if not applied.report.fused:
            whys = sorted({entry.why_not for entry in applied.report.left_alone})
            return {"status": "declined" if whys else "no head", "why": "; ".join(whys)}
        found = step(model, inputs)
        (calls,) = applied.calls()
        read = dict(tensors(found.output))
    finally:
        applied.undo()
    wrong = differences(before, found)
    if _forwards(model) != forwards:
        wrong.append("undo leaves a forward")
    if not differences(before, again, loss=0.0, gradient=0.0):
        wrong += [f"after undo: {each}" for each in differences(before, step(model, inputs), loss=0.0, gradient=0.0)]
    wrong += [f"read later: {name}" for name, value in tensors(before.output) if not _same(value, read.get(name), name)]
    if wrong:
        return {"status": "mismatch", "why": "; ".join(wrong)}
    if not calls.fused:
        return {"status": "not fused", "why": str(calls)}
    return {"status": "made real" if calls.made_real else "fused", "why": ", ".join(calls.made_real)}


def _forwards(model: nn.Module) -> list[Any]:
    """The forwards that stand in the place of the classes' own: transformers 4 leaves some there itself."""
    return [vars(module).get("forward") for module in model.modules()]


class Step(NamedTuple):
    """One forward and backward.

    Attributes:
        loss: The loss.
        gradients: The gradient of every parameter that has one.
        output: What the model returned.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    output: Any


def step(model: nn.Module, inputs: Inputs) -> Step:
    """One forward and backward, the same each time; the output is not read."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    output = model(**copy.deepcopy(inputs))
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(output.loss.detach().clone(), gradients, output)


def differences(before: Step, found: Step, loss: float = LOSS, gradient: float = GRADIENT) -> list[str]:
    """The differences that are larger than *loss* and *gradient*, as shares of the size, in words."""
    wrong = []
    off = (before.loss - found.loss).abs() / before.loss.abs()
    if not off <= loss or before.loss.shape != found.loss.shape:
        wrong.append(f"loss {found.loss} for {before.loss}")
    if before.gradients.keys() != found.gradients.keys():
        wrong.append(f"gradients of {sorted(before.gradients.keys() ^ found.gradients.keys())[:4]}")
    # A gradient that is only rounding errors, such as that of the bias of keys, is judged by the size of all gradients.
    size = max((each.abs().max().item() for each in before.gradients.values() if each.numel()), default=0.0)
    for name in before.gradients.keys() & found.gradients.keys():
        true, value = before.gradients[name], found.gradients[name]
        allowed = gradient * (true.norm() + (1e-2 * gradient * size * true.numel() ** 0.5 if gradient else 0.0))
        if not torch.dist(true, value) <= allowed:
            wrong.append(f"gradient of {name}, {torch.dist(true, value):.1e} of {true.norm():.1e}")
    return wrong


def with_labels(model: nn.Module) -> Inputs:
    """The first call with labels that gives a loss.

    Raises:
        RuntimeError: If there is none; the message has the errors of the tries.
    """
    heard: list[str] = []
    choices = (inputs for choice in candidates(Submodule(model)) for inputs in choice)
    for inputs in itertools.islice(choices, _TRIES):
        for given in labelled(inputs):
            try:
                torch.manual_seed(0)
                loss = model(**copy.deepcopy(given)).loss
                if loss is not None and loss.requires_grad and loss.isfinite().all():
                    loss.backward()
                    return given
                heard.append("it gives no loss")
            except Exception as error:
                heard.append(said(error))
    raise RuntimeError(" | ".join(dict.fromkeys(heard)) or "no inputs are known for it")


def tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors in *value*, at any depth, by name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from tensors(each, f"{name}[{number}]")


def _same(true: Tensor, found: Tensor | None, name: str) -> bool:
    if found is None:
        return False
    if name == "output.loss":  # `differences` judges it; everything else must have the same bits
        return True
    return torch.equal(true.nan_to_num(), found.nan_to_num())


def _find(each: Class) -> type[nn.Module]:
    found: type[nn.Module] = getattr(
        importlib.import_module(f"transformers.models.{each.folder}.{each.module}"), each.name
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of classes; all, unless some are given")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    wanted = {str(each): each for each in classes()}
    tasks = [name for name in wanted if not given.names or any(part in name for part in given.names)]
    found: dict[str, dict[str, Any]] = {}

    def done(task: str, record: dict[str, Any]) -> None:
        found[task] = record
        print(f"| {task} | {record['status']} | {record.get('why', '').replace('|', '/')} |", flush=True)

    print(f"| transformers {transformers.__version__} | status | |\n|---|---|---|")
    pool.run(tasks, _worker, done, given.jobs, LIMIT)
    print()
    for status, count in Counter(record["status"] for record in found.values()).most_common():
        print(f"| {status} | {count} |")


def _worker() -> Any:
    import warnings

    from support.losses import in_question
    from support.managers import manager_of

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    manager = manager_of(in_question())
    by_name = {str(each): each for each in classes()}

    def work(task: str) -> dict[str, Any]:
        try:
            return check(manager, by_name[task])
        except Exception as error:
            return {"status": "died", "why": said(error)}

    return work


if __name__ == "__main__":
    main()
