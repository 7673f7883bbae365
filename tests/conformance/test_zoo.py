"""The check whose name says what is wrong catches every fault of the zoo, and right kernels have none."""

import pytest
from conformance import uses_private
from conformance.zoo import adapters, imports_torch, kernels, wrong_heads
from support.thorough import covering, first_quick, thorough

from fuseplug_testing import ConformanceError, check_kernel
from fuseplug_testing.checks import CHECKS
from fuseplug_testing.public_names import used_by

RIGHT = [
    kernels.Norm,
    kernels.NamedNorm,
    kernels.Gated,
    kernels.Centred,
    kernels.Rotary,
    kernels.FirstHalf,
    kernels.Head,
    kernels.Pair,
    kernels.HasNoGradient,
    kernels.CannotBeTraced,
]

FUNCTIONS = {
    # values
    "zeros": ("numbers", r"output\[0\] is off by"),
    "without_offset": ("numbers", r"1 OffsetNorm: offset: .*output\[0\] is off by"),
    "wrong_dtype": ("numbers", r"output\[0\] is float32.* instead of bfloat16"),
    "narrow": ("numbers", r"float16.*: output\[0\] is off by"),
    "wrong_in_half": ("numbers", r"torch.float16.*: output\[0\] is off by"),
    "leans_in_half": ("numbers", r"bfloat16.*: [a-z0-9\[\] ]+ is 0.\d+% too large on average over"),
    "shifted_in_half": ("numbers", r"bfloat16.*: output\[0\] is \d.\d+% too high on average over \d,\d+ elements"),
    "gradient_leans_in_half": ("numbers", r"bfloat16.*: gradient of args\[0\] is 0.\d+% too large on average"),
    "key_unturned": ("numbers", r"output\[1\] is off by"),
    # gradients
    "wrong_gradient": ("numbers", r"gradient of args\[0\] is off by"),
    "wrong_weight_gradient": ("numbers", "gradient of weight is off by"),
    "without_gradient": ("numbers", r"gradient of args\[0\] is None"),
    "contiguous_gradient_only": ("gradients", "from above transposed in memory.*gradient of"),
    "wrong_when_weight_is_frozen": ("gradients", r"of args\[0\] alone.*gradient of args\[0\] is off by"),
    "wrong_if_differentiated_twice": ("double-backward", "nothing says so: gradient of .*; if differentiated_"),
    # edges
    "wrong_when_large": ("sizes", r"4\d\d\d elements.*off by"),
    "stale": ("sizes", r"elements: output\[0\] is off by"),
    "reused_buffer": ("sizes", r"elements: output\[0\] is off by"),
    "raises_when_empty": ("shapes", "empty.*raises RuntimeError: grid of size 0"),
    "wrong_at_odd": ("shapes", r"dimension 1 odd \(3 of 4\).*off by"),
    "wrong_at_one": ("shapes", r"dimension 1 one \(1 of 4\).*off by"),
    "wrong_in_one_row": ("shapes", r"one row, .*off by"),
    "contiguous_only": ("layouts", "every other element of a buffer.*off by inf"),
    "forgets_storage_offset": ("layouts", "not aligned.*off by inf"),
    "wrong_without_gradients": ("no-grad", r"no_grad, .*output\[0\] is off by"),
    "always_records": ("no-grad", "no_grad, .*gradient"),
    "other_bits_without_gradients": ("no-grad", "its values are not those it gives when gradients are recorded"),
    "reused_buffer_without_gradients": ("no-grad", "no_grad, .*its result changes when it is called again"),
    "hides_nan": ("special-values", r"NaN in args\[0\], .*: it is not where the original has it"),
    "spreads_nan": ("special-values", r"NaN in args\[0\], .*off by inf"),
    "divides_by_zero": ("special-values", "zeros, .*off by inf"),
    "wrong_far_beyond": ("sizes", r"1048\d\d\d elements.*off by"),
    "wrong_when_large_and_odd": ("sizes", r"1048\d\d\d elements.*off by"),
    # results
    "gives_a_subclass": ("numbers", "returns Marked instead of Tensor"),
    "gives_a_subclass_without_gradients": ("results", r"output\[0\] is a Marked instead of a Tensor"),
    "gives_what_cannot_be_viewed": ("results", r"contiguous: output\[0\] lies in memory with strides"),
    "gives_a_list": ("numbers", r"returns \[Tensor, Tensor\] instead of \(Tensor, Tensor\)"),
    "index_on_the_default_device": ("default-device", "set_default_device"),
    "made_on_the_default_device": ("default-device", "raises RuntimeError: .*meta"),
    # memory
    "writes_input": ("numbers", r"args\[0\] afterwards.*written into"),
    "view_of_its_input": ("memory", r"its result lies in the memory of args\[0\]"),
    "reads_unwritten_memory": ("memory", "every new tensor full of NaN.*gradient of weight is off by inf"),
    "keeps_references": ("references", r"the memory of .*args\[0\].* is held after the call"),
    "packs_weight_once": ("copies", r"deepcopy: output\[0\] is off by"),
    # repetition, threads, process
    "not_the_same_twice": ("determinism", r"not the same each time: output\[0\] differs"),
    "shared_workspace": ("threads", "not what one thread gets"),
    "first_thread_only": ("threads", "raises RuntimeError: no context in this thread"),
    "draws_random_numbers": ("process-state", "does not draw the same random numbers"),
    "changes_the_default_dtype": ("process-state", "the default dtype was torch.float32 and is torch.float64"),
    "flushes_denormals": ("process-state", "whether torch flushes denormal numbers was False and is True"),
    "raises_the_recompile_limit": ("process-state", r"torch._dynamo.config.recompile_limit was \d+ and is 99"),
    "writes_environment": ("process-state", r"os.environ\['ZOO_WORKSPACE'\] was None and is '1'"),
    "patches_torch": ("process-state", "torch.nn.functional.relu6 was replaced"),
    "patches_the_class": ("process-state", "CastLastNorm.extra_repr was added|CastLastNorm.extra_repr was replaced"),
    "patches_the_function": ("process-state", "conformance.zoo.specimens.rotate_half was replaced"),
    # compilers, checkpoints and autocast
    "breaks_the_graph": ("compile", r"fullgraph=True.*raises"),
    "wrong_when_compiled": ("compile", "off by"),
    "wrong_when_recomputed": ("checkpoint", "gradient of .* is off by"),
    "gives_a_view": ("in-place", "raises RuntimeError: .* is a view and is being modified inplace"),
    "coarser_under_autocast": ("autocast", r"torch.float32, torch.float32.*off by"),
    "wrong_under_autocast": ("autocast", "is bfloat16.* instead of float32"),
    # lazy results, and a target beside another
    "wrong_loss": ("numbers", r"plain at head: torch.float32: output\[0\] is off by"),
    "wrong_loss_gradient": ("numbers", "gradient of weight is off by"),
    "wrong_loss_in_half": ("numbers", r"torch.float16: output\[0\] is off by"),
    "hides_nan_from_loss": ("special-values", r"NaN in args\[0\], .*: it is not where the original has it"),
    "shared_workspace_of_loss": ("threads", "not what one thread gets"),
    "keeps_references_of_loss": ("references", r"the memory of .*args\[0\].* is held after the call"),
    "without_offset_beside": ("numbers", r"offset at second: .*output\[0\] is off by"),
}
BASES = {
    "index_on_the_default_device": kernels.Gated,
    "gives_a_list": kernels.Rotary,
    "key_unturned": kernels.Rotary,
    "patches_the_function": kernels.Rotary,
    "view_of_its_input": kernels.FirstHalf,
    "wrong_loss": kernels.Head,
    "wrong_loss_gradient": kernels.Head,
    "wrong_loss_in_half": kernels.Head,
    "hides_nan_from_loss": kernels.Head,
    "shared_workspace_of_loss": kernels.Head,
    "keeps_references_of_loss": kernels.Head,
    "without_offset_beside": kernels.Pair,
}

