# SPDX-License-Identifier: Apache-2.0
"""Keys stand for all that decides a block; and any life of a manager with published blocks keeps every block in one place and every
prefix reachable, against a model that knows sequences of tokens only.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from whalefall.runtime.kvcache.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from whalefall.runtime.kvcache.manager import CacheManager, Reservation
from whalefall.runtime.kvcache.prefix_index import KEY_BYTES, MAX_OUTDATED, KeyChain, path_to, root_key

ROOT = root_key(fingerprint="model", layout="blocks of 4")


# Keys.


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.integers(1, 6), st.lists(st.integers(0, 30), max_size=5))
def test_chain_in_pieces_equals_chain_at_once_and_block_by_block(token_ids: list[int], size: int, stops: list[int]) -> None:
    pieces = KeyChain(ROOT, size)
    for stop in [*sorted(stops), len(token_ids)]:
        pieces.extend(token_ids[:stop])
    by_hand = [ROOT]
    for first in range(0, len(token_ids) // size * size, size):
        ids = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids[first : first + size])
        by_hand.append(hashlib.sha256(by_hand[-1] + ids).digest()[:KEY_BYTES])

    assert pieces.keys == KeyChain(ROOT, size, token_ids).keys == by_hand[1:]
    assert all(len(key) == KEY_BYTES for key in pieces.keys)


@given(st.lists(st.integers(0, 500), min_size=8, max_size=24), st.integers(0, 23))
def test_changed_token_changes_the_keys_from_its_block_on(token_ids: list[int], at: int) -> None:
    at %= len(token_ids)
    changed = [*token_ids[:at], token_ids[at] + 1, *token_ids[at + 1 :]]
    before, after = KeyChain(ROOT, 4, token_ids).keys, KeyChain(ROOT, 4, changed).keys
    assert before[: at // 4] == after[: at // 4]
    assert set(before[at // 4 :]).isdisjoint(after[at // 4 :])


def test_root_depends_on_all_that_decides_a_block() -> None:
    base = {"fingerprint": "ab", "layout": "c", "salt": "d", "adapter": "e"}
    roots = [root_key(**base)] + [root_key(**{**base, name: value + "x"}) for name, value in base.items()]
    roots += [root_key(**{**base, "fingerprint": "a", "layout": "bc"}), root_key(**{**base, "salt": "", "adapter": "de"})]
    assert len(set(roots)) == len(roots)


def test_keys_are_the_same_in_every_process() -> None:
    """Files and other engines know blocks by them."""
    code = "from whalefall.runtime.kvcache.prefix_index import *; "
    code += "print(KeyChain(root_key(fingerprint='f', layout='l'), 3, [1, 2, 3]).keys[0].hex())"
    printed = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert printed == {"4e641ea07fcbb8c7e5582558e472b52e"}


# Lives.

Sequence = tuple[int, ...]


class CacheLife(RuleBasedStateMachine):
    """Sequences over few ids, so that prefixes meet; the model maps every published prefix to nothing but itself."""

    held: Bundle[Reservation] = Bundle("held")

    @initialize(num_blocks=st.integers(3, 14), block_tokens=st.integers(1, 3), num_slots=st.integers(1, 5))
    def start(self, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        self.manager = CacheManager(num_blocks, block_tokens, num_slots)
        self.manager.events = []
        self.size = block_tokens
        self.live: dict[Reservation, Sequence] = {}
        self.content: dict[int, Sequence] = {}  # block -> the prefix that ends with it, as its owner wrote it
        self.heard: dict[bytes, bytes | None] = {}
        self.step = 0

    @rule(target=held, ids=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple))
    def reserve(self, ids: Sequence) -> object:
        manager = self.manager
        hit = manager.match(manager.chain(ids), len(ids))
        assert len(hit) * self.size < len(ids)
        assert [self.content[n.block_id] for n in hit] == [ids[: (i + 1) * self.size] for i in range(len(hit))]
        wanted, free = manager.num_wanted(len(ids), hit), manager.num_free_blocks
        reservation = manager.reserve(len(ids), hit)
        if reservation is None:
            assert wanted > free or manager.num_free_slots == 0
            return multiple()
        assert manager.num_free_blocks == free - wanted
        assert len(reservation.block_ids) == manager.blocks_for(len(ids))
        for logical in range(len(hit), len(reservation.block_ids)):
            self.content[reservation.block_ids[logical]] = ids[: (logical + 1) * self.size]
        self.live[reservation] = ids
        return reservation

    @rule(reservation=held, share=st.floats(0, 1))
    def publish(self, reservation: Reservation, share: float) -> None:
        if reservation in self.live:
            ids = self.live[reservation]
            chain = self.manager.chain(())
            for node in self.manager.publish(reservation, chain, ids, int(share * len(ids))):
                assert node.block_id in reservation.block_ids

    @rule(reservation=consumes(held), ahead=st.one_of(st.none(), st.integers(0, 1)))
    def release(self, reservation: Reservation, ahead: int | None) -> None:
        del self.live[reservation]
        self.manager.release(reservation, None if ahead is None else self.step + ahead)

    @rule()
    def finish_step(self) -> None:
        before, coming = self.manager.num_free_blocks, self.manager.num_retiring_blocks
        self.manager.step_done(self.step + 1)
        assert self.manager.num_free_blocks == before + coming
        self.step += 2

    @rule(reservation=held)
    def forget(self, reservation: Reservation) -> None:
        if reservation in self.live:
            chain = self.manager.chain(self.live[reservation])
            self.manager.forget(chain)
            assert self.manager.match(chain, 10**6) == []

    @rule(reservation=held, share=st.floats(0, 1))
    def forget_the_end(self, reservation: Reservation, share: float) -> None:
        """Of a sequence, and all that hangs on it; what stands before stays."""
        if reservation in self.live:
            manager, chain = self.manager, self.manager.chain(self.live[reservation])
            path = manager.index.match(chain.keys, 10**6)
            num_left = int(share * len(path))
            nodes, freed = manager.index.forget(path[num_left:])
            manager._pool.release(freed)
            manager._note_removed(nodes)
            assert manager.index.match(chain.keys, 10**6) == path[:num_left]

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        assert self.manager.num_cached_blocks == 0

    @invariant()
    def is_sound(self) -> None:
        manager = self.manager
        manager.check()
        for node in manager.index:
            assert len(path_to(node)) * self.size == len(self.content[node.block_id])
        for event in manager.events or ():
            match event:
                case BlocksStored():
                    parents = [event.parent_key, *event.keys]
                    self.heard |= dict(zip(event.keys, parents))
                case BlocksRemoved():
                    for key in event.keys:
                        del self.heard[key]
                case AllBlocksCleared():
                    self.heard.clear()
        if manager.events:
            manager.events.clear()
        assert self.heard == {node.key: node.parent.key if node.parent else None for node in manager.index}

    def teardown(self) -> None:
        for reservation in list(self.live):
            self.manager.release(reservation)
        self.manager.step_done(self.step + 2)
        assert self.manager.is_pristine


TestCacheLife = CacheLife.TestCase
TestCacheLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def publish(manager: CacheManager, ids: list[int]) -> None:
    chain = manager.chain(ids)
    reservation = manager.reserve(len(ids), manager.match(chain, len(ids)))
    assert reservation is not None
    manager.publish(reservation, chain, ids, len(ids))
    manager.release(reservation)


def test_longest_idle_goes_first_and_of_a_sequence_its_end() -> None:
    manager = CacheManager(9, 1, 2)
    publish(manager, [1, 2, 3, 4])
    publish(manager, [5, 6, 7])
    publish(manager, [1, 2, 9])  # touches the beginning of the first

    reservation = manager.reserve(3)
    assert reservation is not None

    found = [len(manager.match(manager.chain(ids), 10)) for ids in ([1, 2, 3, 4], [5, 6, 7], [1, 2, 9])]
    assert found == [2, 2, 3]


def test_free_memory_is_taken_before_anything_is_forgotten() -> None:
    manager = CacheManager(9, 1, 2)
    publish(manager, [1, 2, 3, 4])

    assert manager.reserve(4) is not None
    assert manager.num_cached_blocks == 4 and manager.counters.evicted_blocks == 0


def test_block_that_somebody_holds_is_never_evicted() -> None:
    manager = CacheManager(5, 1, 2)
    publish(manager, [1, 2])
    chain = manager.chain([1, 2, 3])
    holder = manager.reserve(3, manager.match(chain, 3))

    assert holder is not None
    assert manager.reserve(2) is None and manager.reserve(1) is not None


@pytest.mark.parametrize("first_to_publish", [0, 1])
def test_second_to_publish_keeps_its_copy_and_its_followers_are_found(first_to_publish: int) -> None:
    manager = CacheManager(20, 2, 4)
    a, b = manager.reserve(4), manager.reserve(6)
    assert a is not None and b is not None
    order = [(a, [1, 2, 3, 4]), (b, [1, 2, 3, 4, 5, 6])]
    for reservation, ids in order[:: 1 if first_to_publish == 0 else -1]:
        manager.publish(reservation, manager.chain(ids), ids, len(ids))
        manager.check()
    manager.release(a)
    manager.release(b)

    found = manager.match(manager.chain([1, 2, 3, 4, 5, 6]), 7)
    assert len(found) == 3 and manager.is_pristine
    assert found[0].block_id == (a, b)[first_to_publish].block_ids[0]


def test_idle_queue_does_not_grow_with_the_hits() -> None:
    manager = CacheManager(9, 1, 2)
    for _ in range(3 * MAX_OUTDATED):
        publish(manager, [1, 2, 3, 4])

    assert manager.num_cached_blocks == 4
    assert len(manager.index._queue) <= 4 + MAX_OUTDATED
    manager.check()


def test_what_a_fault_leaves_of_a_fork_goes_before_the_sequence_it_forks_off_from() -> None:
    manager = CacheManager(9, 1, 2)
    publish(manager, [1, 2, 3, 4])
    publish(manager, [1, 2, 5, 6, 7])
    path = manager.index.match(manager.chain([1, 2, 5, 6, 7]).keys, 5)
    _, freed = manager.index.forget(path[4:])
    manager.give_back(freed)
    manager.check()

    assert [node.block_id for node in manager.index.evict(2)] == [4, 3]
    assert manager.index.evict(4) == path[3::-1]
