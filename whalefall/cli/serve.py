# SPDX-License-Identifier: Apache-2.0
"""`whalefall serve`: the door on a socket. The port is taken and /health answers before the model has loaded."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from whalefall.cli.options import ModelArgument, engine_config, with_engine_options
from whalefall.core.errors import ConfigError
from whalefall.engine import embedded
from whalefall.engine.supervisor import RestartPolicy, Supervisor
from whalefall.observe.log import get_logger, setup_logging
from whalefall.observe.phases import Phases
from whalefall.observe.trace import make_tracer
from whalefall.server.config import ServerConfig

log = get_logger(__name__)
_PANEL = "Server"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


@with_engine_options
def serve(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.", rich_help_panel=_PANEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.", rich_help_panel=_PANEL)] = 8000,
    served_model_name: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Name of the model in the API; may be given several times, answers carry the first.", rich_help_panel=_PANEL),
    ] = None,
    api_key: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Clients must send it as bearer token; may be given several times.",
            envvar="WHALEFALL_API_KEY",
            show_envvar=True,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    admin_token: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Bearer token of the admin routes.", envvar="WHALEFALL_ADMIN_TOKEN", show_envvar=True, rich_help_panel=_PANEL),
    ] = None,
    max_num_queued_reqs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Requests that may wait for their first token; more get a 503.", rich_help_panel=_PANEL),
    ] = 2048,
    max_num_queued_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Their prompt tokens together; more get a 503.", rich_help_panel=_PANEL),
    ] = None,
    max_requests_per_minute: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Of each API key; more get a 429.", rich_help_panel=_PANEL),
    ] = None,
    max_tokens_per_minute: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Of each API key, prompts and answers; more get a 429.", rich_help_panel=_PANEL),
    ] = None,
    request_timeout_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.1, help="An answer that takes longer is ended.", rich_help_panel=_PANEL),
    ] = None,
    body_timeout_s: Annotated[float, typer.Option(min=0.1, help="Slower request bodies get a 408.", rich_help_panel=_PANEL)] = 60.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Larger request bodies get a 413.", rich_help_panel=_PANEL)] = 32 * 2**20,
    keep_alive_s: Annotated[float, typer.Option(min=0.1, help="Comment in silent streams this often.", rich_help_panel=_PANEL)] = 15.0,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0.0, help="After SIGTERM, answers may finish for this long.", rich_help_panel=_PANEL)
    ] = 30.0,
    disable_log_requests: Annotated[
        bool, typer.Option("--disable-log-requests", help="No log line per request.", rich_help_panel=_PANEL)
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="A log line is text or a JSON object.", rich_help_panel=_PANEL)] = LogFormat.TEXT,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="/metrics gives vLLM's own names too, for dashboards.", rich_help_panel=_PANEL)
    ] = False,
    otlp_traces_endpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Send a trace of each request there (OTLP over HTTP); needs the extra `otel`.", rich_help_panel=_PANEL),
    ] = None,
    engine_process: Annotated[
        bool, typer.Option(help="Run the engine in a process of its own, which is restarted when it dies.", rich_help_panel=_PANEL)
    ] = True,
    max_engine_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of the engine process in a row before it stays dead.", rich_help_panel=_PANEL)
    ] = RestartPolicy().max_restarts,
    **engine_options: Any,
) -> None:
    """Serve a model over HTTP: OpenAI chat and completions, streamed or not, with health and metrics."""
    phases = Phases()
    phases.mark("command")
    setup_logging(log_format=log_format)
    config = engine_config(model, engine_options)
    if model is None:
        log.warning("no model was named: %s. Name a checkpoint directory to serve a large one.", embedded.NOTICE)
    names = tuple(served_model_name or (Path(config.model).resolve().name if model else embedded.NAME,))
    listener = _listen(host, port)
    tracer = make_tracer(otlp_traces_endpoint)
    # The engine process first: it imports torch while this one imports a web framework.
    policy = RestartPolicy(max_restarts=max_engine_restarts)
    supervisor = Supervisor(config, policy, log_format=log_format) if engine_process else None
    phases.mark("launching the engine")
    # Only now: a wrong flag or a taken port should not wait for a web framework.
    from whalefall.cli.server_process import ServerProcess

    server_config = ServerConfig(
        served_model_names=names,
        api_keys=tuple(key for key in api_key or () if key),
        admin_token=admin_token or None,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        max_requests_per_minute=max_requests_per_minute,
        max_tokens_per_minute=max_tokens_per_minute,
        request_timeout_s=request_timeout_s,
        body_timeout_s=body_timeout_s,
        max_body_bytes=max_body_bytes,
        keep_alive_s=keep_alive_s,
        drain_timeout_s=drain_timeout_s,
        log_requests=not disable_log_requests,
        vllm_metrics=vllm_metrics,
    )
    phases.mark("web framework")
    raise typer.Exit(ServerProcess(config, server_config, listener, supervisor, phases, tracer).run())


def _listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        ConfigError: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}; choose another with --host and --port") from error
    return listener
