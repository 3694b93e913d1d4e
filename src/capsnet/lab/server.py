"""The Lab's HTTP interface: thin. What the page shows comes from `thinking`, who may ask is decided by `guard`.

Pixels and arrays travel as bytes (`wire`), everything else as JSON; whatever goes wrong is {"detail": "a sentence"}.
Torch works on one image at a time, in one thread; who finds too many waiting is told to come again.
"""

from __future__ import annotations

import asyncio
import io
import mimetypes
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException
from torch import Tensor

from capsnet import __version__
from capsnet.data.photo import fit, open_bounded, prepare_like_mnist, upright_on_white
from capsnet.errors import UserError
from capsnet.lab import thinking, wire
from capsnet.lab.digits import Digits, NotYet, in_the_middle
from capsnet.lab.guard import Guard
from capsnet.lab.shelf import Entry, Shelf

STATIC = Path(__file__).resolve().parent / "static"
BODY_LIMITS = {"/api/encode": 4 << 20, "/api/photo": 8_000_000}  # bytes; everything else takes little
MOST_WAITING = 64
MOST_PHOTOS = 4  # that are held at a time; one of them is decoded
MOST_PIXELS = 40_000_000
LARGE_SIDE = 3000  # a larger picture is made smaller first: it would take five times its pixels to be prepared
SECONDS_TO_SEND = 20
PHOTO_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP")

Answered = TypeVar("Answered")


@dataclass(frozen=True)
class Options:
    """Models beside the shipped ones (names or paths; the first is shown), and where the server listens."""

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8700


class Turns:
    """One thread that does the work, and a bound on how many may wait for it."""

    def __init__(self, most: int) -> None:
        self.most, self.waiting = most, 0
        self.pool = ThreadPoolExecutor(1)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in the queue, taken before the body is read, so that waiting bodies are bounded too."""
        if self.waiting >= self.most:
            raise HTTPException(503, "Too many requests are waiting: try again in a second.", {"Retry-After": "1"})
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def run(self, work: Callable[..., Answered], *arguments: Any) -> Answered:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)


@dataclass
class Lab:
    """What the requests share."""

    shelf: Shelf
    digits: Digits
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    thinking: Turns = field(default_factory=lambda: Turns(MOST_WAITING))
    reading: Turns = field(default_factory=lambda: Turns(MOST_PHOTOS))
    picking: Turns = field(default_factory=lambda: Turns(MOST_WAITING))

    def warm_up(self) -> None:
        """Have the default model ready before the first request: loaded, and its kernels tried."""
        self.thinking.pool.submit(self._think_once)

    def _think_once(self) -> None:
        entry = self.shelf.find(self.shelf.default)
        think(self, entry, torch.zeros(entry.image_shape))

    def close(self) -> None:
        self.digits.stopped.set()
        for turns in (self.thinking, self.reading, self.picking):
            turns.pool.shutdown(wait=False, cancel_futures=True)


class Problem(BaseModel):
    """What is wrong, and how to mend it."""

    detail: str


class Health(BaseModel):
    ok: bool
    boot: str = Field(description="another one after each start of the server")


class Choice(BaseModel):
    """The number of a test picture that fits, if there is one."""

    index: int | None
    count: int = Field(description="how many fit")
    state: Literal["ready", "counting", "fetching", "no data"]
    progress: float = Field(ge=0, le=1)
    why: str = ""


class Models(BaseModel):
    default: str
    models: list[dict[str, Any]]


Coordinate = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-100, le=100)]
Vector = Annotated[list[Coordinate], Field(min_length=2, max_length=2)]
VotesOfOne = Annotated[list[Vector], Field(min_length=2, max_length=4)]


class Hand(BaseModel):
    """Votes û_{j|i} (i, j, 2) drawn by hand."""

    model_config = ConfigDict(extra="forbid")
    votes: Annotated[list[VotesOfOne], Field(min_length=2, max_length=6)]
    iterations: Annotated[int, Field(strict=True, ge=1, le=thinking.MOST_ITERATIONS)]


class HandTrace(BaseModel):
    """Every number of Procedure 1, for every iteration t."""

    logits: list[list[list[float]]]
    couplings: list[list[list[float]]]
    s: list[list[list[float]]]
    v: list[list[list[float]]]
    agreement: list[list[list[float]]]


BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PIXELS_IN = {"requestBody": {"required": True, "content": BYTES}}
FRAME_OUT: dict[int | str, dict[str, Any]] = {200: {"description": "a frame of float32 arrays", "content": BYTES}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "a body that cannot be read"},
    403: {"model": Problem, "description": "not the Lab's own page"},
    404: {"model": Problem, "description": "no such thing"},
    408: {"model": Problem, "description": "a body that did not come"},
    413: {"model": Problem, "description": "a body that is too large"},
    422: {"model": Problem, "description": "a request that makes no sense"},
    503: {"model": Problem, "description": "too much to do, or not ready yet"},
}


class Frame(Response):
    media_type = "application/octet-stream"

    def __init__(self, header: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        super().__init__(wire.pack(header, arrays))


def the_lab(request: Request) -> Lab:
    return request.app.state.lab


def nothing_if_empty(value: Any) -> Any:
    return None if value == "" else value


TheLab = Annotated[Lab, Depends(the_lab)]
ModelName = Annotated[str | None, Query(alias="model", max_length=100, description="a name from /api/models")]
Number = Annotated[int, Field(ge=0, le=10_000_000)]
MaybeNumber = Annotated[Number | None, BeforeValidator(nothing_if_empty), Query()]
api = APIRouter(prefix="/api", responses=PROBLEMS)


def find(lab: Lab, name: str | None) -> Entry:
    try:
        return lab.shelf.find(name or lab.shelf.default)
    except UserError as error:
        raise HTTPException(404, str(error)) from None


async def read_body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), SECONDS_TO_SEND)
    except TimeoutError:
        raise HTTPException(408, f"The request's body did not come within {SECONDS_TO_SEND} seconds.") from None


@api.get("/health")
async def health(lab: TheLab) -> Health:
    """Whether the server is there, and whether it is still the same one."""
    return Health(ok=True, boot=lab.boot)


@api.get("/models")
async def models(lab: TheLab) -> Models:
    """What can be looked at."""
    return Models(**lab.shelf.describe())


@api.get("/models/{name}/decoder", response_class=Response, responses=FRAME_OUT)
async def decoder(lab: TheLab, name: str) -> Frame:
    """The decoder's weights, w0, b0, w1, …, so that the page can paint by itself."""
    entry = find(lab, name)
    async with lab.thinking.place():
        try:
            return Frame(*await lab.thinking.run(lambda: thinking.decoder_weights(lab.shelf.load(entry.name))))
        except UserError as error:
            raise HTTPException(404, str(error)) from None


