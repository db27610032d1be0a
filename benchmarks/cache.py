# SPDX-License-Identifier: Apache-2.0
"""What does the prefix cache cost the scheduler, and how near does it come to a cache that never forgets?

index: a request of 16,384 tokens enters an index of 100,000 blocks and leaves it. Win: match, reserve, publish and release together take
       <= 50 us where 63 blocks are known and one is new. Making the request's keys, once when it arrives, stands beside: converting the
       ids and hashing 64 KiB costs several times that, and the sum of both is printed too. Between
       two requests a prompt's ids have been made, so that the processor's caches hold other things, as after a step. Use nice -n -20
       where others work on the machine (a clock of CPU time is a system call, and shows itself at this scale).
agent: an agent trace through the real scheduler and cache with an empty model; cached tokens by turn against the ideal of whole blocks.
       Win: >= 99 % of the ideal while the pool holds the sessions, and a fall no steeper than the pool's share below that.
How long a hit takes to answer is another question: benchmarks/cache_tiers.py.
Run: nice -n -20 python -m benchmarks.cache [--blocks 100000] [--sessions 24]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator

from whalefall.bench.agent import AgentShape, IdealCache, Session, make_sessions
from whalefall.bench.mixes import FIRST_TOKEN_ID, Lengths, PromptMaker
from whalefall.core.plan import RequestResult, StepResult
from whalefall.core.request import EngineRequest
from whalefall.core.sampling import SamplingParams
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.prefix_index import KeyChain
from whalefall.runtime.scheduler import Scheduler, SchedulerConfig

BLOCK, WINDOW, VOCAB = 256, 128, 129_280
PROMPT_BLOCKS = 64
NUM_SAMPLES = 400
INDEX_COLUMNS = (
    "commit,date,device,load_1min,python,num_blocks,prompt_tokens,hit_median_us,hit_p10_us,hit_min_us,evicting_median_us,"
    "keys_median_us,keys_min_us,keys_and_hit_median_us"
)
AGENT_COLUMNS = "commit,date,replay,pool_share,turn,requests,prompt_tokens,cached_tokens,ideal_tokens,of_ideal,replayed_tokens"
SHAPE = AgentShape(
    system=2_048,
    kinds=2,
    task=Lengths(300, 0.8, 16, 2_048),
    turns=Lengths(12, 0.4, 4, 24),
    answer=Lengths(60, 0.6, 8, 200),
    tool_result=Lengths(500, 0.9, 16, 4_096),
    max_context=32_768,
)


def prompt(number: int) -> list[int]:
    return [(number * 7_919 + i) % VOCAB for i in range(PROMPT_BLOCKS * BLOCK)]


def full_index(num_blocks: int) -> CacheManager:
    """Every block published and idle, in sequences of 64."""
    manager = CacheManager(num_blocks + 1, BLOCK, 4)
    for number in range(num_blocks // PROMPT_BLOCKS):
        enter_and_leave(manager, prompt(number), manager.chain(prompt(number)))
    return manager


def enter_and_leave(manager: CacheManager, ids: list[int], chain: KeyChain) -> float:
    """Microseconds of all that the cache does for one request."""
    start = time.perf_counter()
    hit = manager.match(chain, len(ids))
    reservation = manager.reserve(len(ids), hit)
    assert reservation is not None
    manager.publish(reservation, chain, ids, len(ids))
    manager.release(reservation)
    return (time.perf_counter() - start) * 1e6


def measure_index(num_blocks: int) -> tuple[list[float], list[float], list[float]]:
    """Per request with a hit, per request that evicts a whole prompt's blocks, per prompt of which the keys are made."""
    manager = full_index(num_blocks)
    hits, misses, hashes = [], [], []
    for sample in range(NUM_SAMPLES):
        known = num_blocks // PROMPT_BLOCKS - 1 - sample % (num_blocks // PROMPT_BLOCKS // 2)
        ids = prompt(known)[:-BLOCK] + [sample % VOCAB] * BLOCK
        start = time.perf_counter()
        chain = manager.chain(ids)
        hashes.append((time.perf_counter() - start) * 1e6)
        hits.append(enter_and_leave(manager, ids, chain))
        fresh = prompt(10**6 + sample)
        misses.append(enter_and_leave(manager, fresh, manager.chain(fresh)))
    return hits, misses, hashes


