"""``fuseplug config``."""

from __future__ import annotations

from fuseplug.cli.options import AsJson
from fuseplug.configuration import SETTINGS, environment
from fuseplug.report.plain_text import one_line
from fuseplug.report.tables import console, empty_table, print_json, print_table


def config(as_json: AsJson = False) -> None:
    """Show every setting that is in force, and where it is from."""
    environ = environment()
    rows = [
        (name, environ.get(setting.variable), str(environ.source(setting.variable) or setting.variable), setting.unset)
        for name, setting in SETTINGS.items()
    ]
    if as_json:
        print_json({name: {"value": value, "from": None if value is None else by} for name, value, by, _ in rows})
        return
    table = empty_table("setting", "value", "from")
    for name, value, source, unset in rows:
        table.add_row(*map(one_line, (name, *(("not set", unset) if value is None else (repr(value), source)))))
    print_table(console(), table)
