"""One class of the census by itself, without a model around it: what is fused, and whether it still computes the same.

A module is built from a config of its folder, made small, and called with tensors that are made here. The callers of
rotary functions are attentions, which hardly run alone. So they are only planned; planning runs the function.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fuseplug import KernelManager

from .build import give_values, of_class
from .census import LOSS, Census
from .checking import compared, planned, said
from .feeding import Call, outputs
from .loss_heads import with_labels
from .small_configs import number, small_config

_HIDDEN, _INNER, _EXPERTS, _CHOSEN = 64, 96, 4, 2
_BATCH, _TOKENS = 2, 6
_INDICES, _WEIGHTS = "ind|selected|top_experts", "weight|score|prob"

_OF_EXPERTS = ".*num_experts|n_experts|n_routed_experts|num_local_experts"
_OF_CHOICES = "top_k|moe_topk|top_k_experts|num_experts_per_tok"
_MOST_ADDED = 8
"""The most missing numbers that a config is given."""

_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    (r"layer_idx|layer_id|layer_number|block_id", 0),
    (r".*(act|activation)(_fn|_function)?", "silu"),
    (r".*(intermediate|inner|hidden_features|context_dim|ffn|mlp_dim).*", _INNER),
    (_OF_EXPERTS, _EXPERTS),
    (_OF_CHOICES, _CHOSEN),
    (r".*(size|dim|features|width|d_model)", _HIDDEN),
    (r".*limit", 7.0),
    (r".*(bias|dropout_rate)", False),
    (r"(n|num)_shared_experts", 1),
    (r"num_fwd_mem_blocks|num_mem_blocks", 1),
)
"""The arguments given to a constructor, by patterns of parameter names, if the config has nothing of that name."""


CALL = Call("", {})
"""The call of a `Called`, which holds its own inputs."""


class Class(NamedTuple):
    """A class of the census: the op it computes or, for rotations, calls; its folder; its name."""

    op: str
    folder: str
    name: str


def classes(census: Census) -> list[Class]:
    """All classes of *census*; for rotations, the classes that call them."""
    computing = [Class(op, *where) for op, each in census.classes.items() if op != "rope" for where in each]
    return sorted([*computing, *(Class("rope", *where) for where in census.calls)])


def check(manager: KernelManager, each: Class, plan_only: bool = False) -> dict[str, Any]:
    """The record of one class: plain data, like that of a model; its status is ``"planned"`` if it is not called.

    A class that is fused only in a class around it is recorded with the latter. With *plan_only*, no kernel is run.
    """
    record = _checked(manager, each, plan_only)
    if each.op != "rope" and not _is_fused(record, each):
        for holder in _holders(each):
            around = _checked(manager, each._replace(name=holder), plan_only)
            if _is_fused(around, each):
                return around | {"class": each.name}
    itself = {"op": each.op, "folder": each.folder, "class": each.name, "target": ""}
    silent = "sites" in record and not _sites(record, each)
    return record | {"unanswered": [itself] if silent else []}


def _sites(record: Mapping[str, Any], each: Class) -> list[dict[str, Any]]:
    return [site for site in record.get("sites", ()) if (site["op"], site["class"]) == (each.op, each.name)]


def _is_fused(record: Mapping[str, Any], each: Class) -> bool:
    return any(site["fused"] for site in _sites(record, each))


def _checked(manager: KernelManager, each: Class, plan_only: bool) -> dict[str, Any]:
    record: dict[str, Any] = dict(zip(("op", "folder", "class"), each, strict=True))
    if each.op == LOSS:
        return record | _trained(manager, each, plan_only)
    try:
        module = instance(each)
    except Exception as error:
        return record | {"status": "not built", "why": said(error)}
    called = Called(module)
    if each.op == "rope" or plan_only:
        return record | planned(manager, called, verify=not plan_only) | {"status": "planned"}
    try:
        called.give_inputs()
    except RuntimeError as error:
        return record | planned(manager, called) | {"status": "not run", "why": str(error)}
    return record | compared(manager, called, [CALL])


def _trained(manager: KernelManager, each: Class, plan_only: bool) -> dict[str, Any]:
    """The record of a class that is a whole model, called with labels."""
    try:
        model = of_class(_find(each))
    except Exception as error:
        return {"status": "not built", "why": said(error)}
    if plan_only:
        return planned(manager, model, verify=False) | {"status": "planned"}
    try:
        inputs = with_labels(model)
    except RuntimeError as error:
        return planned(manager, model) | {"status": "not run", "why": str(error)}
    return compared(manager, model, [Call("", inputs, loss=True)])


def _holders(each: Class) -> Iterator[str]:
    """The names of the classes in the same folder, models excepted, whose constructors call *each*."""
    for module in _modules(each.folder, "modeling"):
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__:
                made = re.search(rf"\b{each.name}\(", inspect.getsource(value.__init__)) if name != each.name else None
                if made and not issubclass(value, PreTrainedModel):
                    yield name


def instance(each: Class) -> nn.Module:
    """A small instance of *each*, with values everywhere, in eval mode.

    Raises:
        TypeError: If it is no module, or no config fits; the message has the error with the likeliest config.
    """
    cls = _find(each)
    if not issubclass(cls, nn.Module):
        raise TypeError(f"with the packages installed here, it is a {type(cls).__name__}, not a module")
    if each.op == "rope":
        # Its functions belong to its class, so it does not matter how the instance was constructed.
        return _constructed(cls, each.folder) or _unconstructed(cls)
    torch.manual_seed(0)
    module = _constructed(cls, each.folder)
    if module is None:
        raise TypeError(f"{each.name} cannot be made from any config of {each.folder}: {_why(cls, each.folder)}")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    give_values(module)
    return module.eval().float()


class Called(nn.Module):
    """Calls a module with inputs that are parameters, so that they have gradients as the others do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.names: tuple[str, ...] = ()

    def forward(self) -> Any:
        return self.module(**{name: getattr(self, name) for name in self.names})

    def give_inputs(self) -> None:
        """Hold the first inputs with which the module runs.

        Raises:
            RuntimeError: If there are none; the message has the error of the last try.
        """
        why = "no inputs are known for its forward"
        for given in _inputs(self.module):
            self._hold(given)
            try:
                if outputs(self, CALL)[0]:
                    return
                why = "it gives nothing differentiable"
            except Exception as error:
                why = said(error)
        raise RuntimeError(why)

    def _hold(self, given: Mapping[str, Tensor]) -> None:
        self.names = tuple(given)
        for name, value in given.items():
            self._parameters.pop(name, None)
            self._buffers.pop(name, None)
            if value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)


