# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document is sound, and bodies made from it find neither a fault nor an answer that it does not describe."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.server.support import config, engine_of
from whalefall.server.app import create_app

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


HI = [{"role": "user", "content": "hi"}]
FINE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "whale", "messages": HI},
    "/v1/completions": {"model": "whale", "prompt": "hi"},
    "/v1/responses": {"model": "whale", "input": "hi"},
    "/v1/messages": {"model": "whale", "messages": HI},
}


def document() -> dict[str, Any]:
    return create_app(engine_of("a"), config()).openapi()


def test_every_reference_in_the_document_leads_somewhere() -> None:
    made = document()
    text = json.dumps(made)
    assert set(PATHS) <= set(made["paths"]) and "#/$defs/" not in text
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in made["components"]["schemas"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [*PATHS, "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"])
def test_bodies_made_from_the_document_find_no_fault(path: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    checks = schemathesis.checks
    app = create_app(engine_of("a", "b"), config())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [op.ok() for op in schema.get_all_operations() if op.ok().path == path]
    assert operations
    for operation in operations:

        @hypothesis.settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                # A name that is served and something to answer: the other fields are what is tried here.
                given = [(name, value) for name, value in sorted(case.body.items()) if value is not None]
                few = random.Random(repr(given)).sample(given, k=min(2, len(given)))
                case.body = {**dict(few), **FINE.get(path, {})}
            answer = case.call()
            wanted = [checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
            case.validate_response(answer, checks=[*wanted, checks.response_schema_conformance])

        ask()
