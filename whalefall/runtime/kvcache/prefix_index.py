# SPDX-License-Identifier: Apache-2.0
"""Which published block holds which tokens: content keys, and the tree of blocks that have one. Pure; the caller is the cache manager.

A block's key is a 16-byte digest over the key of the block before it and its own token ids. The chain starts at a root that stands for
everything else that decides the content: model, layout of the block, tenant's salt, adapter. So equal keys mean equal prefixes, and one
key is enough to name a block in another process, on disk or on another machine.

    root ──► key 0 ──► key 1 ──► key 2          a node per published block; whoever holds a node holds all before it
                            └──► key 2'

Published blocks never change. A node that nobody holds stays, idle, until its memory is wanted: the longest idle goes first, and of one
sequence the last block before the one in front of it, because a block without its parent can never be found.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from sys import byteorder

KEY_BYTES = 16
MAX_OUTDATED = 1_000
"""Outdated entries that the idle queue may hold, beside two for each block: more are swept out."""
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
    digest = blake2b(digest_size=KEY_BYTES, person=b"whalefall.kv.1")
    for part in (fingerprint, layout, salt, adapter):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # with lengths: "ab", "c" is not "a", "bc"
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block from the key before it and its ids; ids count as unsigned 32-bit, little endian."""
    ids = array("I", token_ids)
    return blake2b(parent + ids.tobytes(), digest_size=KEY_BYTES).digest()


