"""Random cases: what is drawn, and what goes together. A case is a dict of plain values, so that it
can be printed.
"""

import numpy as np

# What every other case differs from; shrinking goes back to these, one by one.
PLAIN = {
    "data": 0,  # seed of the values
    "n_series": 3,
    "n_steps": 7,
    "features": 2,
    "targets": 1,
    "net": "lstm",
    "hidden": 2,
    "inputs": "one",  # "two", "words": integers for an embedding
    # "two", "labels": integers for a cross-entropy, "last": one target per series
    "outputs": "one",
    "loss": None,
    "opt": "adam",
    "epochs": 1,
    "batchsize": 2,
    "seqsize": 3,
    "overlap": 0,
    "burn_in": 0,
    "accumulate": 1,
    "clip": None,
    "patience": None,
    "scheduler": None,
    "schedule_every": "epoch",
    "max_updates": None,
    "lr_schedule": None,
    "gradient": "truncated",
    "shuffle": False,
    "rebatch": False,
    "spec_form": "Spec",
    "dtype": "float64",
    "y_dtype": None,  # as x
    "order": "C",
    "lengths": False,
    "starts": False,
    "listed": False,  # series as a list of arrays
    "view": False,  # samples(x)
    "weights": None,  # "series", "steps", "zeros"
    "missing": None,  # targets that are NaN: "steps", "stretch", "outputs"
    "nan_inputs": False,  # at steps without a target
    "validation": False,
    "then": None,  # "partial_fit", "warm_start", "resume", "refit"
    "chunks": False,
    "estimator": "Estimator",
    "far": False,  # targets far from 0
    "wild": False,  # other targets within the burn-in
    "class_weight": None,  # of SequenceClassifier: "balanced", "sqrt_balanced", a list
    "kernels": False,  # native ones, where there are any
}

# The memory of arrays: of NumPy, files, torch; lazy ones with masks, or whose values have another
# dtype than they say.
ORDERS = [
    "C",
    "F",
    "time",
    "reversed",
    "strided",
    "memmap",
    "h5mmap",
    "h5chunks",
    "tensor",
    "series",
    "masked",
]

STACKS = {  # cells, and whether each begins a layer
    "linear": [],
    "lstm": [("lstm", True)],
    "gru": [("gru", True)],
    "rnn": [("rnn", True)],
    "rnn_relu": [("rnn_relu", True)],
    "lstm2": [("lstm", True), ("lstm", False)],
    "gru2": [("gru", True), ("gru", False)],
    "lstmcell": [("lstm", True)],
    "grucell": [("gru", True)],
    "rnncell": [("rnn", True)],
    "leaky": [("leaky", True)],
    "gru_leaky": [("gru", True), ("leaky", True)],
    "lstm_rnn": [("lstm", True), ("rnn", True)],
    "flstm": [("flstm", True)],
    "sgru": [("sgru", True)],
    "mgu2": [("mgu", True), ("mgu", False)],
    "hfgru": [("hfgru", True)],
    "windowed": [("lstm", True)],  # says that it takes windows
    "stepwise": [("gru", True)],  # takes single steps only
    "lstm_init": [("lstm_init", True)],  # with a trained initial state
    "grucell_init": [("grucell_init", True)],
    "mingru": [("mingru", True)],
    "minlstm": [("minlstm", True)],
    "lru": [("lru", True)],
    "causalconv": [("causalconv", True)],
    "tcn": [("tcn", True)],
    "attention": [("attention", True)],
    "mingru2": [("stack", True)],
}
READY_MADE = {"SequenceRegressor", "SequenceClassifier"}
CLASSIFIERS = {"EstimatorClassifier", "SequenceClassifier"}
# ready-made estimators have them
READY = {
    "lstm",
    "gru",
    "rnn",
    "lstm2",
    "gru2",
    "flstm",
    "sgru",
    "mgu2",
    "hfgru",
    "mingru2",
}
OF_CELLS = {"lstmcell", "grucell", "rnncell", "leaky"}  # whose states are (B, H)
MORE_STEPS = 4  # other data of a case are longer by fewer than this
NO_WEIGHTS = {"custom", "custom_steps"}  # losses without a fourth argument
LABELS = {"ce", "ce_weights", "ce_ignore"}


