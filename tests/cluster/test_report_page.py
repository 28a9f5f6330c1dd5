"""The page of ``hvdtrain report`` in a browser: Debian's Chromium, without its window."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "single"))

from test_report import make_run

from hvdtrain.runs.report import page
from hvdtrain.runs.run_record import read_run

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")]

# Writes what it sees into the title of the page.
LOOK = """
<script>
setTimeout(() => {
  const figures = [...document.querySelectorAll("main section")].filter((each) => each.querySelector(".bk-Figure"));
  document.title = JSON.stringify({
    figures: figures.length,
    empty: figures.filter((each) => each.querySelector(".bk-Figure").getBoundingClientRect().height < 200).length,
    width: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    links: [...document.querySelectorAll("nav a")].filter((each) => !document.querySelector(each.hash)).length,
  });
}, 3000);
</script>
"""


OPEN_A_TABLE_THEN_UPDATE = """
<script>
setTimeout(() => {
  const tables = document.getElementById("tables");
  tables.querySelector("summary").focus();
  tables.querySelector("details").open = true;
  replaceTables(tables.innerHTML.replaceAll(" open=\\"\\"", ""));
  document.title = JSON.stringify({
    open: [...tables.querySelectorAll("details")].map((each) => each.open),
    focused: document.activeElement.textContent,
  });
}, 1000);
</script>
"""


def look(html, script, folder, *options):
    """What a script writes into the title of a page, and the lines of the browser's console."""
    file = folder / "page.html"
    file.write_text(html.replace("</body>", f"{script}</body>"))
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
            *("--virtual-time-budget=8000", f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)[1]
    return json.loads(title.replace("&quot;", '"')), [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1300, 500])
def test_the_page_in_a_browser(width, is_dark, tmp_path):
    html = page.html([read_run(make_run(tmp_path / "run"))])
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    found, console = look(html, LOOK, tmp_path, f"--window-size={width},900", *dark)
    assert found["figures"] == html.count("<section id=")
    assert found["empty"] == 0
    assert found["links"] == 0
    assert found["width"] <= width, "nothing is wider than the window"
    assert (found["background"] == "rgb(22, 24, 28)") == is_dark
    assert all("[bokeh " in line for line in console), console


def test_an_update_closes_no_table_that_somebody_reads(tmp_path):
    html = page.html([read_run(make_run(tmp_path / "run"))], is_live=True)
    found, _ = look(html, OPEN_A_TABLE_THEN_UPDATE, tmp_path)
    assert found == {"open": [True], "focused": "Options"}