class KeyChain:
    """The keys of one sequence's full blocks, each computed once, when its tokens are known."""

    __slots__ = ("block_tokens", "keys", "root")

    def __init__(self, root: bytes, block_tokens: int, token_ids: Sequence[int] = ()) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        """Of the full blocks so far, in order."""
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the sequence as it is now, from its first token: adds the keys of blocks that have become full."""
        size = self.block_tokens
        first = len(self.keys) * size
        end = len(token_ids) // size * size
        if first >= end:
            return
        ids = array("I", token_ids[first:end]).tobytes()  # in one piece: converting costs more than hashing
        key, block_bytes = self.keys[-1] if self.keys else self.root, size * _ID_BYTES
        for at in range(0, len(ids), block_bytes):
            key = blake2b(key + ids[at : at + block_bytes], digest_size=KEY_BYTES).digest()
            self.keys.append(key)

    def parent_of(self, logical: int) -> bytes | None:
        """The key before that of a logical block; None before the first."""
        return self.keys[logical - 1] if logical else None


class Node:
    """A published block."""

    __slots__ = ("block_id", "is_listed", "key", "num_children", "num_holders", "parent", "times_idle")

    def __init__(self, key: bytes, block_id: int, parent: Node | None) -> None:
        self.key = key
        self.block_id = block_id
        self.parent = parent
        self.num_children = 0
        self.num_holders = 0
        """Reservations that hold it. Whoever holds a node holds its parent, so this never grows towards the leaves."""
        self.times_idle = 0
        self.is_listed = True
        """False after a reset: it can no longer be found, and its block is free when its last holder leaves."""


class PrefixIndex:
    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        # Idle nodes, longest idle first, each with how often it had become idle then: an older entry, or one of a node that is held again,
        # is skipped when it comes to the front. Nodes of one sequence become idle last block first, and a child never has more holders
        # than its parent: so no parent ever stands before its child, and the first entry that counts is a leaf.
        self._idle: deque[tuple[Node, int]] = deque()
        self.num_idle = 0
        """Blocks that nobody holds: as good as free."""
        self.epoch = 0
        """Number of resets so far. What was begun in an earlier epoch must not be published."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def match(self, keys: Sequence[bytes], limit: int) -> list[Node]:
        """The published blocks of the longest known prefix, at most `limit` of them. Changes nothing."""
        # Whoever can be found has a parent that can be found: so the end of the known prefix is searched by halves, and the way back is
        # short. Looking up key after key would cost a cache miss or three each.
        least, most = 0, min(limit, len(keys))
        while least < most:
            middle = (least + most + 1) // 2
            if keys[middle - 1] in self._nodes:
                least = middle
            else:
                most = middle - 1
        return self.path_to(self._nodes[keys[least - 1]]) if least else []

    def hold(self, nodes: Iterable[Node]) -> None:
        """One more holder for each; they are no longer idle."""
        num_idle = 0
        for node in nodes:
            num_holders = node.num_holders
            if num_holders == 0:
                num_idle += 1
            node.num_holders = num_holders + 1
        self.num_idle -= num_idle

    def let_go(self, nodes: Sequence[Node]) -> list[int]:
        """One holder less for each of a sequence's nodes, given in order; the blocks that are free now because a reset came between."""
        freed, idle = [], []
        for node in reversed(nodes):
            node.num_holders = num_left = node.num_holders - 1
            if num_left > 0:
                continue
            assert num_left == 0, f"block {node.block_id} is let go more often than held"
            if node.is_listed:
                node.times_idle = times_idle = node.times_idle + 1
                idle.append((node, times_idle))
            else:
                freed.append(node.block_id)
        self._add_idle(idle)
        return freed

    def publish(self, key: bytes, block_id: int, parent: Node | None) -> Node:
        """Make a block findable; it has no holder yet. The key must be new and the parent findable."""
        assert key not in self._nodes, f"block {block_id}: its key is published already"
        assert parent is None or parent.is_listed, f"block {block_id}: its parent can no longer be found"
        node = self._nodes[key] = Node(key, block_id, parent)
        node.times_idle = 1
        self._add_idle([(node, 1)])
        if parent is not None:
            parent.num_children += 1
        return node

    def evict(self) -> Node:
        """Forget the block that has been idle longest; its memory is the caller's."""
        node, times_idle = self._idle.popleft()
        while not _counts(node, times_idle):
            node, times_idle = self._idle.popleft()
        self.num_idle -= 1
        assert node.num_children == 0, f"block {node.block_id} would leave children that nobody could find"
        del self._nodes[node.key]
        node.is_listed = False
        if node.parent is not None:
            node.parent.num_children -= 1
        return node

    def path_to(self, node: Node) -> list[Node]:
        """The nodes from the start of its sequence to `node`: what to hold so that it stays."""
        path = []
        at: Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        return path

    def forget(self, nodes: Iterable[Node]) -> tuple[list[Node], list[int]]:
        """Make these and all that follow them unfindable; what was forgotten, and the blocks that are free now because they were idle."""
        doomed = dict.fromkeys(node for node in nodes if node.is_listed)  # not a set: what is freed has an order
        if not doomed:
            return [], []
        # A parent is published before its children, and the dictionary keeps that order: one pass finds every descendant.
        for node in self:
            if node.parent in doomed:
                doomed[node] = None
        freed = []
        for node in doomed:
            del self._nodes[node.key]
            node.is_listed = False
            if node.parent is not None:
                node.parent.num_children -= 1
            if node.num_holders == 0:
                self.num_idle -= 1
                freed.append(node.block_id)
        return list(doomed), freed

    def reset(self) -> list[int]:
        """Forget everything; the blocks of idle nodes, which are free now. Those that are held become free when they are let go."""
        self.epoch += 1
        freed = [node.block_id for node in self._idle_nodes()]
        for node in self._nodes.values():
            node.is_listed = False
        self._nodes.clear()
        self._idle.clear()
        self.num_idle = 0
        return freed

    def check(self) -> None:
        """Assert the tree, the counts and the order of eviction."""
        idle = dict.fromkeys(self._idle_nodes())
        assert len(idle) == self.num_idle, "idle blocks are miscounted"
        children: dict[Node, int] = {}
        for key, node in self._nodes.items():
            assert node.key == key and node.is_listed
            assert (node.num_holders == 0) == (node in idle), f"block {node.block_id}: idle and held, or neither"
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, f"block {node.block_id} has lost its parent"
                assert node.parent.num_holders >= node.num_holders, f"block {node.block_id} has a holder that does not hold its parent"
                children[node.parent] = children.get(node.parent, 0) + 1
        assert all(node.num_children == children.get(node, 0) for node in self), "children are miscounted"
        seen: set[Node] = set()
        for node in idle:
            seen.add(node)
            assert node.parent is None or node.parent not in seen, f"block {node.block_id} would be evicted after its parent"

    def _add_idle(self, entries: Sequence[tuple[Node, int]]) -> None:
        self._idle.extend(entries)
        self.num_idle += len(entries)
        if len(self._idle) > 2 * len(self._nodes) + MAX_OUTDATED:
            self._idle = deque(entry for entry in self._idle if _counts(*entry))

    def _idle_nodes(self) -> Iterator[Node]:
        """Longest idle first."""
        return (node for node, times_idle in self._idle if _counts(node, times_idle))


def _counts(node: Node, times_idle: int) -> bool:
    """Whether an entry of the idle queue is the newest of a node that is idle now."""
    return node.is_listed and node.num_holders == 0 and node.times_idle == times_idle
