"""Says why all trials failed: each reason once, with the line of the user's code that raised it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from cerebro_hydra.errors import AllTrialsFailed
from cerebro_hydra.observe.text import without_addresses

_FRAME = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.*)\n(    .*\n)*', re.M
)
_OUR_ERROR = re.compile(r"^cerebro_hydra\.errors\.\w+: ")
_ROOMS = "agent|data|hopper|ml|observe|plan|recipe|replay|shards|spark|storage|testing|tune|wire"
_LIBRARY = re.compile(rf"^<|\b(site-packages|lib/python[\d.]+|cerebro_hydra/({_ROOMS}))/")


def all_failed(errors: Sequence[str], run_path: str | None = None) -> AllTrialsFailed:
    """Return the error of a search whose trials ended with these tracebacks.

    It begins with the most frequent reason. The whole tracebacks stay in the run's folder, if a
    trial was admitted.
    """
    counts = Counter(map(reason, errors)).most_common()
    who = f"all {len(errors)} trials" if len(errors) > 1 else "the only trial"
    lines = [f"{who} failed: {counts[0][0]}"]
    for text, count in counts[1:]:
        lines.append(f"{count} of them: {text}")
    if run_path is not None:
        lines.append(f"the tracebacks are in SearchResult.open({run_path!r}).trials")
    return AllTrialsFailed("\n".join(lines))


def reason(error: str) -> str:
    """Return the first line of a traceback's last error, and where the user's code raised it."""
    frames = list(_FRAME.finditer(error + "\n"))
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"].replace("\\", "/"))]
    text = error[frames[-1].end() :] if frames else error
    text = without_addresses(_OUR_ERROR.sub("", text.strip().partition("\n")[0]))
    if own:
        text += f" ({own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['name']})"
    return text
