"""`outrider serve`."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.config import config_option, plain_asked
from outrider.cli.models import ModelChoice, model_options
from outrider.cli.sampling import length_option, parse_length
from outrider.cli.shared_options import prefix_cache_option
from outrider.errors import OutriderError, ParameterError
from outrider.models.names import DEFAULT_MODEL
from outrider.support.checks import check_count
from outrider.support.optional import require

if TYPE_CHECKING:
    from outrider.batch.continuous import ContinuousBatch
    from outrider.serve.service import Service

_BACKLOG = 128


@click.command()
@model_options
@config_option
@length_option
@click.option("--plain", is_flag=True, help="Without a draft, also where one is named: the baseline.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Texts written side by side, 1 … 4096.")
@click.option(
    "--max-new-tokens",
    type=int,
    default=1024,
    show_default=True,
    help="Of a text at most, and of a chat that names no limit: memory is taken for as many.",
)
@prefix_cache_option
@click.option("--max-waiting", type=int, default=256, show_default=True, help="Texts that may wait for a place.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen at; 0.0.0.0: all of the machine's."
)
@click.option("--port", type=int, default=8000, show_default=True, help="0 … 65535; 0: one that is free.")
@click.option("--name", metavar="NAME", help="What requests call the model  [default: as --target calls it]")
@click.option(
    "--allow-origin",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Of pages in browsers that may ask, http://localhost:3000 say, or '*' for all; may be given several times.",
)
@click.option("--api-key", envvar="OUTRIDER_API_KEY", show_envvar=True, help="What clients must send as a bearer token.")
def serve(models: ModelChoice, **given: Any) -> int:
    """Answer OpenAI's clients over HTTP: completions and chats, streamed or whole, many side by side (docs/server.md).

    What is drawn follows the target's distribution, as in all of Outrider. Ctrl-C ends it.
    """
    models.refuse_compile("a server")
    for package in ("starlette", "uvicorn"):
        require(package, "outrider serve", "`pip install 'outrider[serve]'`")
    plain = plain_asked(given["plain"], "draft", "num_draft_tokens")
    length = parse_length(given["num_draft_tokens"])
    check_count("batch_size", given["batch_size"], 1, 4096)
    check_count("max_new_tokens", given["max_new_tokens"])
    check_count("max_waiting", given["max_waiting"], 0)
    check_count("prefix_cache", given["prefix_cache"], 0)
    check_count("port", given["port"], 0, 65535)
    if plain:
        models = replace(models, draft=())
    models.check()
    with closing(_listening(given["host"], given["port"])) as listening:
        batch = _batch(models, length, given["batch_size"], given["prefix_cache"])
        names = _names(models, given["name"])
        from outrider.serve.service import Service

        service = Service(batch, names, given["max_new_tokens"], given["batch_size"], given["max_waiting"])
        return _run(service, listening, given["api_key"], given["origins"])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that is bound, before a model is loaded for it; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ParameterError(f"host {host!r} is no address of this machine ({error.strerror}): 127.0.0.1 is one") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ParameterError(
            f"port {port} of {host} can't be listened at ({error.strerror}): take another, or 0 for one that is free"
        ) from None
    return made


def _batch(models: ModelChoice, length: Any, size: int, prefix_cache: int) -> ContinuousBatch:
    model = models.load_target()
    if getattr(model, "hears", False):
        raise ParameterError(f"target {model.name} hears audio, which a server is not sent: use outrider generate or batch")
    drafter = models.load_draft(model) if models.draft else None
    from outrider.batch.continuous import ContinuousBatch

    return ContinuousBatch(model, draft=drafter, num_draft_tokens=length, batch_size=size, prefix_cache=prefix_cache)


def _names(models: ModelChoice, name: str | None) -> list[str]:
    """As the user calls the model, and by its folder's or file's own name."""
    if name is not None:
        return [name]
    called = DEFAULT_MODEL if models.target is None else str(models.target)
    return list(dict.fromkeys([Path(called).name or called, called]))


def _run(service: Service, listening: socket.socket, key: str | None, origins: tuple[str, ...]) -> int:
    from outrider.serve.app import make_app
    from outrider.serve.server import GRACE, Server

    host, port = listening.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def ready() -> None:
        click.echo(f"outrider: {service.names[0]} answers at {where}; Ctrl-C ends it", err=True)

    def ending() -> None:
        click.echo(f"outrider: texts under way have {GRACE:g} seconds; Ctrl-C ends them now", err=True)

    server = Server(make_app(service, key, ready, origins), service, ending)
    listening.listen(_BACKLOG)
    try:
        server.run(sockets=[listening])
    finally:
        service.batch.close()
    if not server.started:
        raise OutriderError("the server could not begin")
    click.echo(f"outrider: {service.told()}", err=True)
    return 0
