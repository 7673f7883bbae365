"""The pytest plugin: ``pytest --fuseplug-kernel ID`` makes one test of each check of a kernel.

Every run of pytest in the environment imports this module, so it imports only pytest until the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .kit import PlannedCheck
    from .subjects import Examined


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fuseplug", "Fuseplug: conformance of kernels")
    group.addoption(
        "--fuseplug-kernel",
        action="append",
        default=[],
        metavar="ID",
        help="Check this kernel: the id of an installed one, or package.module:Class. Repeatable. Without paths, "
        "nothing else is run.",
    )
    group.addoption(
        "--fuseplug-device", metavar="DEVICE", help="Run it here. Default: the first of its device types that is here."
    )
    group.addoption(
        "--fuseplug-thorough", action="store_true", help="Try every edge on every specimen at every size. Slow."
    )
    group.addoption(
        "--fuseplug-quick",
        action="store_true",
        help="Ask everything of one specimen only, and of two more whether values and gradients are right.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Without paths on the command line, leave out all other tests."""
    config = session.config
    if config.getoption("fuseplug_kernel") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks of the kernels that the option names."""
    for name in config.getoption("fuseplug_kernel"):
        kernel = KernelUnderTest.from_parent(session, name=name, nodeid=f"fuseplug:{name}")
        checks: list[pytest.Item | pytest.Collector] = list(kernel.collect())
        config.hook.pytest_collectreport(report=pytest.CollectReport(kernel.nodeid, "passed", None, checks))
        items.extend(check for check in checks if isinstance(check, pytest.Item))


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Say what is about to run, because it may take minutes."""
    kernels: dict[str, list[PlannedCheck]] = {}
    for item in items:
        if isinstance(item, CheckItem):
            kernels.setdefault(item.step.examined.name, []).append(item.step)
    return [_announced(steps) for steps in kernels.values()]


def _announced(steps: list[PlannedCheck]) -> str:
    from .kit import announced

    return (
        f"fuseplug: {announced(steps[0].examined, steps)}. What is compiled takes minutes the first time, most of it "
        "in sizes; -v names each test, --durations=10 the slowest"
    )


class KernelUnderTest(pytest.Collector):
    """One kernel; its checks are the items."""

    def collect(self) -> Iterator[pytest.Item]:
        """Make one item for each check and specimen."""
        from .kit import steps

        for step in steps(self._examined()):
            name = f"{step.check.name}[{step.subject}]" if step.subject else step.check.name
            yield CheckItem.from_parent(self, name=name, step=step)

    def _examined(self) -> Examined:
        from fuseplug.errors import FuseplugError

        from .kit import depth_of
        from .naming import named
        from .subjects import Examined

        option = self.config.getoption
        try:
            depth = depth_of(thorough=option("fuseplug_thorough"), quick=option("fuseplug_quick"))
            return Examined(named(self.name).kernel, device=option("fuseplug_device"), depth=depth)
        except FuseplugError as error:
            raise pytest.UsageError(f"--fuseplug-kernel {self.name}: {error}") from error


class CheckItem(pytest.Item):
    """One check on one specimen."""

    def __init__(self, *, step: PlannedCheck, **rest: Any) -> None:
        super().__init__(**rest)
        self.step = step

    def runtest(self) -> None:
        """Fail with every fault; skip if no question could be put."""
        from .results import Conformance, ConformanceError

        findings = self.step.run()
        if faults := [f"{where}: {fault}" if where else fault for where, fault, _ in findings if fault]:
            result = Conformance(self.step.examined.name)
            result.add(self.step.check.name, self.step.subject, findings)
            raise ConformanceError("\n".join(faults), result=result)
        reasons = "\n".join(dict.fromkeys(finding.skipped for finding in findings if finding.skipped))
        if reasons and all(finding.skipped for finding in findings):
            pytest.skip(reasons)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show faults without a traceback, which would show only the kit."""
        from .results import ConformanceError

        if isinstance(excinfo.value, ConformanceError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The item's location for pytest: the kernel, without a line."""
        return Path(self.step.examined.name), None, self.name
