# SPDX-License-Identifier: Apache-2.0
"""`whalefall chat`: a conversation in the terminal, streamed, with the engine in this process. /reset begins anew, /quit leaves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer

from whalefall.cli.options import ModelArgument, engine_config, with_engine_options
from whalefall.core.errors import RequestError
from whalefall.observe.log import setup_logging

HELP = "/reset forgets the conversation, /quit leaves (so does the end of input)"


@with_engine_options
def chat(
    model: ModelArgument = None,
    system: Annotated[Optional[str], typer.Option(help="Instructions that stand before the conversation.")] = None,  # noqa: UP045
    max_tokens: Annotated[Optional[int], typer.Option(min=1, help="Tokens per answer at most.")] = None,  # noqa: UP045
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 1.0,
    thinking: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Let the model think before it answers, or not; without either flag as the model's own files say."),
    ] = None,
    **engine_options: Any,
) -> None:
    """Talk with a model in the terminal. /reset begins anew, /quit leaves."""
    setup_logging("WARNING")
    config = engine_config(model, engine_options)
    from whalefall.engine.async_llm import AsyncLLM
    from whalefall.observe.progress import progress_bar

    with progress_bar("loading weights", unit="bytes") as progress:
        engine = AsyncLLM.from_config(config, progress=progress)
    print(f"{engine.model_name} listens; {HELP}")
    talk = Talk(engine, system=system, max_tokens=max_tokens, temperature=temperature, thinking=thinking, write=_write)
    asyncio.run(_run(engine, talk))


async def _run(engine: Any, talk: Talk) -> None:
    try:
        while (line := await asyncio.to_thread(_read_line)) is not None:
            if not await talk.hear(line):
                return
    finally:
        await engine.shutdown()


class Talk:
    """A conversation: hears lines, writes answers as they come."""

    def __init__(
        self,
        engine: Any,
        *,
        system: str | None,
        max_tokens: int | None,
        temperature: float,
        thinking: bool | None,
        write: Callable[[str], None],
    ) -> None:
        from whalefall.text.chat import codec_for

        self._engine = engine
        self._codec = codec_for(engine.definition.chat_format, engine.tokenizer)
        self._opening = [{"role": "system", "content": system}] if system else []
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._thinking = None if thinking is None else {"type": "enabled" if thinking else "disabled"}
        self._write = write
        self.messages: list[dict[str, Any]] = list(self._opening)
        self._num_answers = 0

    async def hear(self, line: str) -> bool:
        """One line of the user. False: leave."""
        line = line.strip()
        if line == "/quit":
            return False
        if line == "/reset":
            self.messages = list(self._opening)
            self._write("(forgotten)\n")
        elif line.startswith("/"):
            self._write(f"({HELP})\n")
        elif line:
            self.messages.append({"role": "user", "content": line})
            try:
                self.messages.append(await self._answer())
            except RequestError as error:
                self.messages.pop()
                self._write(f"({error})\n")
        return True

    async def _answer(self) -> dict[str, Any]:
        from whalefall.core.sampling import SamplingParams

        prompt = self._codec.encode({"messages": self.messages, "thinking": self._thinking})
        limit = self._max_tokens or prompt.default_max_tokens(self._engine.config.max_model_len)
        params = SamplingParams(max_tokens=limit, temperature=self._temperature, skip_special_tokens=False)
        parser = prompt.parser()
        said = {"reasoning": "", "content": ""}
        self._num_answers += 1
        async for output in self._engine.generate(prompt.token_ids, params, f"chat-{self._num_answers}"):
            for moved in output.outputs:
                self._say(said, parser.push(moved.text))
                if moved.finish_reason is not None:
                    self._say(said, parser.finish("stop" if moved.finish_reason == "stop" else "length"))
        self._write("\n")
        return {"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning"]}

    def _say(self, said: dict[str, str], delta: Any) -> None:
        if delta.reasoning:
            self._write(delta.reasoning if said["reasoning"] else f"(thinks) {delta.reasoning}")
            said["reasoning"] += delta.reasoning
        if delta.content:
            self._write(delta.content if said["content"] or not said["reasoning"] else f"\n(says) {delta.content}")
            said["content"] += delta.content


def _read_line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
