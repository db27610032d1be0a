# SPDX-License-Identifier: Apache-2.0
"""What API process and engine process say to each other, and its bytes: MessagePack, token ids only, no text of a request.

The dataclasses of core/request.py travel as they are; arrays of log-probabilities as raw bytes. Both processes run on one host and from
one installation, so there are no versions to negotiate and no byte order to mind.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from whalefall.core.request import AbortRequests, EngineRequest, RequestUpdate
from whalefall.engine.resolve import ResolvedConfig
from whalefall.observe.metrics import EngineGauges


class LaunchSpec(msgspec.Struct, frozen=True):
    """How an engine process begins; it reads this from its standard input, whose end means that the parent has died."""

    factory: str
    """`module:function` that builds the engine: (EngineConfig, Progress) -> (ResolvedConfig, EngineCore)."""
    options: dict[str, Any]
    """Fields of the EngineConfig."""
    log_format: str
    folder: str = ""
    """Where the sockets are; only this user can enter it."""

    @property
    def commands(self) -> str:
        """Endpoint of ToEngine messages."""
        return f"ipc://{self.folder}/commands"

    @property
    def updates(self) -> str:
        """Endpoint of FromEngine messages."""
        return f"ipc://{self.folder}/updates"


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    abort: AbortRequests


class Reset(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Forget all cached prefixes."""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """End what is open with reason "abort", then leave."""


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """The first sign of life, while the engine is being built."""


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    config: ResolvedConfig
    phases: list[tuple[str, float]]
    """Seconds of each phase of the start, in order."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The engine cannot be built as asked."""

    problems: list[str]


class Updates(msgspec.Struct, tag="updates", array_like=True, frozen=True):
    """What one step did (or more, when the sender fell behind). Empty: a sign of life, with the gauges of the moment."""

    updates: list[RequestUpdate]
    gauges: EngineGauges


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The last message of a process that leaves by itself."""

    fault: str | None
    """What ended the step loop; None when it was told to stop."""


ToEngine: TypeAlias = Submit | Abort | Reset | Stop
FromEngine: TypeAlias = Loading | Ready | Refused | Updates | Ended


def _pack_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _unpack_array(kind: Any, raw: bytes) -> Any:
    """
    Args:
        kind: an array type with its dtype, such as NDArray[np.float32]; all arrays in messages have one dimension.
    """
    (scalar,) = get_args(get_args(kind)[1])
    return np.frombuffer(raw, dtype=scalar)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unpack_array)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_unpack_array)
_launch_spec = msgspec.msgpack.Decoder(LaunchSpec)


def encode(message: ToEngine | FromEngine | LaunchSpec) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(raw: bytes) -> ToEngine:
    return _to_engine.decode(raw)


def decode_from_engine(raw: bytes) -> FromEngine:
    return _from_engine.decode(raw)


def decode_launch_spec(raw: bytes) -> LaunchSpec:
    return _launch_spec.decode(raw)
