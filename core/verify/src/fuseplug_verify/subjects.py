"""The subject of a verification, a method of a module or a function that a method looks up, and how it is run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .data import Example, Refusal
from .rebind import RebindError, calls, space_of
from .safe_access import all_below, attributes_of, class_name
from .verification.memory import not_dense
from .verification.nested import leaves, mapped, tensors, with_tensors
from .verification.neutral import same_random_numbers
from .verification.outcome import GRADIENT, Outcome, same
from .verification.twin import twin
from .watch import Expected

T = TypeVar("T")


def _as_it_is(value: T) -> T:
    return value


@dataclass(frozen=True)
class Subject:
    """The target at a site, ready to be run on examples.

    Attributes:
        original: The function behind the module's method, or the function that the method calls.
        module: For a method, the module whose twins are run; ``None`` for a function.
        alike: The module's signature: whatever is true of this subject is true of any other with the same signature.
        space: For a function, the globals in which the method looks it up.
        draws: Whether the original may draw random numbers. If so, every run draws the same ones, and the process's
            generators are restored afterwards; if not, the generators are left alone.
        lazy: The class of lazy tensors that may stand for its results, as in `Candidate.lazy`.
    """

    original: Callable[..., Any]
    module: nn.Module | None
    alike: int | None = None
    space: Expected | None = None
    draws: bool = True
    lazy: type[Any] | None = None

    @classmethod
    def of_method(cls, module: nn.Module, method: Callable[..., Any], alike: int | None = None) -> Subject | Refusal:
        """The subject for *method*, a function of the class of *module*; or why no kernel can read that module.

        Args:
            module: The module whose copies are run.
            method: The function of its class.
            alike: As in `Subject`.
        """
        return _odd_tensor(module) or cls(method, module, alike)

    @classmethod
    def of_function(cls, method: Callable[..., Any], name: str) -> Subject | Refusal:
        """The subject for the function that *method* looks up as the global *name*; or why it cannot be replaced."""
        try:
            if not calls(method, name):
                return Refusal(f"{method.__qualname__} does not call {name}", kind="unsupported")
            space = space_of(method, name)
            return cls(space[name], None, space=Expected.same(space))
        except RebindError as error:
            return Refusal(str(error), kind="unsupported")

    def run(
        self,
        function: Callable[..., Any],
        example: Example,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        gradients: bool = True,
        training: bool | None = None,
        arguments: Callable[[Tensor], Tensor] = Tensor.clone,
        upstream: Callable[[Tensor], Tensor] = _as_it_is,
        wants: Callable[[str], bool] = lambda _: True,
        autocast: bool = False,
        watching: contextlib.AbstractContextManager[Any] | None = None,
        change: Callable[[nn.Module], None] | None = None,
    ) -> Outcome:
        """Call *function* in the place of the original.

        Args:
            function: The original itself, the reference or a kernel, with the target's signature.
            example: Inputs and parameters; copied, never changed.
            device: Where to run.
            dtype: If given, every floating-point tensor is cast to it first.
            gradients: Whether to run backward, with a fixed random gradient for each differentiable output. If not,
                *function* runs under ``no_grad``.
            training: If given, the training flag that the twin runs with.
            arguments: Returns a copy of an argument in some memory layout. It is differentiable, and never returns the
                tensor itself: code that writes into its input must run, and the write must show.
            upstream: Returns the upstream gradient of an output in some memory layout.
            wants: Whether the gradient of a floating-point argument (``"args[0]"``) or parameter (its name) is wanted.
            autocast: Whether to run the forward under autocast, with the device's own autocast dtype.
            watching: A context to enter around the forward.
            change: Called with the twin before it is run.
        """
        device = torch.device(device)
        place = functools.partial(_placed, device, dtype)
        placed = with_tensors(place, (tuple(example.args), dict(example.kwargs)))
        named = {f"args[{i}]": value for i, value in enumerate(leaves(placed)) if isinstance(value, Tensor)}
        for name, leaf in named.items():
            leaf.requires_grad_(gradients and leaf.is_floating_point() and wants(name))
        args, kwargs = inputs = with_tensors(arguments, placed)
        double = None
        if self.module is not None:
            double = twin(self.module, example, functools.partial(_in_twin, place, gradients))
            if training is not None:
                double.train(training)
            for name, parameter in double.named_parameters():
                named[name] = parameter.requires_grad_(parameter.requires_grad and wants(name))
            if change is not None:
                change(double)
            args = (double, *args)
        with same_random_numbers(device.type) if self.draws else contextlib.nullcontext():
            # No other context around a call with gradients: it would turn on again what a kernel leaves turned off,
            # and that must show.
            with contextlib.ExitStack() as stack:
                if not gradients:
                    stack.enter_context(torch.no_grad())
                if autocast:
                    stack.enter_context(torch.autocast(device.type, torch.get_autocast_dtype(device.type)))
                stack.enter_context(watching or contextlib.nullcontext())
                result = function(*args, **kwargs)
                _refuse_undeclared(self.lazy, result)
                result = (example.after or _as_it_is)(result)
            result = mapped(functools.partial(_computed, self.lazy), result)
            outputs = tensors(result)
            values: dict[str, Tensor | None] = {f"output[{i}]": value for i, value in enumerate(outputs)}
            if gradients:
                wanted = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
                values |= _gradients(outputs, wanted, tensors(inputs), upstream)
        pairs = [*zip(tensors(inputs), tensors(placed), strict=True)]
        values |= {f"args[{i}] afterwards": value for i, (value, _) in enumerate(pairs)}
        written = frozenset(f"args[{i}] afterwards" for i, pair in enumerate(pairs) if not same(*pair))
        if double is not None:
            stored = (*double.named_parameters(), *double.named_buffers())
            values |= {f"{name} afterwards": value for name, value in stored if not value.is_meta}
        structure = str(mapped(_kind, result)).replace("'", "")
        steps = {f"output[{i}]": _steps(output) for i, output in enumerate(outputs)}
        detached = {name: value if value is None else value.detach() for name, value in values.items()}
        return Outcome(detached, structure, steps, written)

    def twin(self, example: Example) -> nn.Module:
        """A copy of the module with the values of *example*, on the CPU.

        Raises:
            TypeError: If the subject is a function.
        """
        if self.module is None:
            raise TypeError("a function has no twin: expected the subject of a method")
        return twin(self.module, example)


def _odd_tensor(module: nn.Module) -> Refusal | None:
    """Why no kernel can read *module*, if a tensor of it or of a module below it is not dense."""
    for part in all_below(module):
        for name, tensor in _own_tensors(part).items():
            if what := not_dense(tensor):
                holder = "its" if part is module else f"the {class_name(part)} below it: its"
                why = "and kernels read dense tensors: make it dense, or leave the module as it is"
                return Refusal(f"{holder} {name} is {what}, {why}", kind="unsupported")
    return None


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes (where FSDP keeps its views) of *module* itself, by name."""
    state = attributes_of(module)
    attributes = {name: value for name, value in state.items() if issubclass(type(value), Tensor)}
    registered = {**state["_parameters"], **state["_buffers"]}
    return {**{name: value for name, value in registered.items() if value is not None}, **attributes}


