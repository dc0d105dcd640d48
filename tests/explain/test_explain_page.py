"""The page of explain: what it shows, that it is whole, and how a browser lays it out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from piecework.explain.elements import color, sides
from piecework.explain.page import report_page
from piecework.explain.report import CaptureReport, PassEntry, Report
from piecework.explain.rewrites import group_alike

VOID = {"meta", "br", "hr", "img", "link", "input"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Tags(HTMLParser):
    """Notes every element, and that all are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def of(self, tag: str, kind: str) -> list[dict[str, str | None]]:
        """The attributes of elements of this tag and class."""
        return [a for t, a in self.found if t == tag and kind in (a.get("class") or "").split()]


def test_the_page_draws_every_piece_and_hole(explained: Callable[..., Report]) -> None:
    report = explained("qwen3_moe")
    page = report_page(report)
    tags = Tags(page)
    assert tags.open == []
    pieces, holes = tags.of("a", "piece"), tags.of("span", "hole")
    assert len(pieces) == 5 + 1, "five of the body, one of the head"
    assert [hole["title"] for hole in holes] == [f"piecework::attention, layer {n}" for n in range(4)]
    kinds = [re.search(r"kind-(\d)", piece["class"] or "") for piece in pieces]
    assert [kind[1] for kind in kinds if kind] == ["0", "1", "2", "1", "3", "0"]
    colors = [re.search(r"--c:([^;]+)", piece["style"] or "") for piece in pieces]
    assert len({found[1] for found in colors[:5] if found}) == 4, "a colour for each kind"
    assert pieces[1]["title"] == "piece 1, like 1 other: 11 ops"


def test_the_page_is_one_file_without_network_or_scripts(explained: Callable[..., Report]) -> None:
    page = report_page(explained("llama"))
    tags = Tags(page)
    assert {tag for tag, _ in tags.found} & {"script", "link", "img", "iframe", "object"} == set()
    assert not re.search(r"https?:|url\(|@import|src=", page)
    targets = {a["id"] for _, a in tags.found if "id" in a}
    links = [a["href"] or "" for tag, a in tags.found if tag == "a"]
    assert links and all(link.startswith("#") and link[1:] in targets for link in links)


def test_names_from_outside_are_escaped(explained: Callable[..., Report]) -> None:
    report = replace(explained("llama"), model='<script>alert("x")</script>')
    page = report_page(report)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert Tags(page).open == []


def test_every_rewrite_is_there_before_and_after(
    command: Callable[..., str], configured: Callable[..., Path], acme: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    found = json.loads(command(str(configured("llama")), "--json", "--html", str(page)))
    text = page.read_text(encoding="utf-8")
    plain = re.sub(r"</?mark>", "", text)
    entries = {entry["name"]: entry for entry in found["programs"][0]["passes"]}
    rewrites = entries["swap_add"]["rewrites"]
    assert len(rewrites) == 6
    for before, after in rewrites:
        assert all(line in plain for line in (*before, *after))
    assert "4 more like it" in text, "all but the first add a residual to a linear layer"
    assert "error" in text and "drop_add" in text
    assert Tags(text).open == []


def test_alike_rewrites_stand_behind_the_first() -> None:
    rewrites = (
        (("add = aten::add(a, b)",), ("add_9 = aten::add(b, a)",)),
        (("add_1 = aten::add(a_4, b_1)",), ("add_10 = aten::add(b_1, a_4)",)),
        (("add_2 = aten::mul(a, b)",), ("x = aten::add(b, a)",)),
    )
    assert [len(group) for group in group_alike(rewrites)] == [2, 1]


def test_what_changed_in_a_line_is_marked() -> None:
    made = sides(["split(x, [4], -1)"], ["split(x, [4], 1)"])
    assert "[4], <mark>-</mark>1)" in made and '<pre class="came">split(x, [4], 1)</pre>' in made
    assert "<mark>" not in sides(["a"], ["b", "c"])
    assert "nothing" in sides(["a < b"], []) and "a &lt; b" in sides(["a < b"], [])


def test_colours_beyond_the_palette_differ() -> None:
    assert len({color(n) for n in range(40)}) == 40


def test_what_goes_wrong_is_on_the_page(explained: Callable[..., Report]) -> None:
    report = explained("llama")
    refused = replace(report.body.passes[0], status="refused", error=float("inf"), reason="too far off")
    skipped = PassEntry("other", "skipped", "not for cpu", 0, None, {}, 0, 0, 0.0, "bitwise", None, ())
    kind = replace(report.body.kinds[0], failure="no such luck")
    body = replace(report.body, passes=(refused, skipped), kinds=(kind, *report.body.kinds[1:]))
    dropped = (("full", (2, 4), "no room"),)
    capture = CaptureReport(
        "full", "eager", ("full",), ("eager",), 2, {"full": (1,)}, 1, 10, 5, 5, dropped, "run somehow"
    )
    page = report_page(replace(report, programs=(body,), capture=capture))
    for part in (
        "too far off",
        "not for cpu",
        "no such luck",
        "no room",
        "Steps outside graphs run somehow.",
        '<span class="chip bad">inf</span>',
    ):
        assert part in page, part
    assert Tags(page).open == []


def chromium(page: Path, folder: Path, *flags: str) -> str:
    """Run Chromium on a page and return its standard output."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *FLAGS, profile, *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


MEASURE = """
<script>
const box = e => e.getBoundingClientRect();
const seen = [...document.querySelectorAll('.program .piece')].map(box);
const style = e => getComputedStyle(e).backgroundColor;
document.title = JSON.stringify({
  pieces: seen.length,
  visible: seen.filter(b => b.width > 20 && b.height > 20).length,
  overlapping: seen.filter((b, i) => i && b.top === seen[i-1].top && b.left < seen[i-1].right).length,
  colors: new Set([...document.querySelector('#program .card').querySelectorAll('.piece')].map(style)).size,
  wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  paper: style(document.body),
});
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 420])
def test_a_browser_lays_it_out(
    explained: Callable[..., Report], tmp_path: Path, dark: bool, width: int
) -> None:
    page = tmp_path / "page.html"
    text = report_page(explained("qwen3_moe", num_hidden_layers=12, mlp_only_layers=[1, 5]))
    page.write_text(text.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    flags = [f"--window-size={width},2000", *(["--force-dark-mode"] if dark else [])]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = chromium(page, tmp_path, *flags, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    found = json.loads(title[1])
    assert (found["pieces"], found["visible"], found["overlapping"]) == (14, 14, 0)
    assert found["colors"] == 4
    assert found["wider"] <= 0, "nothing sticks out to the right"
    lightness = sum(map(int, re.findall(r"\d+", found["paper"])[:3]))
    assert (lightness < 200) if dark else (lightness > 600)
    shot = tmp_path / "page.png"
    chromium(page, tmp_path, *flags, f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000, "it is not blank"
