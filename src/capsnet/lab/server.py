"""The HTTP interface of the Lab. `inference` computes what the page shows, `security` decides who may ask.

Pixels and arrays are sent as bytes (`protocol`), everything else as JSON; an error is {"detail": "a sentence"}.
Torch processes one image at a time in one thread. A request that finds the queue full is told to retry.
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
from capsnet.data.photo import open_bounded, prepare_for, upright_on_white
from capsnet.errors import UserError
from capsnet.lab import inference, protocol
from capsnet.lab.hand import Offer, by_hand, offers
from capsnet.lab.models import Entry, Shelf
from capsnet.lab.samples import Digits, NotYet
from capsnet.lab.security import Guard

STATIC = Path(__file__).resolve().parent / "static"
BODY_LIMITS = {"/api/encode": 4 << 20, "/api/photo": 8_000_000}  # bytes; other requests are small
MOST_WAITING = 64
MOST_PHOTOS = 4  # held in memory at a time; one of them is decoded
MOST_PIXELS = 40_000_000
LARGE_SIDE = 3000  # larger images are reduced first: preparing one takes five times its memory
SECONDS_TO_SEND = 20
PHOTO_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Models besides the shipped ones (names or paths; the page opens with the first), and the server's address."""

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8700


class Queue:
    """One worker thread with a bounded queue."""

    def __init__(self, most: int) -> None:
        self.most, self.waiting = most, 0
        self.pool = ThreadPoolExecutor(1)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in the queue, taken before the body is read, so that the memory of waiting bodies is bounded too."""
        if self.waiting >= self.most:
            raise HTTPException(503, "Too many requests are waiting: retry in a second.", {"Retry-After": "1"})
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)


@dataclass
class Lab:
    """The state that requests share."""

    shelf: Shelf
    digits: Digits
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    computing: Queue = field(default_factory=lambda: Queue(MOST_WAITING))
    reading: Queue = field(default_factory=lambda: Queue(MOST_PHOTOS))
    picking: Queue = field(default_factory=lambda: Queue(MOST_WAITING))

    def warm_up(self) -> None:
        """Load the default model and compile its kernels before the first request."""
        self.computing.pool.submit(self._compute_once)

    def _compute_once(self) -> None:
        entry = self.shelf.find(self.shelf.default)
        compute(self, entry, torch.zeros(entry.image_shape))

    def close(self) -> None:
        self.digits.stopped.set()
        for queue in (self.computing, self.reading, self.picking):
            queue.pool.shutdown(wait=False, cancel_futures=True)


class Problem(BaseModel):
    """What is wrong and how to fix it."""

    detail: str


class Health(BaseModel):
    ok: bool
    boot: str = Field(description="changes with each start of the server")


class Match(BaseModel):
    """The index of a test image that matches, if there is one."""

    index: int | None
    count: int = Field(description="number of matching images")
    state: Literal["ready", "counting", "fetching", "no data"]
    progress: float = Field(ge=0, le=1)
    why: str = ""


class Models(BaseModel):
    default: str
    models: list[dict[str, Any]]


class Routings(BaseModel):
    routings: list[Offer]


Coordinate = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-100, le=100)]
Vector = Annotated[list[Coordinate], Field(min_length=2, max_length=2)]
VotesOfOne = Annotated[list[Vector], Field(min_length=2, max_length=4)]


class Hand(BaseModel):
    """Votes û_{j|i} (i, j, 2) drawn by hand."""

    model_config = ConfigDict(extra="forbid")
    votes: Annotated[list[VotesOfOne], Field(min_length=2, max_length=6)]
    routing: Annotated[str, Field(max_length=100, description="a name from /api/routings")] = "dynamic"
    options: Annotated[dict[str, bool | int | float | str], Field(max_length=20, description="its options")] = {}


Steps = list[list[list[float]]]


class HandTrace(BaseModel):
    """What an algorithm decides at every step t."""

    couplings: Steps = Field(description="c_ij or responsibilities (t, i, j)")
    outputs: Steps = Field(description="upper poses v_j (t, j, 2)")
    activations: list[list[float]] = Field(description="upper activations (t, j)")
    logits: Steps | None = Field(None, description="what the couplings were computed from (t, i, j)")
    variances: Steps | None = Field(None, description="of the Gaussians, where an algorithm fits any (t, j, 2)")
    oscillators: list[Steps] | None = Field(None, description="phases, where votes are oscillators (t, i, j, 2)")
    sums: Steps = Field(description="s_j = Σ_i c_ij û_{j|i} (t, j, 2)")
    agreement: Steps = Field(description="û_{j|i}·v_j (t, i, j)")


BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PIXELS_IN = {"requestBody": {"required": True, "content": BYTES}}
FRAME_OUT: dict[int | str, dict[str, Any]] = {200: {"description": "a frame of float32 arrays", "content": BYTES}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "unreadable body"},
    403: {"model": Problem, "description": "request from another page"},
    404: {"model": Problem, "description": "not found"},
    408: {"model": Problem, "description": "body not received in time"},
    413: {"model": Problem, "description": "body too large"},
    422: {"model": Problem, "description": "invalid request"},
    503: {"model": Problem, "description": "queue full or data not ready"},
}


class Frame(Response):
    media_type = "application/octet-stream"

    def __init__(self, header: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        super().__init__(protocol.pack(header, arrays))


def the_lab(request: Request) -> Lab:
    return request.app.state.lab


def none_if_empty(value: Any) -> Any:
    return None if value == "" else value


TheLab = Annotated[Lab, Depends(the_lab)]
ModelName = Annotated[str | None, Query(alias="model", max_length=100, description="a name from /api/models")]
Number = Annotated[int, Field(ge=0, le=10_000_000)]
MaybeNumber = Annotated[Number | None, BeforeValidator(none_if_empty), Query()]
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
        raise HTTPException(408, f"The request body was not received within {SECONDS_TO_SEND} seconds.") from None


@api.get("/health")
async def health(lab: TheLab) -> Health:
    """Whether the server is running, and whether it is still the same process."""
    return Health(ok=True, boot=lab.boot)


@api.get("/models")
async def models(lab: TheLab) -> Models:
    """The available models and what can be shown of each."""
    return Models(**lab.shelf.listing())


@api.get("/models/{name}/decoder", response_class=Response, responses=FRAME_OUT)
async def decoder(lab: TheLab, name: str) -> Frame:
    """The decoder weights w0, b0, w1, …, so that the page can reconstruct images itself."""
    entry = find(lab, name)
    async with lab.computing.place():
        try:
            return Frame(*await lab.computing.run(lambda: inference.decoder_weights(lab.shelf.load(entry.name))))
        except UserError as error:
            raise HTTPException(404, str(error)) from None


@api.post("/encode", response_class=Response, responses=FRAME_OUT, openapi_extra=PIXELS_IN)
async def encode(
    request: Request,
    lab: TheLab,
    model: ModelName = None,
    routing: Annotated[str, Query(max_length=1000, description='options as JSON, e.g. {"iterations": 3}')] = "{}",
    focus: MaybeNumber = None,
) -> Frame:
    """One image (little-endian float32 pixels from 0 to 1) through a network: capsules, couplings, votes."""
    entry = find(lab, model)
    if focus is not None and focus >= entry.config.num_classes:
        raise HTTPException(422, f"focus must be a class from 0 to {entry.config.num_classes - 1}, got {focus}.")
    async with lab.computing.place():
        pixels = inference.read_pixels(await read_body(request), entry.image_shape)
        header, arrays = await lab.computing.run(compute, lab, entry, pixels, routing, focus)
    return Frame({"model": entry.name, **header}, arrays)


def compute(lab: Lab, entry: Entry, pixels: Tensor, *options: Any) -> inference.Answer:
    with lab.shelf.lock:
        return inference.encode(lab.shelf.load(entry.name), pixels, *options)


@api.get("/digit", response_class=Response, responses=FRAME_OUT)
async def digit(lab: TheLab, index: Number, model: ModelName = None) -> Frame:
    """A test image of the model's dataset: pixels from 0 to 1 and the label."""
    entry = find(lab, model)
    async with lab.picking.place():
        try:
            return Frame(*await lab.picking.run(lab.digits.one, entry, index))
        except NotYet:
            raise HTTPException(503, "The test images are being downloaded.", {"Retry-After": "2"}) from None
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
) -> Match:
    """The index of a test image: random or the next one, of one class or any, all images or only mistakes."""
    entry = find(lab, model)
    async with lab.picking.place():
        found = await lab.picking.run(lab.digits.choose, entry, label, only == "mistakes", random, after)
    return Match(**found)


