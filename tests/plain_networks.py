"""Ready-made estimators as a plain network with the settings of 0.1.0, for tests of networks."""

from fluxutils_py import SequenceClassifier, SequenceRegressor

PLAIN = {
    **{"cell": "lstm", "hidden_size": 32, "dropout": 0.0, "lr": 1e-2, "input_noise": 0.0},
    **{"scale_input": False, "epochs": 100, "max_updates": None, "lr_schedule": None},
    **{"batchsize": 256, "seqsize": None, "shuffle": False, "clip": None},
}


def plain_regressor(hidden_size=32, num_layers=1, cell="lstm", **arguments):
    positional = {"hidden_size": hidden_size, "num_layers": num_layers, "cell": cell}
    return SequenceRegressor(**{**PLAIN, **positional, **arguments})


def plain_classifier(hidden_size=32, num_layers=1, cell="lstm", **arguments):
    positional = {"hidden_size": hidden_size, "num_layers": num_layers, "cell": cell}
    return SequenceClassifier(**{**PLAIN, "class_weight": None, **positional, **arguments})
