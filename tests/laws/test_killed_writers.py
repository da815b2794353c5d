"""Whatever writes files: a kill at any of its system calls loses nothing, and the next run goes on.

A process that is killed leaves the folder as it is at that moment. So the folder is copied before
each call that writes, and each copy is read, and written to again.
"""

import h5py
import numpy as np
import pytest

import fluxutils_py
from fluxutils_py import Estimator, SequenceScaler, h5concat, h5create, h5save
from fluxutils_py.bobbin import write_pytree_json
from fluxutils_py.training import Checkpointer
from tests.system_calls import folders_at_every_call

X = np.arange(3 * 5 * 7, dtype="f4").reshape(3, 5, 7)


def read_h5(folder):
    """Return the values of all datasets of all HDF5 files."""
    values = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            names = ["/"]
            file.visit(names.append)
            for name in names:
                item = file[name]
                is_dataset = isinstance(item, h5py.Dataset)
                values[path.name, name] = str(item[()]) if is_dataset else "group"
    return values


def read_objects(folder):
    """Return what is in files of ``save``."""
    return {p.name: fluxutils_py.load(p).scale_.tolist() for p in sorted(folder.glob("*.pt"))}


def read_texts(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name[0] != "."}


def read_checkpoint(folder):
    return Checkpointer(folder).read()


FITTED = Estimator(spec={"epochs": 1, "batchsize": 5, "seqsize": 7}, random_state=0).fit(X, X[:1])


def h5_with_x(folder):
    h5save(folder / "a.h5", {"x": X, "y": X + 1})


def parts(folder):
    for i in range(2):
        h5save(folder / f"part{i}.h5", {"x": X + i})
    h5save(folder / "a.h5", {"old": X})


WRITERS = {
    "h5save": (h5_with_x, lambda f: h5save(f / "a.h5", {"x": X + 2}), read_h5),
    "h5concat": (
        parts,
        lambda f: h5concat(f / "a.h5", [f / "part0.h5", f / "part1.h5"], 1),
        read_h5,
    ),
    "h5create": (
        lambda _: None,
        lambda f: h5create(f / "a.h5", "g/y", (1, 2, 3), exist_ok=True),
        read_h5,
    ),
    "save": (
        lambda f: fluxutils_py.save(SequenceScaler().fit(X), f / "a.pt"),
        lambda f: fluxutils_py.save(SequenceScaler().fit(3 * X), f / "a.pt"),
        read_objects,
    ),
    "Estimator.export": (
        lambda f: (f / "a.h").write_text("old"),
        lambda f: FITTED.export(f / "a.h", format="c"),
        read_texts,
    ),
    "Checkpointer": (
        lambda f: Checkpointer(f).write({"i": 1}, 1),
        lambda f: Checkpointer(f).write({"i": 2}, 2),
        read_checkpoint,
    ),
    "write_pytree_json": (
        lambda f: (f / "a.json").write_text("old"),
        lambda f: write_pytree_json(f / "a.json", {"x": (1, 2.5)}),
        read_texts,
    ),
}


@pytest.mark.few
@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_at_any_call_loses_nothing_and_the_next_run_goes_on(tmp_path, name):
    prepare, write, read = WRITERS[name]
    folder, copies = tmp_path / "data", tmp_path / "copies"
    folder.mkdir()
    prepare(folder)
    before = read(folder)
    calls = folders_at_every_call(lambda: write(folder), folder, copies)
    if calls is None:
        pytest.skip("the system does not let one process trace another")
    assert len(calls) >= 4, calls
    after, files = read(folder), names(folder)
    assert before != after
    for copy, call in zip(sorted(copies.iterdir()), calls, strict=True):
        found = read(copy)
        assert found in (before, after), (copy.name, call)
        write(copy)
        assert read(copy) == after, (copy.name, call)
        if name != "Checkpointer":  # whose files are numbered on
            assert names(copy) == files, (copy.name, call)
        assert not [path for path in copy.rglob("*") if path.name.endswith(".part")]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
