"""The server of the Lab as a real process: every answer, every rejection, and its behaviour under load."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capsnet import data
from capsnet.cli import main
from capsnet.cli.inputs import prepare_image, training_config
from capsnet.errors import UserError
from capsnet.io import checkpoint
from capsnet.lab import protocol
from capsnet.lab.hand import SEED, SPREAD, by_hand, offers
from capsnet.lab.policy import SERVED
from capsnet.lab.security import Guard
from capsnet.models.capsnet import CapsNet
from capsnet.nn.functional import lengths
from capsnet.routing.base import ALL, ROUTINGS, Parents, Routed, Routing, Sizes
from capsnet.routing.dynamic import DynamicRouting, dynamic_routing
from capsnet.routing.uniform import UniformRouting
from lab_server import Running

NAME = "quick-mnist"


@pytest.fixture(scope="module")
def model() -> CapsNet:
    model = checkpoint.load(NAME)
    assert isinstance(model, CapsNet)
    return model


def pixels_of(image: torch.Tensor) -> bytes:
    return image.numpy().astype("<f4").tobytes()


BLANK = pixels_of(torch.zeros(1, 28, 28))


def encode(
    lab: Running, body: bytes = BLANK, routing: dict[str, object] | None = None, **options: object
) -> tuple[dict, dict[str, np.ndarray]]:
    query = urlencode(options | ({} if routing is None else {"routing": json.dumps(routing)}))
    status, answer, _ = lab.ask(f"/api/encode?{query}", body)
    assert status == 200, answer
    return protocol.unpack(answer)


def refused(lab: Running, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and sentence of a rejection, which is always JSON with one sentence and the security headers."""
    status, answer, response = lab.ask(path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    assert status >= 400
    assert response.headers["content-security-policy"] == SERVED
    found = json.loads(answer)
    assert list(found) == ["detail"]
    assert isinstance(found["detail"], str)
    assert found["detail"].endswith((".", "?"))
    assert "Traceback" not in found["detail"]
    return status, found["detail"]


# Answers


def test_the_models_are_described(lab: Running, model: CapsNet) -> None:
    found = lab.json("/api/models")
    assert found["default"] == NAME
    table = {entry["name"]: entry for entry in found["models"]}
    assert {NAME, "no-decoder", "small-cnn", "deep", "two-digits", "colour"} <= set(table)
    quick = table[NAME]
    assert quick["kind"] == "capsnet"
    assert quick["capsules"] is True
    assert quick["routing"]["name"] == "dynamic"
    assert quick["routing"]["couplings"] == "coupling coefficient"
    iterations, leaky = quick["routing"]["options"]
    assert iterations == {
        **{"name": "iterations", "type": "int", "value": 3, "min": 1, "max": 10, "choices": []},
        "help": "Routing iterations; 1 means uniform couplings.",
    }
    assert (leaky["name"], leaky["type"], leaky["value"]) == ("leaky", "bool", False)
    assert quick["parameters"] == sum(p.numel() for p in model.parameters())
    assert quick["grid"] == list(model.grid)
    assert quick["has_decoder"] is True
    assert quick["error_percent"] is not None
    assert table["small-cnn"]["kind"] == "cnn"
    assert table["no-decoder"]["has_decoder"] is False
    assert table["two-digits"]["multi_label"] is True
    assert "secret" not in json.dumps(found)


def test_a_primary_capsule_sees_what_its_receptive_field_says(model: CapsNet) -> None:
    field = model.shown()["receptive"]
    y, x = 1, 2
    image = torch.rand(1, 1, 28, 28, requires_grad=True)
    capsules = model.primary(model.stem(image)).unflatten(1, (*model.grid, model.config.primary_types))
    capsules[0, y, x].sum().backward()
    assert image.grad is not None
    rows, columns = (image.grad[0, 0].abs().sum(axis).nonzero().flatten() for axis in (1, 0))
    top, left = (field["offset"] + field["stride"] * n for n in (y, x))
    assert top <= rows.min()
    assert rows.max() < top + field["size"]
    assert left <= columns.min()
    assert columns.max() < left + field["size"]
    assert rows.max() - rows.min() >= field["size"] - 3  # and uses nearly all of it


def test_the_page_shows_what_the_model_predicts(lab: Running, model: CapsNet, digits: data.Dataset) -> None:
    for index in range(8):
        image = digits.images[index].float() / 255
        header, arrays = encode(lab, pixels_of(image), model=NAME)
        seen = model.predict(image, trace=True)
        assert header["ranking"][0] == int(seen.labels)
        assert seen.poses is not None
        assert seen.trace is not None
        np.testing.assert_allclose(arrays["activations"], seen.activations[0], atol=1e-5)
        np.testing.assert_allclose(arrays["poses"], seen.poses[0], atol=1e-5)
        np.testing.assert_allclose(arrays["couplings"], seen.trace.couplings[:, 0], atol=1e-5)
        np.testing.assert_allclose(arrays["outputs"][-1], arrays["poses"], atol=1e-6)
        np.testing.assert_allclose(arrays["votes"], seen.trace.votes[0, :, header["focus"]], atol=1e-5)


@pytest.mark.parametrize("iterations", [1, 4, 10])
@pytest.mark.parametrize("leaky", [False, True])
def test_a_request_can_choose_iterations_and_leaky_routing(
    lab: Running, model: CapsNet, digits: data.Dataset, iterations: int, leaky: bool
) -> None:
    image = digits.images[7].float() / 255
    header, arrays = encode(lab, pixels_of(image), {"iterations": iterations, "leaky": leaky})
    top = model.caps[-1]
    with torch.inference_mode():
        u = model.primary(model.stem(image[None]))
        v = dynamic_routing(u, top.weight, top.routing.bias, iterations=iterations, leaky=leaky).poses
    assert header["routing"] == {"iterations": iterations, "leaky": leaky}
    assert len(arrays["couplings"]) == iterations
    np.testing.assert_allclose(arrays["step_activations"][-1], arrays["activations"], atol=1e-6)
    np.testing.assert_allclose(arrays["activations"], lengths(v)[0], atol=1e-5)


def test_the_routing_options_of_a_request_do_not_affect_the_next(lab: Running, digits: data.Dataset) -> None:
    body = pixels_of(digits.images[5].float() / 255)
    before = encode(lab, body)[1]["activations"]
    assert np.abs(encode(lab, body, {"iterations": 9, "leaky": True})[1]["activations"] - before).max() > 1e-4
    np.testing.assert_array_equal(encode(lab, body)[1]["activations"], before)


def test_couplings_start_uniform_sum_to_one_and_sharpen(lab: Running, digits: data.Dataset) -> None:
    body = pixels_of(digits.images[0].float() / 255)
    _, arrays = encode(lab, body, {"iterations": 6})
    np.testing.assert_allclose(arrays["couplings"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(arrays["couplings"][0], 0.1, atol=1e-6)
    assert arrays["entropy"][0] == pytest.approx(1, abs=1e-5)
    assert np.all(np.diff(arrays["entropy"]) < 0)
    assert np.all(np.abs(arrays["agreement"]) <= 1 + 1e-5)
    _, leaky = encode(lab, body, {"iterations": 6, "leaky": True})
    assert np.all(leaky["couplings"].sum(-1) < 1)
    assert leaky["entropy"][0] == pytest.approx(1, abs=1e-5)


def test_the_plane_of_the_votes_keeps_their_spread(lab: Running, digits: data.Dataset) -> None:
    _, arrays = encode(lab, pixels_of(digits.images[2].float() / 255), focus=4)
    votes = arrays["votes"].astype(np.float64)
    spread = np.linalg.svd(votes - votes.mean(0), compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(arrays["votes2d"], axis=0), spread[:2], rtol=1e-3)
    weight = arrays["couplings"][:, :, 4] * np.linalg.norm(votes, axis=-1)
    np.testing.assert_allclose(arrays["weight"], weight, rtol=1e-4, atol=1e-7)
    plane = np.linalg.lstsq(votes - votes.mean(0), arrays["votes2d"], rcond=None)[0]
    drawn = arrays["outputs2d"] - arrays["origin2d"]
    np.testing.assert_allclose(drawn, arrays["outputs"][:, 4] @ plane, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["no-decoder", "small-cnn", "leaky", "deep", "branched", "two-digits", "colour", "gated", "linear"]
)
def test_every_kind_of_model_answers(lab: Running, name: str) -> None:
    about = next(entry for entry in lab.json("/api/models")["models"] if entry["name"] == name)
    header, arrays = encode(lab, pixels_of(torch.rand(about["image_shape"])), model=name)
    assert len(arrays["activations"]) == len(about["classes"]) == len(header["ranking"])
    if not about["capsules"]:
        assert list(arrays) == ["activations"]
        assert about["routing"] is None
    else:
        steps = header["routing"].get("iterations", 1)
        assert arrays["couplings"].shape == (steps, about["routed"], len(about["classes"]))
        np.testing.assert_allclose(arrays["step_activations"][-1], arrays["activations"], atol=1e-6)
        assert arrays["votes2d"].shape == (about["routed"], 2)
        assert arrays["primary"].shape[0] == np.prod(about["grid"]) * about["primary_types"]


def test_a_routing_of_a_plugin_has_its_own_options_and_couplings(lab: Running) -> None:
    gated = next(entry for entry in lab.json("/api/models")["models"] if entry["name"] == "gated")
    assert gated["routing"]["couplings"] == "gate"
    assert [(option["name"], option["type"]) for option in gated["routing"]["options"]] == [
        ("temperature", "float"),
        ("score", "choice"),
    ]
    body = pixels_of(torch.rand(1, 28, 28))
    _, own = encode(lab, body, model="gated")
    header, other = encode(lab, body, {"temperature": 0.5, "score": "mean"}, model="gated")
    assert header["routing"] == {"temperature": 0.5, "score": "mean"}
    assert own["couplings"].sum(-1).max() > 1.01
    assert np.all(own["entropy"] <= 1 + 1e-5)
    assert np.abs(other["activations"] - own["activations"]).max() > 1e-3
    path = with_routing('{"temperature": 0}') + "&model=gated"
    assert refused(lab, path, body) == (422, "temperature must be a number of at least 0.1, got 0.")


def test_the_decoder_weights_reconstruct_what_torch_reconstructs(lab: Running, model: CapsNet) -> None:
    status, answer, _ = lab.ask(f"/api/models/{NAME}/decoder")
    assert status == 200
    header, arrays = protocol.unpack(answer)
    pose = torch.randn(16) / 4
    poses = torch.zeros(10, 16)
    poses[3] = pose
    x = poses.flatten().numpy()
    for layer in range(header["layers"]):
        x = arrays[f"w{layer}"] @ x + arrays[f"b{layer}"]
        x = np.maximum(x, 0) if layer < header["layers"] - 1 else 1 / (1 + np.exp(-x))
    with torch.inference_mode():
        painted = model.reconstruct(poses[None], torch.tensor([3]))
    assert painted is not None
    np.testing.assert_allclose(x, painted.flatten(), atol=1e-4)


def test_routing_by_hand_is_procedure_1(lab: Running) -> None:
    votes = torch.randn(4, 2, 2)
    found = lab.json("/api/hand", {"votes": votes.tolist(), "options": {"iterations": 5}})
    v, _, trace = DynamicRouting(iterations=5).route(votes[None], None, ALL, trace=True)
    assert trace is not None
    assert trace.logits is not None
    np.testing.assert_allclose(found["outputs"][-1], v[0], atol=1e-6)
    np.testing.assert_allclose(found["couplings"], trace.couplings[:, 0], atol=1e-6)
    np.testing.assert_allclose(found["logits"], trace.logits[:, 0], atol=1e-6)
    s = np.einsum("tij,ijq->tjq", found["couplings"], votes)
    np.testing.assert_allclose(found["sums"], s, atol=1e-5)
    logits = np.array(found["logits"])
    np.testing.assert_allclose(logits[:-1] + np.array(found["agreement"])[:-1], logits[1:], atol=1e-5)  # line 7


@pytest.mark.parametrize("name", ROUTINGS.names())
def test_every_routing_by_hand_is_the_algorithm_itself(lab: Running, name: str) -> None:
    votes = torch.randn(5, 3, 2)
    offer = next(one for one in lab.json("/api/routings")["routings"] if one["name"] == name)
    options = {one["name"]: one["value"] for one in offer["options"]}
    if "iterations" in options:
        options["iterations"] = 4
    found = lab.json("/api/hand", {"votes": votes.tolist(), "routing": name, "options": options})
    torch.manual_seed(SEED)
    routing = ROUTINGS.get(name)(**options)
    routing.build(Sizes(lower=5, lower_dim=2, upper=3, upper_dim=2, types=5))
    routing.reset_parameters()
    routing.expect_spread(SPREAD)
    trace = routing.eval().route(votes[None], None, ALL, trace=True).trace
    assert trace is not None
    for key in ("couplings", "outputs", "activations", "logits", "variances", "oscillators"):
        expected = getattr(trace, key)
        if expected is None:
            assert found[key] is None
        else:
            np.testing.assert_allclose(found[key], expected[:, 0].detach(), atol=1e-6)
    assert offer["own_activations"] == routing.own_activations
    assert offer["learnt"] == bool(list(routing.parameters()))


def test_em_by_hand_activates_the_capsule_whose_votes_agree() -> None:
    agreeing, scattered = [[0.8, 0.5], [0.7, 0.65], [0.85, 0.35]], [[-0.3, 0.6], [0.5, -0.5], [-0.6, -0.3]]
    found = by_hand([list(pair) for pair in zip(agreeing, scattered, strict=True)], "em", {})
    first, second = found["activations"][-1]
    assert first > 0.9 > second
    assert all(row[0] > 0.5 for row in found["couplings"][-1])


def test_every_routing_by_hand_says_what_it_does(lab: Running) -> None:
    summaries = {one["name"]: one["summary"] for one in lab.json("/api/routings")["routings"]}
    assert {"gates", "dynamic", "uniform", "max-min", "self-attention", "inverted-attention", "self-routing"} <= set(
        summaries
    )
    assert all(summary.endswith(".") for summary in summaries.values())
    assert len(set(summaries.values())) == len(summaries)


class Overflowing(UniformRouting):
    """Divides by zero."""

    def route(self, u_hat: torch.Tensor, a: torch.Tensor | None, parents: Parents, trace: bool) -> Routed:
        return super().route(u_hat / 0, a, parents, trace)


class WithoutVotes(Routing):
    """Computes everything in `forward`."""


def test_a_routing_that_cannot_be_run_on_these_votes_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTINGS._entries, "overflowing", Overflowing)
    monkeypatch.setitem(ROUTINGS._entries, "without-votes", WithoutVotes)
    assert "without-votes" not in [one.name for one in offers()]
    with pytest.raises(UserError, match="cannot be run on votes alone"):
        by_hand([PAIR, PAIR], "without-votes", {})
    with pytest.raises(UserError, match="overflows"):
        by_hand([PAIR, PAIR], "overflowing", {})


def test_a_test_digit_comes_with_its_label(lab: Running, digits: data.Dataset) -> None:
    status, answer, _ = lab.ask("/api/digit?index=42")
    assert status == 200
    header, arrays = protocol.unpack(answer)
    assert header["label"] == int(digits.labels[42])
    np.testing.assert_allclose(arrays["pixels"] * 255, digits.images[42, 0], atol=1e-4)


def test_digits_are_found_by_class_in_order_and_at_random(lab: Running, digits: data.Dataset) -> None:
    sevens = (digits.labels == 7).nonzero().flatten().tolist()
    assert lab.json("/api/digits?label=7&random=false&after=")["index"] == sevens[0]
    assert lab.json(f"/api/digits?label=7&random=false&after={sevens[0]}")["index"] == sevens[1]
    assert lab.json(f"/api/digits?label=7&random=false&after={sevens[-1]}")["index"] == sevens[0]
    assert lab.json("/api/digits?label=7")["count"] == len(sevens)
    drawn = {lab.json("/api/digits?label=7&random=true")["index"] for _ in range(12)}
    assert len(drawn) > 4
    assert drawn <= set(sevens)


def test_the_mistakes_are_mistakes(lab: Running, model: CapsNet, digits: data.Dataset) -> None:
    found = lab.json(f"/api/digits?model={NAME}&only=mistakes&random=false")
    assert found["state"] == "ready"
    assert 0 < found["count"] < 200
    index = found["index"]
    assert int(model.predict(digits.images[index]).labels) != int(digits.labels[index])


def test_mistakes_without_a_record_are_counted(lab: Running, digits: data.Dataset) -> None:
    deadline = time.monotonic() + 60
    path, answers = "/api/digits?model=small-cnn&only=mistakes&random=false&after=", 0
    while (found := lab.json(path))["state"] == "counting" and time.monotonic() < deadline:
        encode(lab, pixels_of(digits.images[0].float() / 255), model="small-cnn")
        answers += 1
    assert found["state"] == "ready"
    index = found["index"]
    header, _ = encode(lab, pixels_of(digits.images[index].float() / 255), model="small-cnn")
    assert header["ranking"][0] != int(digits.labels[index])
    assert found["count"] > 5000  # the weights are random
    assert answers > 5  # while it counts


def test_a_model_of_other_images_has_no_test_digits(lab: Running) -> None:
    assert lab.json("/api/digits?model=colour")["state"] == "no data"
    assert refused(lab, "/api/digit?model=colour&index=0")[0] == 404


def picture(kind: str = "PNG", size: tuple[int, int] = (90, 120), mode: str = "L") -> bytes:
    """A dark digit one on light paper."""
    image = Image.new(mode, size, "white")
    image.paste("black", (size[0] // 2 - 6, 20, size[0] // 2 + 6, size[1] - 20))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_photo_is_prepared_for_the_network(lab: Running, kind: str) -> None:
    status, answer, _ = lab.ask(f"/api/photo?model={NAME}", picture(kind))
    assert status == 200, answer
    pixels = protocol.unpack(answer)[1]["pixels"]
    assert pixels.shape == (1, 28, 28)
    assert pixels.max() > 0.9
    assert pixels[0, 0].max() == 0  # ink is bright, paper black
    header, _ = encode(lab, pixels.tobytes(), model=NAME)
    assert header["ranking"][0] == 1


def test_a_photo_fits_other_sizes_too(lab: Running) -> None:
    for name, shape in (("two-digits", (1, 36, 36)), ("colour", (3, 32, 32))):
        status, answer, _ = lab.ask(f"/api/photo?model={name}", picture(mode="RGB"))
        assert status == 200, answer
        assert protocol.unpack(answer)[1]["pixels"].shape == shape


def test_a_photo_of_two_digits_is_prepared_as_the_command_line_does(lab: Running, tmp_path: Path) -> None:
    (tmp_path / "two.png").write_bytes(picture())
    pixels = protocol.unpack(lab.ask("/api/photo?model=multimnist", picture())[1])[1]["pixels"]
    expected = prepare_image(checkpoint.load("multimnist"), str(tmp_path / "two.png"), training_config("multimnist"))
    np.testing.assert_array_equal(pixels, expected.image.float() / 255)


def test_the_page_and_its_files_are_served_with_their_types(lab: Running) -> None:
    status, page, response = lab.ask("/")
    assert status == 200
    assert page.startswith(b"<!doctype html>")
    assert response.headers["content-type"].startswith("text/html")
    status, _, response = lab.ask("/static/js/main.js")
    assert status == 200
    assert response.headers["content-type"].startswith("text/javascript")
    assert response.headers["cache-control"] == "no-cache"
    status, _, _ = lab.ask("/static/js/main.js", headers={"If-None-Match": response.headers["etag"]})
    assert status == 304


def test_every_answer_has_the_security_headers(lab: Running) -> None:
    for path in ("/", "/api/health", "/static/js/main.js", "/nothing"):
        _, _, response = lab.ask(path)
        assert response.headers["content-security-policy"] == SERVED
        assert "unsafe" not in SERVED
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"
        assert response.headers["server"] is None


# Rejections


def with_pixel(value: float) -> bytes:
    image = torch.zeros(1, 28, 28)
    image[0, 3, 3] = value
    return pixels_of(image)


def with_routing(options: str) -> str:
    return f"/api/encode?routing={quote(options)}"


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/api/encode", b"", 422, "3136 bytes"),
        ("/api/encode", BLANK[:-4], 422, "3132 bytes"),
        ("/api/encode", BLANK + b"1234", 422, "3140 bytes"),
        ("/api/encode", with_pixel(float("nan")), 422, "finite"),
        ("/api/encode", with_pixel(float("inf")), 422, "finite"),
        ("/api/encode", with_pixel(255), 422, "0 to 1"),
        ("/api/encode", with_pixel(-1), 422, "0 to 1"),
        ("/api/encode?model=quik-mnist", BLANK, 404, "did you mean 'quick-mnist'?"),
        ("/api/encode?model=../../etc/passwd", BLANK, 404, "there is no model"),
        (with_routing('{"iterations": 0}'), BLANK, 422, "iterations must be an integer from 1 to 10, got 0."),
        (with_routing('{"iterations": 11}'), BLANK, 422, "from 1 to 10, got 11."),
        (with_routing('{"iterations": 1e9}'), BLANK, 422, "an integer from 1 to 10"),
        (with_routing('{"iterations": true}'), BLANK, 422, "an integer from 1 to 10, got true."),
        (with_routing('{"leaky": "perhaps"}'), BLANK, 422, 'leaky must be true or false, got "perhaps".'),
        (with_routing('{"iteration": 3}'), BLANK, 422, "did you mean 'iterations'?"),
        (with_routing('{"bias": true}'), BLANK, 422, "there is no routing option 'bias'"),
        (with_routing("[1]"), BLANK, 422, "routing must be a JSON object"),
        (with_routing("{"), BLANK, 422, "routing must be a JSON object"),
        (with_routing("[" * 999), BLANK, 422, "routing must be a JSON object"),
        (with_routing(" " * 1001), BLANK, 422, "routing"),
        (with_routing('{"leaky": true}') + "&model=small-cnn", BLANK, 422, "there is no routing option 'leaky'"),
        ("/api/encode?focus=10", BLANK, 422, "0 to 9"),
        ("/api/encode?focus=-1", BLANK, 422, "focus"),
        ("/api/encode", bytes(5 << 20), 413, "too large"),
        ("/api/digit", None, 422, "index"),
        ("/api/digit?index=10000", None, 404, "0 to 9999"),
        ("/api/digit?index=-1", None, 422, "index"),
        ("/api/digits?only=some", None, 422, "mistakes"),
        ("/api/digits?label=x", None, 422, "label"),
        ("/api/models/no-decoder/decoder", None, 404, "no decoder"),
        ("/api/models/small-cnn/decoder", None, 404, "no decoder"),
        ("/api/models/unknown/decoder", None, 404, "there is no model"),
        ("/api/photo", b"", 422, "image"),
        ("/api/photo", b"not an image", 422, "PNG"),
        ("/api/photo", picture()[:60], 422, "image"),
        ("/api/photo", picture("TIFF"), 422, "TIFF"),
        ("/api/photo", picture("PNG", (8000, 6000)), 422, "40 million"),
        ("/api/photo", bytes(8_000_001), 413, "too large"),
        ("/static/../server.py", None, 404, "nothing"),
        ("/static/%2e%2e/server.py", None, 404, "nothing"),
        ("/docs", None, 404, "nothing"),
        ("/api/health", b"{}", 405, "method"),
    ],
)
def test_a_wrong_request_gets_a_sentence(lab: Running, path: str, body: bytes | None, status: int, word: str) -> None:
    found, sentence = refused(lab, path, body)
    assert found == status, sentence
    assert word in sentence


PAIR = [[0.1, 0.2], [0.3, 0.4]]


def drawn(votes: object = (PAIR, PAIR), **more: object) -> str:
    return json.dumps({"votes": votes, **more})


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ("", 422, "the body: "),
        ("{", 422, ""),
        ("[" * 30_000, 400, ""),
        ("null", 422, ""),
        ('{"votes": NaN}', 422, "votes: "),
        (drawn([PAIR, [[float("nan"), 1], [1, 1]]]), 422, "votes.1.0.0: "),
        (drawn([PAIR, [[1e300, 1], [1, 1]]]), 422, "votes.1.0.0: "),
        (drawn([PAIR, [["1", 1], [1, 1]]]), 422, "votes.1.0.0: "),
        (drawn([PAIR]), 422, "votes: List should have at least 2 items"),
        (drawn([PAIR] * 7), 422, "votes: List should have at most 6 items"),
        (drawn([PAIR, PAIR[:1]]), 422, "votes.1: List should have at least 2 items"),
        (drawn([PAIR, [*PAIR, [1, 1]]]), 422, "every lower capsule must have the same number of votes."),
        (drawn([PAIR, [[1], [1]]]), 422, "votes.1.0: List should have at least 2 items"),
        (drawn(options={"iterations": 11}), 422, "iterations must be an integer from 1"),
        (drawn(options={"iterations": 2.5}), 422, "iterations must be an integer from 1"),
        (drawn(options={"iterations": [3]}), 422, "options.iterations."),
        (drawn(options={"heads": 2}), 422, "there is no routing option 'heads'"),
        (drawn(routing="uniform", options={"iterations": 3}), 422, "there is no routing"),
        (drawn(routing="dynamics"), 422, "there is no routing 'dynamics'; did you mean"),
        (drawn(routing="capsnet.routing.em"), 422, "there is no routing 'capsnet"),
        (drawn(more=1), 422, "more: "),
        (drawn(pad="x" * 70_000), 413, ""),
    ],
)
def test_invalid_votes_get_a_sentence(lab: Running, body: str, status: int, sentence: str) -> None:
    found, said = refused(lab, "/api/hand", body.encode(), Content_Type="application/json")
    assert found == status
    assert said.startswith(sentence)


