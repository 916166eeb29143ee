"""`envfleet serve ENV`: any Gymnasium environment as an OpenEnv server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument

TOKEN_VARIABLE = "ENVFLEET_TOKEN"


def add_parser(subparsers: Any) -> None:
    """Add `serve` to the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve an environment to OpenEnv clients",
        description="Serve an environment to OpenEnv clients over WebSocket. Prints the address, then serves "
        "until Ctrl-C.",
        epilog=f"A token for clients comes from --token-file or the variable {TOKEN_VARIABLE}, never from the "
        "command line, where every user of the machine could read it.",
    )
    parser.add_argument("env", metavar="ENV", help="Echo, Connect4, Connect4-hard, a Gymnasium id, or module:Class")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: only this machine)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--max-sessions", type=int, default=64, help="environments at once (default: 64)")
    parser.add_argument(
        "--workers", type=int, default=None, help="processes the sessions share (default: one a processor, at least 2)"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        choices=["auto", "pipe", "thread", "aio", "serial"],
        help="where environments run (default: auto, worker processes with a thread for each session)",
    )
    parser.add_argument(
        "--idle-timeout-s", type=float, default=300.0, help="end silent sessions, waited for or not (default: 300)"
    )
    parser.add_argument(
        "--handover-s",
        type=float,
        default=5.0,
        help="while others wait, end sessions silent for so long that have no episode running (default: 5)",
    )
    parser.add_argument(
        "--episode-idle-s",
        type=float,
        default=120.0,
        help="while others wait, end sessions silent for so long in the middle of an episode (default: 120)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=float,
        default=30.0,
        help="close connections that have not sent a whole request by then (default: 30)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="one more name clients use for this server, or '*' (default: loopback and the address of --host)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may use this server, such as https://lab.example, or '*' (default: loopback)",
    )
    parser.add_argument("--step-timeout-s", type=float, default=60.0, help="end stuck steps (default: 60)")
    parser.add_argument("--max-message-bytes", type=int, default=16 * 2**20, help="largest message (default: 16 MiB)")
    parser.add_argument("--token-file", type=Path, default=None, help="file with the token clients must send")
    parser.add_argument(
        "--env-kwargs", type=json.loads, default=None, metavar="JSON", help="e.g. '{\"latency_s\": 0.05}'"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; 0 after a clean stop."""
    from envfleet.remote.server import Server, environment_factory

    server = Server(
        environment_factory(args.env, args.env_kwargs)[0] if args.env_kwargs else args.env,
        host=args.host,
        port=args.port,
        max_sessions=args.max_sessions,
        workers=args.workers,
        backend=args.backend,
        idle_timeout_s=args.idle_timeout_s,
        step_timeout_s=args.step_timeout_s,
        max_message_bytes=args.max_message_bytes,
        handover_s=args.handover_s,
        episode_idle_s=args.episode_idle_s,
        request_timeout_s=args.request_timeout_s,
        allow_hosts=args.allow_host,
        allow_origins=args.allow_origin,
        token=read_token(args.token_file),
    )
    _raise_file_limit()
    server.bind()
    config = server.config
    lock = "token needed" if config.token else "open to everyone who can reach it"
    print(f"serving {args.env} on {server.url} ({config.max_sessions} sessions, {lock})", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        pass  # the usual way to end a server
    finally:
        server.close()
    return 0


def _raise_file_limit() -> None:
    """Every connection is a file: take as many as this process may have, so that silent ones cannot use them up."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_token(path: Path | None) -> str | None:
    """The token of the file, else of the environment variable, else None."""
    if path is not None:
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise BadArgument(f"the token file {path} cannot be read: {error.strerror}") from error
        if not token:
            raise BadArgument(f"the token file {path} is empty")
        return token
    return os.environ.get(TOKEN_VARIABLE) or None
