"""The server's routes, over Starlette: OpenAI's completions and chat completions, its list of models, health, metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.batch.answer import Answer
from outrider.errors import OutriderError, ParameterError
from outrider.pieces import Piece
from outrider.results import Result
from outrider.serve.calls import Call, NotServedError, read_call
from outrider.serve.replies import Reply, Streamed, error_body, status_of
from outrider.serve.service import Asked, BusyError, EndingError, Service, not_served

LARGEST = 64 * 2**20  # bytes of a request
_log = logging.getLogger(__name__)
_Said = tuple[int, Piece | Result | Exception]


def make_app(
    service: Service, key: str | None = None, ready: Callable[[], None] = lambda: None, origins: Many[str] = ()
) -> Starlette:
    """The application. key: what a client must send as a bearer token. ready: called when requests can come. origins: of
    which pages in browsers may ask (CORS), "*" for any.
    """
    since = int(time.time())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ready()
        yield
        await run_in_threadpool(service.batch.close)

    async def completions(request: Request) -> Response:
        return await _answer(service, request, chat=False)

    async def chats(request: Request) -> Response:
        return await _answer(service, request, chat=True)

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [about(name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.names:
            return _failed(service, not_served(service, name))
        return JSONResponse(about(name))

    def about(name: str) -> dict[str, Any]:
        length = service.target.max_length
        return {"id": name, "object": "model", "owned_by": "outrider", "created": since, "max_model_len": length}

    async def health(_: Request) -> Response:
        return PlainTextResponse("", 200 if service.batch.open else 503)

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/completions", _guarded(completions, key), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(chats, key), methods=["POST"]),
        Route("/v1/models", _guarded(models, key)),
        Route("/v1/models/{name:path}", _guarded(model, key)),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    browsers = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    middleware = [browsers] if origins else []
    return Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: _no_such_thing}
    )


def _guarded(endpoint: Callable[[Request], Any], key: str | None) -> Callable[[Request], Any]:
    """The endpoint, for those who have the key."""

    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            return JSONResponse(
                error_body("the API key is wrong or missing", "authentication_error", "invalid_api_key"), 401
            )
        made: Response = await endpoint(request)
        return made

    return guarded


async def _no_such_thing(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse(error_body(f"{request.method} {request.url.path}: {error}", "invalid_request_error"), status)


async def _answer(service: Service, request: Request, chat: bool) -> Response:
    try:
        call = read_call(_parsed(await _body(request)), chat, service.most_tokens)
        asked = await run_in_threadpool(service.submit, call)
        reply = Reply(service.names[0], chat, service.target.tokenizer, call.top, call.token_ids)
        if call.stream:
            return StreamingResponse(_events(service, call, asked, reply), media_type="text/event-stream")
        results = await _whole(service, request, asked)
        for result in results:
            service.count(result)
        return JSONResponse(reply.whole(results, asked.prompts))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        return _failed(service, error)


def _failed(service: Service, error: Exception) -> Response:
    service.refused += 1
    if isinstance(error, BusyError):
        return JSONResponse(error_body(error, "rate_limit_error", "busy"), 429, {"Retry-After": "1"})
    if isinstance(error, NotServedError) and error.param == "model":
        return JSONResponse(error_body(error, code="model_not_found"), 404)
    if isinstance(error, EndingError):
        return JSONResponse(error_body(error), 503)
    _tell(error)
    return JSONResponse(error_body(error), status_of(error))


def _tell(error: Exception) -> None:
    """In the server's log, what no client is to blame for; with its traceback, unless it says all."""
    if status_of(error) == 500 and not isinstance(error, EndingError):
        _log.error("a request failed: %s", error, exc_info=None if isinstance(error, OutriderError) else error)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise ParameterError(f"the request must have {LARGEST} bytes at most")
    return b"".join(parts)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ParameterError("the request must be a JSON object") from None


async def _whole(service: Service, request: Request, asked: Asked) -> list[Result]:
    """All answers; cancelled if the client goes, or one of them fails."""
    gone = asyncio.create_task(_disconnected(request))
    answered = asyncio.create_task(_results(asked))
    try:
        await asyncio.wait([gone, answered], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise ClientDisconnect
        return answered.result()
    finally:
        gone.cancel()
        answered.cancel()
        service.leave(asked)


async def _results(asked: Asked) -> list[Result]:
    async def one(answer: Answer) -> Result:
        return await answer

    return await asyncio.gather(*map(one, asked.answers))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(service: Service, call: Call, asked: Asked, reply: Reply) -> AsyncIterator[str]:
    """A stream of server-sent events; the texts are cancelled when it is left."""
    pieces: asyncio.Queue[_Said] = asyncio.Queue()
    readers = [asyncio.create_task(_read(i, answer, pieces)) for i, answer in enumerate(asked.answers)]
    texts = [Streamed(reply, i, asked.prompts[i // call.count]) for i in range(len(readers))]
    results: dict[int, Result] = {}
    try:
        for text in texts:
            yield _event(text.begin())
        while len(results) < len(readers):
            i, said = await pieces.get()
            try:
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, Result):
                    service.count(said)
            except Exception as error:
                service.refused += 1
                _tell(error)
                yield _event(error_body(error))
                break
            if isinstance(said, Result):
                results[i] = said
                yield _event(texts[i].end(said))
            else:
                yield _event(texts[i].piece(said))
        else:
            if call.usage:
                yield _event(reply.usage_of([results[i] for i in range(len(readers))], asked.prompts))
        yield "data: [DONE]\n\n"
    finally:
        for reader in readers:
            reader.cancel()
        service.leave(asked)


async def _read(number: int, answer: Answer, pieces: asyncio.Queue[_Said]) -> None:
    try:
        async for piece in answer:
            pieces.put_nowait((number, piece))
        pieces.put_nowait((number, await answer))
    except Exception as error:
        pieces.put_nowait((number, error))


def _event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n"
