"""The library works where nothing else of Fuseplug can be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fuseplug_verify

ROOT = Path(__file__).parents[2]
ALONE = """
import sys

class Alone:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first.startswith("fuseplug") and first != "fuseplug_verify":
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Alone())
"""
BLOCKS = """
import linecache, re, types
from pathlib import Path

page = types.ModuleType("page")
sys.modules["page"] = page
blocks = re.findall(r"^```python\\n(.*?)^```", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)
assert blocks
for number, block in enumerate(blocks):
    name = f"block {number}"
    linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
    exec(compile(block, name, "exec"), page.__dict__)
"""


def alone(code, *arguments):
    """The output of *code* in a Python that can import the library, but nothing else of Fuseplug."""
    command = [sys.executable, "-c", ALONE + code, *map(str, arguments)]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_nothing_else_can_be_imported_there():
    with pytest.raises(AssertionError, match="fuseplug is not installed"):
        alone("import fuseplug")


def test_a_module_is_verified_there():
    said = alone(BLOCKS, ROOT / "core" / "verify" / "README.md")
    assert re.match(r"its numbers are wrong for float32\[512\] on cpu: output\[0\] is off by 0\.\d+ where", said)


@pytest.mark.thorough
def test_the_tests_beside_this_one_are_collected_there():
    said = alone(
        "import pytest\nsys.exit(pytest.main(['--collect-only', '-q', '-m', 'not thorough', sys.argv[1]]))",
        Path(__file__).parent,
    )
    assert int(re.search(r"(\d+)(?:/\d+)? tests collected", said)[1]) > 100


@pytest.mark.parametrize(
    "code", ["import fuseplug_verify; dir(fuseplug_verify)", "from fuseplug_verify import Adapter"]
)
def test_importing_it_imports_no_torch(code):
    assert alone(f"{code}\nprint('torch' in sys.modules)") == "False\n"


def test_what_runs_modules_imports_torch():
    assert alone("from fuseplug_verify import examine\nprint('torch' in sys.modules)") == "True\n"


@pytest.mark.parametrize("name", fuseplug_verify.__all__)
def test_every_name_is_there(name):
    assert name in dir(fuseplug_verify)
    assert getattr(fuseplug_verify, name).__name__


def test_a_name_that_is_not_there_is_said_to_be_missing():
    with pytest.raises(AttributeError, match="'fuseplug_verify' has no attribute 'nothing'"):
        fuseplug_verify.nothing  # noqa: B018
