# SPDX-License-Identifier: Apache-2.0
"""ServerConfig: what the door itself decides. What the engine decides stands in engine/config.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    served_model_names: tuple[str, ...]
    """Names a request may use; answers carry the first one."""
    api_keys: tuple[str, ...] = ()
    """Requests under /v1 must carry one of them as a bearer token; none lets everybody in."""
    admin_token: str | None = None
    """What changes the server's state needs this as a bearer token; None: nobody may, except forgetting cached prefixes."""
    max_num_queued_reqs: int | None = 2048
    """Requests that may wait for their first token; one more is refused with 503. None: no limit."""
    max_num_queued_tokens: int | None = None
    """Their prompt tokens together, likewise."""
    max_requests_per_minute: int | None = None
    """Of each API key (of everybody together, without keys); more are refused with 429."""
    max_tokens_per_minute: int | None = None
    """Prompt and answer tokens, likewise."""
    request_timeout_s: float | None = None
    """An answer that takes longer ends with reason "abort"; a request that got no token until then with 503."""
    body_timeout_s: float = 60.0
    """A body that takes longer to arrive is refused with 408."""
    max_body_bytes: int = 32 * 2**20
    """A larger request body is refused with 413."""
    max_choices: int = 128
    """Most answers one request may ask for, over all its prompts."""
    max_stored_responses: int = 1000
    """Answers of /v1/responses kept in memory for GET and previous_response_id; the oldest make room."""
    max_stored_bytes: int = 64 * 2**20
    """Their size together, as JSON."""
    keep_alive_s: float = 15.0
    """A stream silent for this long gets a comment, so that nobody on the way hangs up."""
    first_token_wait_s: float = 2.0
    """How long a stream waits for the engine's first word before it sends its headers: a fault in that time gets a real status code."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running answers may finish for this long; then they end with reason "abort"."""
    vllm_metrics: bool = False
    """/metrics gives every number under vLLM's own names too."""
    log_requests: bool = True
    """A line in the log for each request at its end."""