class Talk:
    """One session on its way: what is sent next, and what was cached of it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.context = list(session.system)
        self.answer: list[int] = []
        self.turn = -1

    def next_prompt(self) -> list[int] | None:
        self.turn += 1
        if self.turn == len(self.session.turns) or len(self.context) > SHAPE.max_context - 4_500:
            return None
        self.context += self.session.turns[self.turn].append
        return self.context


def run_trace(replay: str, pool_share: float, num_sessions: int) -> Iterator[str]:
    """Eight sessions at a time, turn about, with a pool that holds so large a share of what they all say."""
    rng = random.Random(5)
    sessions = make_sessions(num_sessions, SHAPE, PromptMaker(rng, "ids", VOCAB, "completions"), rng)
    said = sum(len(s.system) + sum(len(t.append) + t.max_tokens for t in s.turns) for s in sessions)
    num_blocks = max(int(pool_share * said / BLOCK), 8 * SHAPE.max_context // BLOCK // 4)
    config = SchedulerConfig(
        max_model_len=SHAPE.max_context,
        max_num_seqs=8,
        max_num_batched_tokens=8_192,
        replay=replay,  # type: ignore[arg-type]
        decoder_window=WINDOW,
        prefix_caching=True,
        replay_rows=WINDOW,
        has_fixed_state=True,
    )
    scheduler = Scheduler(config, CacheManager(num_blocks + 1, BLOCK, 9))
    ideal, by_turn = IdealCache(BLOCK), defaultdict(lambda: [0, 0, 0, 0])
    waiting, talks = [Talk(s) for s in sessions], {}
    ideals: dict[str, int] = {}

    def send(talk: Talk) -> None:
        ids = talk.next_prompt()
        if ids is None:
            if waiting:
                send(waiting.pop(0))
            return
        name = f"{talk.session.name}.{talk.turn}"
        talks[name], ideals[name] = talk, ideal.hit(ids)
        sampling = SamplingParams(max_tokens=talk.session.turns[talk.turn].max_tokens, ignore_eos=True, seed=0)
        scheduler.add(EngineRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling))

    for _ in range(min(8, len(waiting))):
        send(waiting.pop(0))
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        assert plan is not None
        drawn = tuple(RequestResult(token_ids=(rng.randrange(FIRST_TOKEN_ID, VOCAB),) if s.samples else ()) for s in plan.steps)
        for update in scheduler.commit(plan, StepResult(step_id=plan.step_id, results=drawn), 0.0):
            talk = talks[update.request_id]
            talk.answer += update.new_token_ids
            if update.is_finished:
                row = by_turn[min(talk.turn, 12)]
                row[0] += 1
                row[1] += len(talk.context)
                row[2] += update.num_cached_tokens
                row[3] += ideals[update.request_id]
                talk.context += talk.answer
                talk.answer = []
                ideal.add(talk.context[:-1])
                send(talk)
    total = [sum(row[i] for row in by_turn.values()) for i in range(4)]
    for turn, row in [*sorted(by_turn.items()), ("all", total)]:
        yield f"{replay},{pool_share},{turn},{row[0]},{row[1]},{row[2]},{row[3]},{row[2] / max(1, row[3]):.3f}," + (
            str(scheduler.cache.counters.replayed_tokens) if turn == "all" else ""
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=24)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    hits, misses, hashes = measure_index(args.blocks)
    print(INDEX_COLUMNS)
    print(
        f"{commit},{datetime.date.today()},{platform.machine()} cpu,{os.getloadavg()[0]:.1f},{platform.python_version()},{args.blocks},"
        f"{PROMPT_BLOCKS * BLOCK},{statistics.median(hits):.1f},{statistics.quantiles(hits, n=10)[0]:.1f},{min(hits):.1f},"
        f"{statistics.median(misses):.1f},{statistics.median(hashes):.1f},{min(hashes):.1f},"
        f"{statistics.median(h + k for h, k in zip(hits, hashes, strict=True)):.1f}"
    )
    print(AGENT_COLUMNS)
    for replay in ("bounded", "exact"):
        for pool_share in (1.2, 0.5, 0.2) if replay == "bounded" else (1.2,):
            for line in run_trace(replay, pool_share, args.sessions):
                print(f"{commit},{datetime.date.today()},{line}", flush=True)


if __name__ == "__main__":
    main()
