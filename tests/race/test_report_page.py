"""The report in a real browser: it needs no network, does what its controls say, and shows the summary's numbers."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from race_summary import CONTESTANTS, LAYERS, race_summary

from thalweg.race.page import write
from thalweg.race.verdict import verdict
from thalweg.show.extras import MissingExtra
from thalweg.show.page import embed

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


# The file


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    pytest.importorskip("plotly")
    return race_summary()


def test_the_file_holds_the_summary_and_loads_nothing(summary: dict[str, Any], tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    path = tmp_path / "not" / "yet" / "there.html"
    write(summary, path)
    text = path.read_text(encoding="utf-8")
    assert get_plotlyjs() in text
    ours = text.replace(get_plotlyjs(), "")
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|https?://|\bfetch\(|XMLHttpRequest", ours)
    figures = embedded_in(text)["courses"][0]["figures"]
    curves = {trace["contestant"]: trace["y"] for trace in figures["loss"]["log steps"]["data"] if "fill" not in trace}
    assert curves == {r["contestant"]: r["curve"]["loss"] for r in summary["courses"][0]["results"]}
    write(summary, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == path.read_bytes()


def embedded_in(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found.group(1))


def test_no_name_ends_the_script_it_stands_in() -> None:
    text = embed({"title": HOSTILE})
    assert json.loads(text) == {"title": HOSTILE}
    assert "<" not in text
    assert text.isascii()


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    numbers = {"a": [1.5, float("nan"), (float("inf"), -float("inf"))], "b": 3, "c": None, "d": True}
    assert json.loads(embed(numbers)) == {"a": [1.5, None, [None, None]], "b": 3, "c": None, "d": True}


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r'pip install "thalweg\[cli\]"'):
        write(race_summary(), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


# The page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("plotly")
    with chromium() as started:
        yield started


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a summary as a page, and afterwards sees to it that nothing was asked of a network, and nothing failed."""
    contexts, complaints, requests = [], [], []

    def open_page(summary: dict[str, Any], **options: Any) -> Any:
        path = tmp_path / "report.html"
        write(summary, path)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("#loss .main-svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
    assert not requests


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The usual summary on a desktop, opened once for all tests that its own controls can undo."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(race_summary(), path)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_offline(True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda r: page.complaints.append(r.url) if not r.url.startswith(path.as_uri()) else None)
    page.goto(path.as_uri())
    yield page
    context.close()


@pytest.fixture
def fresh(page: Any) -> Iterator[Any]:
    page.select_option("#course", index=0)
    page.evaluate(UNDO)
    page.complaints.clear()
    yield page
    assert not page.complaints


def test_every_chart_is_there(fresh: Any) -> None:
    drawn = set(fresh.evaluate(f"{CHARTS}.map(c => c.id).filter(id => id)"))
    assert drawn == {"loss", "score", "sweep", "batch-loss", "batch-score"}
    assert fresh.locator("#update .heat:visible").count() == 6
    assert fresh.locator("#trust .heat:visible").count() == 2
    fresh.select_option("#course", index=VALLEY)
    assert set(fresh.evaluate(f"{CHARTS}.map(c => c.id)")) == {"map", "loss", "sweep"}


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


def test_the_log_switch_changes_the_axis(fresh: Any) -> None:
    kind = "document.querySelector('#loss').layout.yaxis.type"
    assert fresh.evaluate(kind) == "log"
    fresh.get_by_role("button", name="Log scale").click()
    assert fresh.evaluate(kind) == "linear"
    assert fresh.locator("#log").get_attribute("aria-pressed") == "false"
    fresh.locator("#log").press("Enter")
    assert fresh.evaluate(kind) == "log"


def test_time_is_steps_or_seconds_in_both_charts(fresh: Any, summary: dict[str, Any]) -> None:
    curves = {result["contestant"]: result["curve"] for result in summary["courses"][0]["results"]}
    for button, key in (("Seconds", "seconds"), ("Steps", "step")):
        fresh.get_by_role("button", name=button, exact=True).click()
        assert fresh.get_by_role("button", name=button, exact=True).get_attribute("aria-pressed") == "true"
        for chart in ("loss", "score"):
            lines = fresh.evaluate(f"document.querySelector('#{chart}').data.filter(t => !t.fill)")
            assert {line["contestant"]: line["x"] for line in lines} == {n: c[key] for n, c in curves.items()}
            assert fresh.evaluate(f"document.querySelector('#{chart}').layout.xaxis.title.text").startswith(key)


def test_curves_and_bands_are_the_summarys(fresh: Any, summary: dict[str, Any]) -> None:
    fresh.select_option("#course", index=LARGEST)
    results = {result["contestant"]: result for result in summary["courses"][LARGEST]["results"]}
    assert results["SGD"]["loss"] is None
    traces = fresh.evaluate("document.querySelector('#loss').data")
    assert {t["contestant"]: t["y"] for t in traces if "fill" not in t} == {
        name: result["curve"]["loss"] for name, result in results.items()
    }
    band = next(trace for trace in traces if trace.get("fill") and trace["contestant"] == "Kron")
    curve = results["Kron"]["curve"]
    assert band["y"] == [*curve["high"], *reversed(curve["low"]), None]
    broken = next(trace for trace in traces if trace.get("fill") and trace["contestant"] == "SGD")
    assert len(broken["y"]) == 2 * 10 + 1  # it ends where the run diverged
    # what diverged does not push the others into a corner
    assert fresh.evaluate("document.querySelector('#loss').layout.yaxis.range[1]") < 1.5


def test_a_chip_hides_its_optimizer_everywhere_and_brings_it_back(fresh: Any) -> None:
    def shown() -> list[list[Any]]:
        return fresh.evaluate(
            f"{CHARTS}.map(c => [c.id || c.closest('.panels').id, "
            "c.data.filter(t => t.contestant === 'LAMB').map(t => t.visible !== false)])"
        )

    chip = fresh.locator("#chips").get_by_role("button", name="LAMB")
    for course, charts in ((0, 5), (VALLEY, 3)):
        fresh.select_option("#course", index=course)
        before = shown()
        with_it = [traces for _, traces in before if traces]
        assert len(with_it) >= charts
        assert all(all(traces) for traces in with_it)
        chip.click()
        assert chip.get_attribute("aria-pressed") == "false"
        assert not any(any(traces) for _, traces in shown())
        assert fresh.locator(".panel[data-contestant=LAMB]:visible").count() == 0
        assert fresh.locator("tr.dim").evaluate_all("rows => rows.map(r => r.dataset.contestant)") == ["LAMB"]
        chip.press("Space")
        assert shown() == before
        assert fresh.locator("tr.dim").count() == 0


def test_all_may_be_hidden(fresh: Any) -> None:
    for chip in fresh.locator(".chip").all():
        chip.click()
    for course in (0, VALLEY):
        fresh.select_option("#course", index=course)
        assert fresh.locator(".chip[aria-pressed=true]").count() == 0
        assert not fresh.evaluate(f"{CHARTS}.some(c => c.data.some(t => t.contestant && t.visible))")


def test_heat_maps_are_the_summarys(fresh: Any, summary: dict[str, Any]) -> None:
    results = {result["contestant"]: result for result in summary["courses"][0]["results"]}
    for kind in ("update", "trust"):
        maps = fresh.evaluate(f"[...document.querySelectorAll('#{kind} .heat')].map(c => c.data[0])")
        drawn = ("LAMB", "LARS") if kind == "trust" else NAMES
        wanted = {name: results[name]["layers"][kind] for name in drawn}
        assert {heat["contestant"]: heat["customdata"] for heat in maps} == wanted
        for heat in maps:
            assert heat["x"] == results[heat["contestant"]]["layers"]["step"]
            for row, values in zip(heat["z"], heat["customdata"], strict=True):
                assert [None if z is None else 10**z for z in row] == [v and pytest.approx(v) for v in values]
    labels = fresh.locator("#update .heat").first.locator(".ytick text").all_text_contents()
    assert labels == LAYERS


def test_the_map_has_every_path(fresh: Any, summary: dict[str, Any]) -> None:
    fresh.select_option("#course", index=VALLEY)
    course = summary["courses"][VALLEY]
    traces = fresh.evaluate("document.querySelector('#map').data")
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


def test_the_sweep_marks_the_chosen_and_the_diverged(fresh: Any, summary: dict[str, Any]) -> None:
    traces = fresh.evaluate("document.querySelector('#sweep').data.filter(t => t.contestant === 'Kron')")
    result = next(r for r in summary["courses"][0]["results"] if r["contestant"] == "Kron")
    line, chosen, crosses, early = traces
    assert (line["x"], line["y"]) == (result["sweep"]["lr"], [None, *result["sweep"]["loss"][1:]])
    assert (early["x"], early["y"]) == (result["sweep"]["lr"][:1], result["sweep"]["loss"][:1])
    assert early["customdata"][0].endswith("stopped at step 55")
    assert (chosen["x"], chosen["y"]) == ([result["lr"]], [line["y"][line["x"].index(result["lr"])]])
    assert crosses["x"] == [result["sweep"]["lr"][-1]]
    assert crosses["customdata"] == ["diverged"]
    # a finite loss of 1e200 must not squeeze the others into one line
    _, _, crosses, _ = fresh.evaluate("document.querySelector('#sweep').data.filter(t => t.contestant === 'LAMB')")
    assert crosses["customdata"] == ["10²⁰⁰"]
    assert fresh.evaluate("document.querySelector('#sweep').layout.yaxis.range[1]") < 3


def test_batch_sizes_compare_the_courses_of_a_task(fresh: Any, summary: dict[str, Any]) -> None:
    for chart, key in (("batch-loss", "loss"), ("batch-score", "score")):
        traces = fresh.evaluate(f"document.querySelector('#{chart}').data")
        shown = {t["contestant"]: dict(zip(t["x"], t["y"], strict=True)) for t in traces}
        for name in NAMES:
            assert shown[name] == {
                course["batch_size"]: result[key]
                for course in summary["courses"][:3]
                for result in course["results"]
                if result["contestant"] == name and result[key] is not None
            }
    assert set(shown["LARS"]) == {64, 256}


def test_hovering_shows_all_curves_at_once(fresh: Any) -> None:
    for clock in ("Steps", "Seconds"):
        fresh.get_by_role("button", name=clock, exact=True).click()
        fresh.locator("#loss").scroll_into_view_if_needed()
        box = fresh.locator("#loss .nsewdrag").first.bounding_box()
        fresh.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
        fresh.mouse.move(box["x"] + box["width"] * 0.52, box["y"] + box["height"] * 0.5)
        fresh.wait_for_selector("#loss .hoverlayer .legend")
        said = fresh.locator("#loss .hoverlayer").text_content()
        for name in NAMES:
            assert re.search(rf"{name} [\d.]+", said)
        fresh.mouse.move(0, 0)


def test_hovering_a_heat_map_shows_layer_and_value(fresh: Any, summary: dict[str, Any]) -> None:
    heat = fresh.locator("#update .heat").first
    heat.scroll_into_view_if_needed()
    box = heat.locator(".nsewdrag").bounding_box()
    fresh.mouse.move(box["x"] + box["width"] - 8, box["y"] + 9)
    fresh.mouse.move(box["x"] + box["width"] - 6, box["y"] + 8)
    fresh.wait_for_selector("#update .hoverlayer .hovertext")
    assert re.search(r"hidden\.0\.weight[\d.×⁻\d¹²³⁰-⁹]+ at step 220", heat.locator(".hoverlayer").text_content())


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
        course |= {
            "title": HOSTILE,
            "about": HOSTILE,
            "loss_name": HOSTILE,
            "score_name": course["score_name"] and HOSTILE,
        }
        for result in course["results"]:
            if result["layers"]:
                result["layers"]["names"][0] = HOSTILE
        course["verdict"] = verdict(course)
    page = opened(hostile)
    assert page.title() == f"{HOSTILE} · thalweg race"
    for place in (
        "h1",
        "#about",
        "#command",
        "#loss-title",
        ".chip >> nth=5",
        "#update h3 >> nth=0",
        "tbody th .name >> nth=0",
    ):
        assert page.locator(place).text_content() == HOSTILE
    page.locator("#loss").scroll_into_view_if_needed()
    box = page.locator("#loss .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.move(box["x"] + 310, box["y"] + 100)
    page.wait_for_selector("#loss .hoverlayer .legend")
    assert "</script><b>x</b>" in page.locator("#loss .hoverlayer").text_content()
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
