"""Closed loops: against a loop that predicts the whole, longer series anew at each step."""

import numpy as np
import pytest
from torch import nn

from fluxutils_py import Estimator, EstimatorClassifier
from fluxutils_py.errors import DataError, ShapeError, SpecError
from fluxutils_py.forecasting import generate, rollout
from fluxutils_py.nn import LSTM

N, T = 3, 17


def test_rollout_feeds_outputs_back(rng):
    x = rng.normal(size=(3, N, T + 1)).astype("float32")
    est = Estimator(spec={"epochs": 1, "seqsize": 8}, random_state=0, verbose=False).fit(
        x[:, :, :-1], x[:2, :, 1:]
    )
    known = rng.normal(size=(1, N, 4)).astype("float32")
    found = rollout(est, x, 5, known=known)
    whole = x
    for t in range(5):
        y = est.predict(whole)[:, :, -1:]
        np.testing.assert_allclose(found[:, :, t : t + 1], y, atol=2e-6)
        if t < 4:
            whole = np.concatenate([whole, np.concatenate([y, known[:, :, t : t + 1]])], 2)
    with pytest.raises(
        ShapeError,
        match=r"2 outputs.* 3 inputs.*known.*\(1, 3, 4\)",
    ):
        rollout(est, x, 5)


@pytest.fixture(scope="module")
def chords():
    """An estimator that was trained on which of four notes sound next, and notes."""
    notes = (np.random.default_rng(0).random((4, N, T)) < 0.3).astype("float32")
    est = Estimator(None, nn.BCEWithLogitsLoss(), spec={"epochs": 1, "seqsize": 8}, random_state=0)
    return est.fit(notes[:, :, :-1], notes[:, :, 1:]), notes


def sampler(seed):
    rng = np.random.default_rng(seed)
    return lambda z: rng.random(z.shape) < 1 / (1 + np.exp(-z))


def test_next_inputs_are_drawn_from_the_outputs(chords):
    est, notes = chords
    found = rollout(est, notes, 6, next_input=sampler(1))
    draw, whole = sampler(1), notes
    for _ in range(6):  # by hand: the whole, longer series anew at each step
        new = draw(est.predict(whole)[:, :, -1]).astype("float32")
        whole = np.concatenate([whole, new[:, :, None]], 2)
    np.testing.assert_array_equal(found, whole[:, :, T:])
    assert found.dtype == np.float32
    assert 0 < found.mean() < 1


def test_next_inputs_may_be_fewer_than_the_outputs(rng):
    x = rng.normal(size=(2, N, T)).astype("float32")
    scores = np.concatenate([x, -x, x])[:, :, :-1]  # six outputs for two inputs
    est = Estimator(spec={"epochs": 1, "seqsize": 8}, random_state=0).fit(scores[:2], scores)
    known = rng.normal(size=(1, N, 2)).astype("float32")
    found = rollout(est, x, 3, known=known, next_input=lambda z: z[1:2] + z[4:5])
    whole = x
    for t in range(3):
        z = est.predict(whole)[:, :, -1]
        np.testing.assert_allclose(found[:, :, t], z[1:2] + z[4:5], atol=1e-5)
        if t < 2:
            new = np.concatenate([found[:, :, t], known[:, :, t]])
            whole = np.concatenate([whole, new[:, :, None]], 2)
    with pytest.raises(ShapeError, match=r"6 outputs.*2 inputs.*next_input"):
        rollout(est, x, 3)
    with pytest.raises(ShapeError, match=r"\(3,\).*2 inputs of 3 series"):
        rollout(est, x, 3, next_input=lambda z: z[0])


def test_scores_are_not_fed_back_as_values(chords, model, text):
    est, notes = chords
    with pytest.raises(SpecError, match=r"BCEWithLogitsLoss.*scores.*next_input"):
        rollout(est, notes, 2)
    with pytest.raises(SpecError, match=r"CrossEntropyLoss.*scores.*generate"):
        rollout(model, text, 2)
    with pytest.raises(DataError, match=r"integers .*rollout.*next_input"):
        generate(est, notes, 2)


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(5, 4), LSTM(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x[..., 0])))


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 5, size=(1, N, T))


@pytest.fixture(scope="module")
def model(text):
    spec = {"epochs": 3, "seqsize": 8}
    est = Estimator(Characters(), nn.CrossEntropyLoss(), None, spec, random_state=0, verbose=False)
    return est.fit(text[:, :, :-1], text[:, :, 1:])


def test_at_temperature_0_the_likeliest_is_taken(model, text):
    found = generate(model, text, 4, temperature=0)
    whole = text
    for _ in range(4):
        whole = np.concatenate([whole, model.predict(whole)[:, :, -1:].argmax(0, keepdims=True)], 2)
    np.testing.assert_array_equal(found, whole[:, :, T:])
    assert found.dtype == text.dtype


def test_draws_follow_the_scores_divided_by_the_temperature(model, text):
    x = np.repeat(text[:, :1], 4000, axis=1)
    scores = model.predict(text[:, :1])[:, 0, -1].astype(float) / 0.5
    expected = np.exp(scores) / np.exp(scores).sum()
    drawn = generate(model, x, 1, temperature=0.5, random_state=0)
    np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=5) / 4000, expected, atol=0.03)
    np.testing.assert_array_equal(drawn, generate(model, x, 1, temperature=0.5, random_state=0))


def test_classifiers_generate_their_labels(text):
    spec = {"epochs": 1, "seqsize": 8}
    est = EstimatorClassifier(Characters(), None, None, spec, random_state=0, verbose=False)
    est.fit(text[:, :, :-1], text[:, :, 1:])
    assert np.isin(generate(est, text, 6, random_state=0), est.classes_).all()


def test_what_cannot_be_generated_from_is_refused(model, text):
    with pytest.raises(DataError, match=r"x .*integers .*\(1, N, T\), got float64"):
        generate(model, text.astype(float), 2)
    with pytest.raises(ValueError, match="temperature must be 0 or more, got -1"):
        generate(model, text, 2, temperature=-1)
    est = EstimatorClassifier(Characters(), spec={"epochs": 1, "seqsize": 8}, random_state=0)
    est.fit(text[:, :, :-1], np.array(list("abcde"))[text[:, :, 1:]])
    with pytest.raises(DataError, match=r"labels of this classifier are <U1.*fit on integers"):
        generate(est, text, 2)
