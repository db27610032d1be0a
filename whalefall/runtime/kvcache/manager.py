# SPDX-License-Identifier: Apache-2.0
"""Who owns which blocks and state slots, and which blocks are remembered. Bookkeeping only: no tensors, no time, no requests by name;
the scheduler is the caller.

A running request holds one `Reservation`: a state slot and a block table that grows. Given back, it is either free at once or *retires*:
a step that was already launched may still read and write it, so it becomes free when that step is done and not before.

             reserve, extend                     publish                        release
    free ───────────────────► private to one ───────────────► published, held ─────────► published, idle
      ▲                             │ release                                                 │ when memory is wanted
      └─────────────────────────────┴─────────────────────────────────────────────────────────┘

A block is published when the tokens that the host knows have passed its end; from then on nobody writes it. Idle blocks count as free:
they are found until their memory is wanted. Two requests that compute the same block at the same time: the first to publish is found by
others, the second keeps its own copy until it ends, and holds the published one too, so that what it publishes behind it stays reachable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from whalefall.core.errors import ConfigError
from whalefall.runtime.kvcache.block_pool import BlockPool
from whalefall.runtime.kvcache.events import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from whalefall.runtime.kvcache.prefix_index import KeyChain, Node, PrefixIndex, path_to, root_key

_BLOCK_ID = attrgetter("block_id")


@dataclass(eq=False, slots=True)
class Reservation:
    """A state slot and a block table, held by one running request."""

    slot: int
    block_ids: list[int] = field(default_factory=list)
    """Physical blocks in logical order. Read only outside this file."""
    num_tokens: int = 0
    """Positions below this have a block."""
    nodes: list[Node] = field(default_factory=list)
    """Published blocks of the first part of the table, held. Where its block differs from the table's, the table has a copy of its own."""
    has_copies: bool = False
    """Whether the table has such a block."""
    epoch: int = 0
    """Of the index when this was reserved; after a reset nothing more is published."""


@dataclass(slots=True)
class CacheCounters:
    """Since start. Tokens of a request count at its first entry; entries after a preemption have counters of their own."""

    query_tokens: int = 0
    """Prompt tokens looked up."""
    hit_tokens: int = 0
    """Those among them in adopted blocks."""
    readmitted_hit_tokens: int = 0
    """Tokens in blocks that preempted requests found again."""
    replayed_tokens: int = 0
    """Rows computed again over adopted blocks, to refill windows."""
    stored_blocks: int = 0
    evicted_blocks: int = 0
    """Whose memory was wanted."""
    duplicate_blocks: int = 0
    """Computed though another request had published the same just before."""
    num_resets: int = 0


