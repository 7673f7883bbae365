"""The sessions of this repository; ``nox -l`` lists them. They install packages from PyPI by name, and nothing else."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # the same installer on every machine, whatever is installed there
nox.options.sessions = ["tests", "tests-npu", "wheels"]

ROOT = Path(__file__).parent
LIBRARIES = (
    "core/verify",
    "core",
    "core/tools",
    "kernel-packages/backends",
)  # in the order of their dependencies
PACKAGES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("kernel-packages/*/pyproject.toml"))
KERNELS = tuple(path for path in PACKAGES if path not in LIBRARIES)
DISTRIBUTIONS = (*LIBRARIES, "tests/kit", "tests/host-npu", *KERNELS)
EXAMPLES = tuple(sorted(ROOT.glob("docs/examples/*/pyproject.toml")))
TRANSFORMERS = ("5.24.0", "4.57.6")
OPS = ("rmsnorm", "swiglu", "rope", "moe", "linear_cross_entropy")
OF_OPS = tuple(f"tests/{op}" for op in OPS)  # they test the backend that tests/support/backends.py chooses
NPU_OPS = (*OPS, "gated_delta_rule", "ssd")
OF_NPU_OPS = tuple(f"tests/{op}" for op in (*NPU_OPS, "recurrences"))
OLDEST_TORCH = re.findall(r'"torch>=([\d.]+)"', (ROOT / "core" / "pyproject.toml").read_text())[0]
TRANSFORMERS_OF_KERNELS = "5.22.2"  # the newest release that accepts the `kernels` in constraints.txt
OTHER_TORCHES = (OLDEST_TORCH, "2.11", "2.15")
WITHOUT_TRITON = (OLDEST_TORCH,)  # its Triton is older than the kernels accept
OLDER_TORCH_NPU = ("2.12.0", "2.9.0.post9")
QUICK, THOROUGH = ("-m", "not thorough"), ("-m", "thorough")
MODELS_ON_NPU = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/npu/test_*models.py"))
OLDER_MODELS = ("tests/models", "tests/survey", "-k", "not (test_every_op and bfloat16) and not everything_compiled")
OLDER_STACKS = (
    "tests/stacks",
    "tests/run/test_fusing.py",
    "tests/run/test_training.py::test_a_script_trains_fused_and_unchanged",
)
NO_DEVICES = ("--ignore=tests/npu", "--ignore=tests/gpu", "--ignore=tests/kernelize")
OF_CORE = ("importlib-metadata", "packaging", "pluggy", "typer")  # the requirements of core, besides torch
FOR_TESTS = ("pytest", "pytest-xdist[psutil]", "accelerate")
FOR_TRITON = ("triton", "liger-kernel", "matplotlib")
FOR_LINT = ("ruff", "mypy", "pytest")  # the plug-in uses pytest's types
FOR_SITE = ("sphinx", "myst-parser", "furo", "sphinx-copybutton")
QUANTISERS = ("torchao", "bitsandbytes")
FOR_LLAMA_FACTORY = ("omegaconf", "torchdata")  # imports of its new trainer that are not here anyway
FOR_MS_SWIFT = ("modelscope", "json_repair", "einops", "aiohttp", "pillow")  # likewise for its SFT
OTHER_LIBRARIES = ("diffusers", "timm", "torchvision")
FOR_SURVEY = ("pytest", "scipy")  # some models import these
PATIENT = ("-o", "faulthandler_timeout=1800")  # a whole model takes Triton's interpreter up to ten minutes
WORKERS = ("-n", "logical", "--maxprocesses", "4", "--dist", "loadgroup")  # each worker loads its own torch
SLOWEST = ("--durations", "15", "--durations-min", "5")  # shows where to save the next minute of a run
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # the workers fill the cores
NOTHING_KEPT = {"FUSEPLUG_CACHE": "off"}  # no result of an earlier run is measured or published
SITE = ("-q", "-E", "-W", "--keep-going", "-d", "build/doctrees")  # -E: pages give warnings only when they are read
BENCHMARKS = ("startup", "planning", "cpu/run")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all that must pass without torch_npu: style, types, the tests for CPUs and of the Triton kernels, the site.

    All of these share one environment, because installing it takes longer than some of them. Each also has a session of
    its own.
    """
    triton = FOR_TRITON if sys.platform == "linux" else ()
    install(session, *FOR_TESTS, "peft", *triton, *FOR_LINT, *FOR_SITE)
    check_style(session)
    test(session, *QUICK, *NO_DEVICES)
    if sys.platform == "linux":
        run_triton_tests(session, *QUICK)
    build_site(session)