CLASSES = [
    (adapters.NotDeclared, "declaration", "op must be a non-empty string.*"),
    (adapters.NoSizes, "declaration", "check_sizes must be positive numbers, at least one"),
    (adapters.NoFunction, "declaration", "right:nowhere cannot be imported: AttributeError"),
    (adapters.NoSpecimens, "declaration", "it names no specimens: declare specimens ="),
    (adapters.RaisingSpecimens, "declaration", "raises LookupError: no such model"),
    (adapters.ForeignSpecimens, "specimens", "none of its modules has the kernel's op"),
    (adapters.UnlikeSpecimens, "specimens", "none of the known variants; of 1 tried, the likeliest is plain: "),
    (adapters.ClaimsMore, "variants", "twice: is claimed, and found on no specimen"),
    (
        uses_private.Kernel,
        "import",
        "uses_private/__init__.py:3: Site of fuseplug.contract is private .*import Site from",
    ),
    (kernels.PatchesOnImport, "import", "changes the whole process: torch.nn.functional.relu6 was replaced"),
    (imports_torch.Kernel, "import", "imports torch"),
    (adapters.SaysLess, "reads", "eps: is read at each call, and not declared: add 'eps'"),
    (adapters.SaysMore, "reads", "scale: is declared in reads, and never read"),
    (adapters.SaysNothingOfVars, "reads", "eps: is read at each call, and not declared"),
    (adapters.SaysNothingOfAChild, "reads", "act.weight: is read at each call, and not declared"),
    (adapters.SetsAnAttribute, "match", "it changed the module it was asked about"),
    (adapters.Unsteady, "match", "it gives different answers when asked twice about one module"),
    (adapters.Rolls, "match", "random's state was changed"),
    (adapters.Presumptuous, "match", "asked about Identity.*AttributeError while matching"),
    (adapters.IgnoresTheGenerator, "example", "it differs for generators at the same point"),
    (adapters.OneExample, "example", "it is the same for every generator"),
    (adapters.SmallExamples, "example", "size 4096: .* elements in the main input where at least 4096"),
    (adapters.OtherMixFirst, "example", "weight is torch.*: put the module's own mix first in mixes"),
    (adapters.RefersToNothing, "shapes", "empty .*: the reference raises ValueError: x is empty in float64"),
    (adapters.ByItself, "numbers", "the kernel was not called"),
    (adapters.NotesOnTheModule, "undo", "has other values for last_shape"),
    (adapters.CannotBePickled, "copies", "pickle: raises"),
    (adapters.CannotBePickled, "copies", r"deepcopy: output\[0\] is off by inf"),
    (wrong_heads.HeadElsewhere, "specimens", "its lm_head is no module of it"),
    (wrong_heads.NewScopeEachTime, "match", "it gives different answers when asked twice about one module"),
    (wrong_heads.AsksForNothing, "match", "it asks for the consent 'lazy_scores' and does not say what is given up"),
    (wrong_heads.AsksWithoutAWord, "match", "it asks for the consent '', which is no word"),
    (wrong_heads.BecomesSomethingElse, "lazy", r"torch.float32: becomes something else: output\[0\] differs"),
    (wrong_heads.BecomesSomethingElseInHalf, "lazy", r"torch.float16: becomes something else: output\[0\] differs"),
    (wrong_heads.StandsForAnotherShape, "lazy", r"torch.float32: stands for float32\[6, 11\]"),
    (wrong_heads.ForgetsAutocast, "lazy", r"under autocast: stands for float32.*, and the original's is bfloat16"),
    (wrong_heads.ForgetsAStep, "own-call", r"1 Scaled: forward\(x, labels\): output\[0\] is off by"),
    (wrong_heads.NeverInItsScope, "own-call", "its scope does not hold"),
    (wrong_heads.RaisesInItsScope, "own-call", "its scope raises KeyError: 'targets'"),
    (wrong_heads.ScopeOfNoMethod, "own-call", "its scope is of training_step, and that is no method of it"),
    (wrong_heads.WithoutInputs, "own-call", "give it a property dummy_inputs"),
    (adapters.RemembersTheDtype, "casts", r"to bfloat16: output\[0\] is float32.* instead of bfloat16"),
]