@api.post("/photo", response_class=Response, responses=FRAME_OUT, openapi_extra=PIXELS_IN)
async def photo(request: Request, lab: TheLab, model: ModelName = None) -> Frame:
    """An image file (PNG, JPEG, WebP, GIF, BMP) prepared for the network: pixels (c, h, w) from 0 to 1."""
    entry = find(lab, model)
    async with lab.reading.place():
        return Frame(*await lab.reading.run(read_photo, await read_body(request), entry))


def read_photo(body: bytes, entry: Entry) -> inference.Answer:
    """An uploaded image, prepared for the model as `capsnet predict` prepares a file."""
    with open_bounded(io.BytesIO(body), "the image") as picture:
        if picture.format not in PHOTO_FORMATS:
            raise UserError(f"the image is {picture.format}: use PNG, JPEG, WebP, GIF or BMP.")
        if picture.width * picture.height > MOST_PIXELS:
            raise UserError(f"the image has {picture.width}×{picture.height} pixels: reduce it to at most 40 million.")
        try:
            if picture.mode in ("L", "LA", "RGB", "RGBA") and "transparency" not in picture.info:
                picture.thumbnail((LARGE_SIDE, LARGE_SIDE))
            image = upright_on_white(picture)
        except Exception as error:  # decoders raise all kinds of exceptions on broken data
            raise UserError(f"the image is damaged ({error}): save it again.") from None
    prepared = prepare_for(image, entry.image_shape, entry.trained_on)
    return {"note": prepared.note}, {"pixels": prepared.image.float() / 255}


