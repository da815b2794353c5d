"""Training with compiled parts of a model gives the result of training without, and leaves nothing
compiled behind.
"""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fluxutils_py import Estimator, net2vec
from fluxutils_py.errors import SpecError
from fluxutils_py.nn import GRU, LSTM, Recur, SequenceStack
from fluxutils_py.nn.compiling import compile_arguments, compiled, parts_to_compile
from fluxutils_py.nn.model_windows import prediction_copy

# torch looks at the .grad of states as it traces, and hides its own warning about that, but not one
# that is an error
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = np.random.default_rng(0).normal(size=(3, 37, 43))
Y = X.cumsum(2)[:1]
HELD_OUT = (X[:, :5], Y[:, :5])
SPEC = {"epochs": 2, "batchsize": 8, "seqsize": 10}
EAGER = {"backend": "eager"}  # traces and guards as any other, and compiles no C++


class Cell(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.gate, self.new, self.n_out = (
            nn.Linear(n_in + n_out, n_out),
            nn.Linear(n_in + n_out, n_out),
            n_out,
        )

    def forward(self, x, state):
        if state is None:
            state = x.new_zeros(x.shape[0], self.n_out)
        z = torch.cat([x, state], -1)
        state = torch.lerp(state, self.new(z).tanh(), self.gate(z).sigmoid())
        return state, state


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = GRU(3, 4), nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        return self.head(torch.cat([self.rnn(x), x], -1))


def own_cell():
    return nn.Sequential(Recur(Cell(3, 5)), nn.Linear(5, 1))


def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


MODELS = {"own cell": own_cell, "skip": Skip, "no state": mlp}


@pytest.fixture
def n_graphs():
    """How many graphs torch has compiled since."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def fitted(model, compile, **settings):
    torch.manual_seed(0)
    est = Estimator(
        MODELS[model](), spec=SPEC, random_state=0, verbose=False, compile=compile, **settings
    )
    return est.fit(X, Y, validation_data=HELD_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_fit_equals_a_plain_one(model, n_graphs):
    found, plain = fitted(model, EAGER), fitted(model, False)
    # for short windows, small groups, states with and without gradient, validation
    assert 0 < n_graphs() <= 8
    torch.testing.assert_close(net2vec(found), net2vec(plain), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        found.validation_loss_curve_, plain.validation_loss_curve_, rtol=1e-12
    )
    np.testing.assert_allclose(found.predict(X), plain.predict(X), atol=1e-12)


@pytest.mark.slow
def test_nothing_compiled_stays(tmp_path, n_graphs):
    seen = []

    def predict(loop):
        # within the fit: by a copy that is not compiled, and leaves the state alone
        if loop.step == 3:
            graphs = n_graphs()
            seen.append(loop.shared_data["estimator"].predict(X[:, :4]))
            assert n_graphs() == graphs

    est, plain = (fitted("own cell", compile, callbacks=predict) for compile in (EAGER, False))
    np.testing.assert_allclose(*seen, atol=1e-12)
    torch.testing.assert_close(net2vec(est), net2vec(plain), rtol=0, atol=1e-12)
    assert not [m for m in est.model_.modules() if m._compiled_call_impl is not None]
    again = pickle.loads(pickle.dumps(est.set_params(callbacks=None)))
    np.testing.assert_array_equal(again.predict(X), est.predict(X))
    est.save(tmp_path / "est.pt")
    loaded = Estimator.load(tmp_path / "est.pt", model=own_cell)
    assert loaded.compile == EAGER
    np.testing.assert_array_equal(loaded.predict(X), est.predict(X))
    assert est.partial_fit(X, Y).n_iter_ == 3


def test_copies_inside_the_block_are_not_compiled():
    model = own_cell()
    with compiled(model, EAGER):
        assert model[0].module._compiled_call_impl is not None
        for other in (
            prediction_copy(model),
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
        ):
            assert not [m for m in other.modules() if m._compiled_call_impl is not None]


def test_parts_are_those_without_recurrent_layers():
    def names(model):
        return [type(part).__name__ for part in parts_to_compile(model)]

    assert names(own_cell()) == ["Cell"]
    assert names(Skip()) == ["Sequential"]
    assert names(mlp()) == ["Sequential"]
    assert names(nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))) == []
    assert names(nn.Sequential(nn.Sequential(nn.Linear(3, 1)), GRU(1, 1))) == []
    assert names(Recur(nn.GRU(3, 4))) == []
    assert "LSTM" not in names(SequenceStack(LSTM, 3, 4))


def test_models_of_recurrent_layers_alone_say_that_it_changes_nothing():
    model = nn.Sequential(LSTM(3, 4), nn.Linear(4, 1))
    est = Estimator(model, spec=SPEC, random_state=0, verbose=False, compile=True)
    with pytest.warns(UserWarning, match=r"compile .*Sequential has only recurrent"):
        est.fit(X, Y)
    assert est.get_params()["compile"] is True


@pytest.mark.slow
def test_what_cannot_be_compiled_trains_uncompiled():
    calls = []

    def broken(graph, inputs):
        calls.append(1)
        raise RuntimeError(
            "InvalidCxxCompiler: No working C++ compiler found" if len(calls) % 2 else "out of luck"
        )

    plain = fitted("no state", False)
    for text in ("no C\\+\\+ compiler that works \\(install g\\+\\+", "out of luck"):
        with pytest.warns(UserWarning, match=f"Sequential trains uncompiled, .*{text}") as c:
            found = fitted("no state", {"backend": broken})
        assert len(c) == 1
        assert torch.equal(net2vec(found), net2vec(plain))


@pytest.mark.slow
def test_an_error_of_the_model_stays_its_own(n_graphs):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 1), 0

        def forward(self, x):
            if self.training:
                raise LookupError("not in training")
            return self.layer(x)

    with pytest.raises(LookupError, match="not in training"):
        Estimator(Wrong(), spec=SPEC, compile=EAGER, verbose=False).fit(X, Y)


@pytest.mark.parametrize("compile", [1, "inductor", {"backnd": "eager"}, {"model": 1}, ["eager"]])
def test_wrong_arguments_are_named(compile):
    with pytest.raises(SpecError, match=r"^compile .*True, False.* dict"):
        compile_arguments(compile)
    with pytest.raises(SpecError, match=r"^compile must be"):
        fitted("no state", compile)


def test_off_by_default():
    assert compile_arguments(Estimator().compile) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled(own_cell(), None):
            pass
