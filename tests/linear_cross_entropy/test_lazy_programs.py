"""Random programs give the same on lazy as on plain logits: values, gradients, shapes, graphs and errors."""

import pytest
import torch
from support.thorough import thorough
from torch import Tensor

from fuseplug_linear_cross_entropy.lazy_tensor import functions, records, tensor, unchanged
from fuseplug_linear_cross_entropy.recognise import lazy_rows

from .programs import differences

QUICK, PROGRAMS, BLOCK = 150, 20_000, 1000


def unlike(seeds):
    """The seed and the first difference of the first program that gives something else, or ``None``."""
    refused = 0
    for seed in seeds:
        found, refusal = differences(seed)
        if found:
            return seed, found[0]
        refused += bool(refusal)
    # More refusals would mean that the programs find out little.
    assert refused < len(seeds) / 20
    return None


@pytest.mark.filterwarnings("ignore")
def test_programs_give_what_they_give_on_plain_logits():
    assert unlike(range(QUICK)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [12152, 12383, 12751])
def test_logits_that_are_printed_after_the_loss_name_their_own_gradient_function(seed):
    assert differences(seed) == ([], "")


@thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, PROGRAMS, BLOCK))
def test_more_programs_do_so(first):
    assert unlike(range(first, first + BLOCK)) is None


def only_the_one_that_is_asked(family, why, asked):
    """An earlier fault: the other tensors are computed when they are needed, from what their sources are by then."""
    with records.as_in_forward():
        for member in family.members:
            lazy = member()
            if isinstance(lazy, records.Recorded) and lazy._record is asked:
                asked.become_real(lazy, why)


def without_its_shape(keys, rows):
    """A fault: a mask chooses what it reaches, whatever its shape."""
    found = []
    for key in keys:
        found += key.nonzero(as_tuple=True) if isinstance(key, Tensor) and key.dtype == torch.bool else [key]
    return tuple(found)


FAULTS = {
    "alone": (records.Family, "become_real", only_the_one_that_is_asked),
    "masks": (lazy_rows, "_places", without_its_shape),
    "metadata": (tensor, "ABOUT", functions.ABOUT | {Tensor.storage_offset, Tensor._is_view}),
    "weights": (unchanged.Remembered, "change", lambda self, waiting=True: ""),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_programs_find_a_fault(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    found = None
    for seed in range(2000):
        try:
            found = differences(seed)[0]
        except Exception as error:
            found = error
        if found:
            return
    raise AssertionError("2000 programs found nothing")
