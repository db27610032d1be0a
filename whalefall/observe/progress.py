# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, and nothing anywhere else. Without the `rich` package it is a plain line of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, *, unit: str, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Gives a function (done, total) that moves the bar.

    Args:
        unit: "bytes" for amounts of data, else the plural of what is counted.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    try:
        import rich.progress as bars
        from rich.console import Console
    except ImportError:
        yield lambda done, total: print(f"\r{title}: {done:,} / {total:,} {unit}", end="" if done < total else "\n", file=sys.stderr)
        return
    count = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
    speed = bars.TransferSpeedColumn() if unit == "bytes" else bars.TextColumn(unit)
    columns = (bars.TextColumn(title), bars.BarColumn(), count, speed, bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
