# SPDX-License-Identifier: Apache-2.0
"""Which published block holds which tokens: content keys, and the tree of blocks that have one. Pure; the caller is the cache manager.

A block's key is a 16-byte digest over the key of the block before it and its own token ids. The chain starts at a root that stands for
everything else that decides the content: model, layout of the block, tenant's salt, adapter. So equal keys mean equal prefixes, and one
key is enough to name a block in another process, on disk or on another machine.

    root ──► key 0 ──► key 1 ──► key 2          a node per published block; whoever holds a node holds all before it
                            └──► key 2'

Published blocks never change. A node that nobody holds stays, idle, until its memory is wanted: the longest idle goes first, and of one
sequence the last block before the one in front of it, because a block without its parent can never be found.

Blocks that follow each other without a fork form one `Run`, however many requests added to it. What costs something is done per run:
a hold marks where it ends in each run on its way, and a run that is let go enters the queue of eviction once, not block by block.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b, sha256
from sys import byteorder

KEY_BYTES = 16
MAX_OUTDATED = 1_000
"""Outdated entries that the queue of eviction may hold, beside one for each block: more are swept out."""
_ID_BYTES = 4
assert array("I").itemsize == _ID_BYTES and byteorder == "little", "keys are shared between machines: ids must have one form everywhere"


def root_key(*, fingerprint: str, layout: str, salt: str = "", adapter: str = "") -> bytes:
    """The key that a chain starts from.

    Args:
        fingerprint: names the weights; other weights, other keys.
        layout: names how a block's bytes are laid out and computed (block size, dtypes, rounding, replay mode).
        salt: separates tenants: nobody hits what was computed under another salt.
        adapter: names what modifies the weights for this request; "" for none.
    """
    digest = blake2b(digest_size=KEY_BYTES, person=b"whalefall.kv.2")
    for part in (fingerprint, layout, salt, adapter):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # with lengths: "ab", "c" is not "a", "bc"
    return digest.digest()


class KeyChain:
    """The keys of one sequence's full blocks, each computed once, when its tokens are known."""

    __slots__ = ("block_tokens", "keys", "root", "salt")

    def __init__(self, root: bytes, block_tokens: int, token_ids: Sequence[int] = (), *, salt: str = "") -> None:
        self.root = root
        self.salt = salt
        """For accounts of what is cached; the root has it already."""
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        """Of the full blocks so far, in order."""
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the sequence as it is now, from its first token: adds the keys of blocks that have become full.

        A key is the digest of the key before it (of the root, for the first) and the block's ids as unsigned 32-bit, little endian: half
        of a SHA-256, for which processors have instructions.
        """
        size = self.block_tokens
        first = len(self.keys) * size
        end = len(token_ids) // size * size
        if first >= end:
            return
        ids = array("I", token_ids[first:end]).tobytes()  # in one piece: converting costs more than hashing
        key, block_bytes = self.keys[-1] if self.keys else self.root, size * _ID_BYTES
        add = self.keys.append
        for at in range(0, len(ids), block_bytes):
            key = sha256(key + ids[at : at + block_bytes]).digest()[:KEY_BYTES]
            add(key)


class Run:
    """Published blocks of one sequence, end to end; other runs may fork off behind any of them."""

    __slots__ = ("ends", "idle", "is_open", "nodes", "num_held", "num_listed", "parent")

    def __init__(self, parent: Node | None) -> None:
        self.parent = parent
        """The node before the first, of another run. Held by this run while anything here is."""
        self.nodes: list[Node] = []
        self.num_listed = 0
        """Nodes that can be found: the first so many. Those behind were forgotten and are still held."""
        self.is_open = True
        """Whether nodes may be added: nothing of it was forgotten."""
        self.ends: dict[int, int] = {}
        """Where holds end: up to how many nodes, and how many holds."""
        self.num_held = 0
        """The first so many nodes have a holder: the largest of `ends`."""
        self.idle: list[tuple[int, int]] = []
        """(end, since), from the last node down: nodes below `end` are idle since then, unless they are held or a later entry says so."""


class Node:
    """A published block."""

    __slots__ = ("block_id", "index", "key", "run")

    def __init__(self, key: bytes, block_id: int, run: Run, index: int) -> None:
        self.key = key
        self.block_id = block_id
        self.run = run
        self.index = index
        """Its place in the run."""

    @property
    def is_listed(self) -> bool:
        """Whether it can be found: not once it was evicted or forgotten, alone or in a reset. If held, it keeps its block even then."""
        return self.index < self.run.num_listed and self.run.nodes[self.index] is self

    @property
    def is_held(self) -> bool:
        return self.index < self.run.num_held

    @property
    def parent(self) -> Node | None:
        """The block before it; None at the start of a sequence. Of a node that is listed or held."""
        return self.run.nodes[self.index - 1] if self.index else self.run.parent


class PrefixIndex:
    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        """What can be found. Read only outside this file."""
        self._queue: deque[tuple[Run, int, int]] = deque()
        """Entries of the runs' `idle` lists, longest idle first. One counts when it is the first of its run and not all held. A run's
        entry stands before that of the run it forks off from, so the last node of the entry in front never has a child."""
        self._num_let_go = 0
        self.num_idle = 0
        """Blocks that nobody holds: as good as free."""
        self.epoch = 0
        """Number of resets so far. What was begun in an earlier epoch must not be published."""

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def find(self, key: bytes) -> Node | None:
        return self.nodes.get(key)

    def match(self, keys: Sequence[bytes], limit: int) -> list[Node]:
        """The published blocks of the longest known prefix, at most `limit` of them. Changes nothing."""
        # Whoever can be found has a parent that can be found: so the end of the known prefix is searched for, in growing steps from the
        # end (the next turn of a conversation adds little), then by halves. Looking up key after key would cost a cache miss or three each.
        nodes = self.nodes
        least, most, step = 0, min(limit, len(keys)), 1
        while least < most:
            at = max(least + 1, most + 1 - step)
            step *= 2
            if keys[at - 1] in nodes:
                least = at
                break
            most = at - 1
        while least < most:
            middle = (least + most + 1) // 2
            if keys[middle - 1] in nodes:
                least = middle
            else:
                most = middle - 1
        return path_to(nodes[keys[least - 1]]) if least else []

    def num_idle_before(self, end: Node) -> int:
        """How many of a sequence's nodes, this one included, nobody holds: the last ones, since who holds a node holds all before it."""
        num_idle = max(0, end.index + 1 - end.run.num_held)
        run = end.run
        while not run.num_held and run.parent is not None:
            end = run.parent
            run = end.run
            num_idle += max(0, end.index + 1 - run.num_held)
        return num_idle

    def hold(self, end: Node) -> None:
        """Keep a node and all before it, until `let_go` of the same node."""
        at: Node | None = end
        while at is not None:
            run, count = at.run, at.index + 1
            run.ends[count] = run.ends.get(count, 0) + 1
            was_held = run.num_held
            if count > was_held:
                run.num_held = count
                self.num_idle -= count - was_held
            at = None if was_held else run.parent

    def let_go(self, end: Node) -> list[int]:
        """Undo one `hold` of this node; the blocks that are free now because they can no longer be found."""
        freed: list[int] = []
        now = self._num_let_go = self._num_let_go + 1
        at: Node | None = end
        while at is not None:
            run, count = at.run, at.index + 1
            if not _end_hold(run.ends, count) or count < run.num_held:
                break
            run.num_held = max(run.ends, default=0)
            if count > run.num_listed:
                first_gone = max(run.num_held, run.num_listed)
                freed += [node.block_id for node in reversed(run.nodes[first_gone:])]
                del run.nodes[first_gone:]
                count = run.num_listed
            if count > run.num_held:
                self._make_idle(run, count, now)
            at = None if run.num_held else run.parent
        return freed

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int], parent: Node | None) -> list[Node]:
        """Make blocks of one sequence findable, and move the caller's hold on the parent to the last of them.

        Args:
            keys: not known yet, at least one.
            parent: of the first; can be found, and the caller holds it.
        """
        run = None if parent is None else parent.run
        if run is None or parent is not run.nodes[-1] or not run.is_open:
            run = Run(parent)  # which holds the parent from now on
        else:
            _end_hold(run.ends, len(run.nodes))
        fresh: list[Node] = []
        count, num_known = len(run.nodes), len(self.nodes)
        for key, block_id in zip(keys, block_ids):
            self.nodes[key] = node = Node(key, block_id, run, count)
            fresh.append(node)
            count += 1
        assert len(self.nodes) == num_known + len(keys), "a key is published already"
        run.nodes += fresh
        run.num_listed = run.num_held = count
        run.ends[count] = 1
        return fresh

    def evict(self, count: int) -> list[Node]:
        """Forget the blocks that have been idle longest; their memory is the caller's, who has looked at `num_idle`."""
        evicted: list[Node] = []
        queue, nodes, left = self._queue, self.nodes, count
        while left:
            run, end, since = queue.popleft()
            idle = run.idle
            if end <= run.num_held or not idle or idle[0] != (end, since):
                continue  # outdated
            floor = _floor(run)
            while left and end > floor:
                node = run.nodes.pop()
                del nodes[node.key]
                evicted.append(node)
                end -= 1
                left -= 1
            run.num_listed = end
            if end > floor:
                idle[0] = (end, since)
                queue.appendleft((run, end, since))
            else:
                del idle[0]
        self.num_idle -= count
        return evicted

    def forget(self, nodes: Iterable[Node]) -> tuple[list[Node], list[int]]:
        """Make these and all that follow them unfindable; what was forgotten, and the blocks that are free now because they were idle."""
        cuts: dict[Run, int] = {}  # how many nodes of a run are left
        for node in nodes:
            if node.is_listed:
                cuts[node.run] = min(node.index, cuts.get(node.run, node.index))
        if not cuts:
            return [], []
        for run in self._runs():  # a run is older than those that fork off from it
            parent = run.parent
            if parent is not None and parent.index >= cuts.get(parent.run, len(parent.run.nodes)):
                cuts[run] = 0
        doomed: list[Node] = []
        freed: list[int] = []
        for run, num_left in cuts.items():
            doomed += run.nodes[num_left : run.num_listed]
            freed += self._cut(run, num_left)
        for node in doomed:
            del self.nodes[node.key]
        return doomed, freed

    def reset(self) -> list[int]:
        """Forget everything; the blocks of idle nodes, which are free now. Those that are held become free when they are let go."""
        self.epoch += 1
        freed = [block_id for run in self._runs() for block_id in self._cut(run, 0)]
        self.nodes.clear()
        self._queue.clear()
        return freed

    def num_freed_by(self, ends: Iterable[Node]) -> int:
        """How many blocks nobody would hold if these holds were let go."""
        left: dict[Run, dict[int, int]] = {}
        num_freed = 0
        for end in ends:
            at: Node | None = end
            while at is not None:
                run, count = at.run, at.index + 1
                if not _end_hold(left.setdefault(run, dict(run.ends)), count):
                    break
                num_held = max(left[run], default=0)
                num_freed += max(0, count - num_held)
                at = None if num_held else run.parent
        return num_freed

    def check(self, ends: Iterable[Node]) -> None:
        """Assert the tree, the holds and the order of eviction.

        Args:
            ends: one for each hold.
        """
        holds = Counter(ends)
        runs = dict.fromkeys([*self._runs(), *(node.run for end in holds for node in path_to(end))])
        holds.update(run.parent for run in runs if run.num_held and run.parent is not None)
        expected: dict[Run, dict[int, int]] = defaultdict(dict)
        for node, count in holds.items():
            expected[node.run][node.index + 1] = count
        listed = [node for run in runs for node in run.nodes[: run.num_listed]]
        assert {node.key: node for node in listed} == self.nodes and len(listed) == len(self), "what is listed cannot be found"
        for run in runs:
            assert run.ends == expected[run], f"holds end at {run.ends} instead of {expected[run]}"
            assert run.num_held == max(run.ends, default=0)
            assert len(run.nodes) == max(run.num_listed, run.num_held), "a node is neither listed nor held"
            assert all(node.run is run and node.index == i for i, node in enumerate(run.nodes))
            assert run.parent is None or run.parent.is_listed or not run.num_listed, "a run has lost its parent"
        idle = {node for node in listed if not node.is_held}
        order = self._order_of_eviction()
        assert len(idle) == len(order) == self.num_idle and idle == set(order), "idle blocks are miscounted, or cannot be evicted"

    def _runs(self) -> dict[Run, None]:
        """Those that can be found; none before the one that it forks off from."""
        return dict.fromkeys(node.run for node in self)

    def _make_idle(self, run: Run, end: int, now: int) -> None:
        """Nodes from `num_held` up to `end` have lost their last holder."""
        self.num_idle += end - run.num_held
        while run.idle and run.idle[-1][0] <= end:
            run.idle.pop()
        run.idle.append((end, now))
        self._queue.append((run, end, now))
        if len(self._queue) > len(self.nodes) + MAX_OUTDATED:
            self._queue = deque(entry for entry in self._queue if entry[1:] in entry[0].idle)

    def _cut(self, run: Run, num_left: int) -> list[int]:
        """Make all but the first nodes of a run unfindable; the blocks of those that were idle."""
        first_free = max(num_left, run.num_held)
        freed = [node.block_id for node in reversed(run.nodes[first_free:])]
        del run.nodes[first_free:]
        self.num_idle -= len(freed)
        run.num_listed, run.is_open = num_left, False
        # The entry that covered the cut goes on below it, as old as it was. Its place in the queue is found by its age: cuts are rare.
        cut = [since for end, since in run.idle if end > num_left]
        run.idle = [(end, since) for end, since in run.idle if end <= num_left]
        if cut and num_left > _floor(run, 0):
            run.idle.insert(0, (num_left, cut[-1]))
            # Of equal age the run that it forks off from has an entry too, which must stay behind.
            self._queue = deque(sorted([(run, num_left, cut[-1]), *self._queue], key=lambda entry: entry[2]))
        return freed

    def _order_of_eviction(self) -> list[Node]:
        """What `evict` would do, on paper."""
        order: list[Node] = []
        ages: list[int] = []
        entries = {run: list(run.idle) for run in self._runs()}
        children = Counter(run.parent for run in entries)
        for run, end, since in self._queue:
            idle = entries.get(run)
            if not idle or idle[0] != (end, since) or end <= run.num_held:
                continue
            floor = max(run.num_held, idle[1][0] if len(idle) > 1 else 0)
            gone = run.nodes[floor:end]
            assert not any(children[node] for node in gone), "a block would be evicted before its children"
            order += reversed(gone)
            ages.append(since)
            del idle[0]
            if floor == 0:
                children[run.parent] -= 1
        assert ages == sorted(ages), "blocks would not be evicted in the order in which they became idle"
        return order


def path_to(node: Node) -> list[Node]:
    """The nodes from the start of its sequence to `node`."""
    run, path = node.run, node.run.nodes[: node.index + 1]
    while run.parent is not None:
        at = run.parent
        run = at.run
        path[:0] = run.nodes[: at.index + 1]
    return path


def _end_hold(ends: dict[int, int], count: int) -> bool:
    """One hold less ends at `count`; whether it was the last one there."""
    left = ends[count] - 1
    if left:
        ends[count] = left
        return False
    del ends[count]
    return True


def _floor(run: Run, at: int = 1) -> int:
    """Down to where the first of a run's idle entries reaches; `at`: the entry behind it."""
    return max(run.num_held, run.idle[at][0] if len(run.idle) > at else 0)
