"""scikit-learn's callbacks see fits and epochs as tasks, alone and inside pipelines and searches."""

import copy

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, HalvingGridSearchCV
from sklearn.pipeline import make_pipeline

from fluxutils_py import (
    Estimator,
    SequenceClassifier,
    SequenceFeatures,
    SequenceRegressor,
    SequenceScaler,
    Spec,
    samples,
    sklearn_callbacks,
)
from fluxutils_py.forecasting import Forecaster

callback = pytest.importorskip("sklearn.callback", reason="scikit-learn >= 1.9 has callbacks")

F, N, T = 2, 7, 33


@pytest.fixture
def data():
    x = np.random.default_rng(0).normal(size=(F, N, T)).astype("f4")
    return x, x[:1].cumsum(2) / 5


class Record:
    """Notes each call, and what it gets."""

    def __init__(self, stop_after=None):
        self.calls = []
        self.got = []
        self.stop_after = stop_after

    def setup(self, estimator, context):
        self.calls.append("setup")

    def teardown(self, estimator, context):
        self.calls.append("teardown")

    def on_fit_task_begin(self, estimator, context, *, X=None, y=None, metadata=None):
        self.calls.append(f"begin {context.task_name} {context.task_id}")
        self.got.append((context.max_subtasks, X, y, metadata))

    def on_fit_task_end(self, estimator, context, *, X=None, fitted_estimator=None):
        self.calls.append(f"end {context.task_name} {context.task_id}")
        if hasattr(fitted_estimator, "predict"):
            self.got.append(np.asarray(fitted_estimator.predict(X)))
        return context.task_name == "epoch" and context.task_id == self.stop_after


class Propagated(Record):
    max_propagation_depth = None


def network(epochs=3, **settings):
    return Estimator(spec=Spec(epochs=epochs, batchsize=4, seqsize=16), random_state=0, **settings)


def epochs_between(n):
    inside = [f"{word} epoch {i}" for i in range(n) for word in ("begin", "end")]
    return ["setup", "begin fit 0", *inside, "end fit 0", "teardown"]


@pytest.mark.slow
def test_epochs_are_tasks_with_the_estimator_fitted_so_far(data):
    x, y = data
    record = Record()
    weight = np.ones(N, "f4")
    est = network().set_callbacks(record).fit(x, y, sample_weight=weight)
    assert record.calls == epochs_between(3)
    assert [g[0] for g in record.got if isinstance(g, tuple)] == [3, 0, 0, 0]
    assert record.got[0][1] is x
    assert record.got[0][2] is y
    assert record.got[0][3]["sample_weight"] is weight
    predictions = [g for g in record.got if not isinstance(g, tuple)]
    for n_epochs, prediction in enumerate(predictions[:3], 1):
        # the same training, ended by itself
        shorter = network(n_epochs).fit(x, y, sample_weight=weight)
        np.testing.assert_array_equal(prediction, shorter.predict(x))
    np.testing.assert_array_equal(predictions[3], est.predict(x))


@pytest.mark.slow
def test_a_fit_with_callbacks_gives_the_same_bits(data):
    x, y = data
    plain = network().fit(x, y)
    watched = network().set_callbacks(Record()).fit(x, y)
    np.testing.assert_array_equal(plain.predict(x), watched.predict(x))
    assert plain.loss_curve_ == watched.loss_curve_


def test_a_callback_that_returns_true_ends_the_training(data):
    record = Record(stop_after=1)
    est = network(9).set_callbacks(record).fit(*data)
    assert record.calls == epochs_between(2)
    assert est.n_iter_ == 2


@pytest.mark.parametrize("priority", [10, 90])
def test_another_hook_that_stops_ends_the_tasks_too(data, priority):
    record = Record()
    est = network(9, callbacks=Stop(priority)).set_callbacks(record).fit(*data)
    assert est.n_iter_ == 2
    # one that stops after epoch 2 was announced ends that task too
    assert record.calls in (epochs_between(2), epochs_between(3))


class Stop:
    def __init__(self, priority):
        self.priority = priority

    def on_epoch(self, loop):
        if loop.epoch == 1:
            loop.stop()


@pytest.mark.few
@pytest.mark.parametrize("cell", ["linear", "auto"])
def test_ready_made_estimators(data, cell):
    record = Record()
    SequenceRegressor(cell=cell, max_updates=60).set_callbacks(record).fit(*data)
    n_epochs = sum(call.startswith("begin epoch") for call in record.calls)
    assert record.calls == epochs_between(n_epochs)
    assert n_epochs == 1 or cell == "auto"


def test_a_classifier_and_partial_fit(data):
    x, y = data
    record = Record()
    est = SequenceClassifier(3, cell="rnn", epochs=1, max_updates=None).set_callbacks(record)
    est.partial_fit(x, (y > 0).astype(int), classes=[0, 1])
    assert record.calls == epochs_between(1)


