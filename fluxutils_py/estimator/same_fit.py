"""Raise an error on every rank where ranks were given different fits or inputs."""

from __future__ import annotations

from typing import Any

from fluxutils_py.data.digest import digest_arrays
from fluxutils_py.errors import RankError, warn
from fluxutils_py.estimator.fingerprint import sample_digests, shared_identity
from fluxutils_py.estimator.fit_loop import FitLoop
from fluxutils_py.estimator.spec import Settings, read_spec
from fluxutils_py.inputs.inputs import Inputs
from fluxutils_py.parallel import RankGroup
from fluxutils_py.training.hooks import Hooks, as_callbacks
from fluxutils_py.versions import installed_version

OF_DATA = ("the shape of", "the dtype of", "the starts")


def require_same_fit(loop: FitLoop) -> None:
    """Raise on every rank unless all have the same fit; then copy the model of rank 0 to all ranks.

    Compares the model, optimizer, spec, versions, and the sizes and a sample of the data.

    Raises
    ------
    RankError
        If they differ; names the first difference, with the value of each rank.
    """
    ranks = loop.ranks
    if ranks.is_single:
        return
    model = loop.model
    identity = shared_identity(loop)
    # data first: its sizes are part of the identity too, and their error names sharded=True
    _require_same_data(loop, identity)
    ranks.require_equal(
        {
            "the version of fluxutils_py": installed_version("fluxutils_py"),
            "the version of torch": installed_version("torch"),
            "the epochs so far": loop.epoch,
            "scaling": loop.data.settings.scaling,
            **identity,
            "the scale of the targets": str(loop.data.codec.scale),
            "hooks that all ranks need": [
                loop.data.validation is not None,
                loop.scheduler is not None,
            ],
        }
    )
    # initial weights drawn by the user's own code may differ between ranks
    ranks.broadcast(list(model.parameters()) + list(model.buffers()))
    n_series = min(len(loop.data.windows.segments), loop.data.windows.batchsize)
    if n_series < ranks.size and ranks.rank == 0:
        warn(f"{ranks.size} ranks share {n_series} series: some have nothing to do")


def _require_same_data(loop: FitLoop, identity: dict[str, str]) -> None:
    """Raise on every rank unless all have the same data; the error tells of ``sharded=True``."""
    ranks = loop.ranks
    # a sample only: ranks may map a file that is larger than memory
    sizes = {name: text for name, text in identity.items() if name.startswith(OF_DATA)}
    try:
        ranks.require_equal(sizes | sample_digests(loop.data))
    except RankError as error:
        if ranks.call != "fit":  # sharded already, or of a forecaster, which needs all series
            raise
        raise RankError(
            f"{error}. If each rank is to train on its own series, call {ranks.call}(..., "
            "sharded=True)"
        ) from None


def collective_settings(settings: Settings, resume: bool, epochs: int | None) -> dict[str, Any]:
    """Return what decides which collective calls a fit makes before :func:`require_same_fit`."""
    # the hooks of the fit itself do not exist yet
    hooks = Hooks()
    for callback in as_callbacks(settings.callbacks):
        hooks.attach(callback)
    spec = read_spec(settings.spec)
    return {
        "whether the fit continues with the model of an earlier one": resume,
        "epochs": spec.epochs if epochs is None else epochs,
        "early_stopping": settings.early_stopping,
        "patience": spec.patience,
        "scaling": settings.scaling,
        **hooks.describe_collective(),
    }


def require_same_inputs(ranks: RankGroup, inputs: Inputs) -> None:
    """Raise on every rank unless the inputs of all ranks have equal sizes."""
    bounds = [array for array in (inputs.starts, inputs.lengths) if array is not None]
    ranks.require_equal(
        {
            **{f"the shape of {s.name}": (s.F, s.N, s.T) for s in inputs.series},
            "the form of x": inputs.form,
            "the starts and lengths": digest_arrays(*bounds),
        }
    )
