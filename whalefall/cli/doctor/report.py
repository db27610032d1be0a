# SPDX-License-Identifier: Apache-2.0
"""The doctor's rows, and how they are shown: a table for people, JSON for machines, an exit code for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "OK"
    NOTE = "NOTE"
    """Worth knowing; never makes the doctor fail."""
    WARN = "WARN"
    """Will work, slower or not for long; fails under --strict."""
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Row:
    status: Status
    subject: str
    found: str
    needed: str = ""
    fix: str = ""
    """A command, or one sentence; empty where nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]
    mend: str | None = None
    """The one command that takes out every CUDA mixture."""

    def exit_code(self, strict: bool) -> int:
        bad = {Status.FAIL, Status.WARN} if strict else {Status.FAIL}
        return int(any(row.status in bad for row in self.rows))


def to_json(report: Report, strict: bool) -> str:
    code = report.exit_code(strict)
    body = {"ok": code == 0, "strict": strict, "rows": [asdict(row) for row in report.rows], "mend": report.mend}
    return json.dumps(body, indent=1, ensure_ascii=False)


def to_text(rows: Sequence[Row]) -> str:
    """Plain lines, for a machine where even rich is missing."""
    width = max((len(row.subject) for row in rows), default=0)
    lines = []
    for row in rows:
        need = f"  (needs {row.needed})" if row.needed and row.status is not Status.OK else ""
        lines.append(f"{row.status:<4}  {row.subject:<{width}}  {row.found}{need}")
        if row.fix:
            lines.append(f"{'':<6}{'':<{width}}  -> {row.fix}")
    return "\n".join(lines)


def print_report(report: Report, strict: bool) -> None:
    try:
        _print_table(report.rows)
    except ImportError:
        print(to_text(report.rows))
    counts = {status: sum(row.status is status for row in report.rows) for status in Status}
    print(f"{counts[Status.OK]} ok, {counts[Status.NOTE]} notes, {counts[Status.WARN]} warnings, {counts[Status.FAIL]} failures")
    if report.mend:
        # Printed outside the table and unwrapped, so that it can be copied as it stands.
        print(f"To mend the CUDA mixture:\n  {report.mend}")
    if strict and report.exit_code(True) and not report.exit_code(False):
        print("Warnings count as failures under --strict.")


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {Status.OK: "green", Status.NOTE: "cyan", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("", "what", "found", "needed", "to mend it"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(Text(row.status, style=colours[row.status]), *(Text(cell) for cell in (row.subject, row.found, row.needed, row.fix)))
    Console().print(table)
