"""Every recurrence on each backend: values and gradients, layouts, dtypes, and the calls left to the reference."""

import itertools

import pytest
import torch
from support.recurrences import BF16, DOUBLE, HALF, SINGLE, rows
from support.thorough import covering

ROWS = rows()
DTYPES = [(SINGLE, SINGLE), (BF16, SINGLE), (HALF, SINGLE), (BF16, BF16)]

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def of_every(values):
    """Parameters for each row with each of the *values* of that row."""
    return [pytest.param(row, value, id=f"{name}-{value}") for name, row in ROWS.items() for value in values(row)]


def grid(name):
    row = ROWS[name]
    return covering(itertools.product([name], DTYPES, row.shapes, [row.how, *row.others], [True, False]))


@pytest.mark.parametrize(
    ("name", "dtypes", "shape", "how", "optional"), [case for name in ROWS for case in grid(name)], ids=str
)
def test_every_shape_and_mix_of_dtypes(backend, name, dtypes, shape, how, optional):
    row = ROWS[name]
    arguments = row.tensors(*dtypes, **shape, optional=optional)
    backend.assert_right(*row.both(backend.module(row.op), **how), arguments, row.tolerance)


@pytest.mark.parametrize(("row", "missing"), of_every(lambda row: row.optional))
def test_without_one_that_may_be_missing(backend, row, missing):
    arguments = row.tensors()
    del arguments[missing]
    backend.assert_right(*row.both(backend.module(row.op)), arguments, row.tolerance)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(("row", "missing"), of_every(lambda row: (None, *row.optional)))
def test_a_step_of_decoding(backend, row, dtypes, missing):
    arguments = row.tensors(*dtypes, **row.step)
    arguments.pop(missing, None)
    ours, theirs = row.both(backend.module(row.op))
    for result, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
        torch.testing.assert_close(result.cpu(), expected)


VIEWS = {
    "a part of the last dimension": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "the other way round": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "exchanged inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x,
    "contiguous": lambda x: x.contiguous(),
    "every second": lambda x: torch.stack((x, x), -1)[..., 0],
    "not aligned": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "one sequence again and again": lambda x: x[:1].expand_as(x) if x.dim() > 1 else x,
}


@pytest.mark.parametrize("view", VIEWS)
@every
def test_every_layout(backend, row, view):
    def seen(function):
        return lambda **arguments: function(**{name: VIEWS[view](t) for name, t in arguments.items()})

    backend.assert_right(*map(seen, row.both(backend.module(row.op))), row.tensors(), row.tolerance)


@pytest.mark.parametrize("decay", [-1e-6, -90.0, -1e4, -1e30, 0.1])
@every
def test_decays_as_weak_and_as_strong_as_can_be_and_states_that_grow(backend, row, decay):
    arguments, (name, some) = row.tensors(**row.long), row.decay
    arguments[name][some] = decay
    backend.assert_right(*row.both(backend.module(row.op)), arguments, row.tolerance)


@pytest.mark.parametrize(("row", "wanted"), of_every(lambda row: row.wanted))
@pytest.mark.parametrize("used", [0, 1])
def test_only_the_gradients_that_are_wanted_of_the_result_that_is_used(backend, row, wanted, used):
    plain = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in row.tensors().items()}
    gradients, expected = (
        torch.autograd.grad(
            function(**leaves)[used].square().sum(), [leaves[name] for name in wanted], allow_unused=True
        )
        for function, leaves in zip(
            row.both(backend.module(row.op)), (backend.on(row.tensors(), *wanted), plain), strict=True
        )
    )
    for name, one, other in zip(wanted, gradients, expected, strict=True):
        if other is None:
            assert one is None or not one.any(), name
        else:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


@every
def test_a_second_derivative(backend, row):
    if not backend.differentiable_twice:
        pytest.skip("the operations have none, and say so")
    leaves = [t.to(backend.device, DOUBLE).requires_grad_() for t in row.tensors(**row.tiny).values()]
    function = row.both(backend.module(row.op))[0]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@every
def test_transforms_of_torch_func(backend, row):
    ours, theirs = row.both(backend.module(row.op))
    arguments, moved = list(row.tensors().values()), list(backend.on(row.tensors()).values())

    def penalty(function):
        return torch.func.grad(lambda *args: function(*args)[0].square().sum())

    torch.testing.assert_close(penalty(ours)(*moved).cpu(), penalty(theirs)(*arguments), rtol=1e-4, atol=1e-4)


@every
def test_under_autocast_it_computes_in_float32(backend, row):
    ours = row.both(backend.module(row.op))[0]
    plain = backend.on(row.tensors(), *row.two)
    leaves = [plain[name] for name in row.two]
    expected = torch.autograd.grad(ours(**plain)[0].sum(), leaves)
    with torch.autocast(backend.device, torch.bfloat16):
        y, _ = ours(**plain)
        gradients = torch.autograd.grad(y.sum(), leaves)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(y, ours(**plain)[0])


@pytest.mark.parametrize(("row", "shape"), of_every(lambda row: row.empty))
def test_what_is_empty_is_the_references(backend, row, shape):
    ours, theirs = row.both(backend.module(row.op))
    arguments = row.tensors(**shape)
    for result, expected in zip(ours(**backend.on(arguments)), theirs(**arguments), strict=True):
        assert torch.equal(result.cpu(), expected)
