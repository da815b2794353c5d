"""The scripts of docs/jobs run as they are, with stand-ins for the commands of a scheduler.

One fit goes through all of them: each starts it where the one before was told to end, and the last
one completes it.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fluxutils_py
from fluxutils_py import Estimator, h5save, net2vec
from fluxutils_py.training import Checkpointer
from fluxutils_py.training.checkpointer import SIGNALS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "many_processes.md"
JOBS, STAND_INS = ROOT / "docs" / "jobs", Path(__file__).parent / "stand_ins"
EPOCHS, T = 120, 250


class Job:
    """Commands that start one job, in a folder."""

    def __init__(self, folder, mpirun, python):
        self.folder, self.n, self.started = folder, 0, []
        folders = [
            Path(python).parent,
            STAND_INS,
            Path(sys.executable).parent,
            Path(mpirun[0]).parent,
        ]
        self.env = {
            **os.environ,
            "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
            "PYTHONPATH": str(Path(fluxutils_py.__file__).parents[1]),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "TRAIN": str(JOBS / "train.py"),
            "MPIRUN_FLAGS": " ".join(mpirun[1:]),
            "REQUEUED": str(folder / "requeued"),
            "STEP": str(folder / "step"),
        }

    def run(self, command, *environments, send=None, to_step=False):
        """Run a command in each environment; send the first a signal in the middle of training.

        Returns the statuses, and all that was said.
        """
        self.n += 1
        log, deadline = self.folder / f"log-{self.n}", time.monotonic() + 120
        how = {"cwd": self.folder, "start_new_session": True}
        with open(log, "w") as out:
            running = [
                subprocess.Popen(command, env={**self.env, **e}, stdout=out, stderr=out, **how)
                for e in environments
            ]
        self.started += running
        while send is not None and not re.search("(?<!in )epoch", log.read_text()):
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            assert all(p.poll() is None for p in running), log.read_text()[-6000:]
            time.sleep(0.01)
        if send is not None:
            os.kill(int((self.folder / "step").read_text()) if to_step else running[0].pid, send)
        return [
            p.wait(timeout=max(1, deadline - time.monotonic())) for p in running
        ], log.read_text()

    def kill(self):
        for p in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path, mpirun_command, python):
    if len(SIGNALS) < 2:
        pytest.skip("this system has no SIGUSR1")
    x = np.random.default_rng(0).normal(size=(2, 5, T))
    y = np.stack([np.roll(x[0], lag, 1) for lag in range(5)]).mean(0)[None]
    h5save(tmp_path / "train.h5", {"x": x, "y": y})
    (tmp_path / "hosts").write_bytes((JOBS / "hosts").read_bytes())
    job = Job(tmp_path, mpirun_command, python)
    yield job
    job.kill()


def kubernetes():
    """The command of the container, and its environment."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    name = job["metadata"]["name"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    # as the pods of an Indexed Job are called
    assert environment["HEAD"] == f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    return container["command"], environment


def port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
def test_one_fit_goes_through_all_jobs(job, tmp_path):
    reached = [0]

    def interrupt(status, command, *environments, **how):
        """Start a job, end it by a signal, and see that it has saved and said so."""
        statuses, said = job.run(command, *environments, **how)
        assert statuses == status, said[-6000:]
        name = signal.Signals(138 - 128 if "SIGUSR1" in said else 143 - 128).name
        assert re.search(
            rf"{name}: saved .*checkpoint-n\d+-step-\d+.pt; the program ends with status", said
        )
        reached.append(Checkpointer(tmp_path / "checkpoints").latest_step())

    def script(name):
        return ["bash", str(JOBS / name), str(tmp_path), str(EPOCHS)]

    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    pmix, nodes = (
        {**slurm, "SLURM_NTASKS": "2"},
        {**slurm, "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "2", "PORT": port()},
    )
    interrupt([0], script("slurm_mpi.sh"), pmix, send=signal.SIGUSR1, to_step=True)
    interrupt([138], script("mpirun_hosts.sh"), {}, send=signal.SIGTERM)
    interrupt([0], script("slurm_torchrun.sh"), nodes, send=signal.SIGUSR1)
    assert (tmp_path / "requeued").read_text() == "17\n17\n"
    command, pod = kubernetes()
    command = [
        *command[:2],
        command[2].replace("--nproc-per-node=4", "--nproc-per-node=1").replace("29500", port()),
    ]
    command[2] += f" {EPOCHS}"
    pod |= {"HEAD": "localhost", "TRAIN": str(JOBS / "train.py"), "FOLDER": str(tmp_path)}
    pods = [{**pod, "JOB_COMPLETION_INDEX": str(i)} for i in range(2)]
    interrupt([1, 1], command, *pods, send=signal.SIGTERM)
    two = [
        {"NODE": str(i), "RANKS": "1", "PORT": port_of_two}
        for port_of_two in [port()]
        for i in range(2)
    ]
    statuses, said = job.run(script("torchrun_nodes.sh"), *two)
    assert statuses == [0, 0], said[-6000:]
    assert f"after {EPOCHS} epochs" in said
    assert reached == sorted(set(reached))
    assert reached[-1] < 3 * EPOCHS

    found = Estimator.load(tmp_path / "model.pt", comm=None)
    uninterrupted = in_one_process(tmp_path)
    assert found.n_iter_ == EPOCHS
    torch.testing.assert_close(net2vec(found), net2vec(uninterrupted), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.loss_curve_, uninterrupted.loss_curve_, rtol=1e-8)


def in_one_process(folder):
    """The fit of train.py without interruption; its script, but for the size of the minibatch."""
    text = (JOBS / "train.py").read_text()
    assert '"batchsize": 64' in text
    text = text.replace('"batchsize": 64', '"batchsize": 128').replace(
        "callbacks=", "callbacks=() and "
    )
    variables = {"__name__": "train"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", str(folder), str(EPOCHS)])
        patch.setattr(Estimator, "save", lambda self, path: None)
        exec(compile(text, "train.py", "exec"), variables)
    return variables["est"]


@pytest.mark.parametrize("name", sorted(path.name for path in JOBS.iterdir()))
def test_scripts_are_in_the_page_and_have_no_errors_of_syntax(name):
    assert f"{{literalinclude}} ../jobs/{name}\n" in PAGE.read_text()
    if name.endswith(".sh"):
        assert os.access(JOBS / name, os.X_OK)
        assert subprocess.run(["bash", "-n", JOBS / name], timeout=300).returncode == 0
