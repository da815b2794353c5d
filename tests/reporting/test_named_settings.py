"""Settings by name, as plain values."""

from functools import partial

import numpy as np
import torch
from sklearn.pipeline import make_pipeline

from fluxutils_py import Estimator, SequenceScaler, Spec
from fluxutils_py.nn.losses import seqloss
from fluxutils_py.reporting.named_settings import named_settings, plain_setting


def test_settings_inside_of_others_have_names():
    est = Estimator(
        opt=partial(torch.optim.SGD, lr=np.float32(0.5)), spec=Spec(epochs=3), loss=torch.nn.MSELoss
    )
    found = named_settings(make_pipeline(SequenceScaler(with_mean=False), est))
    assert found["estimator__opt__lr"] == 0.5
    assert type(found["estimator__opt__lr"]) is float
    assert found["estimator__spec__epochs"] == 3
    assert found["sequencescaler__with_mean"] is False
    assert found["estimator__loss"] == "MSELoss"
    # listed by its parts
    assert not {"estimator", "estimator__opt", "estimator__spec", "sequencescaler"} & set(found)
    assert list(found) == sorted(found)


def test_values_are_numbers_or_short_texts_without_addresses():
    assert plain_setting(np.int64(3)) == 3
    assert plain_setting(torch.optim.SGD) == "SGD"
    assert plain_setting(seqloss) == "seqloss"
    assert plain_setting("a" * 500) == "a" * 197 + "..."
    assert plain_setting(torch.nn.Sequential(torch.nn.ReLU())) == "Sequential( (0): ReLU() )"
    assert plain_setting(None) is None
