"""What ``fuseplug new --backend npu`` writes works here, and its tests fail when its kernel is broken."""

import pytest
from support.generated import WHAT, generate, passes_until_broken
from support.thorough import thorough


@thorough
def test_it_is_fused_in_a_model_and_its_tests_notice_when_it_is_wrong(tmp_path):
    passes_until_broken(generate(tmp_path / "new", "npu", "weight,bias"), "npu", "-k", "in_a_model")


@thorough
@pytest.mark.parametrize("what", WHAT)
def test_its_own_tests_pass_and_fail_when_it_is_broken(tmp_path, what):
    passes_until_broken(generate(tmp_path / "new", "npu", what), "npu")
