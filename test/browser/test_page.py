"""The page in a real browser: ``make test-browser``, apart from the other tests.

Needs selenium, chromium and chromedriver (Debian: ``apt-get install chromium chromium-driver``).
Screenshots are left in the folder of ``--basetemp``, to be looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_patches import optimize_graph
from torch_patches._inductor.fx_passes.comm_overlap.estimate.devices import DEVICES
from torch_patches._inductor.fx_passes.comm_overlap.report import Report
from torch_patches.captured import load_captured
from torch_patches.viewing.page import Sheet, write_page
from torch_patches.viewing.picture import Flight, Kernel, MemoryPoint, Picture, Run, Stop
from torch_patches.viewing.record import LaunchRecord

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_on_gpu")
LLAMA = Path(__file__).parents[1] / "data" / "llama_8l_fsdp8.json.gz"
#: Of a zoom step with 10,000 events, until the next frame is there.
MOST_MS = 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.fail("make test-browser needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with one
    options.add_argument("--window-size=1400,1500")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(as_on_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    graphs = load_captured(LLAMA).graphs
    reports = {
        title: optimize_graph(graphs[name], bucketing_mode="transformer_block")
        for title, name in (("forward", "fw"), ("backward", "bw"))
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page([Sheet.of(report, title) for title, report in reports.items()], path)
    return path


def open_page(browser: Any, path: Path) -> None:
    """Opens a page, and waits for its first frame."""
    browser.get_log("browser")
    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(
        lambda b: b.execute_script("return window.timelines && timelines[0].frames > 0")
    )


def view(browser: Any, sheet: int = 0) -> tuple[float, float]:
    """The part of time that is shown, in ms."""
    found = browser.execute_script(f"const t = timelines[{sheet}]; return [t.from, t.to]")
    return found[0], found[1]


def after(browser: Any, action: Any) -> tuple[float, float]:
    """The view when a frame has been drawn behind an action that asks for one."""
    frames = browser.execute_script("return timelines[0].frames")
    action()
    WebDriverWait(browser, 5).until(
        lambda b: b.execute_script("return timelines[0].frames") > frames
    )
    return view(browser)


def pixels(browser: Any, run: int, x: int, y: int) -> list[int]:
    return browser.execute_script(
        "const c = timelines[0].canvases[arguments[0]], r = window.devicePixelRatio;"
        "return [...c.getContext('2d').getImageData(arguments[1] * r, arguments[2] * r, 1, 1).data]",
        run, x, y,
    )  # fmt: skip


def test_opens_without_a_complaint_and_without_network(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    open_page(browser, page)
    assert browser.get_log("browser") == []
    sent = [e["message"] for e in browser.get_log("performance")]
    requests = [m for m in sent if '"Network.requestWillBeSent"' in m]
    assert requests and all('"url":"file:' in m or '"url":"data:' in m for m in requests)
    browser.save_screenshot(str(page.parent / "forward.png"))
    canvases = browser.find_elements(By.CSS_SELECTOR, "section:not([hidden]) canvas")
    assert [c.is_displayed() for c in canvases] == [True, True]


def test_exposed_parts_are_red(browser: Any, page: Path) -> None:
    open_page(browser, page)
    x = browser.execute_script(
        "const t = timelines[0], s = t.runs[0].stops.reduce((a, b) => a.end - a.start > b.end - b.start ? a : b);"
        "t.show(s.start - 1e-4, s.end + 1e-4); t.draw(); return Math.round(t.x(s.end) - 8)"
    )
    red, green, blue, _ = pixels(browser, 0, x, 27)
    assert red > 200 and green < 90 and blue < 90
    x = browser.execute_script(
        "const t = timelines[0], k = t.runs[0].kernels.reduce((a, b) => a.end - a.start > b.end - b.start ? a : b);"
        "t.show(k.start - 1e-4, k.end + 1e-4); t.draw(); return Math.round(t.x(k.start) + 8)"
    )
    red, green, blue, _ = pixels(browser, 0, x, 27)
    assert blue > red


def test_wheel_buttons_and_keys_zoom(browser: Any, page: Path) -> None:
    open_page(browser, page)
    canvas = browser.find_element(By.CSS_SELECTOR, "canvas")
    whole = view(browser)
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(canvas, 100, 0)
    wheel = ActionChains(browser).scroll_from_origin(origin, 0, -300)
    pointed = browser.execute_script(
        "const t = timelines[0]; return t.ms(t.canvases[0].clientWidth / 2 + 100)"
    )
    zoomed = after(browser, wheel.perform)
    assert zoomed[1] - zoomed[0] < 0.8 * (whole[1] - whole[0])
    assert zoomed[0] < pointed < zoomed[1]  # what is under the pointer stays there
    share = (pointed - zoomed[0]) / (zoomed[1] - zoomed[0])
    assert share == pytest.approx((pointed - whole[0]) / (whole[1] - whole[0]), abs=0.01)
    assert browser.execute_script("return scrollY") == 0
    again = after(browser, lambda: canvas.send_keys("+"))
    assert again[1] - again[0] < zoomed[1] - zoomed[0]
    moved = after(browser, lambda: canvas.send_keys(Keys.ARROW_RIGHT))
    assert moved[0] > again[0] and moved[1] - moved[0] == pytest.approx(again[1] - again[0])
    button = browser.find_element(By.CSS_SELECTOR, "[data-zoom='out']")
    assert after(browser, button.click)[0] < moved[0]
    assert after(browser, lambda: canvas.send_keys("0")) == whole


def test_zooming_keeps_both_runs_in_view(browser: Any, page: Path) -> None:
    open_page(browser, page)
    shortest, longest = browser.execute_script(
        "const t = timelines[0]; return [t.shortest, t.longest]"
    )
    assert shortest < 0.9 * longest
    canvas = browser.find_element(By.CSS_SELECTOR, "canvas")
    for _ in range(6):
        begin, end = after(browser, lambda: canvas.send_keys("+"))
        assert begin < shortest
    assert (begin + end) / 2 < shortest


def test_dragging_pans(browser: Any, page: Path) -> None:
    open_page(browser, page)
    browser.execute_script("timelines[0].zoom(4)")
    canvas = browser.find_element(By.CSS_SELECTOR, "canvas")
    before = view(browser)
    drag = ActionChains(browser).move_to_element(canvas).click_and_hold().move_by_offset(-150, 0)
    moved = after(browser, drag.release().perform)
    width = browser.execute_script("const t = timelines[0]; return t.x(t.to) - t.x(t.from)")
    assert moved[0] - before[0] == pytest.approx((before[1] - before[0]) * 150 / width, rel=0.02)


def test_a_click_tells_and_marks_a_bucket(browser: Any, page: Path) -> None:
    open_page(browser, page)
    canvas = browser.find_elements(By.CSS_SELECTOR, "canvas")[1]
    x, name = browser.execute_script(
        "const t = timelines[0], f = t.runs[1].flights.find((f) => f.bucket === 3);"
        "return [t.x((f.start + f.end) / 2) - t.canvases[1].clientWidth / 2, f.name]"
    )
    row = 24 + 22 + 5 + 11  # title, compute, gap, half a lane
    half = canvas.size["height"] / 2
    click = ActionChains(browser).move_to_element_with_offset(canvas, round(x), round(row - half))
    after(browser, click.click().perform)
    told = browser.find_element(By.CSS_SELECTOR, "section:not([hidden]) .detail").text
    assert told.startswith(name) and "layers." in told
    assert browser.execute_script("return timelines[0].selected.bucket") == 3
    tip = browser.find_element(By.CSS_SELECTOR, "section:not([hidden]) .tip")
    ActionChains(browser).move_by_offset(1, 0).perform()
    assert name in tip.text
    browser.save_screenshot(str(page.parent / "selected.png"))


def test_tabs_show_one_graph_at_a_time(browser: Any, page: Path) -> None:
    open_page(browser, page)
    first, second = browser.find_elements(By.CSS_SELECTOR, "section.sheet")
    assert first.is_displayed() and not second.is_displayed()
    browser.find_element(By.XPATH, "//nav/button[text()='backward']").click()
    assert second.is_displayed() and not first.is_displayed()
    WebDriverWait(browser, 5).until(
        lambda b: b.execute_script("return timelines[1].canvases[0].width") > 600
    )
    browser.save_screenshot(str(page.parent / "backward.png"))
    assert browser.get_log("browser") == []


# -- many events ----------------------------------------------------------------------------------


def long_run(kernels: int, flights: int) -> Run:
    """Kernels of 0.1 ms with gaps, a collective every few of them, stops at each."""
    each = kernels // flights
    made = tuple(
        Kernel(i, f"mm_{i}", "mm", f"layers.{i // 50}", i * 0.15, i * 0.15 + 0.1)
        for i in range(kernels)
    )
    flown, stops, memory = [], [], []
    for number in range(flights):
        start = number * each * 0.15
        launch = LaunchRecord(
            number, f"all_gather_{number}", number * each, (), "all_gather", f"g{number % 3}", 8,
            "bfloat16", "", 1 << 20, "parameter", "", "", number % 40, 0.4, 0.03, DEVICES["H100"].intra_node,
        )  # fmt: skip
        flown.append(Flight(launch, start, start, start + 0.4, 0.05, 0.3, (("mm_1", 0.1),)))
        stops.append(Stop(number, start + 0.1, start + 0.15))
        memory += [MemoryPoint(start, number << 20), MemoryPoint(start + 0.2, number << 19)]
    total = kernels * 0.15
    return Run(
        total, kernels * 0.1, flights * 0.05, flights << 20, flights << 20, made, tuple(flown),
        tuple(stops), tuple(memory),
    )  # fmt: skip


def test_ten_thousand_events_stay_responsive(browser: Any, tmp_path: Path) -> None:
    run = long_run(8000, 2000)
    assert len(run.kernels) + len(run.flights) == 10_000
    picture = Picture(run, run, 3000 << 20, 3000 << 20, (), {}, {})
    path = tmp_path / "long.html"
    write_page([Sheet("long", Report("auto"), picture)], path)
    open_page(browser, path)
    times = browser.execute_async_script(
        """
        const done = arguments[0], t = timelines[0], canvas = t.canvases[0], times = [];
        const step = (left) => {
          if (!left) { done(times); return; }
          const began = performance.now(), span = t.to - t.from;
          canvas.dispatchEvent(new WheelEvent("wheel", {
            deltaY: left > 10 ? -120 : 120, clientX: 700, clientY: 40, cancelable: true }));
          if (t.to - t.from === span) throw new Error("nothing zoomed");
          requestAnimationFrame(() => {
            times.push(performance.now() - began);
            step(left - 1);
          });
        };
        step(20);
        """
    )
    print("zoom steps, ms:", [round(each, 1) for each in times])
    assert len(times) == 20 and max(times) < MOST_MS
    drawn = browser.execute_script(
        "const t = timelines[0]; t.reset(); const began = performance.now(); t.draw();"
        "return performance.now() - began"
    )
    print("a frame of all events, ms:", round(drawn, 1))
    assert drawn < MOST_MS
    assert browser.get_log("browser") == []
    browser.save_screenshot(str(tmp_path / "long.png"))
