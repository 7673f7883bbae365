"""Where `fuseplug.testing` went."""

raise ImportError(
    "fuseplug.testing is no part of fuseplug any more. The conformance kit: pip install fuseplug-testing, and import "
    "fuseplug_testing. The NPU in host memory (fuseplug.testing.npu): pip install fuseplug-host-npu, and import "
    "fuseplug_host_npu."
)
