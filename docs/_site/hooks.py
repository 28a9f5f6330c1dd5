"""MkDocs hooks: generate the reference pages from the code, and bring files of the repository into the site."""

import ast
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvdtrain"
# Files outside docs/ that pages link to, and their places in the site.
_COPIED = {"benchmarks/results/peers.svg": "images/peers.svg", "LICENSE": "license.txt"}
_GENERATED_FROM = {"CHANGELOG.md": "changelog.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version at the bottom of each page."""
    version = _assignments(PACKAGE / "__init__.py")["__version__"]
    config.copyright = f"hvdtrain {version}, Apache License 2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages and the copied files."""
    pages = {
        "reference/command-line.md": command_line_page(),
        **api_pages(),
        "examples.md": examples_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for source, path in _COPIED.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files outside docs/, which work in the repository, into links within the site."""
    folder = os.path.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        path = match.group(1)
        if example := re.fullmatch(r"examples/(\w+)\.py", path):
            target = f"examples.md#{example.group(1).replace('_', '-')}"
        else:
            target = {**_COPIED, **_GENERATED_FROM}.get(path, path)
        return f"]({os.path.relpath(target, folder or '.')})"

    return re.sub(r"\]\(\.\./((?:examples|benchmarks|launch|CHANGELOG|LICENSE)[^)#]*)\)", replace, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces reStructuredText markup in docstrings, links figures, and keeps names and ranges on one line."""
    if page.file.src_uri.startswith("reference/api"):
        html = re.sub(r":(?:func|meth|class|attr|mod):<code>~?([^<]+)</code>", r"<code>\1</code>", html)
        html = re.sub(r"<p>::</p>\n?", "", html).replace("::</p>", ":</p>")
        # Links to errors that the documented module itself does not import.
        errors = "|".join(name for name in public_names() if name.startswith("hvdtrain.errors."))
        errors = errors.replace("hvdtrain.errors.", "")
        target = os.path.relpath("reference/api/errors.html", os.path.dirname(page.file.src_uri))
        html = re.sub(rf"<code>({errors})</code>", rf'<code><a href="{target}#hvdtrain.errors.\1">\1</a></code>', html)
    if page.file.src_uri == "examples.md":
        # Programs name everything; searches shall find the pages that explain it.
        html = html.replace(
            '<div class="language-python highlight">', '<div class="language-python highlight" data-search-exclude>'
        )
    # Figures are links to themselves at full size, unless they are links already.
    html = re.sub(r'(?<=<p>)(<img [^>]*src="([^"]+\.png)"[^>]*>)', r'<a href="\2">\1</a>', html)
    html = re.sub(r"<code>([^<\n]+)</code>", _breakable, html)
    # A word joiner forbids the break within 0.92–1.04.
    return re.sub(r"(?<=\d)–(?=\d)", "–\u2060", html)


def _breakable(code: re.Match[str]) -> str:
    """Code in text: browsers break --run-dir after its hyphens, and long names in narrow columns anywhere."""
    text = code[1]
    if len(text) <= (32 if text.startswith("--") else 24):
        return f'<code class="name">{text}</code>'
    if " " not in text:
        text = re.sub(r"(?<=\w)([._/(=])(?=\w)", r"\1<wbr>", text)
    return f"<code>{text}</code>"


class _FoundApp(BaseException):
    """Carries the command line out of ``cli.parse``, which has no other way to hand it over."""


def command_line_page() -> str:
    """The reference of all commands and options, from the App that parses them."""
    from hvdtrain.commands import cli

    def capture(app: Any, *args: Any, **kwargs: Any) -> None:
        raise _FoundApp(app)

    try:
        with mock.patch.object(cli.App, "parse_args", capture):
            cli.parse(None, [])
    except _FoundApp as found:
        app = found.args[0]
    else:
        raise RuntimeError("cli.parse must parse with cyclopts.App.parse_args")
    parts = [
        "# Command line",
        "Generated from the code that parses it. `train` is the default command: `python -m hvdtrain --steps 100` is\n"
        "`python -m hvdtrain train --steps 100`. The same options can be set in a [TOML file](../running.md#options).",
    ]
    for name in cli._COMMANDS:
        text = app[name].generate_docs(heading_level=2)
        description, _, options = text.partition("```console")[2].partition("```")[2].strip().partition("\n")
        options = re.sub(r"\*\*(.+)\*\*:\n", partial(_group_heading, name), options)
        # cyclopts breaks long descriptions with an indentation that Markdown takes for code.
        options = re.sub(r"\n {8}", " ", options)
        options = options.replace("runs/<task>", "`runs/TASK`")
        options = re.sub(r"(?m)(?<=`: ).+$", lambda each: _CODE.sub(r"`\1`", each[0]), options)
        parts += [f"## {name}", description, f"```text\n{cli.usage_of(name)}\n```", options.strip()]
    return "\n\n".join(parts) + "\n"


# What descriptions of options mention: options, files and addresses.
_CODE = re.compile(
    r"(?<![`\w/-])(--[a-z][a-z-]+(?: (?:exponential|nesterov|local|adasum)\b)?"
    r"|chrome://\w+|[\w.]+\.(?:py|jsonl?|csv|png|svg|pdf|keras)\b)(?!`)"
)


def _group_heading(command: str, match: re.Match[str]) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", f"{command} {match[1]}".lower()).strip("-")
    return f"### {match[1]} {{ #{slug} }}\n"


_SECTIONS = {
    "Your own script": (
        *("init", "Topology", "shard", "broadcast", "DistributedOptimizer", "PartialDistributedOptimizer"),
        *("DistributedGradientTape", "gather", "average", "WholeBatch"),
        *("process_set", "synchronize_batch_normalization", "verify", "autotune", "run"),
    ),
    "Compression": ("PowerSGD", "FP16", "Compression"),
    "Values of all ranks": (
        *("evaluate", "predict", "reduce", "gather_objects", "broadcast_object"),
        *("barrier", "is_main_process", "print_once"),
    ),
    "Trainer": ("Trainer", "Checkpointer", "TableReader", "JobWatch", "ParameterAverager"),
    "Configuration": (
        *("TrainConfig", "GuardConfig", "CheckpointConfig", "LoggingConfig", "LocalSGDConfig"),
        *("BalanceConfig", "QuorumConfig", "RecordConfig", "GpuConfig"),
    ),
    "Tasks and reports": ("Task", "report"),
    "Loggers": (
        *("Reporter", "CompositeReporter", "ConsoleReporter", "CsvReporter", "JsonLinesReporter"),
        *("MLflowReporter", "RankTimesReporter", "TensorBoardReporter", "WandbReporter"),
    ),
}
_SUBMODULES = ("callbacks", "data", "elastic", "errors", "layers")


def api_pages() -> dict[str, str]:
    """The reference of all public names, by path: an overview, and a page for each section."""
    names = public_names()
    package = griffe.load("hvdtrain", search_paths=[str(ROOT)])
    sections = {title: [f"hvdtrain.{name}" for name in section] for title, section in _SECTIONS.items()}
    for module in _SUBMODULES:
        sections[f"hvdtrain.{module}"] = [name for name in names if name.startswith(f"hvdtrain.{module}.")]
    listed = [name for section in sections.values() for name in section]
    if sorted(listed) != sorted(names):
        raise RuntimeError(f"_SECTIONS must list all public names. Different: {set(listed) ^ set(names)}")
    overview = [
        "# Python API",
        "Generated from the docstrings. `import hvdtrain` loads no TensorFlow: names are loaded on first use.",
    ]
    pages = {}
    for title, section in sections.items():
        path = f"api/{title.removeprefix('hvdtrain.').lower().replace(' ', '-')}.md"
        rows = [
            f'| <a id="{name}"></a>[`{name.removeprefix("hvdtrain.")}`]({path}#{name}) '
            f"| {_first_sentence(package[names[name].removeprefix('hvdtrain.')])} |"
            for name in section
        ]
        overview += [f"## [{title}]({path})", "\n".join(["| name | |", "|---|---|", *rows])]
        entries = [
            f'<a id="{name}"></a>\n\n::: {names[name]}\n    options:\n      heading: {name}\n'
            f"      toc_label: {name.rpartition('.')[2]}\n"
            # All reporters have the methods of Reporter.
            f"      inherited_members: {'false' if title == 'Loggers' else 'true'}"
            for name in section
        ]
        pages[f"reference/{path}"] = "\n\n".join([f"# {title}", *entries]) + "\n"
    return {"reference/api.md": "\n\n".join(overview) + "\n", **pages}


def _first_sentence(documented: griffe.Object | griffe.Alias) -> str:
    assert documented.docstring is not None, documented.path
    return documented.docstring.value.partition("\n")[0].replace("``", "`").replace("|", "\\|")


def public_names() -> dict[str, str]:
    """Each public name, ``hvdtrain.Trainer`` or ``hvdtrain.data.Arrays``, with the path of its definition."""
    package = _assignments(PACKAGE / "__init__.py")
    names = {}
    for name in package["__all__"]:
        if name in package["_MODULES"]:
            names[f"hvdtrain.{name}"] = f"hvdtrain.{package['_MODULES'][name]}.{name}"
            continue
        file = PACKAGE / name / "__init__.py"
        if not file.exists():  # a single module, all of whose classes are public
            tree = ast.parse((PACKAGE / f"{name}.py").read_text())
            members = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
            names |= {f"hvdtrain.{name}.{each}": f"hvdtrain.{name}.{each}" for each in members}
            continue
        imported = {
            alias.name: f"{node.module}.{alias.name}"
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        names |= {f"hvdtrain.{name}.{each}": imported[each] for each in _assignments(file)["__all__"]}
    return names


def _assignments(file: Path) -> dict[str, Any]:
    """The literals that a module assigns to names, read without importing TensorFlow."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def examples_page() -> str:
    """All programs in examples/, each with its docstring as the description."""
    parts = ["# Examples", "Complete programs. `(hvd)` marks each line that makes a program distributed."]
    for file in sorted((ROOT / "examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        code = file.read_text().partition('"""\n')[2].strip()
        parts.append(f"## {file.stem} {{ #{file.stem.replace('_', '-')} }}")
        for paragraph in docstring.split("\n\n"):
            is_command = paragraph.startswith("launch/run ")
            parts.append(f"```sh\n{paragraph}\n```" if is_command else paragraph)
        parts.append(f'```python title="examples/{file.name}"\n{code}\n```')
    return "\n\n".join(parts) + "\n"
