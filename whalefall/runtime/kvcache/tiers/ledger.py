# SPDX-License-Identifier: Apache-2.0
"""TierLedger: which records are where, what moves, and for whom a request waits. Keys and numbers only; the scheduler is the caller.

    published   blocks have become findable on the device     -> Store to the host, then Write to the disk
    advance     a request waits to enter                      -> Probe and Fetch from the disk, then Load from the host, or nothing
    report      a move has ended                              -> rows and blocks change hands
    take_moves  what the mover shall do next

A waiting request owns nothing here: only moves under way pin rows and blocks, and each ends with one report. So an abort, a timeout or a
reset needs no cleaning up, it only makes a result unwanted. What was loaded is published on the device like any other block: for the
scheduler it is a prefix hit.

A request waits at most about as long as computing the missing tokens would take, and once per entry: loading is never much worse than
not loading, and a record that never comes stops nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from whalefall.runtime.kvcache.events import BlocksRemoved, BlocksStored, Tier
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.prefix_index import Node, path_to
from whalefall.runtime.kvcache.tiers.cost import CostEstimate
from whalefall.runtime.kvcache.tiers.host_book import HostBook
from whalefall.runtime.kvcache.tiers.moves import Fetch, Load, Move, MoveReport, Probe, Remove, Store, Write


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerConfig:
    num_rows: int
    """Records the host tier holds."""
    has_store: bool = False
    """Whether there is a tier below the host."""
    min_hit_tokens: int = 0
    """A prefix of at most this many tokens is no hit: loading up to here would be for nothing."""
    max_wait_s: float = 2.0
    """A request never waits longer for records than this."""
    min_wait_s: float = 0.05
    """Nor is it sent away sooner, however fast the device computes: estimates of milliseconds are noise."""


@dataclass(slots=True)
class TierCounters:
    """Blocks since start, but for the last line."""

    host_queries: int = 0
    """Blocks of entering requests that the device did not have."""
    host_hits: int = 0
    """Those among them that the host had."""
    disk_queries: int = 0
    """Those that were asked of the disk."""
    disk_hits: int = 0
    """Those that the disk gave, whole."""
    loaded_blocks: int = 0
    """Copied from the host to the device and found there by a request."""
    stored_blocks: int = 0
    written_blocks: int = 0
    skipped_stores: int = 0
    """Published blocks that were not kept: every row was in use."""
    skipped_writes: int = 0
    """Host records that were not written: the disk did not keep up, or refused."""
    num_timeouts: int = 0
    """Requests that did not wait any longer and computed instead."""


class Stage(Enum):
    START = auto()
    FETCHING = auto()
    """Something was asked of the disk."""
    READY = auto()
    """What can be had is in the host's memory."""
    LOADING = auto()
    DONE = auto()


WAITING = frozenset({Stage.START, Stage.FETCHING, Stage.LOADING})
"""Stages that a report ends, or the deadline. (A request that is READY waits for room, not for records.)"""


@dataclass(eq=False, slots=True)
class Prefetch:
    """What one waiting request hopes for. Forgotten without ceremony when the request goes."""

    keys: Sequence[bytes]
    """Of its full blocks, as many as a hit may cover."""
    token_ids: Sequence[int]
    """Its known ids."""
    salt: str = ""
    stage: Stage = Stage.START
    deadline_s: float | None = None
    has_more: bool = False
    """The disk has more than fitted into the host's memory at once: another round follows."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    move: Move
    epoch: int
    prefetch: Prefetch | None = None
    path: list[Node] = field(default_factory=list)
    """Held on the device."""
    nodes: list[Node] = field(default_factory=list)
    """Of a Store: what is copied, aligned with the move's keys."""
    is_suspect: bool = False
    """Its records came under suspicion meanwhile."""


