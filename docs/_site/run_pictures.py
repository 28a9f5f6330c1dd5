"""Takes the pictures of single figures of the gallery's reports: launch/run python docs/_site/run_pictures.py

Needs Chromium.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from gallery import REPORTS, record

from hvdtrain.runs.report import page

FOLDER = Path(__file__).resolve().parents[1] / "images" / "runs"
PICTURES = {
    "slow-rank": ("slow-rank", "ranks"),
    "step-parts": ("slow-rank", "step-parts"),
    "members": ("lost-rank", "members"),
    "comparison": ("comparison", "value-examples-s"),
}
"""The report and the figure of each picture."""
WIDTH, HEIGHT = 480, 440


def take(html: str, figure: str, path: Path) -> None:
    """A picture of one figure, which the page's link to it names, with its title and sentence."""
    only = f"<style>header, #tables, main > section:not(#figure-{figure}) {{ display: none }}</style>"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(html.replace("</head>", f"{only}</head>"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        options += [
            "--virtual-time-budget=8000",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--user-data-dir={folder}/profile",
        ]
        subprocess.run(["chromium", *options, f"--screenshot={path}", file.as_uri()], check=True)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (report, figure) in PICTURES.items():
        take(page.html(list(map(record, REPORTS[report]))), figure, FOLDER / f"{name}.png")