def _refuse_undeclared(lazy: type[Any] | None, result: Any) -> None:
    """Raise a `TypeError` if *result* holds a lazy tensor (one with ``computed()``) of an undeclared class."""
    for tensor in tensors(result):
        if hasattr(type(tensor), "computed") and not (lazy is not None and isinstance(tensor, lazy)):
            raise TypeError(f"it returns a {type(tensor).__name__}, which is lazy, and it was not declared")


def _computed(lazy: type[Any] | None, value: Any) -> Any:
    """The tensor that *value* stands for, if it is of the class *lazy*; else *value* itself."""
    return value.computed() if lazy is not None and isinstance(value, lazy) else value


def _steps(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of *tensor*, 0 for dimensions of one element; ``None`` if it is empty, or skips or repeats memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    steps = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    filled = 1
    for step, size in steps:
        if step != filled:
            return None
        filled *= size
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _placed(device: torch.device, dtype: torch.dtype | None, value: Tensor) -> Tensor:
    """A copy of *value* on *device*; of *dtype*, if that is given and *value* is floating-point."""
    return value.detach().to(device, dtype if dtype and value.is_floating_point() else value.dtype, copy=True)


def _in_twin(place: Callable[[Tensor], Tensor], gradients: bool, value: Tensor) -> Tensor:
    """The copy that *place* makes of a twin's tensor, a parameter as a parameter; a tensor on meta stays as it is."""
    if value.is_meta or not issubclass(type(value), nn.Parameter):
        return value if value.is_meta else place(value)
    return nn.Parameter(place(value), requires_grad=gradients and value.is_floating_point())


def _gradients(
    outputs: Sequence[Tensor],
    leaves: dict[str, Tensor],
    inputs: Sequence[Tensor],
    lay_out: Callable[[Tensor], Tensor],
) -> dict[str, Tensor | None]:
    """The gradients of *leaves*, for upstream gradients that lie in memory as the first of *inputs* with their shape.

    In a model, what is computed from a result mostly lies in memory as the inputs do. Original, reference and kernel
    all get the same upstream gradients.
    """
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return {f"{GRADIENT}{name}": None for name in leaves}
    generator = torch.Generator().manual_seed(1)

    def upstream(output: Tensor) -> Tensor:
        # Eighths of integers below 16 are exact in every dtype, so the truth gets the same numbers as the others.
        numbers = torch.randint(-15, 16, output.shape, generator=generator, device="cpu").div(8)
        placed = numbers.to(output.device, output.dtype)
        like = next((tensor for tensor in inputs if tensor.shape == output.shape), placed)
        lying = torch.empty_like(like, dtype=placed.dtype, device=placed.device, requires_grad=False)
        return lay_out(lying.copy_(placed))

    grads = [upstream(output) for output in differentiable]
    gradients = torch.autograd.grad(differentiable, list(leaves.values()), grads, allow_unused=True)
    return {f"{GRADIENT}{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _kind(value: object) -> Any:
    """Stands for a leaf of the outputs: the value itself if it is ``None`` or a number, else the name of its type."""
    return value if value is None or isinstance(value, int | float) else type(value).__name__
