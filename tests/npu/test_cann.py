"""The stand-in for CANN fits the torch_npu that is installed, and is compiled once."""

import importlib.util
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fuseplug_host_npu import HostNPUUnavailable, loading
from fuseplug_host_npu.cann import build, elf

FOUND = importlib.util.find_spec("torch_npu")

pytestmark = pytest.mark.skipif(FOUND is None, reason="torch_npu is not installed")


@pytest.fixture
def package():
    return Path(FOUND.submodule_search_locations[0])


def test_every_function_that_torch_npu_needs_is_there(package, tmp_path):
    asked = build.wanted(package)
    assert build.RUNTIME in asked.libraries
    made = build.build(package, metadata.version("torch_npu"), tmp_path)
    assert {path.name for path in made.glob("*.so")} == {*asked.libraries}
    assert asked.functions <= elf.read(made / build.RUNTIME).defined
    for name in {*asked.libraries} - {build.RUNTIME}:
        assert build.RUNTIME in elf.read(made / name).needed


def test_what_makes_kernels_is_not_there(package, tmp_path):
    """So a request for a kernel raises, and no result goes uncomputed."""
    made = build.build(package, "0", tmp_path)
    defined = elf.read(made / build.RUNTIME).defined
    assert "aclSetCompileopt" not in defined
    assert not [name for name in defined if name.startswith("aclnn")]
    assert not (made / "libopapi.so").exists()


def test_no_function_is_written_that_is_generated_too():
    written = build.written(build.SOURCE.read_text())
    assert {"aclrtMalloc", "aclInit", "aclopCompileAndExecute", "aclrtGetSocName"} <= written
    assert not {"malloc", "memset", "strcpy"} & written


def test_compiled_once_by_however_many_at_once(package, tmp_path):
    code = (
        "import sys, pathlib; from fuseplug_host_npu.cann import build\n"
        "print(build.build(pathlib.Path(sys.argv[1]), '0', pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(package), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {each.communicate()[0] for each in running}
    assert [each.returncode for each in running] == [0, 0, 0]
    assert len(said) == 1
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == [said.pop().strip()]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.so")}
    assert subprocess.run(command, check=False).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_version_is_compiled_anew(package, tmp_path):
    assert build.build(package, "1", tmp_path) != build.build(package, "2", tmp_path)


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", r"there is no C compiler \(no-such-compiler\): run apt-get install gcc libc6-dev"),
        ("false", "the stand-in for CANN does not compile"),
    ],
)
def test_what_does_not_compile_says_so_and_leaves_nothing_behind(package, tmp_path, monkeypatch, compiler, why):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(HostNPUUnavailable, match=why):
        loading._libraries(package, "0")
    assert not list((tmp_path / "fuseplug").iterdir())


@pytest.mark.parametrize(
    ("what", "instead", "why"),
    [
        ("platform.system", lambda: "Darwin", "torch_npu is for 64-bit Linux, not for Darwin"),
        ("_loadable", lambda library: True, r"CANN is here \(libascendcl.so is found by the loader\)"),
        ("importlib.util.find_spec", lambda name: None, 'torch_npu is not installed: run pip install "torch_npu=='),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(monkeypatch, what, instead, why):
    monkeypatch.setattr(loading, "_loaded", False)
    monkeypatch.setattr(loading, "_loadable", lambda library: False)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(f"fuseplug_host_npu.loading.{what}", instead)
    with pytest.raises(HostNPUUnavailable, match=why):
        loading.load()


@pytest.mark.parametrize("start", [b"MZ", b"\x7fELF\x01\x01", b"\x7fELF\x02\x02"])
def test_other_files_are_no_libraries(tmp_path, start):
    (tmp_path / "file").write_bytes(start + struct.pack("60x"))
    with pytest.raises(ValueError, match="is no 64-bit little-endian ELF file"):
        elf.read(tmp_path / "file")
