# SPDX-License-Identifier: Apache-2.0
"""KV events for routers that choose the replica which knows a prompt: vLLM's schema and transport, so that they need nothing of ours.

ZMQ PUB, three frames: topic, sequence number (8 bytes, big endian), MessagePack of [timestamp, [event, ...], data-parallel rank]. An event
is a map with its "type" (or, for older readers, a tagged array). A ROUTER socket gives missed batches again, from a number on, and ends
with number -1. Sending is a thread's work: the step loop only appends to a queue.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from whalefall.core.errors import ConfigError
from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, Tier

log = get_logger(__name__)
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_MEDIUM = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
"""vLLM's words; routers look for them, so the device is called so even where it is a CPU."""
POLL_S = 0.1
"""How often a quiet publisher looks for replay requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvEventsConfig:
    """The keys of vLLM's --kv-events-config, and `format`."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    """Bound when it has a wildcard or is ipc://, else connected to."""
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches queued per subscriber; a slower one loses the newest."""
    format: Literal["map", "array"] = "map"
    """array: events as vLLM sent them before its pull request 42892."""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig | None:
        """None when events are not enabled.

        Raises:
            ConfigError: not JSON, or a key or value that means nothing.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"kv_events_config is not JSON: {error}") from error
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or values.keys() - known:
            raise ConfigError(f"kv_events_config is {text}, must be an object with keys among {', '.join(sorted(known))}")
        values = {name: value for name, value in values.items() if value is not None}
        for name, choices in (("publisher", ("zmq", "null")), ("format", ("map", "array"))):
            if values.get(name, choices[0]) not in choices:
                raise ConfigError(f"kv_events_config: {name} is {values[name]!r}, must be one of {', '.join(choices)}")
        if values.get("publisher") == "null":
            return None
        config = cls(**values)
        return config if config.enable_kv_cache_events else None


class KvEventPublisher:
    def __init__(self, config: KvEventsConfig, block_tokens: int, *, rank: int = 0, now_s: Callable[[], float] = time.time) -> None:
        """Binds at once.

        Raises:
            ConfigError: an endpoint cannot be used.
        """
        import zmq  # the engine core runs without it

        self._config, self._block_tokens, self._rank, self._now_s = config, block_tokens, rank, now_s
        self._queue: queue.SimpleQueue[list[CacheEvent] | None] = queue.SimpleQueue()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._context = zmq.Context()
        self._publish_socket = self._context.socket(zmq.PUB)
        self._publish_socket.set_hwm(config.hwm)
        self._replay_socket = self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        try:
            is_ours = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith(("ipc://", "inproc://"))
            (self._publish_socket.bind if is_ours else self._publish_socket.connect)(config.endpoint)
            if self._replay_socket is not None and config.replay_endpoint is not None:
                self._replay_socket.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {config.endpoint} or {config.replay_endpoint} cannot be used: {error}") from error
        self.publish([AllBlocksCleared()])  # whoever listened to an engine that stood here before must forget what that one had
        self._thread = threading.Thread(target=self._run, name="whalefall-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Never blocks."""
        self._queue.put(list(events))

    def close(self) -> None:
        """Send what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            if self._replay_socket is not None and self._replay_socket.poll(0):
                self._replay()
            try:
                events = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if events is None:
                break
            number, payload = self._next_number, self.encode(events)
            self._next_number += 1
            self._publish_socket.send_multipart((self._config.topic.encode(), number.to_bytes(8, "big"), payload))
            self._sent.append((number, payload))
        self._context.destroy(linger=1000)

    def _replay(self) -> None:
        assert self._replay_socket is not None
        frames = self._replay_socket.recv_multipart()
        if len(frames) != 3:
            log.warning("kv events: a replay request has %d frames, expected an empty one and a number", len(frames))
            return
        client, _, first = frames
        for number, payload in self._sent:
            if number >= int.from_bytes(first, "big"):
                self._replay_socket.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._replay_socket.send_multipart((client, b"", END_OF_REPLAY, b""))

    def encode(self, events: Sequence[CacheEvent]) -> bytes:
        import msgspec

        described: list[Any] = [self._describe(event) for event in events]
        if self._config.format == "array":
            described = [list(event.values()) for event in described]
        return msgspec.msgpack.encode([self._now_s(), described, self._rank])

    def _describe(self, event: CacheEvent) -> dict[str, Any]:
        """Fields in vLLM's order: in the array form the order is the meaning.

        Fields at their defaults are left out from `extra_keys` on: it has one entry per block, what beside ids and parent makes its hash,
        here the salt of a sequence's first block. `group_idx` and what follows it tell cache groups apart; here is one.
        """
        match event:
            case BlocksStored():
                stored: dict[str, Any] = {
                    "type": "BlockStored",
                    "block_hashes": [_short(key) for key in event.keys],
                    "parent_block_hash": None if event.parent_key is None else _short(event.parent_key),
                    "token_ids": list(event.token_ids),
                    "block_size": self._block_tokens,
                    "lora_id": None,
                    "medium": _MEDIUM[event.tier],
                    "lora_name": None,
                }
                if event.salt and event.parent_key is None:
                    stored["extra_keys"] = [[event.salt], *[None] * (len(event.keys) - 1)]
                return stored
            case BlocksRemoved():
                return {"type": "BlockRemoved", "block_hashes": [_short(key) for key in event.keys], "medium": _MEDIUM[event.tier]}
            case AllBlocksCleared():
                return {"type": "AllBlocksCleared"}


def _short(key: bytes) -> int:
    """vLLM sends the low 64 bits of its hashes, and readers keep them in 64-bit integers."""
    return int.from_bytes(key[-8:], "big")
