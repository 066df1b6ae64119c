"""Shows frames, each in the place of the one before, on a terminal or in a notebook."""

from __future__ import annotations

import io
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;margin:0">{code}</pre>'


class Screen(Protocol):
    """Shows one frame at a time."""

    def show(self, frame: RenderableType) -> None:
        """Show a frame in the place of the one before."""

    def close(self) -> None:
        """Take the latest frame away."""


def screen_of(console: Console) -> Screen:
    """Return the screen of a console."""
    return NotebookScreen(console.width) if console.is_jupyter else TerminalScreen(console)


class TerminalScreen:
    """Redraws a terminal; what `console` prints meanwhile scrolls by above the frame."""

    def __init__(self, console: Console) -> None:
        """Hide the cursor."""
        # Frames are drawn by records, so that no other thread reads the view.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, frame: RenderableType) -> None:
        """Redraw the frame."""
        self._live.update(frame, refresh=True)

    def close(self) -> None:
        """Take the frame off the screen and give the cursor back."""
        self._live.stop()


class NotebookScreen:
    """Updates one HTML display below a notebook's cell; needs nothing but the notebook itself."""

    def __init__(self, width: int) -> None:
        """Make the display, of so many characters."""
        from IPython.display import HTML, DisplayHandle

        self._html, self._width = HTML, width
        self._handle = DisplayHandle()
        self._handle.display(HTML(""))

    def show(self, frame: RenderableType) -> None:
        """Put a frame into the display."""
        self._handle.update(self._html(html(frame, self._width)))

    def close(self) -> None:
        """Empty the display."""
        self._handle.update(self._html(""))


def html(frame: RenderableType, width: int) -> str:
    """Return a frame as HTML, with its colours."""
    console = Console(
        file=io.StringIO(), record=True, width=width, force_jupyter=False, force_terminal=True
    )
    console.print(frame)
    return console.export_html(code_format=_HTML, inline_styles=True)
