"""Custom search: a searcher of the user's own proposes and decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searcher import Searcher


class CustomSearch(Search):
    """Trains what your own searcher proposes, as far as it decides; `Search` has other arguments.

    ```python
    class Halving:
        epochs = 1  # a candidate trains one epoch; then `tell` lets it go on, pauses or stops it

        ...  # closed, ask and tell, as `cerebro_hydra.tune.Searcher` describes them

    CustomSearch(make_searcher=lambda: Halving(candidates=27), num_epochs=9, backend=...).fit(df)
    ```

    Args:
        make_searcher: a function without arguments that returns a new `Searcher`. It is called for
            each fit, and its searchers must decide alike when they are told alike.

    Raises:
        ConfigurationError: `make_searcher` is no function; or as `Search`.
    """

    def __init__(self, *, make_searcher: Callable[[], Searcher], **arguments: Any) -> None:
        super().__init__(**arguments)
        if not callable(make_searcher):
            raise ConfigurationError(
                f"make_searcher is {make_searcher!r}; give a function that returns a new searcher"
            )
        self._make_searcher = make_searcher

    def searcher(self) -> Searcher:
        """Return a new searcher."""
        return self._make_searcher()
