"""Two processes compute what one does: losses, norms, dropout, evaluations; and all of them know what rank 0 says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from bars import CONFIGS, TINY, toy_set, toy_splits

from capsnet.errors import UserError
from capsnet.evaluate import evaluate
from capsnet.group.base import Group
from capsnet.group.launch import Launch, launch
from capsnet.group.member import meet, wait_for_all
from capsnet.group.watch import Watch, missing_text
from capsnet.models.registry import build
from capsnet.nn.shares import Share, batch_moments, prepare, within
from capsnet.train import loop

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_ranks(words: list[str], size: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes of a group, started as torchrun starts them."""
    port = str(free_port())
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": port, "WORLD_SIZE": str(size), **environment}  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *words], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("pair")
    for process in start_ranks([str(HERE / "ranks.py"), str(folder)]):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_have_the_losses_of_one(pair: list[dict[str, Any]], name: str) -> None:
    alone, together = ranks.losses_of(CONFIGS[name]), pair[0]["trained"][name]
    assert torch.tensor(together["losses"]).sub(torch.tensor(alone["losses"])).abs().max() < 1e-4
    assert together["names"] == alone["names"]
    assert together["error"] == alone["error"]


def test_both_processes_end_with_the_same_bits(pair: list[dict[str, Any]]) -> None:
    for name in CONFIGS:
        assert pair[0]["trained"][name]["weights"] == pair[1]["trained"][name]["weights"]


def test_a_synchronised_norm_is_the_norm_of_the_whole_batch(pair: list[dict[str, Any]]) -> None:
    norm, x, dy = ranks.norm_case()
    x.requires_grad_()
    y = norm(x)
    y.backward(dy)
    expected = (y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var)
    for found, wanted in zip(pair[0]["norm"]["tensors"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_synchronised_statistics_is_the_derivative() -> None:
    alone = Share(0, 5, 5, lambda tensor: tensor[None], lambda tensor: tensor)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with within(alone):
        assert torch.autograd.gradcheck(lambda rows: batch_moments(rows)[:2], (x,))


def test_an_evaluation_counts_every_image_once(pair: list[dict[str, Any]]) -> None:
    run = loop.assemble(CONFIGS["capsnet"], Path(), toy_splits())
    for n, limit in ((21, None), (21, 5), (1, None)):
        alone = evaluate(run.model, toy_set(n, 2), batch_size=4, limit=limit)
        for rank in pair:
            found = rank["counted"][f"{n} {limit}"]
            assert found["n"] == alone.n
            torch.testing.assert_close(torch.tensor(found["activations"]), alone.activations)


def test_all_know_what_rank_0_says(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["told"]["value"] == {"rank": 0, "size": 1}  # rank 0 makes it alone
        assert rank["told"]["w"] == 0
        assert "rank 1 has other images of bars than rank 0" in rank["told"]["refused"]


@pytest.mark.slow
def test_every_preset_a_teacher_and_an_init_train_in_two_processes(tmp_path: Path) -> None:
    for process in start_ranks([str(HERE / "ranks.py"), str(tmp_path), "presets"]):
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, out + err
    together = [json.loads((tmp_path / f"presets{rank}.json").read_text()) for rank in range(2)]
    assert together[0] == together[1]
    for name, losses in ranks.losses_of_presets().items():
        assert together[0][name] == pytest.approx(losses, rel=1e-4), name


def test_parts_of_a_batch_take_the_step_of_the_whole() -> None:
    whole = CONFIGS["uneven"]  # 7 images in 3 parts
    config = replace(whole, model=replace(TINY, stem_norm=False))
    parts = ranks.losses_of(replace(config, accumulate=3))["losses"]
    assert torch.tensor(parts).sub(torch.tensor(ranks.losses_of(config)["losses"])).abs().max() < 1e-5


def test_a_batch_that_is_too_small_to_share_is_refused() -> None:
    with pytest.raises(UserError, match="a batch of 3 images cannot be divided into 4 × 1 shares"):
        Group().shares(3, parts=4)


def test_shared_layers_compute_what_they_did_in_one_process() -> None:
    x = torch.rand(4, 1, 12, 12)
    model = build(TINY).train()
    before = model(x).activations
    prepare(model)
    assert torch.equal(model(x).activations, before)


def test_the_limit_of_waiting_is_a_number_of_seconds() -> None:
    place = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="CAPSNET_WAIT is 'soon'"):
        launch(place | {"CAPSNET_WAIT": "soon"})
    assert launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) is None


def test_whoever_is_missing_is_named() -> None:
    places = {0: (9, "step 8", "ann"), 1: (5, "step 4", "bob"), 2: (-1, "", "")}
    text = missing_text(places, 9, "step 8", 30)
    assert text.startswith("rank 1 on bob and rank 2 are missing: they have not reached step 8 within 30 s")
    assert "all 1 processes reached step 8" in missing_text({0: (9, "step 8", "ann")}, 9, "step 8", 30)


def test_a_new_attempt_does_not_hear_the_answers_of_the_last() -> None:
    """Each attempt has a number that all of its processes know, although a question of a dead one is still there."""
    store = dist.HashStore()  # outlives the attempts, as that of torchrun does
    first, second = (Launch(rank, 2, 0, 0, None, 20.0) for rank in range(2))
    met = []

    def join(launch: Launch) -> None:
        number, restarts = meet(launch, store)
        met.append((number, restarts))
        launch = replace(launch, restarts=restarts)
        wait_for_all(launch, Watch(launch, *[dist.PrefixStore(str(number), store)] * 2), store, number)

    for attempt in (1, 2):
        store.set("capsnet/asks/1", "a word of a process that was killed")
        threads = [threading.Thread(target=join, args=[launch]) for launch in (second, first)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert met[-2:] == [(attempt, attempt - 1)] * 2


@pytest.mark.slow
def test_a_process_that_waits_names_the_one_that_never_came() -> None:
    waiting, absent = start_ranks([str(HERE / "ranks.py"), "/nowhere"], CAPSNET_WAIT="4")
    absent.kill()
    absent.communicate()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    assert err.count("capsnet: ") == 1
    assert "rank 1 of 2 has not started within 4 s" in err


@pytest.mark.slow
def test_the_others_say_that_rank_0_never_came() -> None:
    absent, waiting = start_ranks([str(HERE / "ranks.py"), "/nowhere"], CAPSNET_WAIT="4")
    absent.kill()
    absent.communicate()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    assert "does not answer" in err
    assert "is rank 0 running?" in err
