"""The page in headless Chromium, served by this process, which sees every request that the page makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftsmith.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")

WIDTHS = (360, 768, 1280)
# Lays the page out in frames of several widths and measures it there.
MEASURE = """<!doctype html><body><script>
const found = {};
function measure(frame) {
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.body);
  const cut = [...page.querySelectorAll('svg text')].filter(text => {
    const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
    return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
  });
  const small = [...page.querySelectorAll('svg')].map(svg => 12 * svg.getBoundingClientRect().width / 360);
  return {wide: page.documentElement.scrollWidth, room: frame.contentWindow.innerWidth,
    cut: cut.map(text => text.textContent), smallest_text: Math.min(...small),
    ink: style.color, paper: style.backgroundColor};
}
const widths = WIDTHS;
let left = widths.length;
for (const width of widths) {
  const frame = document.createElement('iframe');
  frame.width = width; frame.height = 3000;
  frame.onload = () => {
    frame.contentDocument.querySelectorAll('details').forEach(one => one.open = true);
    found[width] = measure(frame);
    if (--left === 0) document.body.textContent = JSON.stringify(found);
  };
  frame.src = 'report.html'; document.body.append(frame);
}
</script>"""


@pytest.fixture(scope="module")
def site(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Where the page of a run compared with itself is served; and the paths asked for, as they come."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(write_report(finished, finished)["page"], folder / "report.html")
    (folder / "measure.html").write_text(MEASURE.replace("WIDTHS", json.dumps(WIDTHS)))
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def chromium(*arguments: str, profile: Path) -> str:
    """Run it once; any host but this one does not resolve."""
    command = [str(CHROMIUM), "--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=20000"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module", params=["light", "dark"])
def measured(request: Any, site: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By width; under `scheme` what the user prefers, under `asked` what was fetched meanwhile."""
    address, asked = site
    asked.clear()
    preference = f"--blink-settings=preferredColorScheme={int(request.param == 'light')}"
    text = chromium(preference, "--dump-dom", f"{address}/measure.html", profile=tmp_path_factory.mktemp("profile"))
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return {**found, "scheme": request.param, "asked": list(asked)}


def test_the_page_fits_any_screen_without_scrolling_sideways(measured):
    for width in map(str, WIDTHS):
        assert measured[width]["wide"] <= measured[width]["room"] == int(width)


def test_no_text_of_a_chart_is_cut_off_or_too_small(measured):
    for width in map(str, WIDTHS):
        assert measured[width]["cut"] == []
        assert measured[width]["smallest_text"] >= 10


def test_dark_and_light_are_as_the_reader_prefers(measured):
    dark = {"ink": "rgb(228, 232, 237)", "paper": "rgb(20, 23, 27)"}
    light = {"ink": "rgb(27, 31, 36)", "paper": "rgb(255, 255, 255)"}
    assert measured["360"].items() >= (dark if measured["scheme"] == "dark" else light).items()


def test_the_browser_fetches_the_page_alone(measured):
    assert sorted({*measured["asked"]} - {"/favicon.ico"}) == ["/measure.html", "/report.html"]


def test_the_print_is_light_and_whole(site, tmp_path):
    """In the dark too, and with every section's heading on paper."""
    if shutil.which("pdftotext") is None:
        pytest.skip("no pdftotext on the path")
    address, _ = site
    file = tmp_path / "print.pdf"
    chromium(
        "--blink-settings=preferredColorScheme=0", f"--print-to-pdf={file}", f"{address}/report.html", profile=tmp_path
    )
    text = subprocess.run(["pdftotext", "-layout", file, "-"], capture_output=True, text=True, check=True).stdout
    for heading in ("Pipeline", "Rehearsal", "Hidden states", "Acceptance", "Machine and versions", "Do it again"):
        assert f"\n{heading}\n" in text.replace("\f", "\n")
    assert text.count("Export and serving") == 1, "the links to the sections are not printed"
