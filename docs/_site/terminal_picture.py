"""Draws docs/images/terminal.svg from the output of a run, on standard input.

launch/run horovodrun -np 2 python -m hvdtrain --run-dir /tmp/run | launch/run python docs/_site/terminal_picture.py
"""

import io
import re
import sys
import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

# rich's own loads a font from another host.
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" width="520" viewBox="0 0 {width} {height}" role="img">
<title>The output of a run on two ranks</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: system-ui, sans-serif; font-size: 18px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
# As many columns as can be read on a phone.
FIRST_LINES, LAST_LINES, WIDTH = 9, 10, 52


def main() -> None:
    lines = [line.rstrip() for line in sys.stdin if line.startswith("[1,0]<stdout>:")]
    lines = [*lines[:FIRST_LINES], "…", *lines[-LAST_LINES:]]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ launch/run horovodrun -np 2 python -m hvdtrain", style="bold"))
    for line in lines:
        line = re.sub(r"^\[1,0\]<stdout>:", "", line)
        text = Text(textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
        text.highlight_regex(r"(loss|accuracy)\s+[\d.]+", "green")
        text.highlight_regex(r"^(task|ranks|global batch|mode|learning rate|done|weights_sha256):?", "cyan")
        console.print(text)
    path = Path(__file__).parents[1] / "images" / "terminal.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(console.export_svg(title="hvdtrain", code_format=FORMAT, unique_id="run"))


if __name__ == "__main__":
    main()
