"""What the page promises: one file that needs nothing else, tells the truth and trusts no name."""

from __future__ import annotations

import base64
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from capsnet.data import Dataset
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation, evaluate
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.config import CapsNetConfig, CNNConfig
from capsnet.models.registry import MODELS, build
from capsnet.plugins import load_plugin
from capsnet.report import html
from capsnet.routing import options_for
from capsnet.routing.options import DynamicOptions
from capsnet.train.config_records import to_dict
from capsnet.train.presets import get_preset

SMALL: dict[str, Any] = {
    **{"stem_channels": (4,), "stem_kernels": (5,), "stem_strides": (1,), "primary_types": 2},
    **{"primary_kernel": 5, "class_dim": 4, "decoder": (8,)},
}
NASTY = ("<script>alert('x')</script>", '" onerror="alert(1)', "$\\frac{1}$ & <b>猫</b>")
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """A page read as a browser would: its tags with their attributes, its text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def some_data(
    shape: tuple[int, int, int] = (1, 12, 12), classes: tuple[str, ...] = tuple("012"), **more: Any
) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, *shape), generator=generator, dtype=torch.uint8)
    labels = more.get("labels", torch.arange(30) % len(classes))
    return Dataset(images, labels, classes, more.get("name", "toys"))


def judged(dataset: Dataset, wrong: int = 4) -> Evaluation:
    """An evaluation with the first `wrong` examples wrong and the others right."""
    lengths = dataset.targets * 0.7 + 0.1
    lengths[:wrong] = lengths[:wrong].roll(1, 1)
    return Evaluation(dataset.name, lengths, dataset.targets, lengths > 0.5, dataset.classes, dataset.multi_label)


def certificate(**more: Any) -> Certificate:
    return checkpoint.certificate(to_dict(get_preset("quick")), 160.0, device="cpu", **more)


def history() -> list[dict[str, Any]]:
    return [
        {
            "kind": "train",
            "step": k,
            "epoch": k / 9,
            "loss": 1 / k,
            "classification": 1 / k,
            "reconstruction": 9.0,
            "lr": 0.1,
        }
        for k in range(1, 10)
    ]


def dot(*_: object, **__: object) -> bytes:
    """A picture of one pixel, for tests that read words."""
    content = io.BytesIO()
    Image.new("RGB", (1, 1)).save(content, "png")
    return content.getvalue()


def written(folder: Path, config: Any, dataset: Dataset, *, pictures: bool = False, **more: Any) -> tuple[Page, str]:
    torch.manual_seed(0)
    model = build(config).eval()
    model.classes = dataset.classes
    given = {"evaluation": judged(dataset), "history": history(), "certificate": certificate(), **more}
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:
            patch.setattr(html.figures, "render", dot)
        path = html.write_report(folder, model=model, dataset=dataset, **given)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    return page, text


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Page, str]:
    return written(tmp_path_factory.mktemp("plain"), CapsNetConfig((1, 12, 12), 3, **SMALL), some_data(), pictures=True)


def test_the_page_needs_nothing_from_outside(plain):
    page, text = plain
    addresses = [a[k] for _, a in page.tags for k in ("src", "href", "srcset", "data", "action") if k in a]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "http://" not in text
    assert "https://" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert "url(" not in html.CSS
    assert "@import" not in html.CSS
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_the_page_is_small_enough_for_a_mail(plain):
    assert len(plain[1].encode()) < 2_000_000


def test_every_picture_is_whole_has_words_and_its_own_proportions(plain):
    images = plain[0].all("img")
    assert len(images) >= 6
    for image in images:
        picture = Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
        picture.load()
        assert len(image["alt"]) > 20
        assert picture.width / picture.height == pytest.approx(int(image["width"]) / int(image["height"]), rel=0.01)


def test_the_page_holds_the_error_with_its_interval_and_its_origin(plain):
    text = plain[0].text
    low, high = judged(some_data()).summary()["error_percent_interval_95"]
    for expected in ("13.3 %", f"{low:.1f} to {high:.1f} %", "86.7 %", "4 of 30", "toys", "preset quick"):
        assert expected in text
    for expected in ("2 min 40 s", "AdamW", "3 iterations", "12×12 grey", torch.__version__):
        assert expected in text


def test_the_page_keeps_the_whole_certificate_as_json(plain):
    (block,) = [part for part in plain[1].split("<pre>") if part.startswith("{")]
    assert json.loads(Page("<pre>" + block.partition("</pre>")[0] + "</pre>").text) == json.loads(
        json.dumps(certificate().to_json())
    )


def test_the_page_follows_the_readers_light_and_dark_and_small_screens():
    assert "prefers-color-scheme: dark" in html.CSS
    assert "max-width: 560px" in html.CSS


def test_names_from_data_are_text_and_never_markup(tmp_path):
    config = CapsNetConfig((1, 12, 12), 3, **SMALL)
    page, text = written(tmp_path, config, some_data(classes=NASTY, name="<img src=x onerror=alert(1)>"))
    assert not page.all("script")
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    for name in NASTY:
        assert name in page.text
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "<b>猫" not in text


def test_a_folder_with_a_strange_name_is_quoted_in_the_commands(tmp_path):
    folder = tmp_path / "my run; rm -rf <b>"
    page, _ = written(folder, CapsNetConfig((1, 12, 12), 3, **SMALL), some_data())
    assert f"capsnet predict '{folder}' photo.png" in page.text


def test_a_model_without_decoder_has_no_reconstructions_and_the_page_says_so(tmp_path, plain):
    page, _ = written(tmp_path, CapsNetConfig((1, 12, 12), 3, **{**SMALL, "decoder": ()}), some_data())
    assert "no decoder" in page.text
    assert "The couplings say" in page.text
    assert "Pose dimensions" not in page.text
    assert "--what tweaks" not in page.text
    assert "Pose dimensions" in plain[0].text


def test_a_cnn_has_no_capsules_to_show_and_the_page_says_so(tmp_path):
    page, _ = written(tmp_path, CNNConfig((1, 12, 12), 3, (4,), (3,), (2,), (8,)), some_data())
    assert "no capsules" in page.text
    assert "couplings" not in page.text
    assert len(page.all("img")) == 3


def test_a_model_and_a_routing_of_plugins_have_a_page(tmp_path, forget_plugins):
    for plugin in ("my_model.py", "my_routing.py"):
        load_plugin(Path(__file__).parents[1] / "plugins" / plugin)
    config = MODELS.get("shallow").Config((1, 12, 12), 3, types=2, routing=options_for("sharp"))
    page, _ = written(tmp_path, config, some_data())
    assert "2 types of primary capsules → 3 class capsules" in page.text
    assert "no decoder" in page.text
    assert "The couplings say" in page.text


def test_rgb_images_and_stacked_capsules_have_a_page(tmp_path):
    config = CapsNetConfig(
        (3, 14, 18), 2, **{**SMALL, "hidden_caps": ((5, 4),), "routing": DynamicOptions(leaky=True, iterations=1)}
    )
    page, _ = written(tmp_path, config, some_data((3, 14, 18), ("cat", "dog")))
    assert "14×18 RGB" in page.text
    assert len(page.all("img")) == 7


def test_images_with_several_labels_or_none_have_a_page(tmp_path):
    labels = torch.rand(30, 3, generator=torch.Generator().manual_seed(3)) > 0.6
    labels[5] = False
    page, _ = written(tmp_path, CapsNetConfig((1, 12, 12), 3, **SMALL), some_data(labels=labels))
    assert "only if exactly its classes are predicted" in page.text
    assert "in different colours" in page.text


def test_a_perfect_result_and_a_hopeless_one_have_a_page(tmp_path):
    config, dataset = CapsNetConfig((1, 12, 12), 3, **SMALL), some_data()
    perfect, _ = written(tmp_path, config, dataset, evaluation=judged(dataset, 0))
    assert "There are no confusions." in perfect.text
    hopeless, _ = written(tmp_path, config, dataset, evaluation=judged(dataset, 30))
    assert "100.0 %" in hopeless.text
    assert "No example was classified correctly" in hopeless.text


def test_without_history_and_with_a_bare_certificate_the_page_still_stands(tmp_path):
    page, _ = written(
        tmp_path, CapsNetConfig((1, 12, 12), 3, **SMALL), some_data(), history=[], certificate=Certificate()
    )
    assert "No training record" in page.text
    assert "13.3 %" in page.text


def test_a_real_evaluation_fits(tmp_path):
    dataset = some_data()
    model = build(CapsNetConfig((1, 12, 12), 3, **SMALL))
    evaluation = evaluate(model, dataset)
    path = html.write_report(
        tmp_path, model=model, evaluation=evaluation, dataset=dataset, history=[], certificate=certificate()
    )
    assert f"{evaluation.errors} of 30" in Page(path.read_text()).text


def test_an_evaluation_of_other_data_is_refused(tmp_path):
    other = judged(some_data().subset(torch.arange(29)))
    with pytest.raises(UserError, match="29 examples"):
        written(tmp_path, CapsNetConfig((1, 12, 12), 3, **SMALL), some_data(), evaluation=other)
    assert not list(tmp_path.iterdir())


def test_the_same_run_gives_the_same_page(tmp_path):
    config, dataset = CapsNetConfig((1, 12, 12), 3, **SMALL), some_data()
    pages = [written(tmp_path, config, dataset, pictures=True)[1] for _ in range(2)]
    assert pages[0] == pages[1]


def test_a_network_of_branches_is_described_as_one() -> None:
    assert "3 branches" in build(get_preset("best").model).describe()
    assert "branches" not in build(get_preset("quick").model).describe()
