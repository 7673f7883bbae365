"""Programs that are recorded and run uncompiled, to test what a program is given rather than its machine code."""


def uncompiled(recording, *_):
    """Stand in for `compiled_by_inductor`."""
    return lambda *tensors: recording.graph(*recording.arguments(tensors)), lambda: None
