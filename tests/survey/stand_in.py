"""Imported before transformers, which imports torch_npu where that is installed: without CANN, on a stand-in."""

import importlib.util

from fuseplug_host_npu import load

if importlib.util.find_spec("torch_npu") is not None:
    load()