@api.get("/routings")
async def routings(lab: TheLab) -> Routings:
    """The routing algorithms that can be tried by hand, and their options."""
    async with lab.picking.place():
        return Routings(routings=await lab.picking.run(offers))


@api.post("/hand")
async def hand(lab: TheLab, drawn: Hand) -> HandTrace:
    """A routing algorithm on votes drawn by hand, with every number."""
    if len({len(row) for row in drawn.votes}) > 1:
        raise HTTPException(422, "every lower capsule must have the same number of votes.")
    async with lab.computing.place():
        return HandTrace(**await lab.computing.run(by_hand, drawn.votes, drawn.routing, drawn.options))


SENTENCES = {
    "Not Found": "There is nothing at this address.",
    "Method Not Allowed": "This address does not accept this method: see /openapi.json.",
    "There was an error parsing the body": "The body is not valid JSON.",
}


async def validation_error(_: Request, error: Exception) -> JSONResponse:
    """A request that does not match its schema: its first error in a sentence."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return JSONResponse({"detail": f"{where}: {first['msg']}."[:300]}, 422)


async def user_error(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422)


async def http_error(_: Request, error: Exception) -> JSONResponse:
    """Our own errors are sentences already; those of the framework become one."""
    assert isinstance(error, AnyHTTPException)
    sentence = SENTENCES.get(str(error.detail), str(error.detail))
    return JSONResponse({"detail": sentence}, error.status_code, error.headers)


async def internal_error(_: Request, error: Exception) -> JSONResponse:
    """The guard receives the exception after this and prints its traceback."""
    return JSONResponse({"detail": "Internal error: see the terminal of the Lab."}, 500)


class Page(StaticFiles):
    """Our files with correct media types, whatever the system's own table says."""

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

    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(UserError, user_error)
    app.add_exception_handler(AnyHTTPException, http_error)
    app.add_exception_handler(Exception, internal_error)
    lab.warm_up()
    return Guard(app, options.host, options.port, BODY_LIMITS, lab.close)
