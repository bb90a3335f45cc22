"""Two hosts, one rank each: two network namespaces joined by a cable (a veth pair), torchrun on both, no name server. The cable is pulled
in the middle of a step and put back; the run goes on by itself and ends with the bits of a run on one machine."""

import shutil
import subprocess
import sys
import uuid

import pytest

from fsdp_ref.train_run import checkpoints

from .commands import LIMIT, STEPS, TINY, environment, exact, ranks_of, steps_done, until

pytestmark = pytest.mark.slow

ADDRESSES = ("10.231.7.1", "10.231.7.2")
PORT = 29511                 # in a network of its own: nobody else can have it


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two namespaces and of the interface in each."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is missing, which makes the two hosts")
    mark = uuid.uuid4().hex[:6]
    names, cards = [f"fsdp-{mark}-{side}" for side in "ab"], [f"v{mark}{side}" for side in "ab"]
    made = [ip("netns", "add", name) for name in names] + [ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])]
    try:
        if any(done.returncode for done in made):
            pytest.skip(f"this machine lets nobody make network namespaces ({made[-1].stderr.strip() or made[0].stderr.strip()})")
        for name, card, address in zip(names, cards, ADDRESSES, strict=True):
            for words in (("link", "set", card, "netns", name), ("-n", name, "addr", "add", f"{address}/24", "dev", card),
                          ("-n", name, "link", "set", "lo", "up"), ("-n", name, "link", "set", card, "up")):
                done = ip(*words)
                assert done.returncode == 0, done.stderr
        yield list(zip(names, cards, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)                         # takes its end of the cable along
        ip("link", "del", cards[0])


def start_host(hosts, number, *argv):
    """torchrun in one namespace. The first host keeps the meeting place."""
    name, card = hosts[number]
    conf = f"is_host={'true' if number == 0 else 'false'},join_timeout=60,read_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=30"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
                "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-conf", conf,
                "--rdzv-id", "two", "--local-addr", ADDRESSES[number], "-m", "fsdp_ref.train"]
    return subprocess.Popen(["ip", "netns", "exec", name, *torchrun, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**environment(), "GLOO_SOCKET_IFNAME": card})


def test_a_cable_pulled_in_the_middle_of_a_step_and_put_back(hosts, text, reference, tmp_path):
    run = tmp_path / "run"
    processes = [start_host(hosts, number, *TINY, "--data", text, "--out", run, "--timeout", "4") for number in (0, 1)]
    try:
        until(lambda: steps_done(run) >= 15 or any(p.poll() is not None for p in processes), "step 15")
        name, card = hosts[1]
        assert ip("-n", name, "link", "set", card, "down").returncode == 0
        assert steps_done(run) < STEPS and checkpoints(run), "the cable was pulled too late to show anything"
        until(lambda: not ranks_of(processes[0]), "the first host's rank to give the other up")
        assert ip("-n", name, "link", "set", card, "up").returncode == 0
        outputs = [p.communicate(timeout=LIMIT) for p in processes]
    finally:
        for process in [p for p in processes if p.poll() is None]:
            for each in (*ranks_of(process), process):
                each.kill()
    assert [p.returncode for p in processes] == [0, 0], [err[-2000:] for _, err in outputs]
    assert exact(run) == exact(reference)
    assert any("resumed after step 10" in out and "started again" in out for out, _ in outputs)
