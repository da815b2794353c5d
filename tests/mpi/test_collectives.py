"""Predictions, files, searches and checks of several ranks; what happens to scripts that fail."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from fluxutils_py import Estimator


@pytest.mark.slow
def test_ranks_predict_save_search_and_compare_together(ran):
    ran("collectives", 2)


@pytest.mark.few
@pytest.mark.few
@pytest.mark.parametrize(
    ("accident", "status", "told"),
    [("raise ValueError('elsewhere')", 1, "ValueError: elsewhere"), ("raise SystemExit(3)", 3, "")],
)
def test_a_script_that_fails_on_one_rank_ends_on_all(mpirun, tmp_path, accident, status, told):
    program = tmp_path / "script.py"
    program.write_text(
        textwrap.dedent(f"""
        import numpy as np
        from fluxutils_py import Estimator
        from fluxutils_py.parallel import abort_on_exception, get_communicator

        with abort_on_exception():
            comm = get_communicator("auto")
            comm.barrier()
            if comm.rank == 1:
                {accident}
            x = np.zeros((1, 4, 6))
            Estimator(spec=dict(epochs=1, batchsize=2, seqsize=3)).fit(x, x)
        """)
    )
    _, err = mpirun(program, 2, status=status)
    assert told in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        (
            "sys.exit(0)",
            0,
            "RankError: ranks call different things: predict on rank 0, the end of the program on "
            "rank 1",
        ),
        ("raise ValueError('between steps')", 1, "RemoteError: rank 1: ValueError: between steps"),
    ],
)
def test_a_rank_that_ends_the_program_between_steps_is_waited_for_by_none(
    mpirun, tmp_path, end, status, told
):
    program = tmp_path / "script.py"
    program.write_text(
        textwrap.dedent(f"""
        import sys
        import numpy as np
        import torch
        from fluxutils_py import Estimator
        from fluxutils_py.parallel import get_communicator
        from fluxutils_py.bobbin import TrainTask

        class Squares(TrainTask):
            def compute_loss(self, model, batch, *, step, rng):
                return model(batch).square().mean()

        rank = get_communicator("auto").rank
        x = np.zeros((1, 4, 6))
        est = Estimator(spec=dict(epochs=1, batchsize=2, seqsize=3)).fit(x, x)
        task = Squares(torch.nn.Linear(2, 1))
        step_fn = task.make_training_step_fn(batches="per_rank")
        state = task.initialize_train_state(0, torch.optim.SGD)
        try:
            for _ in range(4 - rank):
                state, _ = step_fn(state, torch.ones(3, 2), 0)
            if rank == 1:
                {end}
            est.predict(x)
        except Exception as error:
            if rank == 1:
                raise
            print(type(error).__name__ + ":", error)
        """)
    )
    out, _ = mpirun(program, 2, status=status)
    assert out.startswith(told)


@pytest.mark.slow
def test_a_signal_to_mpirun_ends_training_on_all_ranks_after_a_whole_step(
    mpirun_command, python, tmp_path
):
    program = tmp_path / "script.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        import numpy as np
        from fluxutils_py import Estimator

        x = np.random.default_rng(0).standard_normal((1, 6, 20))
        est = Estimator(spec=dict(epochs=10**6, batchsize=2, seqsize=5), random_state=0)
        est.callbacks = lambda loop: loop.step == 20 and print("running", flush=True)
        try:
            est.fit(x, x)
        except SystemExit:
            est.save("model.flux")
            raise
        """)
    )
    command = [str(c) for c in (*mpirun_command, "-n", 2, python, program)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    # by default, mpirun of Open MPI kills ranks that need more than a second, as on a busy machine
    env["PRTE_MCA_odls_base_sigkill_timeout"] = "60"
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env=env,
        start_new_session=True,
    )
    watchdog = threading.Timer(120, os.killpg, (started.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert [started.stdout.readline().strip() for _ in range(2)] == ["running"] * 2
        started.send_signal(signal.SIGINT)  # it sends them SIGTERM
        started.communicate()
    finally:
        watchdog.cancel()
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode not in (0, -signal.SIGKILL)
    assert Estimator.load(tmp_path / "model.flux").n_iter_ > 0


HOSTS = """
ip netns add {sw}; ip -n {sw} link add br0 type bridge; ip -n {sw} link set br0 up
for i in 1 2; do
  ip netns add {h}$i
  ip -n {h}$i link add eth0 type veth peer name p$i netns {sw}
  ip -n {sw} link set p$i master br0; ip -n {sw} link set p$i up
  ip -n {h}$i addr add 10.231.77.$i/24 dev eth0; ip -n {h}$i link set eth0 up; ip -n {h}$i link set lo up
done
"""
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift; n=${{host##*.}}
exec ip netns exec {h}$n unshare --uts sh -c "hostname {h}$n; $*"
"""


@pytest.fixture
def two_hosts(tmp_path):
    """A command line that starts one rank on each of two hosts: network namespaces with names of
    their own.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mpirun"))):
        pytest.skip("network namespaces need root, ip and unshare")
    name = f"flux{os.getpid()}"
    names = {"h": f"{name}h", "sw": f"{name}sw"}
    try:
        made = subprocess.run(
            ["sh", "-ec", HOSTS.format(**names)], capture_output=True, text=True, timeout=300
        )
        if made.returncode:
            pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        agent = tmp_path / "agent"
        agent.write_text(AGENT.format(**names))
        agent.chmod(0o755)
        net = "10.231.77.0/24"
        yield [
            "ip", "netns", "exec", f"{name}h1", "unshare", "--uts", "sh", "-c", f'hostname {name}h1; exec "$@"', "sh",
            "mpirun", "--allow-run-as-root", "--host", "10.231.77.1:1,10.231.77.2:1", "-n", "2", "--bind-to", "none",
            "--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", net,
            "--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", net,
        ]  # fmt: skip
    finally:
        for host in (f"{name}h1", f"{name}h2", f"{name}sw"):
            subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=300)


def test_two_hosts_train_as_one_process(two_hosts, start, tmp_path):
    pytest.importorskip("mpi4py")
    program = tmp_path / "script.py"
    program.write_text(
        textwrap.dedent("""
        import socket, sys
        import numpy as np
        from fluxutils_py import Estimator, Spec, net2vec
        from fluxutils_py.bobbin import assert_replica_integrity, gather_from_processes

        rng = np.random.default_rng(0)
        x = rng.standard_normal((3, 7, 50))
        y = x.mean(0, keepdims=True)
        est = Estimator(spec=Spec(2, 2, 10), random_state=0).fit(x, y)
        hosts = gather_from_processes(socket.gethostname())
        assert len(set(hosts)) == 2, hosts
        assert_replica_integrity(est.model_, atol=0, rtol=0)
        alone = Estimator(spec=Spec(2, 4, 10), random_state=0, comm=None).fit(x, y)
        assert abs(net2vec(est) - net2vec(alone)).max() < 1e-12
        print("alike")
        """)
    )
    code, out, err = start([*two_hosts, sys.executable, program])
    assert code == 0, f"{out}\n{err}"
    assert out.split() == ["alike", "alike"]


def test_the_hosts_are_taken_down():
    if shutil.which("ip"):
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"flux{os.getpid()}" not in left
