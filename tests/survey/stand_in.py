"""Loads torch_npu, if it is installed, on a stand-in for CANN; to be imported before transformers, which imports it."""

import importlib.util

from fuseplug_host_npu import load

if importlib.util.find_spec("torch_npu") is not None:
    load()
