# SPDX-License-Identifier: Apache-2.0
"""The life of a serving process: listen, wait for the engine, serve, drain on SIGTERM, leave.

The engine loads in a process of its own (supervisor.py), or in a thread of this one.

First signal: /ready says 503, new requests are refused, running answers may finish until the drain time is over; then they end with reason
"abort". A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from whalefall.core.errors import WhalefallError
from whalefall.engine.async_llm import AsyncLLM
from whalefall.engine.config import EngineConfig
from whalefall.engine.opened import read_folder
from whalefall.engine.supervisor import Supervisor
from whalefall.observe.log import get_logger
from whalefall.observe.phases import Phases, show_phases
from whalefall.observe.progress import progress_bar
from whalefall.observe.trace import Tracer
from whalefall.server.app import create_app
from whalefall.server.config import ServerConfig
from whalefall.server.door import Door

log = get_logger(__name__)
_LAST_WORDS_S = 5
"""After answers were told to end, this long for their last bytes to leave."""


class _Server(uvicorn.Server):
    """Signals are handled here and not by the library, which would close the door to health checks at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerProcess:
    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listener: socket.socket,
        supervisor: Supervisor | None,
        phases: Phases,
        tracer: Tracer | None = None,
    ) -> None:
        """
        Args:
            supervisor: of the engine process, already started; None: the engine is loaded into this process.
        """
        self._engine_config = engine_config
        self._config = server_config
        self._listener = listener
        self._supervisor = supervisor
        self._phases = phases
        self._tracer = tracer
        app = create_app(None, server_config)
        self._door: Door = app.state.door
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop",
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        self._failure: BaseException | None = None
        self._engine: AsyncLLM | None = None
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> int:
        """Serve until told to leave. The exit code."""
        # Each token makes a few short-lived objects, and none of them is part of a cycle: look for cycles far less often.
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._serve())
        code = self._exit_code()
        if any(thread.name == "whalefall-load" for thread in threading.enumerate()):
            os._exit(code)  # still loading: tearing the interpreter down under it would crash
        return code

    def _exit_code(self) -> int:
        if isinstance(self._failure, WhalefallError):
            raise self._failure
        if self._failure is not None:
            log.error("loading failed", exc_info=self._failure)
            return 1
        return 0

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._supervisor is not None:
            meeting = loop.create_task(self._meet(self._supervisor))
            await self._server.serve(sockets=[self._listener])
            meeting.cancel()
            await self._supervisor.shutdown()
            return
        # Not the loop's own pool, whose end would wait for a load that nobody needs any more.
        threading.Thread(target=self._load, args=(loop,), name="whalefall-load", daemon=True).start()
        await self._server.serve(sockets=[self._listener])
        if self._engine is not None:
            await self._engine.shutdown()

    async def _meet(self, supervisor: Supervisor) -> None:
        """Read the tokenizer while the engine loads, then wait for it."""
        try:
            supervisor.attach()
            folder = await asyncio.to_thread(read_folder, self._engine_config)
            self._phases.mark("tokenizer")
            resolved = await supervisor.wait_ready()
        except Exception as failure:
            self._on_failure(failure)
        else:
            self._phases.mark("waiting for the engine")
            log.info("start-up of the engine process: %s", show_phases(supervisor.phases))
            self._on_loaded(AsyncLLM(folder.opened(resolved), supervisor, tracer=self._tracer))

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with progress_bar("loading weights", unit="bytes") as progress:
                engine = AsyncLLM.from_config(self._engine_config, progress=progress)
        except BaseException as failure:
            self._post(loop, self._on_failure, failure)
        else:
            self._phases.mark("loading the engine")
            self._post(loop, self._on_loaded, engine)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, call: object, value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this model
            loop.call_soon_threadsafe(call, value)  # type: ignore[arg-type]

    def _on_loaded(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._door.open(engine)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        log.info("start-up: %s", show_phases(self._phases.seconds))
        print(f"Whalefall serves {self._door.model_name} at http://{shown}:{port} (ready after {self._phases.total_s:.1f} s)", flush=True)

    def _on_failure(self, failure: BaseException) -> None:
        self._failure = failure
        self._server.should_exit = True

    def _on_signal(self) -> None:
        if self._draining is not None or self._engine is None:
            self._leave()
            return
        log.info("draining: %d answers under way, up to %g s", len(self._door.active), self._config.drain_timeout_s)
        self._door.is_draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._config.drain_timeout_s
        while self._door.active and clock() < end_s and not self._server.should_exit:
            await asyncio.sleep(0.05)
        await self._door.abort_all()
        self._server.should_exit = True

    def _leave(self) -> None:
        self._door.is_draining = True
        self._server.should_exit = True