@nox.session(name="tests-cpu", default=False)
def tests_cpu(session: nox.Session) -> None:
    """Run the tests of the core and of the kernels for CPUs."""
    install(session, *FOR_TESTS, "peft")
    test(session, *QUICK, *NO_DEVICES)


@nox.session(name="tests-npu")
def tests_npu(session: nox.Session) -> None:
    """Run the tests of the Ascend kernels, on torch_npu itself."""
    on_npu(session, *QUICK, "tests/npu", *OF_NPU_OPS)


@nox.session(name="tests-triton", default=False)
def tests_triton(session: nox.Session) -> None:
    """Run the tests of the Triton kernels: in Triton's interpreter, and compiled for a GPU, which need not be here."""
    on_triton(session, *QUICK)


@nox.session(name="tests-gpu", default=False)
def tests_gpu(session: nox.Session) -> None:
    """Run the tests of the Triton kernels' numbers on a GPU."""
    install(session, *FOR_TRITON, *FOR_TESTS)
    test(session, *QUICK, "--backend", "triton", "tests/gpu/numbers", *OF_OPS)


@nox.session(default=False)
@nox.parametrize("kernels", ("cpu", "npu", "triton"))
def thorough(session: nox.Session, kernels: str) -> None:
    """Run the thorough tests: they check the same for more specimens, models, dtypes and shapes."""
    if kernels == "npu":
        on_npu(session, *THOROUGH, "tests/npu", *OF_NPU_OPS)
    elif kernels == "triton":
        on_triton(session, *THOROUGH)
    else:
        install(session, *FOR_TESTS, "peft")
        test(session, *THOROUGH, *NO_DEVICES)


@nox.session(default=False)
@nox.parametrize("kernels", ("cpu", "npu"))
def older(session: nox.Session, kernels: str) -> None:
    """Run the tests that build or train models on the older transformers, whole models in float32 only."""
    if kernels == "npu":
        on_npu(session, *MODELS_ON_NPU, transformers=TRANSFORMERS[1])
    else:
        install(session, *FOR_TESTS, "peft", transformers=TRANSFORMERS[1])
        test(session, *OLDER_MODELS, *OLDER_STACKS)


@nox.session(name="tests-torch-releases", default=False)
@nox.parametrize("torch", OTHER_TORCHES)
def tests_torch_releases(session: nox.Session, torch: str) -> None:
    """Run the tests of the core, the kit and the ops on another torch and its Triton. Downloads 3 GB each."""
    # The interpreter of Triton 3.6 does not know newer releases of numpy.
    more = () if torch in WITHOUT_TRITON else ("numpy<2.4", *FOR_TRITON)
    install(session, f"torch=={torch}.*", *more, *FOR_TESTS, "peft", free=("torch", "triton", "numpy"))
    test(
        session,
        *QUICK,
        "tests/verify",
        "tests/core",
        "tests/tools",
        "tests/backends",
        "tests/conformance",
        *OF_OPS,
    )
    if torch not in WITHOUT_TRITON:
        session.env["TRITON_INTERPRET"] = "1"
        test(session, *QUICK, "tests/gpu/numbers", *OF_OPS)


@nox.session(default=False)
def stacks(session: nox.Session) -> None:
    """Train with the libraries that people put around models, including trainers that nothing here requires."""
    others = ("peft", "trl", "lightning", "deepspeed", *QUANTISERS)
    install(session, *FOR_TESTS, *others, *FOR_LLAMA_FACTORY, *FOR_MS_SWIFT)
    # Their metadata allow only older releases of transformers, PEFT and TRL.
    session.install("-c", "constraints.txt", "--no-deps", "ms-swift", "llamafactory")
    test(session, "tests/stacks")


@nox.session(name="tests-npu-releases", default=False)
@nox.parametrize("torch_npu", OLDER_TORCH_NPU)
def tests_npu_releases(session: nox.Session, torch_npu: str) -> None:
    """Check every call of the Ascend kernels against another torch_npu, beside its torch. Downloads a torch each."""
    install(session, f"torch_npu=={torch_npu}", *FOR_TESTS, free=("torch", "torch_npu"))
    test(session, "--fuseplug-host-npu", "tests/npu", *OF_NPU_OPS, "-k", "fake_npu or fake_backend")


