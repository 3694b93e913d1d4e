"""Ablations: variants are compared with a base on the same seeds, and resume after any interruption."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.experiments import ablation
from capsnet.experiments.ablation import AUTHORS, BASE, VARIANTS, Ablation, chosen, outcomes
from capsnet.experiments.core.plan import Record
from capsnet.files import Lock
from capsnet.io.records import Certificate
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from capsnet.train.presets import get_preset

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_every_named_variant_changes_the_papers_network_or_is_part_of_it() -> None:
    made = Ablation("x", get_preset("paper"), chosen(["all"], get_preset("paper"))).configs()
    assert set(made) == {BASE, "together", *VARIANTS} - {"exponential"}
    assert made["together"].model == get_preset("official").model
    assert made["together"].loss == get_preset("official").loss
    assert len({str(to_dict(config)) for config in made.values()}) == len(made)
    some = Ablation("x", get_preset("paper"), ("bias", "init")).configs()
    assert list(some) == [BASE, "bias", "init", "init+bias"]
    assert set(AUTHORS) <= set(VARIANTS)


def test_variants_of_your_own_are_spelt_in_one_way() -> None:
    words = ["lr = 0.002", "+ epochs=5", "batch-size=64", "epochs=5+lr=2e-3", "class_dim=8"]
    assert chosen(words, Config()) == ("epochs=5+lr=0.002", "batch_size=64", "model.class_dim=8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name at least one variant"),
        (["biass"], "did you mean 'bias'"),
        (["lr=x"], "lr takes a number, got 'x'"),
        (["lr=-1"], "lr=-1.0 is too small"),
        (["seed=1"], "same for all trainings"),
        (["bias", "--seeds", "0"], "--seeds is the number of trainings per variant"),
        (["bias", "--name", "../x"], "is not a name"),
        (["bias", "--validation", "0"], "set --validation above 0"),
        (["leaky", "--preset", "baseline-mnist"], "there is no field 'model.routing.leaky'"),
        (["lr=0.1", "--minutes", "1"], "--minutes is not a flag of capsnet ablate"),
        (["+".join(f"augment.{n}=0.1" for n in ("scale", "shear", "elastic", "share", "until", "rotate"))
          + "+loss.present=0.8+loss.absent=0.2+loss.down_weight=0.3+loss.reconstruction=0.1+weight_decay=0.1+clip=1"],
         "at most 200 characters"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_the_help_names_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ablate", "--help"])
    assert set(VARIANTS) <= set(capsys.readouterr().out.replace(",", " ").split())


def test_an_ablation_trains_what_is_new_prints_its_table_and_leaves_no_folder_behind(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "lr=0.0001", "--seeds", "2", "--name", "mine", *tiny_flags]) == 0
    out = capsys.readouterr().out
    assert "lr 0.003 → 0.0001" in out
    assert "results/ablation/mine.png" in out
    first = json.loads(Path("results/ablation/mine.json").read_text())
    assert [record["name"] for record in first["rows"]] == [
        f"{name}-seed{seed}" for seed in (0, 1) for name in ("base", "lr=0.0001")
    ]
    assert [path.name for path in Path("runs/ablation/mine-own-images").iterdir()] == [".lock"]
    assert main(["ablate", "lr=0.0001", "class_dim=8", "--seeds", "2", "--name", "mine", *tiny_flags, "--json"]) == 0
    told, second = json.loads(capsys.readouterr().out), json.loads(Path("results/ablation/mine.json").read_text())
    assert second["rows"][:4] == first["rows"]
    assert [o["name"] for o in told["outcomes"]] == ["base", "lr=0.0001", "model.class_dim=8"]
    assert [o["seeds"] for o in told["outcomes"]] == [[0, 1]] * 3
    committed = json.loads((Path(__file__).parents[2] / "results/ablation/paper.json").read_text())
    assert committed.keys() == second.keys()
    assert committed["rows"][0].keys() <= second["rows"][0].keys()


def test_an_interrupted_ablation_resumes_with_the_same_command(tiny_flags: list[str]) -> None:
    words = ["ablate", "lr=0.0001", "--seeds", "1", "--name", "mine", *tiny_flags, "--epochs", "60"]
    command = [sys.executable, "-m", "capsnet", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        metrics = Path("runs/ablation/mine-own-images/lr=0.0001-seed0/metrics.jsonl")
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "resume with: capsnet ablate lr=0.0001" in err
    base = json.loads(Path("results/ablation/mine.json").read_text())["rows"]
    assert [record["name"] for record in base] == ["base-seed0"]
    begun = len(metrics.read_text().splitlines())
    assert begun < 60
    assert main(words) == 0
    rows = json.loads(Path("results/ablation/mine.json").read_text())["rows"]
    assert rows[0] == base[0]
    assert len(rows[1]["outcome"]["curve"]) == 60


def test_variants_that_fail_do_not_stop_the_others_and_the_table_is_shown(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "primary_kernel=99", "lr=0.001", "--seeds", "1", "--name", "mine", *tiny_flags]) == 2
    out, err = capsys.readouterr()
    assert "lr 0.003 → 0.001" in out
    assert "model.primary_kernel=99-seed0 failed: " in err
    assert [path.name for path in Path("results/ablation").glob("*.json")] == ["mine.json"]
    assert not list(Path("runs/ablation").glob("*/model*"))


def test_where_the_base_fails_with_a_later_seed_the_table_of_the_others_is_shown(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = Path("runs/ablation/mine-own-images/base-seed1")
    taken.mkdir(parents=True)
    lock = Lock(taken)  # another training holds the folder
    assert main(["ablate", "lr=0.001", "--seeds", "3", "--name", "mine", *tiny_flags]) == 2
    lock.release()
    out, err = capsys.readouterr()
    assert "lr 0.003 → 0.001" in out
    assert "base-seed1 failed" in err
    rows = json.loads(Path("results/ablation/mine.json").read_text())["rows"]
    assert {record["seed"] for record in rows} == {0, 2}  # without its base a seed has nothing to compare
    assert main(["ablate", "lr=0.001", "--seeds", "3", "--name", "mine", *tiny_flags, "--json"]) == 0
    assert [sorted(o["seeds"]) for o in json.loads(capsys.readouterr().out)["outcomes"]] == [[0, 1, 2]] * 2


def test_where_the_base_fails_at_once_nothing_else_is_trained(
    tiny_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "lr=0.001", "--name", "mine", *tiny_flags, "--model.primary-kernel", "99"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("capsnet: ")
    assert not Path("results").exists()


def test_trainings_of_other_settings_or_images_are_not_mixed(tiny_config: Config) -> None:
    plan = Ablation("x", tiny_config, ("lr=0.001",), seeds=1)
    ablation.conduct(plan)
    with pytest.raises(UserError, match=r"x\.json has base-seed0 with other settings than these: choose another"):
        ablation.conduct(replace(plan, base=replace(tiny_config, epochs=1)))
    with (
        Lock(ablation.PLACE.run("x", tiny_config.preset, "")),
        pytest.raises(UserError, match=r"another process is using runs/ablation/x-.*: wait until it ends"),
    ):
        ablation.conduct(plan)
    shutil.copy(next(Path("photos/cat").iterdir()), "photos/cat/zzz.png")
    with pytest.raises(UserError, match=r"x\.json was trained before the images.* changed: choose another"):
        ablation.conduct(plan)


def record(method: str, seed: int, error: float, n: int = 100) -> Record:
    outcome = {"error_percent": error, "n": n}
    config = to_dict(replace(Config(), seed=seed, lr=0.001 if method == BASE else 0.002))
    birth = Certificate(config=config)
    return Record(method=method, seed=seed, outcome=outcome, seconds=1.0, certificate=birth)


def test_differences_are_paired_by_seed_and_only_clear_ones_are_marked() -> None:
    noisy = [record("base", s, e) for s, e in enumerate((10.0, 20.0, 30.0))]
    better = [record("lr=0.002", s, e) for s, e in enumerate((4.0, 14.0, 24.5))]
    alone = [record("average=0.9", 7, 1.0)]  # without a base of its seed
    base, changed = outcomes([*better, *noisy, *alone])
    assert (base.name, base.error_percent, base.difference) == ("base", 20.0, 0.0)
    assert changed.difference == pytest.approx(-5.8333)
    assert changed.flags == ["--lr", "0.002"]
    assert changed.half_interval_95 == pytest.approx(4.303 * (5.8333**0.5) / 3**0.5, abs=0.001)  # by counting
    assert not changed.sure
    large = [record("base", s, e, 10_000) for s, e in enumerate((10.0, 20.0, 30.0))]
    sure = outcomes([*large, *(record("lr=0.002", s, e, 10_000) for s, e in enumerate((4.0, 14.0, 24.5)))])[1]
    assert sure.sure
    assert "-5.83 ± 0.72 *" in ablation.table([base, sure]).rows[1]
    single = outcomes([record("base", 0, 10.0), record("lr=0.002", 0, 9.999)])[1]
    assert single.half_interval_95 is None
    assert ablation.table([single]).rows[0][3] == "+0.00"  # no minus for what rounds to nothing
