# SPDX-License-Identifier: Apache-2.0
"""The examples of the protocols run as they stand, against a server on a real socket."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.server.support import engine_of
from tests.server.test_openai_client import serving

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat.py", "answer tokens"),
        ("completions.py", "scored 17 tokens"),
        ("responses.py", "stored: completed"),
        ("messages.py", "ended by end_turn"),
    ],
)
async def test_example_runs(name: str, said: str) -> None:
    async with serving(engine_of("th", "</think>", "an", "swer"), served_model_names=("krill",)) as url:
        command = (sys.executable, str(EXAMPLES / name), url.removesuffix("/v1"))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    assert said in out.decode()