@nox.session(default=False)
def kernelize(session: nox.Session) -> None:
    """Test kernels that transformers' own use_kernels puts on whole models."""
    install(session, *FOR_TESTS, "kernels", transformers=TRANSFORMERS_OF_KERNELS)
    test(session, "tests/kernelize")


@nox.session(default=False)
@nox.parametrize("kernels", ("inductor", "npu", "triton"))
def catalogue(session: nox.Session, kernels: str) -> None:
    """Quickly check the kernels of this repository, and write docs/catalogue.md. Name kernels to check only these."""
    install(session, *{"npu": ("torch_npu",), "triton": ("triton", "liger-kernel")}.get(kernels, ()))
    session.install("--no-deps", "--no-build-isolation", *(str(example.parent) for example in EXAMPLES))
    session.run("python", "tests/catalogue/checks.py", kernels, *session.posargs, env=ONE_THREAD | NOTHING_KEPT)
    session.run("python", "tests/catalogue/page.py")


@nox.session(default=False)
def conformance(session: nox.Session) -> None:
    """Check every kernel on every specimen; the tests use only some specimens."""
    install(session, "torch_npu", "triton", *FOR_TESTS)
    for interpret, hows in ((None, ("inductor", "npu")), ("1", ("triton",))):
        session.env["TRITON_INTERPRET"] = interpret
        chosen = [f"--fuseplug-kernel={how}_fused_{op}" for how in hows for op in (NPU_OPS if how == "npu" else OPS)]
        test(session, "--fuseplug-host-npu", *chosen)


@nox.session(default=False)
def lint(session: nox.Session) -> None:
    """Check style with ruff and types with mypy --strict."""
    install(session, *FOR_LINT)
    check_style(session)


def check_style(session: nox.Session) -> None:
    """Check style and types of everything, and of what ``fuseplug new`` writes."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *(str(ROOT / path / "src") for path in DISTRIBUTIONS))
    for example in EXAMPLES:
        session.run("mypy", str(example.parent / "src"))
    with tempfile.TemporaryDirectory() as elsewhere:
        lint_new_distributions(session, Path(elsewhere))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site of the documentation in build/site; a warning is an error."""
    install(session, *FOR_SITE)
    build_site(session)


