"""``hvdtrain report``: writes the page of some runs, or serves it."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hvdtrain.errors import DataError, UsageError
from hvdtrain.runs.report import page
from hvdtrain.runs.report.drawing import require_bokeh
from hvdtrain.runs.report.serving import LOOPBACK, LiveRuns, make_server
from hvdtrain.runs.run_files import open_run_files
from hvdtrain.runs.run_record import read_files, read_run
from hvdtrain.stores.urls import is_url, require_usable
from hvdtrain.system.atomic_files import write_text


def run(
    runs: Sequence[str],
    *,
    output: Path = Path("report.html"),
    serve: bool = False,
    address: str = LOOPBACK,
    port: int = 0,
) -> int:
    """Writes or serves the page.

    Raises:
        UsageError: no run is named, Bokeh is not installed, or the port is taken.
        DataError: a folder holds no run, or the file cannot be written.
    """
    if not runs:
        raise UsageError("RUN is missing. For example: hvdtrain report runs/digits")
    require_bokeh()
    for each in runs:
        if is_url(each):
            require_usable("RUN", each)
    if serve:
        with ExitStack() as stack:
            opened = [stack.enter_context(open_run_files(each)) for each in runs]
            return _serve(LiveRuns(lambda: list(map(read_files, opened))), address, port)
    try:
        write_text(output, page.html([read_run(each) for each in runs]))
    except OSError as error:
        raise DataError(f"--output must be a file that can be written. Received: {str(output)!r} ({error})") from error
    print(f"written: {output}", flush=True)
    return 0


def _serve(live: LiveRuns, address: str, port: int) -> int:
    live.values("")  # Errors now, not in a browser.
    token = secrets.token_urlsafe(16)
    with make_server(live, address, port, token) as server:
        print(f"http://{address}:{server.server_port}/{token}/ shows the run; Ctrl-C ends this.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
    return 0
