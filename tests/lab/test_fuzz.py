"""Generated requests, valid and invalid: the Lab answers them or rejects them with a sentence."""

from __future__ import annotations

import json
from urllib.parse import urlencode

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from capsnet.lab import protocol
from lab_server import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = {
    "/api/health": "GET",
    "/api/models": "GET",
    "/api/models/{name}/decoder": "GET",
    "/api/encode": "POST",
    "/api/digit": "GET",
    "/api/digits": "GET",
    "/api/photo": "POST",
    "/api/routings": "GET",
    "/api/hand": "POST",
}
QUIET = settings(
    max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def description(lab: Running) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{lab.url}openapi.json")


def fuzz(description: schemathesis.BaseSchema, path: str, mode: GenerationMode, checks: list) -> int:
    """Send generated requests to an address and return their number."""
    asked = 0

    @QUIET
    @given(case=description[path][OPERATIONS[path]].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        nonlocal asked
        asked += 1
        case.call_and_validate(checks=checks)

    ask()
    return asked


@pytest.mark.parametrize("path", OPERATIONS)
def test_a_request_as_described_is_answered_as_described(description: schemathesis.BaseSchema, path: str) -> None:
    assert fuzz(description, path, GenerationMode.POSITIVE, CHECKS)


@pytest.mark.parametrize("path", ["/api/encode", "/api/digit", "/api/digits", "/api/photo", "/api/hand"])
def test_a_request_that_is_not_as_described_is_refused(description: schemathesis.BaseSchema, path: str) -> None:
    empty_means_nothing = path == "/api/digits"  # label= means any label
    checks = CHECKS if empty_means_nothing else [*CHECKS, negative_data_rejection]
    assert fuzz(description, path, GenerationMode.NEGATIVE, checks)


@given(
    pixels=st.lists(st.floats(width=32), min_size=1, max_size=8) | st.just([0.0, 0.5, 1.0]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "routing": st.fixed_dictionaries(
                {}, optional={"iterations": st.integers(-1, 12) | st.none(), "leaky": st.booleans() | st.floats()}
            ).map(json.dumps)
            | st.text(max_size=20),
            "focus": st.integers(-1, 11),
            "model": st.sampled_from(["quick-mnist", "../weights/quick-mnist", "%00", "ü"]),
        },
    ),
)
@settings(QUIET)
def test_any_pixels_get_numbers_or_a_sentence(lab: Running, pixels: list[float], options: dict[str, object]) -> None:
    body = np.resize(np.array(pixels, "<f4"), 784).tobytes()
    status, answer, _ = lab.ask(f"/api/encode?{urlencode(options)}", body)
    assert status in (200, 404, 422)
    if status == 200:
        _, arrays = protocol.unpack(answer)
        assert all(np.isfinite(array).all() for array in arrays.values())
        assert np.all(arrays["activations"] <= 1)
    else:
        assert isinstance(json.loads(answer)["detail"], str)


@given(
    body=st.binary(max_size=200), begins=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM"])
)
@settings(QUIET)
def test_any_bytes_are_an_image_or_get_a_sentence(lab: Running, begins: bytes, body: bytes) -> None:
    assert lab.ask("/api/photo", begins + body)[0] in (200, 422)


def test_the_schema_lists_every_address(lab: Running) -> None:
    assert set(lab.json("/openapi.json")["paths"]) == set(OPERATIONS)


def test_the_lab_is_still_running_afterwards(lab: Running) -> None:
    assert lab.json("/api/health")["ok"]
    assert lab.memory() < 1500
