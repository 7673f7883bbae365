"""The state of a model, to the last attribute, for comparing before and after."""

import types


def state_of(model):
    """The contents of every module's registries and instance, by name."""
    registries = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        path: {"": dict(module.__dict__)} | {name: dict(module.__dict__[name]) for name in registries}
        for path, module in model.named_modules()
    }


def differing(before, after):
    """The places where two states do not hold the same objects under the same names in the same order."""
    found = [f"module {path!r}" for path in before.keys() ^ after.keys()]
    for path in before.keys() & after.keys():
        for registry, held in before[path].items():
            now = after[path][registry]
            if list(held) != list(now):
                found.append(f"{path}{registry}: {list(held)} became {list(now)}")
                continue
            found += [f"{path}{registry}.{name}" for name in held if not _same(held[name], now[name])]
    return found


def _same(one, other):
    # Each look-up makes a new bound method.
    return one == other if isinstance(one, types.MethodType) else one is other


def equal(one, other):
    return bool(((one == other) | (one.isnan() & other.isnan())).all()) and one.dtype == other.dtype
