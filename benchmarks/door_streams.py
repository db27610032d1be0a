# SPDX-License-Identifier: Apache-2.0
"""How many tokens a second does the API process deliver to 150 clients, one token a chunk?   Win: >= 20,000, and no stream starved.

Run: python -m benchmarks.door_streams [--streams 150] [--tokens 2000] [--endpoint chat] [--step-ms 6.5] [--repeat 3]

Three processes, as in service: an engine process with the real loop and scheduler and a stub in place of the model, which gives every
stream one token a step; the API process with the real door on a real socket; and this one, with one thread that reads all streams.
`cpu us/token` is what the API process computed per token: it hardly depends on who else uses the machine, the rate does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

from whalefall.testing.stub_process import STEP_VARIABLE

BODIES = {
    "completions": ("/v1/completions", {"prompt": [5, 6, 7]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}
COLUMNS = ("endpoint", "streams", "tokens", "step_ms", "tokens_per_s", "chunks_per_token", "slowest_to_fastest", "cpu_us_per_token")
COLUMNS += ("load_1m",)


class Stream:
    """One client: counts the events of its answer and reads nothing else of them."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(request)
        self.num_chunks = 0
        self.first_s = self.last_s = 0.0
        self._tail = b""

    def read(self) -> bool:
        """Whether there may be more."""
        data = self.socket.recv(1 << 16)
        now_s = time.monotonic()
        self.num_chunks += data.count(b"data: {")
        self.first_s = self.first_s or now_s
        self.last_s = now_s
        self._tail = (self._tail + data)[-64:]
        return bool(data) and b"[DONE]" not in self._tail


def run_once(options: argparse.Namespace) -> dict[str, object]:
    environment = {**os.environ, STEP_VARIABLE: str(options.step_ms / 1000)}
    command = [sys.executable, "-m", "benchmarks.door_streams", "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        before_s = cpu_seconds(server.pid)
        streams = read_all(port, options)
        cpu_s = cpu_seconds(server.pid) - before_s
    finally:
        server.terminate()
        server.wait()
    total = options.streams * options.tokens
    seconds = max(s.last_s for s in streams) - min(s.first_s for s in streams)
    lengths = [s.last_s - s.first_s for s in streams]
    return {
        "endpoint": options.endpoint,
        "streams": options.streams,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
        "tokens_per_s": round(total / seconds),
        "chunks_per_token": round(sum(s.num_chunks for s in streams) / total, 3),
        "slowest_to_fastest": round(max(lengths) / min(lengths), 2),
        "cpu_us_per_token": round(1e6 * cpu_s / total, 1),
        "load_1m": os.getloadavg()[0],
    }


def read_all(port: int, options: argparse.Namespace) -> list[Stream]:
    path, body = BODIES[options.endpoint]
    asked = {**body, "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": options.tokens}
    payload = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: door\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    streams = [Stream(port, head.encode() + payload) for _ in range(options.streams)]
    selector = selectors.DefaultSelector()
    for stream in streams:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.data.socket)
                key.data.socket.close()
    return streams


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve() -> None:
    """The API process: everything that `whalefall serve` has between socket and engine process."""
    from whalefall.cli.server_process import ServerProcess
    from whalefall.engine.config import EngineConfig
    from whalefall.engine.supervisor import Supervisor
    from whalefall.observe.phases import Phases
    from whalefall.server.config import ServerConfig
    from whalefall.testing.stub_process import stub_folder

    config = EngineConfig(model="stub", max_num_seqs=256)
    supervisor = Supervisor(config, factory="whalefall.testing.stub_process:paced")
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server_config = ServerConfig(served_model_names=("stub",), log_requests=False)

    class Serving(ServerProcess):
        async def _meet(self, supervisor: Supervisor) -> None:
            from whalefall.engine.async_llm import AsyncLLM

            self._engine = AsyncLLM(stub_folder().opened(await supervisor.wait_ready()), supervisor)
            self._door.open(self._engine)
            print(listener.getsockname()[1], flush=True)

    profile = os.environ.get("DOOR_STREAMS_PROFILE")
    server = Serving(config, server_config, listener, supervisor, Phases())
    if profile is None:
        server.run()
        return
    import cProfile

    profiler = cProfile.Profile(time.thread_time)  # CPU time: others may use the machine
    profiler.runcall(server.run)
    profiler.dump_stats(profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--endpoint", choices=sorted(BODIES), default="completions")
    parser.add_argument("--step-ms", type=float, default=6.5, help="of the engine: 150 streams and 6.5 ms are 23,000 tokens/s")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    for _ in range(options.repeat):
        writer.writerow(run_once(options))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
