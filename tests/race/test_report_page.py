"""The report in a real browser: it needs no network, does what its controls say, and shows the summary's numbers."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from race_summary import CONTESTANTS, LAYERS, race_summary
from thalweg.show.page import embed

from thalweg.race.page import write
from thalweg.race.verdict import verdict
from thalweg.show.extras import MissingExtra

HOSTILE = "</script><b>x</b> \u2028 \"'&amp; é漢 %{x} $1 ${title}"
NAMES = [contestant["name"] for contestant in CONTESTANTS]
PATIENCE = 120_000  # milliseconds
LARGEST, VALLEY = 2, 3  # places of courses in the summary
#: Puts every switch back as it was when the page was opened.
UNDO = """() => {
  const wanted = { log: true, "by-steps": true, dark: false };
  for (const button of document.querySelectorAll(".chip, #log, #by-steps, #dark")) {
    if (button.getAttribute("aria-pressed") !== String(wanted[button.id] ?? true)) button.click();
  }
}"""
#: All charts and heat maps on the page that have something drawn in them.
CHARTS = "[...document.querySelectorAll('.chart, .heat')].filter(c => c.data && c.offsetParent)"


# ---- the file


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    pytest.importorskip("plotly")
    return race_summary()


@pytest.fixture(scope="module")
def file(summary: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "not" / "yet" / "there.html"
    write(summary, path)
    return path


@pytest.fixture(scope="module")
def held(file: Path) -> Any:
    """What the page shows, by course: words, a table and figures."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', file.read_text("utf-8"), re.S)
    assert found
    return json.loads(found.group(1))["courses"]


