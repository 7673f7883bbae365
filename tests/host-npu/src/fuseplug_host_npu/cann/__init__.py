"""A stand-in for CANN's runtime libraries, with which torch_npu can be imported where there is no NPU."""
