"""Asks every kernel about every kind of site, and finds out which kernel changed a stand-in that it was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pluggy

from fuseplug_verify import neutral

from ..contract import Answer, Rejection, Site
from ..discovery.records import KernelRecord
from ..model_tree.gc_paused import collection_paused
from .snapshot import Snapshot

IMPURE = Rejection("it changed the module it was asked about; match() may only look", kind="error")


class Question(NamedTuple):
    """A site, and the kernels to be asked about it."""

    site: Site
    records: Sequence[KernelRecord]


class Questioner:
    """Puts questions to kernels through pluggy.

    Args:
        plugins: Holds the kernels, each under its id.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins
        self._callers: dict[tuple[str, ...], Callable[..., list[Answer]]] = {}

    @collection_paused()
    def ask(self, questions: Sequence[Question]) -> list[list[Answer]]:
        """The answers to each of *questions*, in the order of kernel ids.

        All kernels are asked together, because normally none changes anything, and one check of the stand-ins is cheap.
        If something was changed, each kernel is asked alone, to find out which kernel changed it.
        """
        before = Snapshot(question.site.module for question in questions)
        with neutral(random_kept=True):
            answers = [self._put(question) for question in questions]
            if before.changed():
                before.restore()
                answers = [self._put_one_by_one(question) for question in questions]
        return [sorted(of_question, key=lambda answer: answer.kernel_id) for of_question in answers]

    def _put(self, question: Question) -> list[Answer]:
        key = tuple(record.kernel_id for record in question.records)
        if key not in self._callers:
            others = [plugin for name, plugin in self._plugins.list_name_plugin() if name not in key]
            self._callers[key] = self._plugins.subset_hook_caller("propose", others)
        return self._callers[key](site=question.site)

    def _put_one_by_one(self, question: Question) -> list[Answer]:
        before = Snapshot([question.site.module])
        answers = []
        for record in question.records:
            alone = self._put(Question(question.site, [record]))
            if before.changed():
                before.restore()
                alone = [Answer(record.kernel_id, rejection=IMPURE)]
            answers += alone
        return answers
