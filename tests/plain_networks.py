"""Ready-made estimators as a plain network with the settings of 0.1.0, for tests of networks."""

from fluxutils_py import SequenceClassifier, SequenceRegressor

PLAIN = {
    **{"cell": "lstm", "hidden_size": 32, "dropout": 0.0, "lr": 1e-2, "input_noise": 0.0},
    **{"scale_input": False, "epochs": 100, "max_updates": None, "lr_schedule": None},
    **{"batchsize": 256, "seqsize": None, "shuffle": False, "clip": None},
}


def plain_regressor(hidden_size=32, **arguments):
    return SequenceRegressor(**{**PLAIN, "hidden_size": hidden_size, **arguments})


def plain_classifier(hidden_size=32, **arguments):
    plain = {**PLAIN, "class_weight": None, "hidden_size": hidden_size}
    return SequenceClassifier(**{**plain, **arguments})
