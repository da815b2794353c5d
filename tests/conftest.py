"""What all tests share."""

import os
import random
import threading

# One thread: the models are small, and two threads that wait for each other are slow where the cores are shared.
# Before torch is imported, so that it holds for its worker threads and for programs that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# What scikit-learn asks for before it dispatches to other array libraries. Before scipy is imported.
os.environ["SCIPY_ARRAY_API"] = "1"

import numpy as np
import pytest
import torch

# programs that tests start, not modules to import here
collect_ignore_glob = ["*/programs/*"]


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same global generators, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  scikit-learn still draws from the global generator
    torch.manual_seed(0)


@pytest.fixture
def rng():
    """A NumPy generator of its own for each test."""
    return np.random.default_rng(0)


@pytest.fixture
def no_thread_stays():
    """Threads that a test starts have ended when it has; those that other tests left, of joblib, do not count."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
