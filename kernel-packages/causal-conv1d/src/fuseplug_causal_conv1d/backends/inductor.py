"""Causal convolutions as Inductor compiles them, on every device Inductor knows, the CPU included.

Each program serves one of two layouts: that of a projection, in which the channels of a token lie side by side, or the
one in which the tokens of a channel do. The result and the gradient of the input have the layout of the input.

The backward goes window by window, so that tensors between its two programs stay in the cache. The first program
computes the sums again, and their gradient through the activation, in float32. In one program with the rest, Inductor
would write the sums and the results of the activation to memory instead. The second program makes the other gradients
from that of the sums. A window includes the tokens around it that its programs read, and zeros before the first token
and after the last: a program that tested each token's position would take several times as long. The gradient of the
weight is first summed over `_BLOCK` tokens; to sum over all of them, Inductor would go down one column of the memory
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.fallback import by_reference
from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.dtypes import working_dtype
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import Program, plain, recording, worth_compiling

from .. import reference
from ..reference import Variant, later

_BLOCK = 32

_WINDOW = 2**20
"""How many numbers a window has: 4 MB in float32."""


class _Form(NamedTuple):
    """The properties of a call for which programs are compiled.

    Attributes:
        variant: The variant.
        dim: The dimension of the tokens: 1 in ``(batch, tokens, channels)``, 2 in ``(batch, channels, tokens)``.
    """

    variant: Variant
    dim: Literal[1, 2]


def compute(variant: Variant, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_causal_conv1d.reference.causal_conv1d`, fused: the same arguments, result and errors.

    The result is computed in float32 and rounded once, so it is usually closer to the exact one. Inside
    ``torch.compile``, ``torch.export`` and other tracers, the reference computes the call, so that the compiler around
    it can fuse further.
    """
    fits = bias is None or bias.dtype is weight.dtype
    if not (fits and _are_floating(x, weight) and worth_compiling(x.shape, x, weight, bias)):
        return by_reference(reference.compute, variant, x, weight, bias)
    if recording(x, weight, bias):
        # Before the backward, the caller may write into tensors that the original does not keep.
        x = x if x.dtype is weight.dtype else x.clone()
        bias = None if bias is None else bias.clone()
    result: Tensor
    if x.stride(1) <= x.stride(2):
        result = _convolved(_Form(variant, 1), x.transpose(1, 2), weight, bias)
        return result.transpose(1, 2)
    result = _convolved(_Form(variant, 2), x, weight, bias)
    return result


causal_conv1d = computed_by(compute, reference.causal_conv1d)


def _are_floating(*tensors: Tensor) -> bool:
    return all(tensor.is_floating_point() and tensor.device == tensors[0].device for tensor in tensors)