class TierLedger:
    def __init__(self, device: CacheManager, config: LedgerConfig) -> None:
        self.config = config
        self.counters = TierCounters()
        self.cost = CostEstimate(device.block_tokens)
        self.book = HostBook(config.num_rows)
        self._device = device
        self._moves: list[Move] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._next_move_id = 0
        self._sought: set[bytes] = set()
        """Keys that are asked of the disk: whoever wants them too waits for the same answer."""
        self._storing: set[bytes] = set()
        self._num_writing = 0
        # A quarter of the rows may wait for the disk, a half may be on its way from it: the rest stays for what is published.
        self._max_writing = max(1, config.num_rows // 4)
        self._max_fetch = max(1, config.num_rows // 2)
        device.tiers = self

    @property
    def has_moves(self) -> bool:
        """Whether a report is still to come."""
        return bool(self._under_way)

    @property
    def num_returning_blocks(self) -> int:
        """Device blocks that can be had when the moves under way have ended."""
        if not self._under_way:
            return 0
        loading = sum(len(way.move.block_ids) for way in self._under_way.values() if isinstance(way.move, Load))
        return loading + self._device.index.num_freed_by(self.held_ends)

    @property
    def held_ends(self) -> list[Node]:
        """Last nodes of what moves under way hold on the device; one entry for each hold."""
        return [way.path[-1] for way in self._under_way.values() if way.path]

    @property
    def loading_blocks(self) -> list[int]:
        """Device blocks that are being filled."""
        return [b for way in self._under_way.values() if isinstance(way.move, Load) for b in way.move.block_ids]

    def published(self, nodes: Sequence[Node]) -> None:
        """Keep what has become findable on the device, part of one sequence, in order."""
        fresh = [n for n in nodes if n.is_listed and n.key not in self.book and n.key not in self._storing]
        if not fresh:
            return
        path = path_to(fresh[-1])
        self.book.touch([node.key for node in path])  # before rows are taken: a sequence is not given up for its own tail
        rows = self._take_rows(len(fresh))
        self.counters.skipped_stores += len(fresh) - len(rows)
        fresh = fresh[: len(rows)]
        if not fresh:
            return
        self._device.index.hold(path[-1])
        keys = tuple(node.key for node in fresh)
        self._storing.update(keys)
        then = self._plan_write(keys, rows)
        store = Store(self._new_id(), keys, tuple(node.block_id for node in fresh), tuple(rows), then)
        self._start(store, path=path, nodes=fresh)
        if then is not None:
            self._under_way[then.move_id] = _UnderWay(then, self._device.index.epoch)

    def begin(self, keys: Sequence[bytes], token_ids: Sequence[int], salt: str = "") -> Prefetch:
        """For a request that waits to enter, with what it knows now."""
        return Prefetch(keys, token_ids, salt)

    def advance(self, prefetch: Prefetch, now_s: float, *, may_load: bool) -> bool:
        """Take the next step towards the records of a waiting request; whether nothing more is to be waited for.

        Args:
            may_load: the request could enter now if its blocks were there.
        """
        if prefetch.stage is Stage.START:
            self._look(prefetch, now_s)
        if prefetch.stage is Stage.READY and may_load:
            self._load(prefetch)
        if prefetch.stage in WAITING and prefetch.deadline_s is not None and now_s >= prefetch.deadline_s:
            self.counters.num_timeouts += 1
            prefetch.stage = Stage.DONE
        return prefetch.stage is Stage.DONE

    def report(self, report: MoveReport) -> None:
        """A move has ended."""
        way = self._under_way.pop(report.move_id, None)
        assert way is not None, f"move {report.move_id} is reported twice, or never began"
        is_void = way.is_suspect or way.epoch != self._device.index.epoch
        match way.move:
            case Store():
                self._end_store(way.move, way, report, is_void=is_void)
            case Load():
                self._end_load(way.move, way, report, is_void=is_void)
            case Probe():
                self._end_probe(way.move, way, report, is_void=is_void)
            case Fetch():
                self._end_fetch(way.move, way, report, is_void=is_void)
            case Write():
                self._end_write(way.move, way, report)
        if way.path:
            self._device.let_go(way.path[-1])  # last: what was loaded hangs on it

    def take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def next_deadline_s(self, prefetches: Iterable[Prefetch]) -> float | None:
        """When the first of these stops waiting, if none of its moves ends before."""
        return min((p.deadline_s for p in prefetches if p.stage in WAITING and p.deadline_s is not None), default=None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """These records are under suspicion, in every tier."""
        doomed = set(keys)
        self.book.forget(doomed)
        self._note_lost()
        for way in self._under_way.values():
            if not doomed.isdisjoint(way.move.keys):
                way.is_suspect = True
        if self.config.has_store and doomed:
            self._start(Remove(self._new_id(), tuple(doomed)))

    def reset(self) -> None:
        """Forget the host's records; the disk, which others share, keeps its own. The device's index has just begun a new epoch."""
        self.book.reset()
        self.book.lost.clear()  # the device has noted that all is cleared

    def check(self) -> None:
        """Assert that rows are where they should be."""
        self.book.check()
        assert self._num_writing == sum(len(w.move.keys) for w in self._under_way.values() if isinstance(w.move, Write))
        if not self._under_way:
            assert self.book.num_available == self.book.num_rows, "a row is pinned and nothing moves"
            assert not self._sought and not self._storing, "a key is waited for and nothing moves"

    # The way up: host or disk to device.

    def _look(self, prefetch: Prefetch, now_s: float) -> None:
        keys = prefetch.keys
        on_device = len(self._device.index.match(keys, len(keys)))
        on_host = len(self.book.match(keys[on_device:]))
        rest = keys[on_device + on_host :]
        if prefetch.deadline_s is None:
            self.counters.host_queries += len(keys) - on_device
            self.counters.host_hits += on_host
            wait_s = self.cost.compute_s(len(keys) - on_device)
            prefetch.deadline_s = now_s + min(self.config.max_wait_s, max(self.config.min_wait_s, wait_s or self.config.max_wait_s))
        if not rest or not self.config.has_store or not self._is_hit(len(keys)) or not self.cost.is_fetch_worthwhile(len(rest)):
            prefetch.stage = Stage.READY
            return
        if rest[0] in self._sought:
            return  # somebody asks for it already: look again when that is answered
        self.book.touch(keys)
        wanted = tuple(rest[: self._max_fetch])
        prefetch.stage = Stage.FETCHING
        prefetch.has_more = len(rest) > len(wanted)
        self._sought.update(wanted)
        self.counters.disk_queries += len(wanted)
        self._start(Probe(self._new_id(), wanted), prefetch=prefetch)

    def _load(self, prefetch: Prefetch) -> None:
        prefetch.stage = Stage.DONE
        index, keys = self._device.index, prefetch.keys
        path = index.match(keys, len(keys))
        rows = self.book.match(keys[len(path) :])
        end = len(path) + len(rows)
        if not rows or not self._is_hit(end) or not self.cost.is_load_worthwhile(len(rows)):
            return
        if path:
            index.hold(path[-1])  # before blocks are taken: they must not be evicted for their own tail
        block_ids = self._device.borrow(len(rows))
        if block_ids is None:
            if path:
                self._device.let_go(path[-1])
            return
        self.book.touch(keys[:end])
        self.book.pin(rows)
        prefetch.stage = Stage.LOADING
        move = Load(self._new_id(), tuple(keys[len(path) : end]), block_ids, tuple(rows))
        self._start(move, path=path, prefetch=prefetch)

    def _is_hit(self, num_blocks: int) -> bool:
        return num_blocks * self._device.block_tokens > self.config.min_hit_tokens

    def _end_probe(self, move: Probe, way: _UnderWay, report: MoveReport, *, is_void: bool) -> None:
        self._sought.difference_update(move.keys)
        prefetch = way.prefetch
        assert prefetch is not None
        if report.num_done < len(move.keys):
            prefetch.has_more = False
        is_wanted = prefetch.stage is Stage.FETCHING and not is_void
        rows = self._take_rows(report.num_done) if is_wanted and report.num_done else []
        if rows:
            keys = move.keys[: len(rows)]
            prefetch.has_more |= len(rows) < report.num_done
            self._sought.update(keys)
            self._start(Fetch(self._new_id(), keys, tuple(rows)), prefetch=prefetch)
        elif prefetch.stage is Stage.FETCHING:
            prefetch.has_more = False
            prefetch.stage = Stage.READY

    def _end_fetch(self, move: Fetch, way: _UnderWay, report: MoveReport, *, is_void: bool) -> None:
        self._sought.difference_update(move.keys)
        self.cost.note_fetch(report.num_done, report.elapsed_s)
        self.counters.disk_hits += report.num_done
        if not is_void:
            self._enter(list(zip(move.keys[: report.num_done], move.rows)))
        self.book.unpin(move.rows)
        prefetch = way.prefetch
        assert prefetch is not None
        if report.num_done < len(move.keys):
            prefetch.has_more = False
        if prefetch.stage is Stage.FETCHING:
            prefetch.stage = Stage.READY

    def _end_load(self, move: Load, way: _UnderWay, report: MoveReport, *, is_void: bool) -> None:
        self.book.unpin(move.rows)
        prefetch = way.prefetch
        assert prefetch is not None
        is_done = report.num_done == len(move.keys)
        if is_done:
            self.cost.note_load(report.num_done, report.elapsed_s)
        if is_done and not is_void:
            self.counters.loaded_blocks += len(move.keys)
            self._device.adopt(way.path, move.keys, move.block_ids, prefetch.token_ids, prefetch.salt)
        else:
            self._device.give_back(move.block_ids)
        if prefetch.stage is Stage.LOADING:
            prefetch.stage = Stage.START if prefetch.has_more and is_done else Stage.DONE

    # The way down: device to host to disk.

    def _end_store(self, move: Store, way: _UnderWay, report: MoveReport, *, is_void: bool) -> None:
        self._storing.difference_update(move.keys)
        kept: list[tuple[bytes, int]] = []
        if report.num_done == len(move.keys) and not is_void:
            kept = [(key, row) for key, row, node in zip(move.keys, move.rows, way.nodes) if node.is_listed]
        self._enter(kept)
        self.counters.stored_blocks += len(kept)
        self.book.unpin(move.rows)

    def _plan_write(self, keys: tuple[bytes, ...], rows: Sequence[int]) -> Write | None:
        """What of a Store goes on to the disk; its rows stay pinned until it is there."""
        if not self.config.has_store:
            return None
        count = min(len(keys), self._max_writing - self._num_writing)
        self.counters.skipped_writes += len(keys) - count
        if count == 0:
            return None
        self._num_writing += count
        self.book.pin(rows[:count])
        return Write(self._new_id(), keys[:count], tuple(rows[:count]))

    def _end_write(self, move: Write, way: _UnderWay, report: MoveReport) -> None:
        self._num_writing -= len(move.keys)
        self.counters.written_blocks += report.num_done
        self.counters.skipped_writes += len(move.keys) - report.num_done
        self.book.unpin(move.rows)
        if way.is_suspect:
            self._start(Remove(self._new_id(), move.keys))  # the first removal may have come before the write

    # The host's tier as others hear of it.

    def _enter(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        new = tuple(key for key, row in pairs if self.book.enter(key, row))
        if new and self._device.events is not None:
            self._device.events.append(BlocksStored(keys=new, parent_key=None, token_ids=(), tier=Tier.HOST))

    def _take_rows(self, count: int) -> list[int]:
        rows = self.book.take(count)
        self._note_lost()
        return rows

    def _note_lost(self) -> None:
        if self.book.lost and self._device.events is not None:
            self._device.events.append(BlocksRemoved(tuple(self.book.lost), tier=Tier.HOST))
        self.book.lost.clear()

    def _new_id(self) -> int:
        self._next_move_id += 1
        return self._next_move_id

    def _start(self, move: Move, *, prefetch: Prefetch | None = None, path: Sequence[Node] = (), nodes: Sequence[Node] = ()) -> None:
        self._under_way[move.move_id] = _UnderWay(move, self._device.index.epoch, prefetch, list(path), list(nodes))
        self._moves.append(move)
