"""The catalogue agrees with the files."""

import copy
import json
import re

import pytest
from catalogue import checks, page


@pytest.fixture
def files(tmp_path, monkeypatch):
    """An empty folder in place of that of our results, and one of our results to change."""
    monkeypatch.setattr(page, "CHECKS", tmp_path)
    (result,) = json.loads((checks.CHECKS / "inductor_fused_rmsnorm.json").read_text())
    return tmp_path, result


def test_the_page_says_what_the_files_say():
    assert page.PAGE.read_text() == page.page(), "run python tests/catalogue/page.py"


def test_every_kernel_of_this_repository_is_on_it():
    for name in checks.kernels():
        assert f"`{name}`" in page.page()


def test_a_strangers_result_is_a_row_with_what_failed(files):
    folder, result = files
    result = copy.deepcopy(result)
    result["kernel"] |= {"id": "acme_norm", "distribution": "acme", "version": "2.1"}
    result["verdict"] = "failed"
    checks_of_it = {check["name"]: check for check in result["checks"]}
    checks_of_it["numbers"] |= {"passed": 2, "failed": 1}
    result["device"] |= {"type": "cuda", "name": "H100"}
    (folder / "acme.json").write_text(json.dumps([result]))
    (row,) = re.findall(r"^\|.*\[`acme_norm`\].*$", page.page(), re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "rmsnorm"
    assert cells[3].startswith("H100; torch ")
    assert cells[-1] == "acme 2.1"
    right = sum(bool(check["passed"] and not check["failed"]) for check in result["checks"])
    skipped = len(result["checks"]) - right - 1
    assert cells[:2] == ["[`acme_norm`](results/checks/acme.json)", f"{right}, 1, {skipped}"]


def test_what_is_emulated_is_said_to_be():
    rows = re.findall(r"^\|.*\[`npu_.*$", page.page(), re.MULTILINE)
    assert rows
    assert all(", emulated; torch " in row for row in rows)


def test_what_has_no_file_is_named(files):
    said = page.page()
    assert "**Without a row**" in said
    assert "`triton_fused_moe`" in said


def test_the_kernels_are_those_of_the_entry_points():
    found = checks.kernels()
    assert found["npu_fused_rope"] == "npu"
    assert found["liger_fused_rope"] == "triton"
    assert found["inductor_fused_layernorm"] == "inductor"
    assert len(found) == 26
