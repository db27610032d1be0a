# SPDX-License-Identifier: Apache-2.0
"""KV events as a router reads them: over real sockets, decoded by hand, in both forms; and an account kept from them equals the index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from whalefall import LLM, SamplingParams
from whalefall.core.errors import ConfigError
from whalefall.engine.kv_events import KvEventPublisher, KvEventsConfig
from whalefall.runtime.kvcache.events import AllBlocksCleared, BlocksRemoved, BlocksStored, Tier
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

KEYS = (bytes(range(16)), bytes(range(16, 32)))
EVENTS = [
    BlocksStored(keys=KEYS, parent_key=None, token_ids=(1, 2, 3, 4)),
    BlocksRemoved(keys=KEYS[1:]),
    AllBlocksCleared(),
]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def replayed(context: zmq.Context[Any], endpoint: str, first: int) -> list[tuple[int, Any]]:
    """All batches from a number on, as (number, batch)."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[8:], "big")


def test_events_are_maps_in_an_array_with_time_and_rank(tmp_path: Path) -> None:
    config = KvEventsConfig(endpoint=f"ipc://{tmp_path}/events")
    publisher = KvEventPublisher(config, 2, now_s=lambda: 12.5)
    batch = msgspec.msgpack.decode(publisher.encode(EVENTS))
    publisher.close()
    stored = {
        "type": "BlockStored",
        "block_hashes": [hash_of(key) for key in KEYS],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [hash_of(KEYS[1])], "medium": "GPU"}
    assert batch == [12.5, [stored, removed, {"type": "AllBlocksCleared"}], 0]


def test_salt_stands_beside_the_first_block_and_the_medium_beside_each_event(tmp_path: Path) -> None:
    """As vLLM says them: what makes a hash beside ids and parent; and the host's tier by hash alone."""
    publisher = KvEventPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/events"), 2)
    events = [
        BlocksStored(keys=KEYS, parent_key=None, token_ids=(1, 2, 3, 4), salt="tenant"),
        BlocksStored(keys=KEYS[1:], parent_key=KEYS[0], token_ids=(3, 4), salt="tenant"),
        BlocksStored(keys=KEYS, parent_key=None, token_ids=(), tier=Tier.HOST),
        BlocksRemoved(keys=KEYS, tier=Tier.HOST),
    ]
    _, (first, later, on_host, off_host), _ = msgspec.msgpack.decode(publisher.encode(events))
    publisher.close()
    assert first["extra_keys"] == [["tenant"], None] and first["medium"] == "GPU"
    assert "extra_keys" not in later and later["parent_block_hash"] == hash_of(KEYS[0])
    assert on_host["medium"] == off_host["medium"] == "CPU"
    assert on_host["block_hashes"] == off_host["block_hashes"] == [hash_of(key) for key in KEYS]
    assert (on_host["parent_block_hash"], on_host["token_ids"]) == (None, [])


def test_account_of_the_host_tier_equals_its_book(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """Through stores, evictions, loads and a reset; what is removed was there, what is stored was not."""
    write_toy_checkpoint(tmp_path / "toy")
    events = f'{{"endpoint": "ipc://{tmp_path}/events", "replay_endpoint": "ipc://{tmp_path}/replay"}}'
    options = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 2, "use_tqdm": False}
    with LLM(tmp_path / "toy", **options) as llm:  # type: ignore[arg-type]
        memory = llm.config.memory
    options["host_cache_bytes"] = 40 * memory.block_bytes
    options["kv_cache_memory_bytes"] = 2 * memory.slot_bytes + 20 * memory.block_bytes
    with LLM(tmp_path / "toy", kv_events_config=events, **options) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        prompts = [[(11 * i + j) % 50 + 2 for j in range(30)] for i in range(9)]
        for salt in ("", "tenant"):
            for ids in [*prompts, *prompts[-4:]]:  # some of the last are on the device still, others in the host's memory
                llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params)
                while llm.core.scheduler.waits_for_moves:
                    llm.core.turn()
            if not salt:
                llm.reset_prefix_cache()
        tiers = llm.core.scheduler.tiers
        assert tiers is not None and tiers.book.num_evicted > 0 and tiers.counters.loaded_blocks > 0
        listed = {hash_of(key) for key in tiers.book.keys}
        llm.core.turn()
        batches = replayed(context, f"ipc://{tmp_path}/replay", 0)

    known: set[int] = set()
    salted = 0
    for event in (event for _, (_, batch, _) in batches for event in batch):
        if event["type"] == "AllBlocksCleared":
            known.clear()
        elif event["medium"] == "CPU" and event["type"] == "BlockStored":
            assert known.isdisjoint(event["block_hashes"])
            known.update(event["block_hashes"])
        elif event["medium"] == "CPU":
            assert known.issuperset(event["block_hashes"])
            known.difference_update(event["block_hashes"])
        elif event["type"] == "BlockStored" and event["parent_block_hash"] is None:
            salted += event.get("extra_keys") == [["tenant"], *[None] * (len(event["block_hashes"]) - 1)]
    assert known == listed and salted > 0


