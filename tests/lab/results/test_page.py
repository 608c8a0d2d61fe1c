"""The report's page as a reader has it: in Chromium, from a file."""

import re

import pytest

from gtracer.lab.results import report
from gtracer.lab.results.statistics import read
from support.browser import chromium
from support.records import HOSTILE, detailed, small, varied


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The small study's page, that of a study that varies ρ, and one with all figures."""
    made = {}
    for study in (small, varied, detailed):
        runs = tmp_path_factory.mktemp(study.__name__)
        study(runs)
        made[study.__name__] = report.write(runs, runs / "report")
    return made


@pytest.fixture
def visit(browser, pages):
    """Open a page, and be sure at the end that it had nothing to complain of and asked for nothing."""
    complaints, asked, contexts = [], [], []

    def open_page(name="small", **options):
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(url.startswith("file:") for url in asked)
    assert len(asked) == len(contexts)


def test_charts_are_drawn(visit):
    page = visit("varied")
    assert page.locator("svg.chart").count() == 4
    lines = page.locator('figure:has-text("by epoch.") g[id*="series-"] > path')
    assert lines.count() == 6
    for index in range(lines.count()):
        box = lines.nth(index).bounding_box()
        assert box["width"] > 100
        assert box["height"] > 10


def column(page, heading):
    """The values below a heading as they stand, top to bottom, and the heading's button."""
    headings = page.locator("#table thead th").all_inner_texts()
    place = next(i for i, text in enumerate(headings) if text.startswith(heading))
    cells = page.locator(f"#table tbody tr:visible td:nth-child({place + 1})").all_inner_texts()
    return cells, page.locator("#table thead th").nth(place)


def numbers(cells):
    return [float(re.match(r"[+−\d.]+", cell)[0].replace("−", "-")) for cell in cells if cell[0] not in "–n"]