def convolution_formula(form: _Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The whole computation in float32, rounded once to the dtype of *x*, which has the layout of *form*."""
    sums = _sums(form, x.to(working_dtype(x, weight)), weight.t(), bias)
    return form.variant.activate(sums).to(x.dtype)


def _sums(form: _Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of *x*, in its dtype; *weight* is ``(width, channels)``, so that it is read like *x*.

    Products are shifted, not *x*. So, as in the original, no factor meets the zeros before the first token, where a
    factor that is not finite would give NaN.
    """
    width = weight.shape[0]
    terms = [
        later(x * _factor(form, column, x.dtype), width - 1 - tap, form.dim)
        for tap, column in enumerate(weight.unbind())
    ]
    total = sum(terms[1:], terms[0])
    return total if bias is None else total + _factor(form, bias, x.dtype)


def _factor(form: _Form, per_channel: Tensor, dtype: torch.dtype) -> Tensor:
    wide = per_channel.to(dtype)
    return wide if form.dim == 1 else wide.unsqueeze(1)


def _gradient_of_sums(form: _Form, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The gradient of the sums, through the activation. *x* begins ``width - 1`` tokens before *grad*."""
    wide = working_dtype(x, weight)
    sums = _sliding(form, x.to(wide), weight.unbind(), grad.shape[form.dim])
    if bias is not None:
        sums = sums + _factor(form, bias, wide)
    _, pull = torch.func.vjp(form.variant.activate, sums)  # type: ignore[misc]
    (of_sums,) = pull(grad.to(wide))
    gradient: Tensor = of_sums.contiguous()
    return gradient


def _sliding(form: _Form, x: Tensor, columns: Sequence[Tensor], tokens: int) -> Tensor:
    """At each of *tokens* positions of *x*, the sum of the tokens from there on, each times one of *columns*."""
    terms = [x.narrow(form.dim, tap, tokens) * _factor(form, column, x.dtype) for tap, column in enumerate(columns)]
    total: Tensor = sum(terms[1:], terms[0])
    return total


def _gradients(
    form: _Form, needs: Sequence[bool], of_sums: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """A window's gradients of *x*, *weight* and *bias*, as *needs* says; the last two in the dtype of the sums.

    Each token had a part in its own sum and in those of the next ``width - 1`` tokens, whose gradients *of_sums* has
    after the window. *x* has as many tokens before it.
    """
    wide = working_dtype(x, weight)
    of_sums, width = of_sums.to(wide), weight.shape[0]
    tokens = of_sums.shape[form.dim] - (width - 1)
    own = of_sums.narrow(form.dim, 0, tokens)
    gradients = []
    if needs[0]:
        gradients.append(_sliding(form, of_sums, weight.unbind()[::-1], tokens).to(x.dtype).contiguous())
    if needs[1]:
        shifted = [x.narrow(form.dim, tap, tokens).to(wide) for tap in range(width)]
        gradients.append(torch.stack([_total(form, own * source) for source in shifted]))
    if bias is not None and needs[2]:
        gradients.append(_total(form, own))
    return tuple(gradients)


def _total(form: _Form, terms: Tensor) -> Tensor:
    """The sum of *terms* for each channel."""
    if form.dim == 2:
        return terms.sum(2).sum(0)
    batch, _, channels = terms.shape
    return terms.reshape(batch, -1, _BLOCK, channels).sum(2).sum((0, 1))


_programs: dict[Hashable, Program] = {}


def _run(function: Callable[..., tuple[Tensor, ...]], form: _Form, what: Hashable, *tensors: Tensor | None) -> Any:
    """Call *function* as a compiled program: one for each name, *form*, *what*, and `_kind` of the tensors."""
    dense = [None if tensor is None else _dense(form, tensor) for tensor in tensors]
    values = [tensor for tensor in dense if tensor is not None]
    key = (function.__name__, form, what, *(None if tensor is None else _kind(tensor) for tensor in dense))
    program = _programs.get(key)
    if program is None:
        present = [tensor is not None for tensor in dense]

        def of_present(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            return function(*[next(rest) if is_present else None for is_present in present])

        varying = [(0, form.dim) if value.dim() == 3 else () for value in values]
        program = _programs.setdefault(key, Program(of_present, varying))
    return program(*values)


def _dense(form: _Form, tensor: Tensor) -> Tensor:
    """*tensor*, copied unless a program takes its layout: packed, or rows with gaps between them."""
    if form.dim == 2 or tensor.dim() < 3:
        return tensor.contiguous()
    batch, tokens, channels = tensor.shape
    outer, inner, last = tensor.stride()
    if last != 1 or inner < channels or (batch > 1 and outer != tokens * inner):
        return tensor.contiguous()
    # A batch of one may have any stride, but programs are compiled for the one that follows from that of rows.
    return tensor.squeeze(0).unsqueeze(0) if batch == 1 else tensor


def _kind(tensor: Tensor) -> Hashable:
    """The properties of a tensor that are compiled in. Of x, it is the stride of rows: the weight has the channels."""
    if tensor.dim() < 3:
        return tensor.dtype, tensor.device, tensor.shape
    return tensor.dtype, tensor.device, None if tensor.is_contiguous() else tensor.stride(1)


def _launched(
    form: _Form, _: Sequence[bool], x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, tuple[()]]:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        sums = _sums(form, x.to(working_dtype(x, weight)), weight, bias)
        return (form.variant.activate(sums).to(x.dtype).contiguous(),)

    (result,) = _run(forward, form, None, x, weight.t(), bias)
    return result, ()


def _backward(
    form: _Form, needs: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> list[Tensor]:
    def of_sums(*tensors: Any) -> tuple[Tensor, ...]:
        return (_gradient_of_sums(form, *tensors),)

    def gradients(*tensors: Any) -> tuple[Tensor, ...]:
        return _gradients(form, needs, *tensors)

    turned, around = weight.t(), weight.shape[1] - 1
    of_x = torch.empty_like(x) if needs[0] else None
    totals: list[Tensor] = []
    for start, stop in _windows(form, x):
        upstream = _window(form, grad, start, stop + around)
        nearby = _window(form, x, start - around, stop + around)
        if form.variant.activation is not None:
            (upstream,) = _run(of_sums, form, None, upstream, nearby, turned, bias)
        parts = list(_run(gradients, form, tuple(needs), upstream, nearby, turned, bias))
        if of_x is not None:
            inside = of_x.narrow(form.dim, start, min(stop, x.shape[form.dim]) - start)
            inside.copy_(parts.pop(0).narrow(form.dim, 0, inside.shape[form.dim]))
        totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
    results = [] if of_x is None else [of_x]
    if needs[1]:
        results.append(totals.pop(0).t().to(weight.dtype).contiguous())
    return [*results, *[total.to(weight.dtype) for total in totals]]


def _windows(form: _Form, x: Tensor) -> list[tuple[int, int]]:
    """The start and end of each window. All have whole blocks, so the last may end after the last token.

    Each has at least two blocks: a program for one block would serve nothing else, and more tokens would need another
    program.
    """
    tokens = x.shape[form.dim]
    length = max(2, min(_WINDOW * tokens // x.numel() // _BLOCK, -(-tokens // _BLOCK))) * _BLOCK
    return [(start, start + length) for start in range(0, tokens, length)]


def _window(form: _Form, tensor: Tensor, start: int, stop: int) -> Tensor:
    """The tokens of *tensor* from *start* to *stop*, with zeros where it has none."""
    tokens = tensor.shape[form.dim]
    first, last = max(start, 0), min(stop, tokens)
    inside = tensor.narrow(form.dim, first, last - first)
    missing = (first - start, stop - last)
    return functional.pad(inside, (0, 0) * (2 - form.dim) + missing) if any(missing) else inside


_convolved = differentiable(_launched, _backward, convolution_formula, plain)