@api.post("/encode", response_class=Response, responses=FRAME_OUT, openapi_extra=PIXELS_IN)
async def encode(
    request: Request,
    lab: TheLab,
    model: ModelName = None,
    iterations: Annotated[int | None, Query(ge=1, le=thinking.MOST_ITERATIONS)] = None,
    leaky: bool | None = None,
    focus: MaybeNumber = None,
) -> Frame:
    """One image, little-endian float32 pixels from 0 to 1, through a network: capsules, couplings, votes."""
    entry = find(lab, model)
    if focus is not None and focus >= entry.config.num_classes:
        raise HTTPException(422, f"focus is a class from 0 to {entry.config.num_classes - 1} and is {focus}.")
    async with lab.thinking.place():
        pixels = thinking.read_pixels(await read_body(request), entry.image_shape)
        header, arrays = await lab.thinking.run(think, lab, entry, pixels, iterations, leaky, focus)
    return Frame({"model": entry.name, **header}, arrays)


def think(lab: Lab, entry: Entry, pixels: Tensor, *options: Any) -> thinking.Seen:
    with lab.shelf.lock:
        return thinking.encode(lab.shelf.load(entry.name), pixels, *options)


@api.get("/digit", response_class=Response, responses=FRAME_OUT)
async def digit(lab: TheLab, index: Number, model: ModelName = None) -> Frame:
    """A test picture of the model's data set: pixels from 0 to 1, and its label."""
    entry = find(lab, model)
    async with lab.picking.place():
        try:
            return Frame(*await lab.picking.run(lab.digits.one, entry, index))
        except NotYet:
            raise HTTPException(503, "The test pictures are being fetched.", {"Retry-After": "2"}) from None
        except UserError as error:
            raise HTTPException(404, str(error)) from None