@pytest.mark.parametrize("transformer", [SequenceScaler(), SequenceFeatures()])
def test_the_fit_of_a_transformer_is_one_task(data, transformer):
    record = Record()
    transformer.set_callbacks(record)
    transformer.fit(data[0])
    assert record.calls == ["setup", "begin fit 0", "end fit 0", "teardown"]


@pytest.mark.slow
def test_a_forecaster_has_epochs(data):
    record = Record()
    Forecaster(h=3, season_length=4, hidden_size=4, max_steps=5).set_callbacks(record).fit(data[0])
    n_epochs = sum(call.startswith("begin epoch") for call in record.calls)
    assert n_epochs > 0
    assert record.calls == epochs_between(n_epochs)
    assert record.got[0][0] is None  # their number is not known in advance


@pytest.mark.slow
def test_an_error_in_the_fit_still_tears_down(data):
    x, y = data
    record = Record()
    est = network().set_callbacks(record)
    with pytest.raises(RuntimeError, match="no second epoch"):
        est.set_params(callbacks=Failing()).fit(x, y)
    assert record.calls[-1] == "teardown"
    est.set_params(callbacks=None).fit(x, y)  # and the next fit begins anew
    assert record.calls[-9:] == epochs_between(3)[-9:]


class Failing:
    def on_epoch(self, loop):
        if loop.epoch == 1:
            raise RuntimeError("no second epoch")


@pytest.mark.slow
def test_scoring_monitor_has_the_score_of_each_epoch(data):
    x, y = data
    monitor = callback.ScoringMonitor(scoring="r2")
    network(3).set_callbacks(monitor).fit(samples(x), samples(y))
    rows = [row for row in monitor.get_logs().data if row["task_name"] == "epoch"]
    assert [row["task_id"] for row in rows] == [0, 1, 2]
    for n_epochs, row in enumerate(rows, 1):
        predicted = network(n_epochs).fit(x, y).predict(x)
        expected = r2_score(y.reshape(-1), predicted.reshape(-1))
        assert row["r2"] == pytest.approx(expected, abs=0.35)
    assert rows[0]["r2"] != rows[2]["r2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "n_jobs"), [(GridSearchCV, 1), (GridSearchCV, 2), (HalvingGridSearchCV, 1)]
)
def test_searches_hand_callbacks_on(data, search, n_jobs, capsys):
    pytest.importorskip("rich", reason="ProgressBar prints by it")
    x, y = data
    monitor = callback.ScoringMonitor(scoring="neg_mean_squared_error")
    pipe = make_pipeline(SequenceScaler(), network(2).set_callbacks(monitor))
    arguments = {"min_resources": 4} if search is HalvingGridSearchCV else {}
    found = search(pipe, {"estimator__random_state": [0, 1]}, cv=2, n_jobs=n_jobs, **arguments)
    found.set_callbacks(callback.ProgressBar(max_propagation_depth=None))
    found.fit(samples(x), samples(y))
    runs = monitor.get_logs(select="all")
    n_rows = sum(row["task_name"] == "epoch" for run in runs for row in run.data)
    assert n_rows > 4
    out = capsys.readouterr().out
    assert "SequenceScaler - fit" in out
    assert "Estimator - fit" in out


class Counting:
    def on_epoch(self, loop):
        pass


def test_propagated_from_a_pipeline(data):
    x, y = data
    record = Propagated()
    make_pipeline(SequenceScaler(), network(2)).set_callbacks(record).fit(samples(x), samples(y))
    assert record.calls.count("setup") == record.calls.count("teardown") == 1
    assert record.calls.count("begin epoch 1") == 1


@pytest.mark.parametrize("wrong", [5, Record, Counting()])
def test_what_is_no_callback_is_refused(wrong):
    est = network().set_callbacks(Record())
    with pytest.raises(TypeError, match=r"set_callbacks.*callbacks=\["):
        est.set_callbacks(wrong)
    assert len(est._skl_callbacks) == 1


def test_a_callback_of_scikit_learn_among_those_of_this_package_names_the_place(data):
    with pytest.raises(TypeError, match="set_callbacks"):
        network(callbacks=[Record()]).fit(*data)


def test_clones_have_the_callbacks_and_copies_and_files_do_not_break(data, tmp_path):
    x, y = data
    record = Record()
    est = clone(network(1).set_callbacks(record)).fit(x, y)
    assert record.calls == epochs_between(1)
    copy.deepcopy(est)
    est.save(tmp_path / "est.pt")
    again = Estimator.load(tmp_path / "est.pt")
    np.testing.assert_array_equal(again.predict(x), est.predict(x))


def test_an_older_scikit_learn_has_none(monkeypatch, data):
    monkeypatch.setattr(sklearn_callbacks, "FitCallback", None)
    with pytest.raises(ImportError, match=r"scikit-learn.*1\.9"):
        network().set_callbacks(Record())
    network(1).fit(*data)
