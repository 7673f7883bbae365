"""A stand-in for CANN's runtime libraries, with which torch_npu can be imported on a machine without an NPU."""