def test_what_a_package_uses_that_is_private_is_named():
    (found,) = used_by("conformance.uses_private")
    assert found.startswith("uses_private/__init__.py:3: Site of fuseplug.contract is private")
    assert found.endswith(": import Site from fuseplug")
    assert list(used_by("conformance.zoo.kernels")) == []
    assert list(used_by("fuseplug_liger.rope")) == []  # fuseplug_liger is released together with what it uses


def _check(_, check, __):
    """What the first half must cover: every check."""
    return [check]


def faults_of(kernel, **how):
    with pytest.raises(ConformanceError) as raised:
        check_kernel(kernel, **how)
    return raised.value.result.faults


def like(base, **declared):
    """A kernel like *base*, except for what is *declared*. It is in the same module, whose import is checked."""
    return type("Kernel", (base,), {"__module__": base.__module__, **declared})


def assert_named(faults, check, why):
    said = [str(fault) for fault in faults if fault.check == check]
    assert said, f"{check} found nothing; these did: {sorted({fault.check for fault in faults})}"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError("\n".join(said))


def alone(check):
    """*check*, and the checks on which it relies."""
    (found,) = (each for each in CHECKS if each.name == check)
    return [*found.needs, check]


@pytest.mark.parametrize(
    ("function", "check", "why"),
    covering([pytest.param(name, *rest, id=name) for name, rest in FUNCTIONS.items()], by=_check),
)
def test_what_computes_wrong_is_caught_and_named(function, check, why):
    base = BASES.get(function, kernels.Norm)
    kernel = like(base, function=f"conformance.zoo.wrong:{function}")
    assert_named(faults_of(kernel, checks=alone(check)), check, why)