class LowerTiers(Protocol):
    """Where published blocks go on to, as the manager sees it (tiers/ledger.py)."""

    @property
    def held_ends(self) -> Sequence[Node]:
        """Last nodes of the sequences that moves under way hold; one entry for each hold."""
        ...

    @property
    def loading_blocks(self) -> Sequence[int]:
        """Blocks that were borrowed and are being filled."""
        ...

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that can be had again when the moves under way have ended."""
        ...

    def published(self, nodes: Sequence[Node]) -> None: ...

    def forget(self, keys: Iterable[bytes]) -> None: ...

    def reset(self) -> None: ...


class CacheManager:
    def __init__(self, num_blocks: int, block_tokens: int, num_slots: int, *, fingerprint: str = "", layout: str = "") -> None:
        """num_blocks counts the null block, which is never handed out; slots are 0..num_slots-1. fingerprint, layout: see `root_key`."""
        _check_sizes(num_blocks, block_tokens, num_slots)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_slots = num_slots
        self.index = PrefixIndex()
        self.counters = CacheCounters()
        self.events: list[CacheEvent] | None = None
        """Set to a list to have every change noted there; the reader empties it."""
        self.tiers: LowerTiers | None = None
        """Told of what is published and forgotten here."""
        self._fingerprint, self._layout = fingerprint, layout
        self._plain_root = root_key(fingerprint=fingerprint, layout=layout)
        self._pool = BlockPool(num_blocks)
        self._free_slots = list(range(num_slots - 1, -1, -1))  # a stack with slot 0 on top: low slots stay busy, high ones stay cold
        self._held: set[Reservation] = set()
        self._retiring: deque[tuple[int, Reservation]] = deque()  # by step; steps are launched in order, so a queue is enough

    @property
    def capacity_tokens(self) -> int:
        """Positions that one request could fill with the whole pool to itself."""
        return self._pool.num_usable * self.block_tokens

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now, those of idle prefixes among them."""
        return self._pool.num_free + self.index.num_idle

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a hit can find."""
        return len(self.index)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks that become free once the launched steps are done."""
        if not self._retiring:
            return 0
        shared = self.index.num_freed_by(reservation.nodes[-1] for _, reservation in self._retiring if reservation.nodes)
        return shared + sum(len(_private_blocks(reservation)) for _, reservation in self._retiring)

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that can be had soon, without taking them from anybody: after the launched steps, or after moves between tiers."""
        return self.num_retiring_blocks + (0 if self.tiers is None else self.tiers.num_returning_blocks)

    @property
    def is_pristine(self) -> bool:
        """Everything is free, as at the start, but for what is remembered."""
        return self.num_free_blocks == self._pool.num_usable and len(self._free_slots) == self.num_slots

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def chain(self, token_ids: Sequence[int], *, salt: str = "", adapter: str = "") -> KeyChain:
        """The keys of a sequence in this cache."""
        is_plain = not salt and not adapter
        root = self._plain_root if is_plain else root_key(fingerprint=self._fingerprint, layout=self._layout, salt=salt, adapter=adapter)
        return KeyChain(root, self.block_tokens, token_ids, salt=salt)

    def match(self, chain: KeyChain, num_known: int) -> list[Node]:
        """The published blocks of the longest known prefix of a request with `num_known` tokens; at least one token is left to compute."""
        return self.index.match(chain.keys, (num_known - 1) // self.block_tokens)

    def num_wanted(self, num_tokens: int, hit: Sequence[Node] = ()) -> int:
        """By how much `num_free_blocks` would fall if positions [0, num_tokens) were reserved on top of a hit."""
        return self.blocks_for(num_tokens) - len(hit) + (self.index.num_idle_before(hit[-1]) if hit else 0)

    def has_room(self, num_wanted: int) -> bool:
        """Whether there are a slot and so many blocks."""
        return bool(self._free_slots) and num_wanted <= self.num_free_blocks

    def reserve(self, num_tokens: int, hit: Sequence[Node] = ()) -> Reservation | None:
        """A slot and blocks for positions [0, num_tokens), the first of them adopted; None (and no change) when there are not enough."""
        num_new = self.blocks_for(num_tokens) - len(hit)
        num_idle = self.index.num_idle_before(hit[-1]) if hit else 0
        if not self._free_slots or num_new + num_idle > self.num_free_blocks:
            return None
        if hit:
            self.index.hold(hit[-1])  # before blocks are taken: they must not be evicted for their own tail
        block_ids = [*map(_BLOCK_ID, hit), *self._take(num_new)]
        num_tokens = len(block_ids) * self.block_tokens
        reservation = Reservation(self._free_slots.pop(), block_ids, num_tokens, [*hit], epoch=self.index.epoch)
        self._held.add(reservation)
        return reservation

    def extend(self, reservation: Reservation, num_tokens: int) -> tuple[int, ...] | None:
        """Append blocks until positions [0, num_tokens) are covered; the new ones, or None (and no change) when there are not enough."""
        assert reservation in self._held, f"slot {reservation.slot}: extended after it was given back"
        count = self.blocks_for(num_tokens) - len(reservation.block_ids)
        if count > self.num_free_blocks:
            return None
        new_ids = self._take(count) if count > 0 else ()
        reservation.block_ids.extend(new_ids)
        reservation.num_tokens = len(reservation.block_ids) * self.block_tokens
        return new_ids

    def publish(self, reservation: Reservation, chain: KeyChain, token_ids: Sequence[int], num_tokens: int) -> list[Node]:
        """Make findable what is complete: the blocks of positions [0, num_tokens), whose tokens are final and whose steps are done.

        Args:
            chain: of the request; brought up to date here.
            token_ids: its known ids.
        Returns:
            The nodes that are new in the index, in order.
        """
        nodes = reservation.nodes
        first, end = len(nodes), num_tokens // self.block_tokens
        if first >= end or reservation.epoch != self.index.epoch:
            return []
        parent = nodes[-1] if nodes else None
        if parent is not None and not parent.is_listed:
            return []  # it was forgotten: nobody could find what follows
        keys = chain.keys
        if len(keys) < end:
            chain.extend(token_ids)
        if keys[first] in self.index.nodes:
            known = self.index.match(keys, end)
            self._move_hold(parent, known[-1])
            nodes += known[first:]
            self.counters.duplicate_blocks += len(known) - first
            reservation.has_copies = True
            first, parent = len(known), known[-1]
        if first == end:
            return []
        fresh = self.index.publish(keys[first:end], reservation.block_ids[first:end], parent)
        nodes += fresh
        self.counters.stored_blocks += len(fresh)
        if self.events is not None:
            self._note_stored(fresh, parent, token_ids[first * self.block_tokens : end * self.block_tokens], chain.salt)
        if self.tiers is not None:
            self.tiers.published(fresh)
        return fresh

    def forget(self, chain: KeyChain) -> None:
        """Let nobody find the blocks of this sequence any more, nor what follows them: they are under suspicion."""
        nodes, freed = self.index.forget(self.index.match(chain.keys, len(chain.keys)))
        self._pool.release(freed)
        self._note_removed(nodes)
        if self.tiers is not None:
            self.tiers.forget(chain.keys)

    def reset(self) -> None:
        """Forget every prefix. Running requests keep their blocks, and what they go on to compute is not published."""
        self._pool.release(self.index.reset())
        self.counters.num_resets += 1
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        if self.tiers is not None:
            self.tiers.reset()

    # For moves between tiers.

    def borrow(self, count: int) -> tuple[int, ...] | None:
        """Blocks for records that are on their way here, or None when there are not enough; to be adopted or given back."""
        return self._take(count) if count <= self.num_free_blocks else None

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._pool.release(block_ids)

    def adopt(
        self, path: Sequence[Node], keys: Sequence[bytes], block_ids: Sequence[int], token_ids: Sequence[int], salt: str = ""
    ) -> None:
        """Publish borrowed blocks that are filled now; those that became known or unreachable meanwhile are given back.

        Args:
            path: the nodes before the first of `keys`, held by the caller; perhaps forgotten since.
            token_ids: of the sequence, from its start.
            salt: of the sequence.
        """
        parent = path[-1] if path else None
        if parent is not None:
            if not parent.is_listed:
                self._pool.release(block_ids)
                return
            self.index.hold(parent)
        num_known = 0
        while num_known < len(keys) and (node := self.index.find(keys[num_known])) is not None:
            self._move_hold(parent, node)
            parent, num_known = node, num_known + 1
        self._pool.release(block_ids[:num_known])
        if num_known < len(keys):
            fresh = self.index.publish(keys[num_known:], block_ids[num_known:], parent)
            if self.events is not None:
                first = (len(path) + num_known) * self.block_tokens
                self._note_stored(fresh, parent, token_ids[first : first + len(fresh) * self.block_tokens], salt)
            parent = fresh[-1]
        assert parent is not None
        self.let_go(parent)  # all of them become idle now

    def let_go(self, end: Node) -> None:
        """End a hold on a node and all before it."""
        self._pool.release(self.index.let_go(end))

    def release(self, reservation: Reservation, after_step: int | None = None) -> None:
        """Give everything back: at once, or when `after_step` (the newest launched step that names it) is done."""
        assert reservation in self._held, f"slot {reservation.slot}: given back twice"
        self._held.remove(reservation)
        if after_step is None:
            self._free(reservation)
            return
        # At most two steps are launched and not done. An older one can still come after a newer one here: keep the queue sorted.
        at = len(self._retiring)
        while at and self._retiring[at - 1][0] > after_step:
            at -= 1
        self._retiring.insert(at, (after_step, reservation))

    def step_done(self, step_id: int) -> None:
        """Steps up to `step_id` have run to their end: what retired on them is free now."""
        while self._retiring and self._retiring[0][0] <= step_id:
            _, reservation = self._retiring.popleft()
            self._free(reservation)

    def check(self) -> None:
        """Assert that every block and slot has exactly one place: free, private to one reservation, or published; and who holds what."""
        self._pool.check()
        reservations = [*self._held, *(reservation for _, reservation in self._retiring)]
        moving_ends, moving_blocks = ([], []) if self.tiers is None else (self.tiers.held_ends, self.tiers.loading_blocks)
        ends = [*moving_ends, *(reservation.nodes[-1] for reservation in reservations if reservation.nodes)]
        self.index.check(ends)
        nodes = {*self.index, *(node for end in ends for node in path_to(end))}
        owned = [node.block_id for node in nodes] + [b for reservation in reservations for b in _private_blocks(reservation)]
        owned += moving_blocks
        slots = [reservation.slot for reservation in reservations]
        assert len(set(owned)) == len(owned), "a block has two owners"
        assert not any(self._pool.is_free(block_id) for block_id in owned), "a block is owned and free"
        assert len(owned) + self._pool.num_free == self._pool.num_usable, "blocks are lost"
        assert all(r.nodes == (path_to(r.nodes[-1]) if r.nodes else []) for r in reservations), "a reservation's nodes are not one sequence"
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "slots are lost or owned twice"
        assert all(r.num_tokens == len(r.block_ids) * self.block_tokens for r in reservations), "a reservation miscounts its tokens"
        assert all(len(r.nodes) <= len(r.block_ids) for r in reservations), "a reservation holds more than its table"
        assert [step for step, _ in self._retiring] == sorted(step for step, _ in self._retiring), "retiring queue is out of order"

    def _take(self, count: int) -> tuple[int, ...]:
        """Blocks that nobody remembers first; then the memory of the longest idle prefixes."""
        num_free = self._pool.num_free
        if count <= num_free:
            return self._pool.allocate(count)
        evicted = self.index.evict(count - num_free)
        self.counters.evicted_blocks += count - num_free
        if self.events is not None:
            self._note_removed(evicted)
        block_ids = tuple(map(_BLOCK_ID, evicted))
        return self._pool.allocate(num_free) + block_ids if num_free else block_ids

    def _move_hold(self, old_end: Node | None, new_end: Node) -> None:
        """To a later node of the same sequence."""
        self.index.hold(new_end)
        if old_end is not None:
            self.index.let_go(old_end)

    def _free(self, reservation: Reservation) -> None:
        freed = _private_blocks(reservation)
        if reservation.nodes:
            freed += self.index.let_go(reservation.nodes[-1])
        if freed:
            self._pool.release(freed)
        self._free_slots.append(reservation.slot)

    def _note_stored(self, fresh: Sequence[Node], parent: Node | None, token_ids: Sequence[int], salt: str) -> None:
        if self.events is not None:
            keys, parent_key = tuple(node.key for node in fresh), None if parent is None else parent.key
            self.events.append(BlocksStored(keys=keys, parent_key=parent_key, token_ids=tuple(token_ids), salt=salt))

    def _note_removed(self, nodes: Sequence[Node]) -> None:
        if self.events is not None and nodes:
            self.events.append(BlocksRemoved(tuple(node.key for node in nodes)))


def _private_blocks(reservation: Reservation) -> list[int]:
    """Blocks of the table that nobody else can know."""
    nodes, block_ids = reservation.nodes, reservation.block_ids
    if not reservation.has_copies:
        return block_ids[len(nodes) :]
    copies = [block_id for node, block_id in zip(nodes, block_ids) if node.block_id != block_id]
    return copies + block_ids[len(nodes) :]


def _check_sizes(num_blocks: int, block_tokens: int, num_slots: int) -> None:
    problems = []
    if num_blocks < 2:
        problems.append(f"num_blocks is {num_blocks}, at least 2 are needed (block 0 is the null block): give the KV cache more memory")
    if block_tokens < 1:
        problems.append(f"block_tokens is {block_tokens}, must be at least 1")
    if num_slots < 1:
        problems.append(f"num_slots is {num_slots}, must be at least 1")
    if problems:
        raise ConfigError(problems)
