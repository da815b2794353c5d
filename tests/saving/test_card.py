"""Model cards in Markdown."""

import hashlib

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

import fluxutils_py
from fluxutils_py import Estimator, SequenceRegressor, SequenceScaler, samples
from fluxutils_py.forecasting import Forecaster

F, N, T = 3, 7, 11
X = np.random.default_rng(0).normal(2, 3, size=(F, N, T)).astype("f4")
SMALL = {
    "cell": "lstm",
    "hidden_size": 3,
    "epochs": 2,
    "batchsize": 7,
    "seqsize": 5,
    "random_state": 0,
}


def rows(text):
    """The tables of a card: name to value."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: value for name, value in filter(lambda cell: len(cell) == 2, cells)}


def test_a_card_tells_what_an_estimator_is_and_was_fitted_on(tmp_path):
    est = SequenceRegressor(**SMALL).fit(X, X[:1], validation_data=(X[:, :2], X[:1, :2]))
    text = fluxutils_py.card(est, tmp_path / "model.md")
    assert (tmp_path / "model.md").read_text() == text
    assert text.startswith("# Model card: SequenceRegressor\n")
    found = rows(text)
    assert found["x"].startswith(f"({F}, {N}, {T}) float32, digest ")
    assert found["validation y"].startswith("(1, 2, 11) float32")
    n_parameters = sum(p.numel() for p in est.model_.parameters())
    assert found["network"].endswith(f"{n_parameters} parameters")
    assert found["hidden_size"] == "3"
    assert found["epochs"] == "2"
    assert float(found["training loss of the last epoch"]) == pytest.approx(est.loss_curve_[-1])
    assert float(found["least validation loss"]) == pytest.approx(min(est.validation_loss_curve_))
    assert found["numpy"] == np.__version__
    assert 'fluxutils_py.load("model.pt")' in text


def test_the_digest_is_that_of_the_corners():
    # the first and last 8 steps of the first and the last series, time-major
    corners = [X[:, n : n + 1, t : t + 8] for n in (0, N - 1) for t in (0, T - 8)]
    expected = hashlib.sha256(b"".join(c.transpose(2, 1, 0).tobytes() for c in corners))
    est = SequenceRegressor(**SMALL).fit(X, X[:1])
    assert rows(fluxutils_py.card(est))["x"].endswith(expected.hexdigest()[:12])


def test_the_card_of_a_loaded_estimator_is_the_same(tmp_path):
    est = SequenceRegressor(**SMALL).fit(X, X[:1])
    fluxutils_py.save(est, tmp_path / "model.pt")
    assert fluxutils_py.card(fluxutils_py.load(tmp_path / "model.pt")) == fluxutils_py.card(est)


@pytest.mark.slow
def test_pipelines_and_searches_list_their_parts():
    pipe = make_pipeline(SequenceScaler(), SequenceRegressor(**SMALL))
    grid = {"sequenceregressor__hidden_size": [2]}
    search = GridSearchCV(pipe, grid, cv=2).fit(samples(X), samples(X[:1]))
    found = rows(fluxutils_py.card(search))
    assert found["sequencescaler"] == "SequenceScaler"
    assert found["best sequenceregressor\\_\\_hidden_size".replace("\\_", "_")] == "2"
    assert float(found["best mean score of the search"]) == pytest.approx(
        search.best_score_, rel=1e-5
    )
    assert found["sequenceregressor.x"].startswith("(3, 7, 11)")


@pytest.mark.slow
def test_forecasters_have_cards():
    fc = Forecaster(h=2, max_steps=50, season_length=3, random_state=0)
    found = rows(fluxutils_py.card(fc.fit(X[:1] + 20)))
    assert found["series"] == str(N)
    assert found["steps of each series"] == f"{T} to {T}"


def test_texts_cannot_break_the_table():
    scaler = SequenceScaler().fit(samples(X, feature_names=["a|b", "<b>\nc", "[d](e)"]))
    assert "a\\|b, \\<b> c, \\[d](e)" in fluxutils_py.card(scaler)


def test_what_is_not_fitted_has_no_card(tmp_path):
    with pytest.raises(NotFittedError):
        fluxutils_py.card(SequenceRegressor(), tmp_path / "model.md")
    assert list(tmp_path.iterdir()) == []


class Own(torch.nn.Module):
    def __init__(self, n_in, n_out, width=2, act=torch.nn.ReLU):
        super().__init__()
        self.hidden, self.act = torch.nn.Linear(n_in, width), act()
        self.head = torch.nn.Linear(width, n_out)

    def forward(self, x):
        return self.head(self.act(self.hidden(x)))


class OwnEstimator(Estimator):
    pass


def loading(obj):
    """The line of a card that loads."""
    return next(line for line in fluxutils_py.card(obj).splitlines() if ".load(" in line)


@pytest.mark.slow
def test_the_card_of_a_network_of_ones_own_asks_for_it(tmp_path):
    spec = {"epochs": 1, "batchsize": 7, "seqsize": 11}
    est = Estimator(Own, spec=spec).set_params(model__width=3).fit(X, X[:1])
    path = tmp_path / "model.pt"
    assert 'fluxutils_py.load("model.pt", model=Own)' in loading(est)
    # what the card says works, as it stands
    est.save(path)
    made = eval(loading(est).partition(" = ")[2].replace("model.pt", str(path)))
    np.testing.assert_array_equal(made.predict(X), est.predict(X))
    pipe = make_pipeline(SequenceScaler(), clone(est).set_params(model__act=torch.nn.Tanh))
    pipe.fit(samples(X), samples(X[:1]))
    assert "model=partial(Own, act=...))" in loading(pipe)
    assert "model=Own(...))" in loading(Estimator(Own(3, 1), spec=spec).fit(X, X[:1]))
    assert 'OwnEstimator.load("model.pt")' in loading(OwnEstimator(spec=spec).fit(X, X[:1]))
    fc = Forecaster(h=2, max_steps=2, season_length=3, freq=None, network=Own, n_models=1)
    assert "network=...)" in loading(fc.fit(X[:1] + 20))
