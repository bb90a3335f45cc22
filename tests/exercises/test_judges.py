"""Rules of the judges of notebooks 07 to 12 that no answer alone can show: the disk, the counted clock, malformed evidence."""

import pytest
import torch

from fsdp_ref.lab.checks import exercise
from fsdp_ref.lab.checks import forward_prefetch as prefetch
from fsdp_ref.lab.checks.capstone import RANKS, plan_of
from fsdp_ref.lab.checks.finding import Finding, close, ratio, verdicts
from fsdp_ref.lab.checks.inside.capstone import build
from fsdp_ref.lab.checks.inside.disk import Disk, Killed, PeerGone, contents, digest
from fsdp_ref.lab.checks.layers import shard_of
from fsdp_ref.lab.checks.observe import Evidence, RankEvidence
from fsdp_ref.lab.checks.sharded_save import _names_of

JUDGES = ("fsdp_forward", "fsdp_backward", "clip_grad_norm", "forward_prefetch", "sharded_save", "exact_resume", "reshard_on_load",
          "capstone")
FORGED = (None, 7, {}, {"log": None}, {"log": [{}], "calls": [{}], "shards": 3, "rows": None, "end": {}, "outputs": [], "empty": [[9, 9]]},
          {"log": [], "calls": [{"unit": "__class__", "reshard": True, "param": "", "reduce": ""}], "answers": None})


class Alone:
    """A wire of one rank whose peers say what a test wants them to say."""

    world = 1

    def __init__(self, *peers):
        self.peers = list(peers)

    def all_reduce(self, votes):
        votes += torch.tensor(self.peers.pop(0) if self.peers else [0, 0])


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
def test_evidence_of_another_form_is_a_wrong_answer_and_no_crash(name, value):
    found = exercise(name)
    case = next(iter(found.cases(3)))
    told = found.judge(case, Evidence(case.world, [RankEvidence(value=value, returned=True) for _ in range(case.world)]))
    assert any(verdict.property == "values" and verdict.passed is False for verdict in told) or not all(verdict.passed for verdict in told)


def test_wrong_values_take_the_words_of_their_cause():
    found = [Finding("order", "never gathered", 1, "unit 0"), Finding("values", "off by 3")]
    values, order, kept = verdicts(found, {"values": "good", "order": "in order", "lifetime": "freed"})
    assert values.words == order.words == "rank 1: never gathered" and not values.passed
    assert kept.passed and kept.words == "freed"


def test_a_kill_comes_before_an_operation_or_in_the_middle_of_a_write(tmp_path):
    tensors = {"w": torch.arange(8.0)}
    disk = Disk(tmp_path, Alone(), kill_at=1)
    disk.mkdir("step-00000001")
    with pytest.raises(Killed):
        disk.write("step-00000001/rank-0.safetensors", tensors)
    assert contents(tmp_path) == {"step-00000001": {}}
    disk = Disk(tmp_path, Alone(), kill_at=0, half=True)
    with pytest.raises(Killed):
        disk.write("step-00000001/rank-0.safetensors", tensors)
    assert contents(tmp_path)["step-00000001"] == {"rank-0.safetensors": "unreadable"}
    Disk(tmp_path, Alone()).write("step-00000001/rank-0.safetensors", tensors)
    assert contents(tmp_path)["step-00000001"] == {"rank-0.safetensors": digest(tensors)}


def test_a_barrier_ends_when_a_peer_is_gone_and_knows_whether_it_died(tmp_path):
    disk = Disk(tmp_path, Alone([0, 0], [1, 1]))
    disk.barrier()
    with pytest.raises(PeerGone):
        disk.barrier()
    assert disk.barriers == 2 and not disk.stuck
    returned = Disk(tmp_path, Alone([1, 0]))
    with pytest.raises(PeerGone):
        returned.barrier()
    assert returned.stuck, "nobody died: this barrier is one too many"


def test_a_path_out_of_the_disk_is_refused(tmp_path):
    for path in ("../x", "/etc/x", "a/../../x"):
        with pytest.raises(ValueError, match="leads out of the disk"):
            Disk(tmp_path, Alone()).mkdir(path)


def test_a_file_keeps_its_history_through_renames():
    log = [{"what": "rename", "path": old, "to": new} for old, new in (("a", "b/x"), ("b", "c"), ("other", "d"))]
    assert _names_of("a", log) == {"a", "b/x", "c/x"}
    assert _names_of("ab", log) == {"ab"}, "a name that only begins alike is another file"


def test_the_least_exposed_time_by_hand():
    assert prefetch.bound(prefetch.case_of(2, [3, 3, 3, 3], [4, 4, 4, 4], 1)) == 3, "the first gather alone"
    assert prefetch.bound(prefetch.case_of(2, [5, 5, 5], [2, 2, 2], 1)) == 5 + 3 + 3, "each later one less the compute before it"
    assert prefetch.bound(prefetch.case_of(2, [1, 6, 1], [2, 9, 9], 1)) == 1 + 4


def test_slices_and_ratios():
    flat = torch.arange(1.0, 6.0)
    assert [shard_of(flat, rank, 3).tolist() for rank in range(3)] == [[1, 2], [3, 4], [5, 0]]
    assert ratio(3 * flat, flat) == pytest.approx(3) and ratio(flat + 1, flat) is None and ratio(flat[:2], flat) is None
    assert close(flat * (1 + 1e-7), flat) and not close(flat * (1 + 1e-4), flat) and not close(flat * torch.nan, flat)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
def test_the_capstones_figures_are_those_of_the_engine(reshard):
    """The simulator replays the engine itself on meta tensors: traffic and messages are equal, and memory is never less than is needed.

    It is more by what the forecast counts as at rest (the gradients of all units), and, where units are kept, by the one whose gradients
    are being reduced: it is freed by then."""
    from fsdp_ref.plan import simulate
    from fsdp_ref.policies import MixedPrecisionPolicy
    model = build()
    blocks = [f"blocks.{index}" for index in range(6)]
    calls = [{"unit": unit, "reshard": reshard, "param": "bfloat16", "reduce": "float32"} for unit in [*blocks, ""]]
    plan = plan_of(model, calls)
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    found = simulate(build, RANKS, machine="h100", inputs=tokens, units=lambda model: [model.get_submodule(name) for name in blocks],
                     mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), reshard_after_forward=reshard)
    events = [event for event in found.ledger.events if event.wire_bytes]
    assert found.peak <= plan.memory <= found.peak * (1.1 if reshard else 1.2)
    assert plan.messages == len(events) and plan.traffic == pytest.approx(sum(event.wire_bytes for event in events))