def _find(each: Class) -> type[nn.Module]:
    return next(vars(module)[each.name] for module in _modules(each.folder, "modeling") if each.name in vars(module))


def _modules(folder: str, kind: str) -> Iterator[Any]:
    package = importlib.import_module(f"transformers.models.{folder}")
    for found in pkgutil.iter_modules(package.__path__):
        if found.name.startswith(f"{kind}_") and not found.name.startswith(("modeling_tf_", "modeling_flax_")):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def _constructed(cls: type[nn.Module], folder: str) -> nn.Module | None:
    for config, every in itertools.product(_configs(cls, folder), (False, True)):
        for _ in range(_MOST_ADDED):
            try:
                return cls(**_arguments(cls, config, every))
            except AttributeError as error:
                if config is None or not _added(config, error.name):
                    break
            except Exception:  # the config may be for another class; `_why` finds the error again
                break
    return None


def _added(config: PretrainedConfig, name: str | None) -> bool:
    """Set *name* in *config*, if a likely value is known; return whether. No config has all that some classes need."""
    known = None if name is None or hasattr(config, name) else _known(name)
    if known is None:
        return False
    vars(config)[str(name)] = known
    return True


def _why(cls: type[nn.Module], folder: str) -> str:
    config = next(iter(_configs(cls, folder)), None)
    try:
        cls(**_arguments(cls, config))
    except Exception as error:
        return said(error)
    return ""


