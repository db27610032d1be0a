# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m whalefall.engine.process`, started by supervisor.py and by nobody else.

The main thread builds the engine and runs its step loop; a thread per socket does the (de)serialising beside it. A third thread waits for
the end of standard input: the parent holds the other end, so it closes when the parent dies, however it dies, and then this process leaves.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import msgspec
import zmq

from whalefall.core.errors import ConfigError, EngineDead
from whalefall.core.request import RequestUpdate, ResetPrefixCache
from whalefall.engine import messages
from whalefall.engine.config import EngineConfig
from whalefall.engine.core import EngineCore
from whalefall.engine.messages import Abort, Ended, FromEngine, LaunchSpec, Loading, Ready, Refused, Reset, Submit, Updates
from whalefall.engine.resolve import ResolvedConfig
from whalefall.observe.log import get_logger, setup_logging
from whalefall.observe.phases import Phases
from whalefall.observe.progress import progress_bar

log = get_logger(__name__)

SIGN_OF_LIFE_S = 0.25
"""At least this often the parent hears from us; it also bounds the age of its gauges."""
EXIT_REFUSED = 2
EXIT_FAULT = 70


def build(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    """The usual factory: a checkpoint's engine."""
    from whalefall.engine.wiring import load_engine, open_model

    phases.mark("imports")
    opened = open_model(config)
    phases.mark("checkpoint")
    with progress_bar("loading weights", unit="bytes") as progress:
        core = load_engine(opened, progress=progress)
    phases.mark("weights and caches")
    return opened.config, core


class Link:
    """This end of the two sockets. Updates go out in the order in which they were posted."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._context = zmq.Context()
        self._core: EngineCore | None = None
        # Connected before the first message leaves: what the parent sends when we are ready must find somebody.
        self._commands = self._context.socket(zmq.PULL)
        self._commands.rcvhwm = 0
        self._commands.connect(spec.commands)
        self._outbox: queue.SimpleQueue[FromEngine | list[RequestUpdate]] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="whalefall-updates", daemon=True)
        self._sender.start()

    def post(self, message: FromEngine | list[RequestUpdate]) -> None:
        self._outbox.put(message)

    def serve(self, core: EngineCore) -> None:
        """From now on commands reach the core."""
        self._core = core
        threading.Thread(target=self._receive, name="whalefall-commands", daemon=True).start()

    def end(self, fault: str | None) -> None:
        """Say goodbye and wait until all has been said."""
        self._outbox.put(Ended(fault))
        self._sender.join()
        if self._core is None:
            self._commands.close(linger=0)
        self._context.term()  # wakes and ends the receiver

    def _send(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = 0
        socket.connect(self._spec.updates)
        while True:
            message = self._next()
            socket.send(messages.encode(message))
            if isinstance(message, Ended):
                socket.close(linger=1000)
                return

    def _next(self) -> FromEngine:
        try:
            item = self._outbox.get(timeout=SIGN_OF_LIFE_S)
        except queue.Empty:
            item = []
        if not isinstance(item, list):
            return item
        return Updates(item, self._core.gauges) if self._core is not None else Loading()

    def _receive(self) -> None:
        core = self._core
        assert core is not None
        while True:
            try:
                message = messages.decode_to_engine(self._commands.recv())
            except zmq.ContextTerminated:
                return self._commands.close(linger=0)
            except msgspec.MsgspecError:
                log.exception("a command was not understood")  # our own slip; its request is told by the front's side alone
                continue
            try:
                if isinstance(message, Submit):
                    core.send(message.request)
                elif isinstance(message, Abort):
                    core.send(message.abort)
                elif isinstance(message, Reset):
                    core.send(ResetPrefixCache())
                else:
                    core.stop()
            except EngineDead:
                pass  # the loop has ended in this moment, and the parent ends everything it still holds open


def main() -> int:
    phases = Phases()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group, and draining needs us: the parent says when to stop
    spec = _read_spec()
    threading.Thread(target=_leave_with_parent, args=(Path(spec.folder),), name="whalefall-parent", daemon=True).start()
    setup_logging(log_format=spec.log_format)
    link = Link(spec)
    link.post(Loading())
    module, _, name = spec.factory.partition(":")
    try:
        config, core = getattr(import_module(module), name)(EngineConfig(**spec.options), phases)
    except ConfigError as error:
        link.post(Refused(list(error.problems)))
        link.end("refused")
        return EXIT_REFUSED
    except Exception:
        log.exception("the engine could not be built")
        return EXIT_FAULT
    link.serve(core)
    link.post(Ready(config, phases.seconds))
    core.run(link.post)
    link.end(core.fault)
    return 0 if core.fault is None else EXIT_FAULT


def _read_spec() -> LaunchSpec:
    size = int.from_bytes(sys.stdin.buffer.read(4), "big")
    return messages.decode_launch_spec(sys.stdin.buffer.read(size))


def _leave_with_parent(folder: Path) -> None:
    # The raw descriptor: a buffered reader's lock, held here for good, would hang the interpreter's own exit.
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # usually gone since we were ready
    os._exit(1)


if __name__ == "__main__":
    code = main()
    # Daemon threads may sit in sockets or in a library; nothing is left to lose.
    sys.stderr.flush()
    os._exit(code)