def draw(seed):
    """A valid case from a number."""
    rng = np.random.default_rng([seed, 14])

    def one(*values, p=None):
        """One of some values; the first with probability ``p``."""
        if p is not None and rng.random() < p:
            return values[0]
        values = values if p is None else values[1:]
        return values[rng.integers(len(values))]

    T = int(one(1, *[int(rng.integers(2, 22))], p=0.04))
    case = {
        "data": int(rng.integers(2**31)),
        "n_series": int(rng.integers(1, 7)),
        "n_steps": T,
        "features": int(rng.integers(1, 4)),
        "targets": int(one(1, 2, 3, p=0.5)),
        "net": str(one("lstm", "conv", *STACKS, p=0.15)),
        "hidden": int(rng.integers(1, 4)),
        "inputs": str(one("one", "two", "words", p=0.75)),
        "outputs": str(one("one", "two", "labels", "labels", "last", p=0.6)),
        "loss": one(
            None, "l1", "huber", "smooth", "summed", "custom", "custom_steps", "custom_ws", p=0.4
        ),
        "opt": str(
            one("adam", "sgd", "momentum", "adamw", "default", "rmsprop", "instance", p=0.3)
        ),
        "epochs": int(one(1, 2, 3)),
        "batchsize": int(rng.integers(1, 9)),
        "seqsize": one(None, int(rng.integers(1, T + 3)), p=0.15),
        "overlap": int(one(0, *range(1, 7), p=0.5)),
        "burn_in": int(one(0, 1, 2, 3, 5, p=0.65)),
        "accumulate": int(one(1, 2, 3, 100, p=0.7)),
        "clip": one(None, 0.03, 0.3, 2.0, p=0.6),
        "patience": one(None, 1, 2, p=0.75),
        "scheduler": one(None, "steps", "exponential", "plateau", p=0.65),
        "schedule_every": str(one("epoch", "step")),
        "shuffle": bool(one(False, True, p=0.75)),
        "rebatch": one("auto", True, False),
        "spec_form": str(one("Spec", "dict", "namedtuple", "object", p=0.6)),
        "dtype": str(one("float64", "float32", ">f8", ">f4", "float16", p=0.8)),
        "y_dtype": one(None, "float64", "float32", ">f8", p=0.85),
        "order": str(one(*ORDERS)),
        "lengths": bool(one(False, True, p=0.65)),
        "starts": bool(one(False, True, p=0.8)),
        "listed": bool(one(False, True, p=0.85)),
        "view": bool(one(False, True, p=0.9)),
        "weights": one(None, "series", "steps", "zeros", p=0.55),
        "missing": one(None, "steps", "stretch", "outputs", p=0.6),
        "nan_inputs": bool(one(False, True, p=0.7)),
        "validation": bool(one(False, True, p=0.65)),
        "then": one(None, "partial_fit", "warm_start", "resume", "resume", "refit", p=0.5),
        "chunks": bool(one(True, False)),
        "estimator": str(
            one(
                "Estimator",
                "EstimatorRegressor",
                "EstimatorClassifier",
                "SequenceRegressor",
                "SequenceClassifier",
                p=0.75,
            )
        ),
        "far": bool(one(False, True, p=0.8)),
        "kernels": bool(one(True, False)),
    }
    if rng.random() < 0.12:  # few long series, where folding matters
        case.update(
            n_series=int(rng.integers(1, 3)),
            n_steps=int(rng.integers(16, 60)),
            epochs=1,
            seqsize=int(one(1, 2)),
        )
    if case["patience"] is not None and rng.random() < 0.5:
        case["epochs"] = 5
    if rng.random() < 0.25:
        case.update(
            max_updates=one(None, 1, 2, 3, 5, 8, 13),
            lr_schedule=one("onecycle", "cosine", None),
        )
    if rng.random() < 0.15:
        case.update(gradient="exact")
        if rng.random() < 0.8:
            case.update(net=str(one("lru", "mingru", "minlstm", "mingru2", p=0.4)))
    case["wild"] = bool(rng.random() < 0.6)
    case["class_weight"] = one("balanced", "sqrt_balanced", [0.5, 2.0, 1.25], None)
    if rng.random() < 0.1:
        case.update(estimator="linear", targets=int(rng.integers(1, 4)))
        case.update(missing=one(None, "steps", "stretch", "outputs", "outputs", p=0.3))
    return settle(case)