def _unconstructed(cls: type[nn.Module]) -> nn.Module:
    module = object.__new__(cls)
    nn.Module.__init__(module)
    return module


def _configs(cls: type[nn.Module], folder: str) -> Iterator[PretrainedConfig | None]:
    """The configs of *folder*, small: first those that the constructor names, then by likeness to the class's name."""
    found = {
        name: value
        for module in _modules(folder, "configuration")
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, PretrainedConfig) and value.__module__ == module.__name__
    }
    asked = str([p.annotation for p in _parameters(cls)])
    for name in sorted(found, key=lambda name: (name not in re.findall(r"\w+", asked), -_alike(name, cls.__name__))):
        for make in (small_config, _shrunk):
            try:
                yield _filled(make(found[name]))
            except Exception:  # the survey of models reports configs that cannot be made small
                continue
    yield None


def _shrunk(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """An instance with smaller numbers, whether or not they fit together."""
    config = config_class()
    for name, value in vars(config).items():
        if type(value) is int:
            vars(config)[name] = number(name, value, itertools.repeat(0))
    return config


def _filled(config: PretrainedConfig) -> PretrainedConfig:
    """*config* with sizes where it has none, for layers that its models lack by default, and never with one expert."""
    for name, value in vars(config).items():
        if value == 1 and re.fullmatch(f"{_OF_EXPERTS}|{_OF_CHOICES}", name):
            vars(config)[name] = _known(name)
        elif (value is None or (type(value) is int and value == 0)) and (known := _known(name)) is not None:
            vars(config)[name] = known
    return config


def _known(name: str) -> Any:
    return next((value for pattern, value in _ARGUMENTS if re.fullmatch(pattern, name)), None)


def _alike(left: str, right: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _parameters(cls: type[nn.Module]) -> Sequence[inspect.Parameter]:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _arguments(cls: type[nn.Module], config: PretrainedConfig | None, every: bool = False) -> dict[str, Any]:
    """What the constructor of *cls* needs, by name; with *every*, also likely values for what defaults to ``None``."""
    arguments: dict[str, Any] = {}
    for parameter in _parameters(cls):
        name = parameter.name
        if "config" in name:
            arguments[name] = config
        elif parameter.default is parameter.empty or (every and parameter.default is None):
            of_config = getattr(config, name, None)
            arguments[name] = _known(name) if of_config is None else of_config
    return arguments


def _inputs(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The inputs with which *module* may be called, likely ones first."""
    parameters = inspect.signature(module.forward).parameters.values()
    taken = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p.name for p in taken if p.default is p.empty or re.search(f"gate$|{_INDICES}|{_WEIGHTS}", p.name)]
    tokens = _BATCH * _TOKENS
    stacked = {len(parameter) for parameter in module.parameters() if parameter.dim() == 3}
    # If one projection has fewer matrices than another, some experts have none: only two, so that tokens reach others.
    experts = min(stacked, default=_EXPERTS) + 2 * (len(stacked) > 1)
    chosen = min(_CHOSEN, experts)
    for width, flat, dense in itertools.product(_widths(module), (False, True), (False, True)):
        generator = torch.Generator().manual_seed(0)
        given: dict[str, Tensor] = {}
        for name in needed:
            if re.search(_INDICES, name):
                given[name] = torch.rand(tokens, experts, generator=generator).topk(chosen)[1]
            elif re.search(_WEIGHTS, name):
                given[name] = torch.rand(tokens, experts if dense else chosen, generator=generator)
            else:
                shape = (tokens, width) if flat else (_BATCH, _TOKENS, width)
                given[name] = torch.randn(shape, generator=generator)
        yield given


def _widths(module: nn.Module) -> list[int]:
    found = [parameter.shape[-1] for parameter in module.parameters()]
    found += [size for parameter in module.parameters() for size in parameter.shape]
    return list(dict.fromkeys([_HIDDEN, *found]))[:6]
