"""`envfleet serve ENV`: any Gymnasium environment as an OpenEnv server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from envfleet.cli.options import add_shared
from envfleet.errors import BadArgument

TOKEN_VARIABLE = "ENVFLEET_TOKEN"
HELP = "serve an environment to OpenEnv clients"
DESCRIPTION = (
    "Serves an environment to OpenEnv clients over WebSocket. Prints the address, then serves until Ctrl-C. A token for "
    f"clients comes from --token-file or the variable {TOKEN_VARIABLE}, never from the command line, where every user of "
    "the machine could read it."
)

#: Options of `ServerConfig` that are one value, with their help; type and default are the config's.
_VALUES = {
    "host": "where to listen; the default is reached from this machine only",
    "port": "0 chooses a free port",
    "max_sessions": "the most sessions at a time",
    "idle_timeout_s": "end sessions without a message for this time",
    "handover_s": "the same while other clients wait, for sessions without a running episode",
    "episode_idle_s": "the same while other clients wait, for sessions with a running episode",
    "request_timeout_s": "close connections that have not sent a complete request within this time",
    "step_timeout_s": "end steps that take longer",
    "max_message_bytes": "largest message",
}
_LISTS = {
    "allow_hosts": ("--allow-host", "NAME", "one more name clients use for this server, or '*' (loopback and the address of --host are allowed)"),
    "allow_origins": ("--allow-origin", "ORIGIN", "a web origin whose pages may use this server, such as https://lab.example, or '*' (loopback is allowed)"),
}  # fmt: skip


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"size": 3}}')
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from envfleet.remote.server_config import ServerConfig

    add_shared(parser, "env")
    for name, text in _VALUES.items():
        default = getattr(ServerConfig, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
    for name, (flag, metavar, text) in _LISTS.items():
        parser.add_argument(flag, action="append", default=[], metavar=metavar, dest=name, help=text)
    add_shared(parser, "num_workers", help="processes the sessions share (default: one per CPU, at least 2)")
    add_shared(
        parser,
        "backend",
        metavar=None,
        choices=["auto", "pipe", "thread", "aio", "serial"],
        help="where environments run; auto: worker processes with a thread for each session",
    )
    add_token_file(parser, "file with the token clients must send")
    parser.add_argument("--env-kwargs", type=_mapping, default=None, metavar="JSON", help="e.g. '{\"latency_s\": 0.05}'")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; 0 after a clean stop."""
    from envfleet.remote.server import Server
    from envfleet.slots.factories import resolve

    options: dict[str, Any] = {name: getattr(args, name) for name in (*_VALUES, *_LISTS, "backend")}
    env = resolve(args.env, args.env_kwargs) if args.env_kwargs else args.env
    server = Server(env, num_workers=args.num_workers, token=read_token(args.token_file), **options)
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


def add_token_file(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare `--token-file`."""
    parser.add_argument("--token-file", type=Path, help=f"{text} (default: the variable {TOKEN_VARIABLE})")


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
