"""`piecework serve`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

from piecework.cli.flags import add_config_flags, add_model_argument, config_from_args, model_from_args
from piecework.cli.logs import show_logs
from piecework.cli.parser import Parser
from piecework.config import EngineConfig, ServerConfig

DESCRIPTION = """\
Serve a model over HTTP with the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models,
/tokenize, /detokenize, /health, /metrics, /version. SIGTERM lets running requests finish, then ends."""


def run(arguments: Sequence[str]) -> int:
    """Run the command until the server is told to stop."""
    args = make_parser().parse(arguments)
    engine = config_from_args(EngineConfig, args, **model_from_args(args))
    server = config_from_args(ServerConfig, args)
    show_logs(engine.log_level)

    from piecework.server.run import serve

    def announce(url: str) -> None:
        print(f"Serving {engine.load.model} at {url}", flush=True)

    return serve(engine, server, on_ready=announce)


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("serve", DESCRIPTION)
    add_model_argument(parser, "what to serve")
    add_config_flags(parser, EngineConfig, ServerConfig)
    return parser