def test_older_readers_get_arrays(tmp_path: Path) -> None:
    publisher = KvEventPublisher(KvEventsConfig(endpoint=f"ipc://{tmp_path}/events", format="array"), 2, now_s=lambda: 12.5)
    batch = msgspec.msgpack.decode(publisher.encode(EVENTS))
    publisher.close()
    first, second = (hash_of(key) for key in KEYS)
    stored = ["BlockStored", [first, second], None, [1, 2, 3, 4], 2, None, "GPU", None]
    assert batch == [12.5, [stored, ["BlockRemoved", [second], "GPU"], ["AllBlocksCleared"]], 0]


def test_subscriber_hears_batches_in_order_under_their_topic(tmp_path: Path, context: zmq.Context[Any]) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KvEventPublisher(KvEventsConfig(endpoint=endpoint, topic="kv-events"), 2)
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.subscribe(b"kv-events")
        socket.connect(endpoint)
        heard: list[tuple[bytes, int]] = []
        while not heard:  # a subscription takes a moment to arrive; what was sent before is lost, as with any PUB socket
            publisher.publish(EVENTS)
            if socket.poll(100):
                topic, number, _ = socket.recv_multipart()
                heard.append((topic, int.from_bytes(number, "big")))
        publisher.publish(EVENTS)
        while socket.poll(500):
            topic, number, _ = socket.recv_multipart()
            heard.append((topic, int.from_bytes(number, "big")))
    publisher.close()
    assert {topic for topic, _ in heard} == {b"kv-events"}
    numbers = [number for _, number in heard]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_router_that_replays_all_knows_what_the_index_knows(tmp_path: Path, context: zmq.Context[Any]) -> None:
    write_toy_checkpoint(tmp_path / "toy")
    events = f'{{"endpoint": "ipc://{tmp_path}/events", "replay_endpoint": "ipc://{tmp_path}/replay", "topic": "kv"}}'
    options = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "kv_cache_memory_bytes": 400_000, "use_tqdm": False}
    with LLM(tmp_path / "toy", kv_events_config=events, **options) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        prompts = [[(7 * i + j) % 50 + 2 for j in range(9 + i)] for i in range(12)]
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts[:5]], params)
        index = {hash_of(node.key): hash_of(node.parent.key) if node.parent else None for node in llm.core.scheduler.cache.index}

        known: dict[int, int | None] = {}
        batches: list[tuple[int, Any]] = []
        while len(known) != len(index) or not batches:
            batches = replayed(context, f"ipc://{tmp_path}/replay", 0)
            known = account_of(batches)
    assert known == index
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert sum(event["type"] == "AllBlocksCleared" for _, (_, listed, _) in batches for event in listed) == 2


def account_of(batches: list[tuple[int, Any]]) -> dict[int, int | None]:
    """Hash -> parent hash of every block that is there after these batches."""
    known: dict[int, int | None] = {}
    for _, (_, events, _) in batches:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                known.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del known[block]
            else:
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                parent = event["parent_block_hash"]
                assert parent is None or parent in known
                for block in event["block_hashes"]:
                    known[block] = parent
                    parent = block
    return known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ('{"endpont": "x"}', "keys among"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"format": "xml"}', "xml"),
        ("[]", "object"),
    ],
)
def test_config_that_means_nothing_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KvEventsConfig.parse(text)


def test_endpoint_that_is_taken_is_refused(tmp_path: Path) -> None:
    missing = f"ipc://{tmp_path}/no/such/folder"
    with pytest.raises(ConfigError, match="cannot be used"):
        KvEventPublisher(KvEventsConfig(endpoint=missing), 4)


def test_events_can_be_configured_and_off() -> None:
    assert KvEventsConfig.parse('{"enable_kv_cache_events": false}') is None
    assert KvEventsConfig.parse('{"publisher": "null"}') is None