def test_only_its_own_address_is_answered(lab: Running) -> None:
    port = lab.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", f"LOCALHOST:{port}"):
        assert lab.ask("/api/health", headers={"Host": host})[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil:{port}", "", ":"):
        assert refused(lab, "/api/health", Host=host)[0] == 403


def test_only_its_own_page_is_answered(lab: Running) -> None:
    port = lab.port
    assert lab.ask("/api/health", headers={"Origin": f"http://127.0.0.1:{port}"})[0] == 200
    for origin in (
        "null",
        "http://evil.example",
        f"https://127.0.0.1:{port}",
        "http://127.0.0.1",
        "http://localhost:1",
    ):
        assert refused(lab, "/api/health", Origin=origin)[0] == 403
        assert refused(lab, "/api/encode", BLANK, Origin=origin)[0] == 403
    for site in ("cross-site", "same-site"):
        assert refused(lab, "/api/models", Sec_Fetch_Site=site)[0] == 403
        assert lab.ask("/", headers={"Sec-Fetch-Site": site})[0] == 200  # a link from another site


@pytest.mark.parametrize(
    ("host", "asked", "known"),
    [
        ("0.0.0.0", "192.168.1.5:8700", True),
        ("0.0.0.0", "evil.example:8700", False),
        ("192.168.1.5", "192.168.1.5:8700", True),
        ("192.168.1.5", "192.168.1.6:8700", False),
        ("::1", "[::1]:8700", True),
        ("127.0.0.1", "[::1]", False),
    ],
)
def test_a_lab_for_others_answers_to_its_address_and_no_other_name(host: str, asked: str, known: bool) -> None:
    assert Guard(lambda *_: None, host, 8700, {}, lambda: None).knows(asked) is known  # type: ignore[arg-type, return-value]


def guarded(app: ASGIApp) -> list[Message]:
    """What is sent for a request whose client has gone."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "headers": [(b"host", b"localhost:8700")]}
    guard = Guard(app, "127.0.0.1", 8700, {}, lambda: None)
    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop already: the browser tests' one
        pool.submit(lambda: asyncio.run(guard(scope, gone, keep))).result()
    return sent


def test_an_internal_error_is_printed_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    sent = guarded(broken)
    assert sent[0]["status"] == 500
    assert (b"content-security-policy", SERVED.encode()) in sent[0]["headers"]
    assert b"secret" not in sent[1]["body"]
    assert json.loads(sent[1]["body"])["detail"].endswith(".")
    assert "a secret" in capsys.readouterr().err


def test_an_upload_that_is_broken_off_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def reading(scope: Scope, receive: Receive, _: Send) -> None:
        await Request(scope, receive).body()

    assert guarded(reading) == []
    assert capsys.readouterr().err == ""


def raw(lab: Running, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", lab.port), timeout=60) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def test_a_body_with_a_wrong_length_is_cut_off(lab: Running) -> None:
    head = f"POST /api/hand HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = raw(lab, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 2)
    assert answer.startswith(b"HTTP/1.1 413")
    assert raw(lab, head.encode() + b"Content-Length: -5\r\n\r\n").startswith(b"HTTP/1.1 4")
    assert raw(lab, b"GET /api/health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403")
    assert raw(lab, b"\x16\x03\x01 not HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")


# Under load


def test_two_hundred_requests_at_once_leave_it_standing_and_small(lab: Running, digits: data.Dataset) -> None:
    body = pixels_of(digits.images[1].float() / 255)
    expected = encode(lab, body, {"iterations": 10})[1]["activations"]
    before = lab.memory()

    def one(_: int) -> int:
        status, answer, response = lab.ask(with_routing('{"iterations": 10}'), body)
        if status == 200:
            np.testing.assert_array_equal(protocol.unpack(answer)[1]["activations"], expected)
        else:
            assert response.headers["retry-after"]
        return status

    with ThreadPoolExecutor(200) as pool:
        statuses = Counter(pool.map(one, range(400)))
    assert set(statuses) <= {200, 503}
    assert statuses[200] >= 64
    assert lab.memory() - before < 100
    assert lab.json("/api/health")["ok"]


def test_two_hundred_large_bodies_at_once_are_not_all_held(lab: Running) -> None:
    before = lab.forget_peak()
    body = bytes(7_900_000)

    def one(_: int) -> int:
        try:
            return lab.ask("/api/photo", body)[0]
        except OSError:  # rejected while sending: the server closes the connection
            return 503

    with ThreadPoolExecutor(50) as pool:
        statuses = Counter(pool.map(one, range(200)))
    assert set(statuses) <= {422, 503, 408}  # 408: on a busy machine a body may be late
    assert statuses[422] + statuses[408] > 0  # some were accepted
    assert lab.memory("VmHWM") - before < 250  # all of them would be 1,580
    assert lab.json("/api/health")["ok"]


def test_a_picture_of_many_pixels_and_few_bytes_takes_little_memory(lab: Running) -> None:
    body = picture(size=(6000, 6000), mode="RGBA")
    before = lab.forget_peak()
    status, answer, _ = lab.ask(f"/api/photo?model={NAME}", body)
    assert status == 200, answer
    assert protocol.unpack(answer)[1]["pixels"].max() > 0.5
    assert lab.memory("VmHWM") - before < 400  # the pixels take 144, preparing all of them would take 720


# The command


def test_a_port_in_use_gets_one_sentence(lab: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--port", str(lab.port), "--no-browser"]) == 2
    assert capsys.readouterr().err == f"capsnet: port {lab.port} is in use: choose another --port or omit it.\n"


def test_a_missing_model_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("quik-mnist", str(tmp_path), str(tmp_path / "x.safetensors")):
        assert main(["lab", model, "--port", "0", "--no-browser"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert model in error


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_without_its_extra_the_lab_says_how_to_install_it(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["lab", "--no-browser"]) == 2
    assert capsys.readouterr().err == "capsnet: the Lab needs FastAPI and uvicorn: pip install 'capsnet[lab]'.\n"


def test_ctrl_c_stops_it_quietly() -> None:
    words = [sys.executable, "-m", "capsnet", "lab", "--no-browser"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:87\d\d/", started)
    assert address, started
    with urlopen(f"{address[0]}api/health") as answer:  # the server handles signals from now on
        assert json.load(answer)["ok"]
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0
    assert complaints == ""
