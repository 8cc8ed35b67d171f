"""The server as process 1 of its own process namespace, as in a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import grpc
import numpy as np
import psutil
import pytest

from qrnn_protos.v1 import prediction_pb2_grpc
from support.server_process import environment, server_process
from support.servers import array, request

AS_FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def can_be_first():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*AS_FIRST, "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_be_first(), reason="no process namespaces here")

ORPHANS = """
import os, subprocess, sys, time
from qrnn_serve.core.first_process import leave_process_1
leave_process_1()
assert os.getpid() == 2 and os.getppid() == 1
for _ in range(5):
    subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)
time.sleep(1)
print("ready", flush=True)
input()
sys.exit(7)
"""


def first_process(wrapper):
    """The process that is number 1 inside, seen from outside."""
    [first] = psutil.Process(wrapper.pid).children()
    return first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_as_process_1_ends_in_order_on_a_signal(artefacts, tmp_path, number):
    """Process 1 passes the signal on; the server stops and its exit status is that of process 1."""
    path = artefacts["ids"].paths["native"]
    log = tmp_path / "log"
    with (
        server_process(path, log, wrapper=AS_FIRST) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = prediction_pb2_grpc.PredictionServiceStub(channel)
        reply = stub.Predict(request([np.array([1, 2])]), timeout=30)
        first_process(server.process).send_signal(number)
        status = server.process.wait(60)

    np.testing.assert_array_equal(array(reply.rows), [0])
    assert status == 0, server.log
    assert "stopping grace_s" in server.log


def test_process_1_collects_orphans_and_ends_as_its_child_does():
    """Processes whose parents have ended leave no zombies; the exit status is the program's."""
    process = subprocess.Popen(
        [*AS_FIRST, sys.executable, "-c", ORPHANS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    process.stdout.readline()
    children = first_process(process).children(recursive=True)
    zombies = [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
    process.communicate("\n", timeout=60)

    assert len(children) == 1
    assert zombies == []
    assert process.returncode == 7


def test_process_1_tells_by_which_signal_its_child_was_killed():
    """A program that is killed gives 128 and the signal's number."""
    code = "import os; from qrnn_serve.core.first_process import leave_process_1 as l; l(); "
    done = subprocess.run(
        [*AS_FIRST, sys.executable, "-c", code + "os.kill(os.getpid(), 9)"],
        check=False,
        env=environment(),
    )

    assert done.returncode == 128 + 9


def test_other_processes_are_left_as_they_are():
    """Not process 1: nothing is forked."""
    from qrnn_serve.core.first_process import leave_process_1

    before = os.getpid()
    leave_process_1()

    assert os.getpid() == before
