# SPDX-License-Identifier: Apache-2.0
"""`whalefall serve`: the door on a socket. The port is taken and /health answers before the model has loaded."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from whalefall.cli.options import ModelArgument, engine_config, with_engine_options
from whalefall.core.errors import ConfigError
from whalefall.engine import embedded
from whalefall.observe.log import setup_logging
from whalefall.server.config import ServerConfig

_PANEL = "Server"


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
        Optional[str],  # noqa: UP045
        typer.Option(help="Clients must send it as bearer token.", envvar="WHALEFALL_API_KEY", show_envvar=True, rich_help_panel=_PANEL),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Larger request bodies get a 413.", rich_help_panel=_PANEL)] = 32 * 2**20,
    keep_alive_s: Annotated[float, typer.Option(min=0.1, help="Comment in silent streams this often.", rich_help_panel=_PANEL)] = 15.0,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0.0, help="After SIGTERM, answers may finish for this long.", rich_help_panel=_PANEL)
    ] = 30.0,
    disable_log_requests: Annotated[
        bool, typer.Option("--disable-log-requests", help="No log line per request.", rich_help_panel=_PANEL)
    ] = False,
    **engine_options: Any,
) -> None:
    """Serve a model over HTTP: OpenAI chat and completions, streamed or not, with health and metrics."""
    setup_logging()
    if model is None:
        print(f"no model was named: {embedded.NOTICE}. Name a checkpoint directory to serve a real one.", file=sys.stderr)
    config = engine_config(model, engine_options)
    names = tuple(served_model_name or (Path(config.model).resolve().name if model else embedded.NAME,))
    listener = _listen(host, port)
    # Only now: a wrong flag or a taken port should not wait for a web framework.
    from whalefall.cli.server_process import run_server

    server_config = ServerConfig(
        served_model_names=names,
        api_key=api_key or None,
        max_body_bytes=max_body_bytes,
        keep_alive_s=keep_alive_s,
        drain_timeout_s=drain_timeout_s,
        log_requests=not disable_log_requests,
    )
    raise typer.Exit(run_server(config, server_config, listener))


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