def test_the_file_loads_nothing_and_is_the_same_twice(summary: dict[str, Any], file: Path, tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    text = file.read_text(encoding="utf-8")
    assert get_plotlyjs() in text
    ours = text.replace(get_plotlyjs(), "")
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://|\bfetch\(|XMLHttpRequest", ours)
    write(summary, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == file.read_bytes()


def test_no_name_ends_the_script_it_stands_in_and_no_number_is_without_a_word() -> None:
    text = embed({"title": HOSTILE})
    assert json.loads(text) == {"title": HOSTILE}
    assert "<" not in text
    assert text.isascii()
    numbers = {"a": [1.5, float("nan"), (float("inf"), -float("inf"))], "b": 3, "c": None, "d": True}
    assert json.loads(embed(numbers)) == {"a": [1.5, None, [None, None]], "b": 3, "c": None, "d": True}


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r'pip install "thalweg\[cli\]"'):
        write(race_summary(), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_curves_and_bands_are_the_summarys(summary: dict[str, Any], held: Any) -> None:
    for course, shown in zip(summary["courses"], held, strict=True):
        curves = {result["contestant"]: result["curve"] for result in course["results"]}
        figures = shown["figures"]
        for clock, key in (("steps", "step"), ("seconds", "seconds")):
            for chart, told in (
                (figures["loss"][f"log {clock}"], "loss"),
                ((figures["score"] or {}).get(clock), "score"),
            ):
                if chart is None:
                    continue
                lines = {line["contestant"]: line for line in chart["data"] if "fill" not in line}
                assert {name: (line["x"], line["y"]) for name, line in lines.items()} == {
                    name: (curve[key], curve[told]) for name, curve in curves.items()
                }
                assert chart["layout"]["xaxis"]["title"]["text"].startswith(key)
    results = {result["contestant"]: result for result in summary["courses"][LARGEST]["results"]}
    assert results["SGD"]["loss"] is None
    chart = held[LARGEST]["figures"]["loss"]["log steps"]
    bands = {trace["contestant"]: trace["y"] for trace in chart["data"] if trace.get("fill")}
    curve = results["Kron"]["curve"]
    assert bands["Kron"] == [*curve["high"], *reversed(curve["low"]), None]
    assert len(bands["SGD"]) == 2 * 10 + 1  # it ends where the run diverged
    assert chart["layout"]["yaxis"]["range"][1] < 1.5, "what diverged does not push the others into a corner"


def test_heat_maps_are_the_summarys(summary: dict[str, Any], held: Any) -> None:
    results = {result["contestant"]: result for result in summary["courses"][0]["results"]}
    for kind, drawn in (("update", NAMES), ("trust", ("LAMB", "LARS"))):
        maps = [panel["data"][0] for panel in held[0]["figures"][kind]["panels"]]
        wanted = {name: results[name]["layers"][kind] for name in drawn}
        assert {heat["contestant"]: heat["customdata"] for heat in maps} == wanted
        for heat in maps:
            assert heat["x"] == results[heat["contestant"]]["layers"]["step"]
            for row, values in zip(heat["z"], heat["customdata"], strict=True):
                assert [None if z is None else 10**z for z in row] == [v and pytest.approx(v) for v in values]


def test_the_map_has_every_path(summary: dict[str, Any], held: Any) -> None:
    course, traces = summary["courses"][VALLEY], held[VALLEY]["figures"]["map"]["data"]
    paths = {
        t["contestant"]: list(map(list, zip(t["x"], t["y"], strict=True)))
        for t in traces
        if t.get("line", {}).get("dash")
    }
    assert paths == {result["contestant"]: result["path"] for result in course["results"]}
    ground = next(trace for trace in traces if trace["type"] == "contour")
    assert 10 ** ground["z"][7][11] == pytest.approx(course["contours"]["value"][7][11])
    minimum = next(trace for trace in traces if trace.get("name") == "minimum")
    assert (minimum["x"], minimum["y"]) == ([1], [1])


def test_the_sweep_marks_the_chosen_and_the_diverged(summary: dict[str, Any], held: Any) -> None:
    sweep = held[0]["figures"]["sweep"]
    line, chosen, crosses, early = (trace for trace in sweep["data"] if trace["contestant"] == "Kron")
    result = next(r for r in summary["courses"][0]["results"] if r["contestant"] == "Kron")
    assert (line["x"], line["y"]) == (result["sweep"]["lr"], [None, *result["sweep"]["loss"][1:]])
    assert (early["x"], early["y"]) == (result["sweep"]["lr"][:1], result["sweep"]["loss"][:1])
    assert early["customdata"][0].endswith("stopped at step 55")
    assert (chosen["x"], chosen["y"]) == ([result["lr"]], [line["y"][line["x"].index(result["lr"])]])
    assert (crosses["x"], crosses["customdata"]) == ([result["sweep"]["lr"][-1]], ["diverged"])
    # a finite loss of 1e200 must not squeeze the others into one line
    _, _, crosses, _ = (trace for trace in sweep["data"] if trace["contestant"] == "LAMB")
    assert crosses["customdata"] == ["10\u00b2\u2070\u2070"]
    assert sweep["layout"]["yaxis"]["range"][1] < 3


def test_batch_sizes_compare_the_courses_of_a_task(summary: dict[str, Any], held: Any) -> None:
    for key in ("loss", "score"):
        traces = held[0]["figures"][f"batch-{key}"]["data"]
        shown = {t["contestant"]: dict(zip(t["x"], t["y"], strict=True)) for t in traces}
        for name in NAMES:
            assert shown[name] == {
                course["batch_size"]: result[key]
                for course in summary["courses"][:3]
                for result in course["results"]
                if result["contestant"] == name and result[key] is not None
            }
        assert set(shown["LARS"]) == {64, 256}


# ---- the page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("plotly")
    with chromium() as started:
        yield started


@contextmanager
def opened_page(browser: Any, path: Path, **options: Any) -> Iterator[Any]:
    """A page; in the end, nothing has been asked of a network, and nothing has failed."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **options})
    context.set_offline(True)
    page, complaints = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(path.as_uri()) else None)
    page.goto(path.as_uri())
    page.wait_for_selector("#loss .main-svg")
    yield page
    context.close()
    assert not complaints


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a summary as a page."""
    with ExitStack() as pages:

        def open_page(summary: dict[str, Any], **options: Any) -> Any:
            write(summary, tmp_path / "report.html")
            return pages.enter_context(opened_page(browser, tmp_path / "report.html", **options))

        yield open_page


@pytest.fixture(scope="module")
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The usual summary on a desktop, opened once for all tests that its own controls can undo."""
    with opened_page(browser, file) as page:
        yield page


@pytest.fixture
def fresh(page: Any) -> Any:
    page.select_option("#course", index=0)
    page.evaluate(UNDO)
    return page


def test_what_is_drawn_is_what_the_file_holds(fresh: Any, held: Any) -> None:
    drawn = set(fresh.evaluate(f"{CHARTS}.map(c => c.id).filter(id => id)"))
    assert drawn == {"loss", "score", "sweep", "batch-loss", "batch-score"}
    assert fresh.locator("#trust .heat:visible").count() == 2
    panels = fresh.evaluate("[...document.querySelectorAll('#update .heat')].map(c => c.data[0].customdata)")
    assert panels == [panel["data"][0]["customdata"] for panel in held[0]["figures"]["update"]["panels"]]
    labels = fresh.locator("#update .heat").first.locator(".ytick text").all_text_contents()
    assert labels == LAYERS
    for chart in ("sweep", "batch-loss", "batch-score"):
        assert lines_in(fresh, chart) == points_of(held[0]["figures"][chart])
    fresh.select_option("#course", index=VALLEY)
    assert set(fresh.evaluate(f"{CHARTS}.map(c => c.id)")) == {"map", "loss", "sweep"}
    assert lines_in(fresh, "map")[1:] == points_of(held[VALLEY]["figures"]["map"])[1:]
    for log in ("log", "linear"):
        for clock in ("Seconds", "Steps"):
            fresh.get_by_role("button", name=clock, exact=True).click()
            assert fresh.get_by_role("button", name=clock, exact=True).get_attribute("aria-pressed") == "true"
            assert lines_in(fresh, "loss") == points_of(held[VALLEY]["figures"]["loss"][f"{log} {clock.lower()}"])
            assert fresh.evaluate("document.querySelector('#loss').layout.yaxis.type") == log
        fresh.locator("#log").press("Enter")


def lines_in(page: Any, chart: str) -> Any:
    return page.evaluate(f"document.querySelector('#{chart}').data.map(t => [t.contestant ?? null, t.x, t.y])")


def points_of(figure: Any) -> Any:
    return [[trace.get("contestant"), trace["x"], trace["y"]] for trace in figure["data"]]


def test_words_say_who_won(fresh: Any, summary: dict[str, Any]) -> None:
    assert fresh.locator("#verdict").text_content() == summary["courses"][0]["verdict"]
    assert "runs were hopeless" in fresh.locator("#results-note").text_content()
    assert "3 runs are missing" in fresh.locator("#missing").text_content()
    fresh.select_option("#course", index=LARGEST)
    assert fresh.locator("#verdict").text_content().endswith("SGD diverged.")
    fresh.select_option("#course", index=VALLEY)
    assert fresh.locator("h1").text_content() == "Rosenbrock's valley"
    footer = fresh.locator("footer").text_content()
    for said in (summary["command"], "15 November 2026", "Imaginary 9000", "2 cores", "numpy 2.4.6"):
        assert said in footer


def test_a_chip_hides_its_optimizer_everywhere_and_brings_it_back(fresh: Any) -> None:
    def shown() -> list[list[Any]]:
        return fresh.evaluate(
            f"{CHARTS}.map(c => [c.id || c.closest('.panels').id, "
            "c.data.filter(t => t.contestant === 'LAMB').map(t => t.visible !== false)])"
        )

    chip = fresh.locator("#chips").get_by_role("button", name="LAMB")
    before = shown()
    with_it = [traces for _, traces in before if traces]
    assert len(with_it) >= 5
    assert all(all(traces) for traces in with_it)
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert not any(any(traces) for _, traces in shown())
    assert fresh.locator(".panel[data-contestant=LAMB]:visible").count() == 0
    assert fresh.locator("tr.dim").evaluate_all("rows => rows.map(r => r.dataset.contestant)") == ["LAMB"]
    chip.press("Space")
    assert shown() == before
    assert fresh.locator("tr.dim").count() == 0


@pytest.mark.nightly
def test_all_may_be_hidden(fresh: Any) -> None:
    for chip in fresh.locator(".chip").all():
        chip.click()
    for course in (0, VALLEY):
        fresh.select_option("#course", index=course)
        assert fresh.locator(".chip[aria-pressed=true]").count() == 0
        assert not fresh.evaluate(f"{CHARTS}.some(c => c.data.some(t => t.contestant && t.visible))")


def hover(page: Any, chart: str, x: float, y: float, seen: str) -> str:
    """What is said where the mouse is: so far from the edges of a chart, from the right and below where negative."""
    place = page.locator(chart).first
    place.scroll_into_view_if_needed()
    box = place.locator(".nsewdrag").first.bounding_box()
    at = box["x"] + x + box["width"] * (x < 0), box["y"] + y
    page.mouse.move(at[0] - 8, at[1])
    page.mouse.move(*at)
    page.wait_for_selector(f"{chart} .hoverlayer {seen}")
    return str(place.locator(".hoverlayer").text_content())


def test_hovering_shows_all_curves_at_once_or_a_layer_and_its_value(fresh: Any) -> None:
    for clock in ("Steps", "Seconds"):
        fresh.get_by_role("button", name=clock, exact=True).click()
        said = hover(fresh, "#loss", 300, 100, ".legend")
        assert all(re.search(rf"{name} [\d.]+", said) for name in NAMES)
        fresh.mouse.move(0, 0)
    said = hover(fresh, "#update .heat", -6, 8, ".hovertext")
    assert re.search(r"hidden\.0\.weight[\d.×⁻\d¹²³⁰-⁹]+ at step 220", said)


@pytest.mark.nightly
def test_the_table_sorts_and_marks_the_best(opened: Open, summary: dict[str, Any]) -> None:
    page = opened(summary)

    def rows() -> list[str]:
        return page.locator("#results tbody tr").evaluate_all("rows => rows.map(r => r.dataset.contestant)")

    results = summary["courses"][0]["results"]
    assert rows() == [result["contestant"] for result in results]
    state = page.get_by_role("button", name="state / parameter")
    state.click()
    assert rows()[0] == "Adafactor"
    assert page.locator("th[aria-sort=ascending]").text_content() == "state / parameter"
    state.press("Enter")  # the button that was clicked still has the focus, though the table is new
    assert rows()[0] == "Kron"
    page.get_by_role("button", name="test accuracy").click()
    assert rows()[0] == max(results, key=lambda result: result["score"])["contestant"]
    best = page.locator("td.best").evaluate_all("cells => cells.map(c => c.parentElement.dataset.contestant)")
    assert best.count("Kron") >= 2  # loss, steps to target
    assert "Adafactor" in best  # state
    page.select_option("#course", index=LARGEST)
    diverged = page.locator("tr[data-contestant=SGD]")
    assert "diverged" in diverged.text_content()
    assert diverged.locator(".best").count() == 0  # no praise for the speed at which it failed


def test_dark_changes_page_and_charts(fresh: Any) -> None:
    def colours() -> tuple[str, str, str]:
        return fresh.evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('#loss')._fullLayout.font.color,"
            " document.querySelector('#loss').data.find(t => t.contestant === 'AdamW' && !t.fill).line.color]"
        )

    light = colours()
    assert light[2] == "#2b2b2b"
    fresh.get_by_role("button", name="Dark").click()
    dark = colours()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert dark[2] == "#d4d4d4"
    assert fresh.locator("#dark").get_attribute("aria-pressed") == "true"
    fresh.get_by_role("button", name="Dark").click()
    assert colours() == light


@pytest.mark.nightly
def test_dark_follows_the_system_until_somebody_chooses(opened: Open, summary: dict[str, Any]) -> None:
    page = opened(summary, color_scheme="dark")

    def is_now(theme: str) -> None:
        page.wait_for_function(f"() => document.documentElement.dataset.theme === '{theme}'")

    is_now("dark")
    page.emulate_media(color_scheme="light")
    is_now("light")
    page.emulate_media(color_scheme="dark")
    is_now("dark")
    page.locator("#dark").click()
    is_now("light")
    page.reload()
    is_now("light")  # remembered
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('no memory') } })")
    page.reload()
    is_now("dark")
    page.locator("#dark").click()
    is_now("light")


@pytest.mark.nightly
def test_a_phone_shows_it_without_scrolling_sideways(opened: Open, summary: dict[str, Any]) -> None:
    page = opened(summary, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for course in (0, VALLEY):
        page.select_option("#course", index=course)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(f"{CHARTS}.every(c => c.querySelector('.main-svg').getBoundingClientRect().right <= 390)")
        small = "buttons => buttons.filter(b => b.offsetParent && b.getBoundingClientRect().height < 44).map(b => b.id)"
        assert page.locator("button, select").evaluate_all(small) == []
    page.locator(".chip").first.tap()
    assert page.locator(".chip").first.get_attribute("aria-pressed") == "false"


def test_it_fits_a_window_that_changes(fresh: Any) -> None:
    try:
        fresh.set_viewport_size({"width": 700, "height": 900})
        fits = "c => Math.abs(c.querySelector('.main-svg').getBoundingClientRect().width - c.clientWidth) < 2"
        fresh.wait_for_function(f"() => document.querySelector('#loss').clientWidth < 700 && {CHARTS}.every({fits})")
    finally:
        fresh.set_viewport_size({"width": 1280, "height": 900})


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(fresh: Any) -> None:
    controls = fresh.locator("header button, .bar button, .bar select, main button")
    unnamed = (
        "all => all.filter(c => !(c.ariaLabel || (c.labels?.[0] ?? c).textContent.trim()) || c.tabIndex < 0).length"
    )
    assert controls.evaluate_all(unnamed) == 0
    fresh.locator("h1").click()
    fresh.keyboard.press("Tab")
    assert fresh.evaluate("document.activeElement.dataset.contestant") == NAMES[0]
    fresh.keyboard.press("Shift+Tab")
    assert fresh.evaluate("document.activeElement.id") == "dark"


@pytest.mark.nightly
def test_hostile_names_are_shown_as_text(opened: Open, summary: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(summary).replace('"Kron"', json.dumps(HOSTILE)))
    hostile |= {"title": HOSTILE, "command": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    for course in hostile["courses"]:
        course |= dict.fromkeys(("title", "about", "loss_name"), HOSTILE)
        course["score_name"] = course["score_name"] and HOSTILE
        for result in course["results"]:
            if result["layers"]:
                result["layers"]["names"][0] = HOSTILE
        course["verdict"] = verdict(course)
    page = opened(hostile)
    assert page.title() == f"{HOSTILE} · thalweg race"
    places = ("h1", "#about", "#command", "#loss-title", ".chip >> nth=5", "#update h3 >> nth=0")
    for place in (*places, "tbody th .name >> nth=0"):
        assert page.locator(place).text_content() == HOSTILE
    assert "</script><b>x</b>" in hover(page, "#loss", 310, 100, ".legend")
    assert page.evaluate("document.querySelectorAll('b').length") == page.locator("td.best b").count()
    label = page.locator("#update .ytick text").first.text_content()
    assert label.startswith("</script><b>")
    page.select_option("#course", index=VALLEY)
    assert page.locator("#verdict").text_content().startswith(HOSTILE)


@pytest.mark.nightly
def test_races_that_have_hardly_begun_or_went_wrong(opened: Open, summary: dict[str, Any]) -> None:
    odd = copy.deepcopy(summary)
    nobody, alone, lost, perfect = odd["courses"] = [copy.deepcopy(summary["courses"][0]) for _ in range(4)]
    nobody["results"] = []
    del alone["results"][1:]
    for result in lost["results"]:
        result |= {"loss": None, "loss_low": None, "loss_high": None, "score": None, "layers": None}
        result["curve"] |= {key: [None] * len(result["curve"]["step"]) for key in ("loss", "low", "high", "score")}
        result["sweep"]["loss"] = [None] * len(result["sweep"]["lr"])
    curve = perfect["results"][0]["curve"]
    curve["loss"][-1] = curve["low"][-1] = 0.0

    page = opened(odd)
    for index, rows in enumerate([0, 1, 6, 6]):
        page.select_option("#course", index=index)
        assert page.locator("#results tbody tr").count() == rows
        assert page.locator("#batch-pair").is_hidden()
        page.locator("#by-seconds").click()
        page.locator("#log").click()
        page.locator("#log").click()
    # no logarithm shows a loss of 0: it stands at the lowest there is, and says what it is
    shown = page.evaluate("document.querySelector('#loss').data.find(t => t.contestant === 'Kron' && !t.fill)")
    assert shown["y"][-1] == min(v for r in perfect["results"] for v in r["curve"]["low"] if v)
    assert shown["customdata"][-1] == "0"


@pytest.mark.nightly
def test_losses_below_zero_and_scores_that_are_no_shares(opened: Open, summary: dict[str, Any]) -> None:
    odd = copy.deepcopy(summary)
    odd["courses"] = odd["courses"][:2]
    for result in (result for course in odd["courses"] for result in course["results"]):
        curve = result["curve"]
        for values in (curve["loss"], curve["low"], curve["high"], result["sweep"]["loss"]):
            values[:] = [None if value is None else value - 3 for value in values]
        result |= {key: result[key] - 3 for key in ("loss", "loss_low", "loss_high")}
        result |= {key: 100 * result[key] for key in ("score", "score_low", "score_high")}
        curve["score"] = [100 * score for score in curve["score"]]
    page = opened(odd)
    assert page.locator("#log").get_attribute("aria-pressed") == "false"
    for chart in ("loss", "sweep", "batch-loss"):
        axis = page.evaluate(f"document.querySelector('#{chart}')._fullLayout.yaxis")
        assert axis["type"] == "linear"
        assert axis["range"][0] < axis["range"][1] <= 0
    words = page.evaluate("document.querySelector('#score').data[0].customdata")
    assert float(words[-1]) == pytest.approx(odd["courses"][0]["results"][0]["curve"]["score"][-1], rel=0.01)