@pytest.mark.parametrize("heading", ["n", "Last epoch", "Seconds"])
def test_a_click_sorts(visit, heading):
    page = visit()
    before, head = column(page, heading)
    head.get_by_role("button").click()
    upwards, _ = column(page, heading)
    assert numbers(upwards) == sorted(numbers(before))
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").press("Enter")
    downwards, _ = column(page, heading)
    assert numbers(downwards) == sorted(numbers(before), reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator('#table th[aria-sort="none"]').count() == page.locator("#table th").count() - 1


def test_what_was_not_run_stays_at_the_end(visit):
    page = visit()
    for _ in range(2):
        column(page, "Last epoch")[1].get_by_role("button").click()
        assert column(page, "Last epoch")[0][-1] == "not run"


def test_words_are_sorted_too(visit):
    page = visit()
    column(page, "Setting")[1].get_by_role("button").click()
    column(page, "Setting")[1].get_by_role("button").click()
    assert column(page, "Setting")[0] == ["half wrong"] * 3 + ["clean"] * 3


def test_filter_hides_rows(visit):
    page = visit()
    page.get_by_label("Filter").fill("tracer half")
    assert column(page, "Method")[0] == ["SGD-TRACER"]
    assert page.locator("#count").inner_text() == "1 of 6 rows"
    page.get_by_label("Filter").fill("")
    assert len(column(page, "Method")[0]) == 6


def hover(page, figure, name, index):
    """Put the mouse on a vertex of a line, and read the tip."""
    page.locator(f"#{figure} svg").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([figure, name, index]) => {
            const series = charts[figure].series.find((s) => s.name === name);
            const point = points(series).at(index);
            const drawing = document.getElementById(figure).querySelector("svg");
            const at = new DOMPoint(point.x, point.y).matrixTransform(drawing.getScreenCTM());
            return [at.x, at.y];
        }""",
        [figure, name, index],
    )
    page.mouse.move(x, y)
    return page.locator("#tip").inner_text().split("\n")


def test_hover_says_name_and_value(visit, pages):
    page = visit("varied")
    results, _ = read(pages["varied"].parent.parent)
    sam = {r.point.config.rho: r.accuracy for r in results.all if r.point.method == "SAM"}
    assert hover(page, "figure-0", "SAM", 1) == ["SAM", f"ρ 0.1: {sam[0.1]} %"]
    sgd = results.all[0]
    assert hover(page, "figure-0", "SGD", 3) == ["SGD", f"{sgd.accuracy} %"]
    assert hover(page, "figure-1", "SGD", -1) == ["SGD", f"epoch 6: {sgd.accuracy} %"]
    assert hover(page, "figure-3", "SGD", 0) == ["SGD", f"{sgd.seconds:.3g} s, 1.00×"]
    assert page.locator("circle.mark").count() == 1
    page.mouse.move(2, 2)
    assert page.locator("#tip").is_hidden()
    assert page.locator("circle.mark").count() == 0


def test_a_name_in_the_tip_is_text(visit):
    page = visit()
    assert hover(page, "figure-0", HOSTILE, 2)[0] == HOSTILE


def luminance(colour):
    """Of an rgb() colour, as WCAG has it."""
    shares = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def computed(page, selector, what):
    return page.locator(selector).first.evaluate(f"element => getComputedStyle(element).{what}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(visit, scheme):
    page = visit(color_scheme=scheme)
    ground = computed(page, "html", "backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    for selector in ("h1", "td.number[data-value]", "td.number:not([data-value])", "figcaption", ".notes", ".files a"):
        assert contrast(computed(page, selector, "color"), ground) >= 4.5, selector
    assert contrast(computed(page, "svg.chart text", "fill"), ground) >= 4.5
    for line in page.locator('g[id*="-series-"] > path').all():
        assert contrast(line.evaluate("element => getComputedStyle(element).stroke"), ground) >= 2.2


def test_a_hostile_label_is_text(visit):
    page = visit()
    assert HOSTILE in page.locator("h1").inner_text()
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0
    assert HOSTILE in page.title()


def test_paper_is_white(visit):
    page = visit(color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert computed(page, "html", "backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".filter").is_hidden()
    assert len(page.pdf(format="A4")) > 10_000


def test_a_narrow_page_does_not_scroll_sideways(visit):
    page = visit()
    page.set_viewport_size({"width": 380, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_a_cue_tells_that_a_table_scrolls(visit):
    """As long as it does; and all of it can be reached."""
    page = visit("detailed")
    cue, area = page.locator(".cue").first, page.locator(".scroll").first
    page.set_viewport_size({"width": 390, "height": 700})
    cue.wait_for(state="visible")
    assert area.evaluate("element => (element.scrollLeft = 9999, element.scrollLeft)") > 100
    last = page.locator("#table thead th").last.bounding_box()
    assert last["x"] + last["width"] <= 390
    page.set_viewport_size({"width": 1900, "height": 700})
    cue.wait_for(state="hidden")


@pytest.mark.parametrize("name", ["small", "varied", "detailed"])
def test_charts_can_be_read_on_a_telephone(visit, name):
    """All text of a chart has 11 pixels and its place inside the screen."""
    page = visit(name)
    page.set_viewport_size({"width": 390, "height": 800})
    found = page.locator("svg.chart").evaluate_all(
        """charts => charts.flatMap(chart => [...chart.querySelectorAll("text")].map(text => {
            const size = parseFloat(getComputedStyle(text).fontSize) * chart.getScreenCTM().a
            const {left, right} = text.getBoundingClientRect()
            return [text.textContent, size, left, right]
        }))"""
    )
    assert len(found) > 20
    assert not [text for text, size, left, right in found if size < 11 or left < 0 or right > 390]


def test_the_best_cells_are_bold(visit):
    page = visit()
    assert page.locator("#table td b").all_inner_texts() == [
        "31.6 ± 0.6", "32.0 ± 0.3", "44.5 ± 0.3", "45.8 ± 0.2", "10.5 ± 0.3",
    ]  # fmt: skip
    weight = page.locator("#table td b").first.evaluate("element => getComputedStyle(element).fontWeight")
    assert int(weight) >= 600


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_a_matrix_can_be_read(visit, scheme):
    """On the darkest of its cells, mixed with what is below it."""
    page = visit("detailed", color_scheme=scheme)
    text = computed(page, 'figure:has-text("Confusion") svg text', "fill")
    ground = [int(c) for c in re.findall(r"\d+", computed(page, "html", "backgroundColor"))[:3]]
    cells = page.locator('figure:has-text("Confusion") svg path[style*="fill: #"]')
    for cell in cells.all():
        fill, alpha = cell.evaluate(
            "e => [getComputedStyle(e).fill, Number(e.style.opacity || e.style.fillOpacity || 1)]"
        )
        mixed = [alpha * int(c) + (1 - alpha) * g for c, g in zip(re.findall(r"\d+", fill)[:3], ground, strict=True)]
        assert contrast(text, "rgb({:.0f}, {:.0f}, {:.0f})".format(*mixed)) >= 4.5
    assert cells.count() >= 8
    assert page.locator("details[open] summary").inner_text() == "4 runs"
