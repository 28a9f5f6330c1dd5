"""The documentation as a site: it builds without a warning, loads nothing from other hosts, and documents all names."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import griffe
import pytest

import hvdtrain
from hvdtrain.config.exclusions import RULES
from hvdtrain.config.fields import option_names
from hvdtrain.config.wording import flag_of, naming_flags

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = re.compile(r"""(?:src=|@import |url\()["']?(https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [mkdocs, "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "_site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Anchors(HTMLParser):
    """Collects the ids of a page, and what it loads."""

    def __init__(self, page: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        if tag in ("script", "img", "iframe") and "src" in attributes:
            self.loaded.add(attributes["src"])
        if tag == "link" and attributes.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.loaded.add(attributes["href"])


@pytest.mark.slow
def test_every_public_name_has_an_entry(site):
    names = set(hooks().public_names())
    for pages in ([site / "reference" / "api.html"], (site / "reference" / "api").iterdir()):
        ids = set().union(*(Anchors(page).ids for page in pages))
        assert names <= ids, names - ids
    modules = {"callbacks", "data", "elastic", "errors", "layers"}
    assert {"hvdtrain.callbacks.distributed", "hvdtrain.data.Arrays", "hvdtrain.errors.JobError"} <= names
    assert {f"hvdtrain.{name}" for name in hvdtrain.__all__} - {f"hvdtrain.{name}" for name in modules} <= names


def test_every_public_name_has_a_docstring():
    package = griffe.load("hvdtrain", search_paths=[str(ROOT)])
    source, reporter = (set(package[each].all_members) for each in ("data.source.Source", "loggers.reporter.Reporter"))
    missing = []
    for name, path in hooks().public_names().items():
        found = package[path.removeprefix("hvdtrain.")]
        members = found.members.values() if found.is_class else ()
        # Keras documents what its callbacks override, Source what sources implement, Reporter what reporters override.
        overrides = source if name not in ("hvdtrain.data.Source", "hvdtrain.Trainer") else set()
        overrides = overrides | (reporter if name.endswith("Reporter") and name != "hvdtrain.Reporter" else set())
        public = [
            each
            for each in members
            if not each.name.startswith(("_", "on_")) and each.name not in overrides and not each.is_alias
        ]
        # An attribute counts if the class declares it.
        public = [each for each in public if each.is_function or each.annotation is not None]
        missing += [f"{name}: {each.path}" for each in (found, *public) if not each.has_docstring]
    assert not missing, "\n".join(missing)


def test_the_tests_of_faults_exist():
    named = re.findall(r"`([a-z]+/\w+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 40
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


@pytest.mark.slow
def test_every_option_is_documented(site):
    from hvdtrain.commands.bench.config import BenchConfig
    from hvdtrain.commands.config import EvalConfig, ExportConfig, RunConfig

    text = (site / "reference" / "command-line.html").read_text().replace('<code class="name">', "<code>")
    for command, config in {
        "train": RunConfig,
        "eval": EvalConfig,
        "bench": BenchConfig,
        "export": ExportConfig,
    }.items():
        section = text.partition(f'<h2 id="{command}">')[2].partition("<h2 ")[0]
        names = option_names(config)
        assert len(names) > 3
        assert [name for name in names if f"<code>{flag_of(name)}" not in section] == []
    assert '<h2 id="doctor">' in text


@pytest.mark.slow
def test_searches_do_not_find_programs(site):
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    examples = [each["text"] for each in found if each["location"].startswith("examples.html#")]
    assert len(examples) == len(list((ROOT / "examples").glob("*.py")))
    assert not [text for text in examples if "import " in text]


def pages_of(site: Path) -> list[Path]:
    """All pages but the reports of the gallery, which are complete in themselves."""
    return [page for page in site.rglob("*.html") if page.parent != site / "gallery"]


@pytest.mark.slow
def test_the_gallery_has_reports_that_load_nothing(site):
    reports = sorted((site / "gallery").iterdir())
    assert [each.name for each in reports] == ["comparison.html", "lost-rank.html", "slow-rank.html"]
    assert not any(Anchors(each).loaded for each in reports)
    texts = [each.read_text() for each in reports]
    assert "balance_every" in texts[0]
    assert "1 rank lost, or left; 2 ranks from here on" in texts[1]
    assert "by a factor of 6.7, from step 705 on." in texts[2]


@pytest.mark.slow
def test_every_page_shows_the_version_and_loads_the_logo(site):
    for page in pages_of(site):
        assert f"hvdtrain {hvdtrain.__version__}, " in page.read_text() or page.name == "404.html", page
        assert any(each.endswith("images/logo.svg") for each in Anchors(page).loaded), page


@pytest.mark.slow
def test_nothing_is_loaded_from_other_hosts(site):
    pages = pages_of(site)
    assert len(pages) > 20
    for page in pages:
        loaded = Anchors(page).loaded
        assert loaded
        assert not [each for each in loaded if re.match(r"(https?:)?//", each)], page
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not FOREIGN.search(file.read_text()), file


def messages() -> list[list[str | None]]:
    """The texts in the code, each as its pieces; None stands for a value."""
    found = []
    for folder in ("hvdtrain", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append([each.value if isinstance(each, ast.Constant) else None for each in node.values])
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append([node.value])
    return found


def begins(pieces: list[str | None], heading: str) -> bool:
    """Whether a message begins with the heading, for some values."""
    if not heading:
        return True
    if not pieces:
        return False
    piece, *rest = pieces
    if piece is None:
        return any(begins(rest, heading[length:]) for length in range(1, len(heading) + 1))
    return piece.startswith(heading) or (heading.startswith(piece) and begins(rest, heading[len(piece) :]))


def test_the_headings_of_the_faq_are_messages():
    known = [pieces for pieces in messages() if len(pieces[0] or "") > 3]
    # Of a shell script, of what is added to Horovod, and of cyclopts.
    others = [ROOT / "launch" / "run", ROOT / "launch" / "horovod" / "repack.py"]
    with naming_flags():
        rules = [rule.message({fact: str(fact) for fact in rule.facts}) for rule in RULES]
    texts = "\n".join([*(file.read_text() for file in others), "Unknown option: ", *rules])
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(headings) >= 12
    for heading in headings:
        assert heading in texts or any(begins(pieces, heading) for pieces in known), heading


def test_the_diagrams_are_those_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    diagrams = importlib.import_module("diagrams")
    assert {file.stem for file in diagrams.FOLDER.iterdir()} == set(diagrams.PICTURES)
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name, draw in diagrams.PICTURES.items():
        picture = draw()
        assert (diagrams.FOLDER / f"{name}.svg").read_text() == picture
        # The type of a picture of 400 px, on a page of 340 px.
        assert min(map(int, re.findall(r'font-size="(\d+)"', picture))) >= 14
        assert re.search(r"\n<title>.+</title>\n<desc>.+</desc>\n", picture)
        texts = re.findall(rf"!\[(.+)\]\(images/diagrams/{name}\.svg\)", pages)
        assert texts, name
        assert [number for number in re.findall(r"\d[\d.,]*\d", texts[0]) if number not in picture] == []


def test_start_here_takes_five_minutes_to_read():
    words = (ROOT / "docs" / "index.md").read_text().split()
    # 200 words a minute.
    assert len(words) < 5 * 200


def test_the_readme_is_short_and_names_both_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    for command in ("launch/run horovodrun -np 2 python -m hvdtrain", "launch/run pytest"):
        assert f"\n{command} " in readme
    for page in re.findall(r"\]\((docs/[^)#]+)", readme):
        assert (ROOT / page).exists(), page


def test_rows_of_a_table_have_as_many_cells_as_its_heading():
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
            rows = [re.sub(r"`[^`]*`", "", row).replace("\\|", "") for row in table.splitlines()]
            assert len({row.count("|") for row in rows}) == 1, f"{page}: {table}"
            assert all(row.endswith("|") for row in rows), f"{page}: {table}"
