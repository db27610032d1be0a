# SPDX-License-Identifier: Apache-2.0
"""Child: one engine process as its parent holds it: the process, the two sockets, and the pipe whose end tells it that we are gone.

The sockets are files in a folder that only this user can enter. It is removed when the process is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from whalefall.engine import messages
from whalefall.engine.messages import FromEngine, LaunchSpec, Loading, ToEngine
from whalefall.observe.log import get_logger

log = get_logger(__name__)


class Child:
    def __init__(self, spec: LaunchSpec) -> None:
        """Starts the process. The spec's folder is made here."""
        self.started_s = time.monotonic()
        self.heard_s = self.started_s
        """When it last gave a sign of life."""
        self.exit_code: int | None = None
        spec = msgspec.structs.replace(spec, folder=tempfile.mkdtemp(prefix="whalefall-"))
        self._folder: str | None = spec.folder
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PUSH, spec.commands)
        self._updates = self._bind(zmq.PULL, spec.updates)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] = lambda message: None
        self._has_ended: asyncio.Event | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._launch(spec)
        except OSError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def attach(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[FromEngine], None], on_exit: Callable[[Child], None]) -> None:
        """From now on messages and the end of the process are reported, in this loop."""
        self._loop, self._on_message, self._has_ended = loop, on_message, asyncio.Event()
        loop.add_reader(self._descriptor(), self.drain)
        loop.call_soon(self.drain)  # the descriptor only tells of changes: something may be there already
        threading.Thread(target=self._wait, args=(loop, on_exit), name="whalefall-child", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Never blocks; to a process that is gone it says nothing."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(messages.encode(message), zmq.DONTWAIT)

    def drain(self) -> None:
        """Report every message that is there."""
        while not self._updates.closed:
            try:
                raw = self._updates.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.heard_s = time.monotonic()
            try:
                message = messages.decode_from_engine(raw)
            except msgspec.MsgspecError:
                log.exception("the engine process sent what nobody understands: it is killed")
                self.kill()
                return
            if not isinstance(message, Loading):
                self._forget_folder()
            self._on_message(message)

    async def wait(self) -> None:
        """Until the process has ended."""
        assert self._has_ended is not None
        await self._has_ended.wait()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def close(self) -> None:
        """Let go of the sockets; the process has ended or is about to."""
        if self._loop is not None and not self._updates.closed:
            self._loop.remove_reader(self._descriptor())
        self._context.destroy(linger=0)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._forget_folder()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0  # the queue's bound is the number of open requests, not ours to drop
        socket.bind(endpoint)
        return socket

    def _descriptor(self) -> int:
        """Becomes readable when something changes at the socket of updates."""
        return int(self._updates.getsockopt(zmq.FD))

    def _launch(self, spec: LaunchSpec) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "whalefall.engine.process"], stdin=subprocess.PIPE, env=_environment())
        raw = messages.encode(spec)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: its end is reported as any other
            process.stdin.write(len(raw).to_bytes(4, "big") + raw)
            process.stdin.flush()
        return process

    def _wait(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[Child], None]) -> None:
        assert self._process is not None
        self.exit_code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody cares any more
            loop.call_soon_threadsafe(self._report_end, on_exit)

    def _report_end(self, on_exit: Callable[[Child], None]) -> None:
        assert self._has_ended is not None
        self._has_ended.set()
        on_exit(self)

    def _forget_folder(self) -> None:
        """Connections live on without the files, and files of a process that is killed would stay."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _environment() -> dict[str, str]:
    """Ours, and a bound on compute threads: with one per core, each step would wait for the core that this process is using."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores - 1)), **os.environ}


def describe_exit(code: int | None) -> str:
    """As a reader of logs would say it: "exit code 70", "signal 9, SIGKILL"."""
    if code is None or code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"