def build_site(session: nox.Session) -> None:
    """Build the site in build/site."""
    session.run("python", "-m", "sphinx", *SITE, "-c", "docs", ".", "build/site", env=ONE_THREAD)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the wheels, and use them from outside the checkout: core alone, then everything, then the kit."""
    clean(session)
    session.install("-c", "constraints.txt", "hatchling")
    built = Path(session.create_tmp()).absolute() / "wheels"
    shutil.rmtree(built, ignore_errors=True)
    for path in DISTRIBUTIONS:
        with session.chdir(path):
            session.run("python", "-m", "hatchling", "build", "-t", "sdist", "-d", str(built), silent=True)
    as_wheels(session, built, *map(str, built.glob("*.tar.gz")))  # from sdists, as others build
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", "hatchling")
    session.install("-c", "constraints.txt", "torch", *OF_CORE)

    def install_ours(*names: str) -> None:
        session.install("--no-index", "--find-links", str(built), *names)  # only ours, whatever an index has

    scripts = ROOT / "tests" / "wheels"
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        install_ours("fuseplug")
        session.run("python", "-P", str(scripts / "core_alone.py"))
        install_ours("fuseplug[all]")
        session.run("fuseplug", "list")
        session.run("fuseplug", "run", "--", "python", "-c", "import _fuseplug_on_import")  # its folder was injected
        session.run("python", "-P", str(scripts / "outside.py"), str(ROOT))
        session.install("-c", str(ROOT / "constraints.txt"), "pytest")
        install_ours("fuseplug[testing]", "fuseplug-host-npu")
        session.run("pytest", "--fuseplug-kernel", "inductor_fused_rmsnorm", "-k", "declaration or import")
        session.run("python", "-c", "from fuseplug_host_npu.cann import build; assert build.SOURCE.exists()")
        new_distributions(session, Path(elsewhere))


def lint_new_distributions(session: nox.Session, folder: Path) -> None:
    """Check style and types of what ``fuseplug new`` writes from all templates. Programs in Triton have no types."""
    session.run("python", str(ROOT / "tests" / "wheels" / "every_template.py"), str(folder))
    rules = (f"extend = {str(ROOT / 'pyproject.toml')!r}", 'src = ["*/src"]', "[lint.per-file-ignores]")
    ignored = ('"*/tests/**" = ["ANN", "D", "S"]', '"triton*/src/**/backend.py" = ["ANN001", "ANN202", "N803"]')
    (folder / "ruff.toml").write_text("\n".join((*rules, *ignored)))
    session.run("ruff", "check", str(folder))
    session.run("ruff", "format", "--check", str(folder))
    session.run("mypy", "--explicit-package-bases", *map(str, folder.glob("[!t]*/src")))


def new_distributions(session: nox.Session, folder: Path) -> None:
    """Build the examples and what ``fuseplug new`` writes, install the wheels, and run their tests.

    Other tests, such as tests/npu/test_new.py, break what it wrote and check that its own tests notice.
    """
    session.install("-c", str(ROOT / "constraints.txt"), "hatchling", "pytest-xdist[psutil]")
    folders = [Path(shutil.copytree(example.parent, folder / example.parent.name)) for example in EXAMPLES]
    session.run("fuseplug", "new", "scaled", "--params", "weight,bias,eps=1e-5")
    folders.append(folder / "fuseplug-scaled")
    as_wheels(session, folder / "dist", *map(str, folders))
    wheels = [f"{wheel}[testing]" for wheel in folder.glob("dist/*.whl")]
    session.install("-c", str(ROOT / "constraints.txt"), *wheels)
    tests = [str(path / "tests") for path in folders]
    session.run("pytest", "-q", "--import-mode=importlib", *WORKERS, *tests, env=ONE_THREAD)


def as_wheels(session: nox.Session, folder: Path, *sources: str) -> None:
    """Build the wheels of *sources* into *folder*."""
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), *sources)


@nox.session(default=False)
@nox.parametrize("transformers", TRANSFORMERS)
def coverage(session: nox.Session, transformers: str) -> None:
    """Check every model type of transformers, fused against unfused. Writes docs/coverage.md; resumes where it was."""
    install(session, *FOR_SURVEY, transformers=transformers)
    alone = {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", **ONE_THREAD, **NOTHING_KEPT}
    session.run("python", "-m", "survey.run", *session.posargs, env=alone)


@nox.session(name="coverage-elsewhere", default=False)
@nox.parametrize("kernels", ("npu", "triton"))
def coverage_elsewhere(session: nox.Session, kernels: str) -> None:
    """Check every model type with the kernels for other devices: the NPU in host memory, or Triton's interpreter."""
    install(session, {"npu": "torch_npu"}.get(kernels, kernels), *FOR_SURVEY)
    alone = {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    alone |= {"TRITON_INTERPRET": "1", **ONE_THREAD, **NOTHING_KEPT}
    session.run("python", "-m", "survey.run", "--kernels", kernels, *session.posargs, env=alone)


@nox.session(name="coverage-libraries", default=False)
def coverage_libraries(session: nox.Session) -> None:
    """Check the norms and gated MLPs of diffusers and timm against unfused ones. Writes docs/coverage-libraries.md."""
    install(session, *FOR_SURVEY, *OTHER_LIBRARIES)
    alone = {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", **ONE_THREAD, **NOTHING_KEPT}
    session.run("python", "-m", "survey.libraries", *session.posargs, env=alone)


@nox.session(name="coverage-liger", default=False)
def coverage_liger(session: nox.Session) -> None:
    """Plan every model type with Liger-Kernel's kernels, for a GPU, which need not be here. Writes docs/liger.json."""
    install(session, "triton", "liger-kernel", *FOR_SURVEY)
    alone = {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", **ONE_THREAD, **NOTHING_KEPT}
    session.run("python", "-m", "survey.liger", *session.posargs, env=alone)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small language model on real text, unfused and fused, and show that only the speed differs."""
    install(session, "matplotlib")
    session.run("python", "docs/demo/train.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure start-up, planning, and kernels against their best peers. Writes docs/performance.md."""
    install(session, "psutil")
    for script in BENCHMARKS:
        session.run("python", f"tests/benchmarks/{script}.py", *session.posargs, env=NOTHING_KEPT)
    session.run("python", "tests/benchmarks/page.py")


@nox.session(name="bench-models", default=False)
def bench_models(session: nox.Session) -> None:
    """Measure whole models, unfused, fused and compiled. Writes docs/performance.md and its picture."""
    install(session, "psutil", "matplotlib")
    session.run("python", "tests/benchmarks/model.py", *session.posargs, env=NOTHING_KEPT)
    for script in ("picture", "page"):
        session.run("python", f"tests/benchmarks/{script}.py")


@nox.session(name="bench-gpu", default=False)
def bench_gpu(session: nox.Session) -> None:
    """Measure the Triton kernels against their peers: the cost of a call on the host, then, on a GPU, everything."""
    install(session, *FOR_TRITON)
    # This peer does not have wheels for every machine. An absent peer is left out, and the tables say so.
    session.run(
        *("python", "-m", "pip", "install", "-q", "-c", "constraints.txt", "quack-kernels"), success_codes=range(256)
    )
    session.run("python", "tests/benchmarks/host.py")
    session.run("python", "tests/benchmarks/gpu/run.py", *session.posargs, env=NOTHING_KEPT)
    session.run("python", "tests/benchmarks/page.py")


@nox.session(name="bench-npu", default=False)
def bench_npu(session: nox.Session) -> None:
    """Check the kernels on this Ascend NPU; time them against eager and torch_npu's own. Writes two files to send."""
    install(session, "torch_npu")
    session.run("python", "tests/benchmarks/npu/run.py", *session.posargs, env=NOTHING_KEPT)


def install(
    session: nox.Session, *packages: str, transformers: str = TRANSFORMERS[0], free: tuple[str, ...] = ()
) -> None:
    """Install our distributions and *packages*, all except those in *free* at the tested versions."""
    clean(session)
    lines = (ROOT / "constraints.txt").read_text().replace(TRANSFORMERS[0], transformers).splitlines()
    pinned = Path(session.create_tmp()) / "constraints.txt"
    pinned.write_text("\n".join(line for line in lines if line.partition("==")[0] not in free))
    session.install("-c", str(pinned), "torch", "transformers", "hatchling", *packages)
    session.install("-c", str(pinned), "--no-build-isolation", *(f"./{path}" for path in DISTRIBUTIONS))


def on_npu(session: nox.Session, *chosen: str, transformers: str = TRANSFORMERS[0]) -> None:
    """Run tests with torch_npu on the NPU in host memory."""
    if sys.platform != "linux":
        session.skip("torch_npu has wheels for Linux only")
    install(session, "torch_npu", *FOR_TESTS, transformers=transformers)
    test(session, "--fuseplug-host-npu", *chosen)


def on_triton(session: nox.Session, *chosen: str) -> None:
    """Install Triton, and run the tests of the Triton kernels."""
    if sys.platform != "linux":
        session.skip("triton has wheels for Linux only")
    install(session, *FOR_TRITON, *FOR_TESTS)
    run_triton_tests(session, *chosen)


def run_triton_tests(session: nox.Session, *chosen: str) -> None:
    """Run the tests of the Triton kernels: numbers in the interpreter, programs compiled."""
    session.env["TRITON_INTERPRET"] = "1"
    test(session, *PATIENT, *chosen, "tests/gpu/numbers", *OF_OPS)
    session.env["TRITON_INTERPRET"] = None
    test(session, *chosen, "tests/gpu/programs")


def test(session: nox.Session, *chosen: str) -> None:
    """Run pytest in as many processes as there are cores, each with one thread."""
    session.run("python", "-m", "pytest", *WORKERS, *SLOWEST, *chosen, *session.posargs, env=ONE_THREAD)


def clean(session: nox.Session) -> None:
    """Keep the environment of nox out of the session: nox itself may have been started with a PYTHONPATH."""
    session.env["PYTHONPATH"] = None
    # Let pip compile nothing: "off" is how this variable says so. A run imports only a part of what is installed, and
    # Python compiles that part when it is imported and keeps it, if it may. To compile the rest would take half of the
    # time of an installation.
    session.env["PIP_NO_COMPILE"] = "off"
    session.env["PYTHONDONTWRITEBYTECODE"] = None
