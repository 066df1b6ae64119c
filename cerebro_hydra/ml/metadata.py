"""Reads the metadata file of a saved stage, which Spark ML wrote and anybody may have changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Params

from cerebro_hydra.documents import decode, parse, unreadable
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage.names import Name
from cerebro_hydra.storage.store import explained

if TYPE_CHECKING:
    from pyspark import SparkContext

P = TypeVar("P", bound=Params)


@dataclass(frozen=True)
class StageMetadata:
    """Holds what Spark ML's own loading needs of a stage: its uid and its Params."""

    uid: Name
    """It names the stage's folder when a pipeline is saved again."""
    paramMap: dict[str, Any]
    defaultParamMap: dict[str, Any]

    def restore(self, stage: P, where: str) -> P:
        """Give a new stage its uid and Params.

        Raises:
            StoreError: the stage has no such Param, or it does not take the value.
        """
        stage._resetUid(self.uid)
        known = {param.name for param in stage.params}
        for given, setting in (
            (self.paramMap, stage._set),
            (self.defaultParamMap, stage._setDefault),
        ):
            for name, value in given.items():
                if name not in known:
                    raise unreadable(f"a Param of {where}", name)
                try:
                    setting(**{name: value})
                except (TypeError, ValueError) as error:
                    raise StoreError(
                        f"{where} holds the Param {name} that can't be set ({error}); restore it "
                        "from a copy"
                    ) from error
        return stage


def read_metadata(context: SparkContext, path: str) -> dict[str, Any]:
    """Return the metadata of a saved stage; the class that it names is not looked up.

    Raises:
        StoreError: there is none at `path`, or it is damaged.
    """
    where = f"the metadata of {path!r}"
    with explained("read", f"{path}/metadata"):
        text = context.textFile(f"{path}/metadata", 1).first()
    metadata: dict[str, Any] = decode(dict[str, Any], parse(text.encode(), where), where)
    return metadata
