"""The dtypes for which kernels are written."""

import pytest
import torch

from fuseplug_backends.dtypes import MODEL_DTYPES, have_model_dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_one_tensor_of_another_dtype_is_enough(dtype):
    usual = [torch.empty(1, dtype=each) for each in MODEL_DTYPES]
    assert have_model_dtypes(*usual, None)
    assert not have_model_dtypes(*usual, None, torch.empty(1, dtype=dtype))
