"""Causal convolutions as Inductor compiles them, on every device Inductor knows, the CPU included.

A program is for one of two layouts: that of a projection, in which the channels of a token lie side by side, and that
in which the tokens of a channel do. The result, and the gradient of the input, lie as the input does.

The backward is two programs. The first computes the sums anew and, through the activation, their gradient, in float32;
in one program with the rest, Inductor would write down the sums and what the activation makes of them instead. The
second makes the other gradients from it. That of the weight is first summed over `_BLOCK` tokens: over all of them,
Inductor would go down one column of the memory after the other.
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
from ..reference import Variant, earlier, later

_BLOCK = 32


class _Form(NamedTuple):
    """What a program is compiled for.

    Attributes:
        variant: The variant.
        dim: The dimension of the tokens: 1 in ``(batch, tokens, channels)``, 2 in ``(batch, channels, tokens)``.
    """

    variant: Variant
    dim: Literal[1, 2]


def compute(variant: Variant, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`fuseplug_causal_conv1d.reference.causal_conv1d`, fused: the same arguments, result and errors.

    It is computed in float32 and rounded once, so it is as a rule nearer to the exact result. Inside ``torch.compile``,
    ``torch.export`` and other tracers it *is* the reference, for the compiler around it to fuse further.
    """
    fits = bias is None or bias.dtype is weight.dtype
    if not (fits and _are_floating(x, weight) and worth_compiling(x.shape, x, weight, bias)):
        return by_reference(reference.compute, variant, x, weight, bias)
    if recording(x, weight, bias):
        # What the original does not keep its caller may write into before the backward.
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
    """The whole in float32, rounded once to the dtype of *x*, which lies as *form* says."""
    sums = _sums(form, x.to(working_dtype(x, weight)), weight.t(), bias)
    return form.variant.activate(sums).to(x.dtype)


def _sums(form: _Form, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of *x*, in its dtype; *weight* is ``(width, channels)``, so that it is read as *x* is.

    Products are shifted, not *x*: as in the original, no factor meets the zeros before the first token, or NaN would
    come of one that is not finite.
    """
    terms = [later(x * factor, places, form.dim) for factor, places in _factors(form, weight, x.dtype)]
    total = sum(terms[1:], terms[0])
    return total if bias is None else total + _factor(form, bias, x.dtype)


def _factors(form: _Form, weight: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, int]]:
    """What x is multiplied by for each tap, and by how many places its product is later."""
    width = weight.shape[0]
    return [(_factor(form, column, dtype), width - 1 - tap) for tap, column in enumerate(weight.unbind())]


def _factor(form: _Form, per_channel: Tensor, dtype: torch.dtype) -> Tensor:
    wide = per_channel.to(dtype)
    return wide if form.dim == 1 else wide.unsqueeze(1)


def _gradient_of_sums(form: _Form, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = working_dtype(x, weight)
    _, pull = torch.func.vjp(form.variant.activate, _sums(form, x.to(wide), weight, bias))  # type: ignore[misc]
    (of_sums,) = pull(grad.to(wide))
    gradient: Tensor = of_sums
    return gradient


def _gradient_of_x(form: _Form, of_sums: Tensor, weight: Tensor) -> Tensor:
    """Each token had a part in its own sum and in those of the next ``width - 1``."""
    factors = _factors(form, weight, of_sums.dtype)
    terms = [earlier(of_sums * factor, places, form.dim) for factor, places in factors]
    return sum(terms[1:], terms[0])


def _total(form: _Form, terms: Tensor) -> Tensor:
    """The sum of *terms* for each channel."""
    if form.dim == 2:
        return terms.sum(2).sum(0)
    batch, tokens, channels = terms.shape
    # At least two, however few tokens there are: a program with one block would be for that alone, and calls with more
    # tokens would be compiled for again.
    blocks = tokens // _BLOCK + 2
    padded = functional.pad(terms, (0, 0, 0, blocks * _BLOCK - tokens))
    return padded.view(batch, blocks, _BLOCK, channels).sum(2).sum((0, 1))


def _gradients(
    form: _Form, needs: Sequence[bool], of_sums: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Those of *x*, *weight* and *bias* that *needs* names, each in its dtype and packed densely."""
    wide = working_dtype(x, weight)
    of_sums = of_sums.to(wide)
    gradients = []
    if needs[0]:
        gradients.append(_gradient_of_x(form, of_sums, weight).to(x.dtype).contiguous())
    if needs[1]:
        source, places = x.to(wide), reversed(range(weight.shape[0]))
        columns = [_total(form, of_sums * later(source, place, form.dim)) for place in places]
        gradients.append(torch.stack(columns).to(weight.dtype))
    if bias is not None and needs[2]:
        gradients.append(_total(form, of_sums).to(bias.dtype))
    return tuple(gradients)


_programs: dict[Hashable, Program] = {}


def _run(function: Callable[..., tuple[Tensor, ...]], form: _Form, what: Hashable, *tensors: Tensor | None) -> Any:
    """*function* of *tensors* compiled, for its name, *form*, *what*, and what of the tensors is compiled in."""
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
    """*tensor*, copied unless it lies as a program takes it: packed, or as rows with gaps between them."""
    if form.dim == 2 or tensor.dim() < 3:
        return tensor.contiguous()
    batch, tokens, channels = tensor.shape
    outer, inner, last = tensor.stride()
    in_rows = last == 1 and inner >= channels and (batch == 1 or outer == tokens * inner)
    return tensor if in_rows else tensor.contiguous()


def _kind(tensor: Tensor) -> Hashable:
    """What of a tensor is compiled in: of three dimensions, how far rows lie apart. The weight has the channels."""
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
        return (_gradient_of_sums(form, *tensors).contiguous(),)

    def gradients(*tensors: Any) -> tuple[Tensor, ...]:
        return _gradients(form, needs, *tensors)

    turned = weight.t()
    if form.variant.activation is not None:
        (grad,) = _run(of_sums, form, None, grad, x, turned, bias)
    results = list(_run(gradients, form, tuple(needs), grad, x, turned, bias))
    if needs[1]:
        results[needs[0]] = results[needs[0]].t().contiguous()
    return results


_convolved = differentiable(_launched, _backward, convolution_formula, plain)
