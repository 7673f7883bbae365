"""Compile a row-wise formula of plain PyTorch, forward and backward, with few compilations and little overhead.

The backward is the compiled vector-Jacobian product of the formula itself, so there is no derivative to get wrong, and
nothing is saved but the inputs. The backward computes the forward's sums again: keeping them was tried, and was no
faster on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseplug.fallback import is_small_declined

from ..differentiating import differentiable, recording
from ..torch_private import reinterpret_tensor, storage_id
from ..tracing import is_batch_of_gradients, is_watched
from .layout import keeping_order, strides_of
from .program import Program, in_new_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Constants = tuple[Hashable, ...]
    Formula = Callable[..., Tensor]


class Compiled:
    """A formula, and the programs that were compiled for it.

    One program serves every rank and number of rows. There is one for each combination of constants, dtypes, width,
    device, wanted gradients, and whether there are gaps between rows in memory. A model has a few widths, and compiling
    a width in is worth the time: on two x86 cores, the backward of 2048 rows of 2048 takes 1.13 ms instead of 1.43 ms.

    Args:
        formula: ``formula(*tensors, *constants)``, returning one tensor. It treats all leading dimensions of its
            tensors alike. All rows share a tensor of one dimension. ``None`` is passed on.
    """

    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self._programs: dict[Hashable, Program] = {}
        self._keeps: dict[Hashable, tuple[bool, ...]] = {}
        self._differentiable = differentiable(self._launched, self.backward, self._by_formula, plain)

    def __call__(self, constants: Constants, x: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the formula for tensors that are `plain`.

        Args:
            constants: The formula's last arguments; compiled in.
            x: ``(..., hidden)``, with at least two dimensions, not empty. One row has a program of its own.
            others: The formula's other tensors, on the device of *x*.

        Returns:
            The result. Its dimensions have the memory order of those of *x*, as the result of elementwise formulas has.
        """
        compute = self._recorded if recording(x, *others) else self.forward
        return keeping_order(functools.partial(compute, constants), x, *others)

    def _recorded(self, constants: Constants, *tensors: Tensor | None) -> Tensor:
        needs = tuple([t is not None and t.requires_grad for t in tensors])
        kept = self.keeps(constants, tensors, needs)
        # If the formula casts a tensor, it would keep the cast, so its caller may write into the tensor before the
        # backward. Such a tensor is copied here, where the copy is recorded: a copy inside a forward has no second
        # derivative.
        copies = [t if t is None or itself else t.clone() for t, itself in zip(tensors, kept, strict=True)]
        result: Tensor = self._differentiable(constants, *copies)
        return result

    def _launched(self, constants: Constants, _: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, tuple[()]]:
        return self.forward(constants, *tensors), ()

    def _by_formula(self, constants: Constants, *tensors: Tensor | None) -> Tensor:
        return self.formula(*tensors, *constants)

    def forward(self, constants: Constants, x: Tensor, *others: Tensor | None) -> Tensor:
        """Compute the formula without recording anything for a backward."""
        (result,) = self._run(constants, None, x, *others)
        return _shaped(result, (*x.shape[:-1], result.shape[1]))

    def backward(
        self, constants: Constants, needs: tuple[bool, ...], grad: Tensor, *tensors: Tensor | None
    ) -> list[Tensor]:
        """Compute the gradients of the *tensors* that *needs* marks."""
        gradients = self._run(constants, needs, grad.contiguous(), *tensors)
        shapes = [t.shape for t, need in zip(tensors, needs, strict=True) if t is not None and need]
        return [_shaped(gradient, shape) for gradient, shape in zip(gradients, shapes, strict=True)]

    def keeps(
        self, constants: Constants, tensors: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> tuple[bool, ...]:
        """Return for each of *tensors* whether PyTorch, running the formula, keeps the tensor itself for a backward."""
        key = (constants, needs, tuple([None if t is None else (t.dtype, t.shape[-1], t.dim() > 1) for t in tensors]))
        if key not in self._keeps:
            # The caller's thread may forbid hooks on saved tensors.
            self._keeps[key] = in_new_thread(_keeps, self.formula, constants, tensors, needs)
        return self._keeps[key]

    def _run(self, constants: Constants, needs: tuple[bool, ...] | None, *tensors: Tensor | None) -> Sequence[Tensor]:
        # Lean, because between matmuls each access to a tensor takes a few of the call's hundred microseconds.
        rows = []
        key: list[Hashable] = [constants, needs]
        for t in tensors:
            if t is None:
                key.append(None)
                continue
            width, tight = t.shape[-1], t.is_contiguous()
            if not tight:
                t, tight = _rows(t)
            elif t.dim() > 2:
                t = reinterpret_tensor(t, (t.numel() // width, width), (width, 1))
            rows.append(t)
            key += (t.dtype, t.device, width, tight)  # no program reads memory of another device
        program = self._programs.get(tuple(key))
        if program is None:
            present = [t is not None for t in tensors]
            varying = [(0,) if t.dim() > 1 else () for t in rows]
            new = _program(self.formula, constants, needs, present=present, varying=varying)
            program = self._programs.setdefault(tuple(key), new)
        return program(*rows)


def _keeps(
    formula: Formula, constants: Constants, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[bool, ...]:
    """Run *formula* on two rows without values, and see which tensors it saves."""
    likes = [
        None
        if t is None
        else torch.empty((2, t.shape[-1]) if t.dim() > 1 else t.shape, dtype=t.dtype, device="meta", requires_grad=need)
        for t, need in zip(tensors, needs, strict=True)
    ]
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        formula(*likes, *constants)
    kept = {storage_id(tensor) for tensor in saved}
    return tuple([t is None or storage_id(t) in kept for t in likes])


SMALL = 1 << 16
"""Elements below which no compiled call is worth its fixed cost, which is about 10 µs forward and 50 µs backward.

In a model, the guard has compared the size before (`BaseKernel.gains_from`), or must not (``every_size``). `SMALL` is
for callers of a package's public function, made by `fuseplug_backends.functional.by_device`, and for the small examples
of verification, whose widths no large call has.
"""


def worth_compiling(shape: Sequence[int], *tensors: Tensor | None) -> bool:
    """Whether to run a program for elements of *shape*, here and now.

    A program is for rows, so *shape* must have two dimensions or more. It must not be empty, and the program's inputs,
    *tensors*, must be `plain`. Where small calls are declined, there must be `SMALL` elements or more.
    """
    return len(shape) > 1 and math.prod(shape) >= (SMALL if is_small_declined() else 1) and plain(*tensors)


def plain(*tensors: Tensor | None) -> bool:
    """Whether *tensors* can be handed to a compiled program, here and now.

    Tracers, functorch transforms, forward-mode differentiation and dispatch modes need to see the operations;
    subclasses (DTensor, fake tensors) bring operations of their own, and so does a batch of gradients. The memory of a
    tensor such as ``z.conj().imag`` holds its negative.
    """
    if is_watched():  # first, because Dynamo does not trace `is_batch_of_gradients`
        return False
    for t in tensors:
        if t is not None and (type(t) not in (Tensor, torch.nn.Parameter) or is_batch_of_gradients(t) or t.is_neg()):
            return False
    return True


def plain_floating(*tensors: Tensor | None) -> bool:
    """Whether *tensors* are `plain`, floating, not empty, and on one device; ``None`` is skipped."""
    present = [tensor for tensor in tensors if tensor is not None]
    device = present[0].device
    return plain(*present) and all(t.numel() and t.is_floating_point() and t.device == device for t in present)


def _shaped(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Give *rows*, a program's result, its *shape*, but not as a view: the caller may want to write into the result."""
    return rows if len(shape) == rows.dim() else reinterpret_tensor(rows, tuple(shape), strides_of(shape))


def _rows(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return *tensor* as a matrix of rows, and whether there are no gaps between the rows.

    A matrix, so that the rank is no reason to compile again; a shared vector stays a vector. Rows that share memory are
    copied: a program for a repeated row would have its stride of 0 compiled in, and be right for no other stride.
    """
    if tensor.dim() > 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    if tensor.stride(-1) != 1 or tensor.stride(0) < tensor.shape[-1]:
        tensor = tensor.contiguous()
    return tensor, tensor.is_contiguous()


def standard_state(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context without gradients and autocast."""
    if not torch.is_autocast_enabled(device_type):
        return torch.no_grad()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def _program(
    formula: Formula,
    constants: Constants,
    needs: tuple[bool, ...] | None,
    *,
    present: Sequence[bool],
    varying: Sequence[Sequence[int]],
) -> Program:
    def all_of(tensors: Sequence[Tensor]) -> list[Any]:
        values = iter(tensors)
        return [next(values) if is_present else None for is_present in present]

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (formula(*all_of(tensors), *constants).contiguous(),)

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        grad, *others = all_of(tensors)

        def of_wanted(*wanted: Tensor) -> Tensor:
            values = iter(wanted)
            every = [next(values) if need else t for t, need in zip(others, needs or (), strict=True)]
            return formula(*every, *constants)

        _, pull = torch.func.vjp(of_wanted, *itertools.compress(others, needs or ()))  # type: ignore[misc]
        return tuple([gradient.contiguous() for gradient in pull(grad)])

    return Program(forward if needs is None else backward, varying)
