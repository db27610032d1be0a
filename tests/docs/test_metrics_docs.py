# SPDX-License-Identifier: Apache-2.0
"""The list in docs/metrics.md, the dashboard and the server name the same metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from whalefall.observe.metrics import DraftStats, EngineGauges, EngineStats, TierStats
from whalefall.server.metrics import registry_for, render

DOCS = Path(__file__).parents[2] / "docs"
SUFFIX = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def exposed() -> dict[str, str]:
    """Name -> type, as a scraper sees them; counters with their _total."""
    with_tiers = EngineStats(engine=EngineGauges(tiers=TierStats(has_disk=True), drafts=DraftStats()))  # without, their metrics are absent
    door = SimpleNamespace(model_name="m", engine_if_loaded=SimpleNamespace(stats=lambda: with_tiers))
    families = text_string_to_metric_families(render(registry_for(door)).decode())
    return {f.name + ("_total" if f.type == "counter" else ""): f.type for f in families}


def expressions() -> list[str]:
    dashboard = json.loads((DOCS / "dashboards" / "whalefall.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_documented_metrics_are_the_servers(exposed: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(whalefall:\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert dict(rows) == exposed
    assert len(rows) == len(dict(rows))


def test_dashboard_asks_only_for_metrics_that_exist(exposed: dict[str, str]) -> None:
    asked = {name for expr in expressions() for name in re.findall(r"whalefall:\w+", expr)}
    for name in asked:
        base = SUFFIX.sub("", name)
        assert (exposed.get(base) == "histogram") if base != name else name in exposed, name


def test_dashboard_shows_every_metric_once_at_least(exposed: dict[str, str]) -> None:
    asked = {SUFFIX.sub("", name) for expr in expressions() for name in re.findall(r"whalefall:\w+", expr)}
    assert set(exposed) - asked == {"whalefall:time_per_output_token_seconds"}


def test_counters_are_asked_for_as_rates_and_gauges_are_not(exposed: dict[str, str]) -> None:
    for expr in expressions():
        for name in re.findall(r"whalefall:\w+", expr):
            is_rate = f"rate({name}" in expr
            assert is_rate == (exposed.get(SUFFIX.sub("", name)) != "gauge"), expr


def test_exposition_has_help_and_type_for_every_metric() -> None:
    door = SimpleNamespace(model_name="m", engine_if_loaded=SimpleNamespace(stats=EngineStats))
    text = render(registry_for(door)).decode()
    helped, typed = (set(re.findall(rf"^# {word} (\S+)", text, re.MULTILINE)) for word in ("HELP", "TYPE"))
    assert helped == typed
    assert {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")} >= helped - {
        name for name in helped if re.search(rf"^# TYPE {name} histogram", text, re.MULTILINE)
    }