def settle(case):
    """The same case, without what does not go together."""
    c = {**PLAIN, **case}

    def unless(condition, **changes):
        if not condition:
            c.update(changes)

    if c["estimator"] == "linear":
        c.update(inputs="one", outputs="one", loss=None, burn_in=0, then=None, validation=False)
        c.update(gradient="truncated", shuffle=False, far=False, y_dtype=None)
        unless(c["dtype"] not in ("float16", "int64"), dtype="float64")
    if c["estimator"] in READY_MADE:
        c.update(
            inputs="one",
            loss=None,
            opt="adamw",
            accumulate=1,
            patience=None,
            scheduler=None,
            spec_form="Spec",
        )
        unless(c["net"] in READY, net="lstm2")
        unless(c["outputs"] == "last", outputs="one")
        c["y_dtype"] = None
        unless(c["dtype"] in ("float64", ">f8"), dtype="float64")
        unless(not c["shuffle"], shuffle=False)
    if c["estimator"] in CLASSIFIERS:
        unless(c["estimator"] == "SequenceClassifier" and c["weights"] != "zeros", weights=None)
        c.update(
            outputs="labels",
            lengths=False,
            starts=False,
            listed=False,
            missing=None,
            loss=None,
            view=False,
        )
    unless(c["estimator"] == "SequenceRegressor", far=False)
    if c["gradient"] == "exact" or c["net"] == "lru":
        # long gradients take steps without bounds into chaos, where rounding decides
        unless(c["opt"] not in ("sgd", "momentum", "instance"), opt="adam")
    if c["gradient"] == "exact":
        c["overlap"] = 0
        if c["net"] == "lru":
            unless(c["inputs"] != "words", net="mingru")
            unless(c["dtype"] in ("float64", ">f8"), dtype="float64")
    unless(
        c["n_series"] * c["n_steps"] > 2 or c["estimator"] not in CLASSIFIERS,
        estimator="Estimator",
    )
    unless(c["estimator"] == "SequenceClassifier", class_weight=None)
    if c["outputs"] == "labels":
        unless(c["loss"] in LABELS, loss=("ce", "ce_weights", "ce_ignore")[c["data"] % 3])
        c.update(targets=1, y_dtype="int64", nan_inputs=False)
        unless(c["estimator"] in {"Estimator", *CLASSIFIERS}, estimator="Estimator")
        unless(c["estimator"] not in CLASSIFIERS, loss=None)
        unless(c["missing"] is None or c["loss"] == "ce_ignore", missing=None)
        unless(c["missing"] != "outputs", missing="steps")
    elif c["loss"] in LABELS:
        c["loss"] = None
    if c["outputs"] == "last":
        c.update(burn_in=0, missing=None, nan_inputs=False, y_dtype="float64", listed=False)
        unless(c["n_steps"] > 1, outputs="one")
        unless(c["n_steps"] > 3, targets=1)  # (N, G) with G == T could mean all steps
        unless(c["loss"] not in NO_WEIGHTS, loss=None)
        unless(c["weights"] is None, weights="series")
    if c["outputs"] == "two":
        unless(c["targets"] > 1, targets=2)
        c["view"] = False
    if c["inputs"] == "two":
        unless(c["features"] > 1, features=2)
        c["view"] = False
    if c["inputs"] == "words":
        c.update(features=1, dtype="int64", nan_inputs=False, shuffle=False)
        unless(c["net"] != "conv", net="gru")
        unless(c["y_dtype"] is not None, y_dtype="float32")
    if c["loss"] in NO_WEIGHTS:
        c.update(
            weights=None, missing=None, lengths=False, starts=False, listed=False, nan_inputs=False
        )
    if c["loss"] == "summed":  # what a sum is divided by where steps are missing, no document says
        c.update(
            weights=None, missing=None, lengths=False, starts=False, listed=False, rebatch=False
        )
        # without bounds: large steps diverge
        unless(c["net"] not in ("causalconv", "tcn"), net="gru")
    unless(c["missing"] or not c["nan_inputs"], nan_inputs=False)
    unless(c["missing"] != "outputs" or c["targets"] > 1, missing="steps")
    unless(not c["shuffle"] or (c["dtype"] != "float16" and not c["nan_inputs"]), shuffle=False)
    unless(
        c["dtype"] != "float16" or c["order"] not in ("h5mmap", "h5chunks", "tensor", "masked"),
        order="C",
    )
    swapped = f"{c['dtype']} {c['y_dtype']}"  # torch has no other byte orders
    unless(c["order"] != "tensor" or ">" not in swapped, order="time")
    unless(not c["listed"] or c["order"] in ("C", "F", "time", "series", "masked"), order="C")
    if c["listed"]:
        c["view"] = False
    single = c["dtype"] not in ("float64", ">f8")
    if single:  # decisions on differences of 1e-7
        c["patience"] = None
        unless(c["scheduler"] != "plateau", scheduler="steps")
        unless(c["opt"] != "default", opt="adamw")
    unless(c["scheduler"] != "plateau", schedule_every="epoch")
    unless(c["lr_schedule"] is None, scheduler=None)
    unless(c["max_updates"] is None, shuffle=False)  # which rows a part of an epoch took is unknown
    unless(c["net"] != "stepwise" or c["loss"] not in ("custom", "custom_ws"), net="gru")
    if c["net"] == "mingru2":
        c["hidden"] = 4  # normalising two features gives their signs, whatever their digits
    if c["net"] == "conv":
        c["hidden"] = max(c["hidden"], 2)
        unless(c["loss"] not in ("custom_steps",), loss="custom")
    # of a classifier, all labels occur behind the burn-in
    n_behind = 3 if c["estimator"] in CLASSIFIERS else 1
    c["burn_in"] = max(0, min(c["burn_in"], longest_row(c) - n_behind))
    unless(c["burn_in"] > 0, wild=False)
    unless(c["then"] not in ("resume", "warm_start") or c["opt"] != "instance", opt="adam")
    return c


def longest_row(c):
    """How many steps some row of any fit of a case has at least; ``burn_in`` must be below."""
    return min(_longest_piece(c, c["n_steps"] + more) for more in range(MORE_STEPS))


def _longest_piece(c, n_steps):
    pieces = c["batchsize"] // c["n_series"]
    if c["rebatch"] == "auto" and c["gradient"] == "exact":
        pieces = 1
    elif c["rebatch"] == "auto":
        pieces = min(pieces, n_steps // (8 * c["seqsize"])) if c["seqsize"] else 1
    return n_steps // pieces if c["rebatch"] is not False and 2 <= pieces < n_steps else n_steps
