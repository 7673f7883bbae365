"""The script for owners of an NPU runs as a script, and its verdict can be bad."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.thorough import thorough

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "verify_on_npu.py"


def verify(directory, *arguments, environ=None):
    out = directory / "result.json"
    command = [
        sys.executable,
        "-m",
        "fuseplug_host_npu",
        str(SCRIPT),
        "--quick",
        "--repeats",
        "1",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=900, env={**os.environ, **(environ or {})}
    )
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())


@thorough
def test_everything_is_right(host_npu, tmp_path):
    done, result = verify(tmp_path, "--parts", "ops", "models")
    assert (done.returncode, result["failures"]) == (0, []), done.stdout + done.stderr
    assert result["machine"]["chip"].startswith("Ascend910")
    assert {row["name"].partition(",")[0] for row in result["ops"]} == {
        f"npu_fused_{op}" for op in ("rmsnorm", "swiglu", "rope", "moe")
    }
    assert all(row["µs, forward and backward"]["fused"]["median"] > 0 for row in result["ops"])
    assert all(row["report"]["fused"] for row in result["models"])


def test_wrong_numbers_are_written_down(host_npu, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('verify_on_npu' in word for word in sys.orig_argv):\n"
        "    import fuseplug_rmsnorm.kernels as kernels\n"
        "    kernels.NpuRMSNormKernel.function = 'wrong:rms_norm'\n"
    )
    (tmp_path / "wrong.py").write_text(
        "from fuseplug_rmsnorm.backends.npu import rms_norm as right\n"
        "def rms_norm(x, weight=None, eps=1e-6, **options):\n"
        "    return right(x, weight, eps + 0.1, **options)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path), "FUSEPLUG_KERNELS": "npu_fused_rmsnorm"}
    done, result = verify(tmp_path, "--parts", "ops", environ=environ)
    assert done.returncode == 1
    assert {failure["where"].partition(",")[0] for failure in result["failures"]} == {"npu_fused_rmsnorm"}
    assert "from the truth" in result["failures"][0]["what"]