@api.get("/digits")
async def digits(
    lab: TheLab,
    model: ModelName = None,
    label: MaybeNumber = None,
    only: Literal["all", "mistakes"] = "all",
    random: bool = False,
    after: MaybeNumber = None,
) -> Choice:
    """The number of a test picture: at random or the next, of one class or any, right or only the mistakes."""
    entry = find(lab, model)
    async with lab.picking.place():
        found = await lab.picking.run(lab.digits.choose, entry, label, only == "mistakes", random, after)
    return Choice(**found)


@api.post("/photo", response_class=Response, responses=FRAME_OUT, openapi_extra=PIXELS_IN)
async def photo(request: Request, lab: TheLab, model: ModelName = None) -> Frame:
    """A picture file (PNG, JPEG, WebP, GIF, BMP) as the network wants it: pixels (c, h, w) from 0 to 1."""
    entry = find(lab, model)
    async with lab.reading.place():
        return Frame(*await lab.reading.run(read_photo, await read_body(request), entry))


def read_photo(body: bytes, entry: Entry) -> thinking.Seen:
    """A digit is prepared as MNIST was made and put in the middle; anything else is scaled to fit."""
    with open_bounded(io.BytesIO(body), "the picture") as picture:
        if picture.format not in PHOTO_FORMATS:
            raise UserError(f"the picture is {picture.format}, and PNG, JPEG, WebP, GIF and BMP are read.")
        if picture.width * picture.height > MOST_PIXELS:
            raise UserError(
                f"the picture has {picture.width}×{picture.height} pixels: shrink it to 40 million at most."
            )
        try:
            if picture.mode in ("L", "LA", "RGB", "RGBA") and "transparency" not in picture.info:
                picture.thumbnail((LARGE_SIDE, LARGE_SIDE))
            image = upright_on_white(picture)
        except Exception as error:  # decoders raise whatever they like at broken data
            raise UserError(f"the picture is damaged ({error}): save it again.") from None
    if not entry.sees_digits:
        return {"note": "scaled to fit."}, {"pixels": fit(image, *entry.image_shape).float() / 255}
    prepared = prepare_like_mnist(image)
    return {"note": prepared.note}, {"pixels": in_the_middle(prepared.image.float() / 255, entry.image_shape)}


@api.post("/hand")
async def hand(drawn: Hand) -> HandTrace:
    """Procedure 1 on votes drawn by hand, every number of it."""
    if len({len(row) for row in drawn.votes}) > 1:
        raise HTTPException(422, "every lower capsule votes for the same upper capsules: give each as many votes.")
    return HandTrace(**thinking.by_hand(drawn.votes, drawn.iterations))


SENTENCES = {
    "Not Found": "There is nothing at this address.",
    "Method Not Allowed": "This address is not asked in this way: look at /openapi.json.",
    "There was an error parsing the body": "The body is no JSON that can be read.",
}


async def say_what_is_wrong(_: Request, error: Exception) -> JSONResponse:
    """A request that does not fit its description: the first thing wrong with it, in a sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return JSONResponse({"detail": f"{where}: {first['msg']}."[:300]}, 422)


async def say_user_error(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422)


async def say_http_error(_: Request, error: Exception) -> JSONResponse:
    """A refusal of ours has its sentence; the framework's own ones get one."""
    assert isinstance(error, AnyHTTPException)
    sentence = SENTENCES.get(str(error.detail), str(error.detail))
    return JSONResponse({"detail": sentence}, error.status_code, error.headers)


async def say_sorry(_: Request, error: Exception) -> JSONResponse:
    """The traceback is printed by the guard, which gets the exception after this."""
    return JSONResponse({"detail": "The Lab made a mistake; its terminal says more."}, 500)


class Page(StaticFiles):
    """Our files with the types that browsers want, whatever the machine's own table says."""

    def __init__(self) -> None:
        mimetypes.add_type("text/javascript", ".js")
        super().__init__(directory=STATIC)


def create_app(options: Options | None = None) -> Guard:
    """The Lab as an ASGI application."""
    options = options or Options()
    shelf = Shelf(options.models)
    app = FastAPI(title="capsnet lab", version=__version__, docs_url=None, redoc_url=None)
    app.state.lab = lab = Lab(shelf, Digits(shelf))
    app.include_router(api)
    page = Page()
    app.mount("/static", page)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    app.add_exception_handler(RequestValidationError, say_what_is_wrong)
    app.add_exception_handler(UserError, say_user_error)
    app.add_exception_handler(AnyHTTPException, say_http_error)
    app.add_exception_handler(Exception, say_sorry)
    lab.warm_up()
    return Guard(app, options.host, options.port, BODY_LIMITS, lab.close)