def test_what_is_the_same_each_time_only_if_torch_is_asked_for_it_is_right_and_said():
    kernel = like(kernels.Norm, function="conformance.zoo.wrong:the_same_if_asked")
    result = check_kernel(kernel, checks=alone("determinism"))
    reasons = {skip.why for skip in result.skipped if skip.check == "determinism"}
    unless = "not the same each time unless torch.use_deterministic_algorithms(True) was called"
    assert reasons == {f"{unless}: output[0] differs"}


NOT_BY_NAME = {
    "packs_weight_once",  # a copy has no weights of its own if they are passed by name
    "patches_the_class",  # it patches another class
    "contiguous_gradient_only",
    "stale",  # two of these examples have one shape, so `numbers` finds the fault
}
BY_NAME = [(name, *rest) for name, rest in FUNCTIONS.items() if name not in NOT_BY_NAME.union(BASES)]


@pytest.mark.parametrize(("function", "check", "why"), first_quick(BY_NAME), ids=lambda value: value)
def test_what_computes_wrong_is_caught_where_arguments_are_passed_by_name(function, check, why):
    kernel = like(kernels.NamedNorm, function=f"conformance.zoo.wrong:{function}")
    why = why.replace("gradient of weight", r"gradient of args\[1\]").replace("OffsetNorm", "NamedOffsetNorm")
    assert_named(faults_of(kernel, checks=alone(check)), check, why)


@pytest.mark.parametrize(
    ("kernel", "check", "why"),
    covering(CLASSES, by=_check),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_has_no_manners_is_caught_and_named(kernel, check, why, monkeypatch):
    monkeypatch.setattr("fuseplug_testing.importing.fresh_python.LONGEST", 60.0)  # torch takes seconds
    assert_named(faults_of(kernel, checks=alone(check)), check, why)


@thorough  # in the first half, test_plugin.py does this with one of them
@pytest.mark.parametrize("kernel", RIGHT, ids=lambda kernel: kernel.__name__)
def test_a_right_kernel_has_no_fault(kernel):
    result = check_kernel(kernel)
    assert not result.faults
    unasked = {check.name for check in CHECKS} - result.passed.keys()
    without_gradient = {"gradients", "double-backward", "checkpoint"} if not kernel.differentiable else set()
    of_a_function = {"copies", "casts"} if kernel is kernels.Rotary else set()
    # Without its model, a head is called outside its scope; own-call covers compile and autocast.
    by_itself = {"lazy", "own-call"} if kernel is not kernels.Head else {"compile", "autocast"}
    assert unasked == without_gradient | of_a_function | by_itself


def test_every_check_catches_something():
    assert {check for check, _ in FUNCTIONS.values()} | {check for _, check, _ in CLASSES} == {c.name for c in CHECKS}
