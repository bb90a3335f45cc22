"""The catalogue: from evidence, as the parts that gather it word it, to a kind, the ranks at fault, and a sentence. No processes."""

from __future__ import annotations

import pytest

from fsdp_ref.catalogue import ADVICE, PHRASES, Kind
from fsdp_ref.diagnosis import Evidence, Raised, Running, diagnose, is_group_error

GLOO = Raised("RuntimeError", "[../third_party/gloo/x.cc:78] Timed out waiting 15000ms for recv operation to complete", "line 4 of x.py")
END = "; every rank must make the same calls in the same order (nothing was sent)"
NEVER = "; every rank must call the same collectives in the same order"


def disagree(calls: str) -> Evidence:
    text = f"the ranks disagree about collective number 3: {calls}{END}"
    return Evidence({rank: Raised("RankError", text) for rank in range(3)})


def told(text: str, *also: int) -> Evidence:
    return Evidence({rank: Raised("RankError", text) for rank in (0, *also)})


A = "ranks 0 and 2: all-reduce of a (avg), 4 x float32, at line 7 of the cell"
B = "rank 1: all-reduce of b (avg), 4 x float32, at line 9 of the cell"
CASES = {
    "order": (disagree(f"{A}; {B} (rank 1 takes its calls in another order, or left one out)"), Kind.ORDER, (1,)),
    "loop": (disagree(f"{A}; {B} (line 7 stands in the loop `for t in x` (line 2), which rank 1 did not go through as often)"),
             Kind.BRANCH, (1,)),
    "branch": (disagree(f"{A}; {B} (line 7 stands under `if loss < best` (line 6), which was false on rank 1)"), Kind.BRANCH, (1,)),
    "size": (disagree(f"{A}; {B} (the same call with another number of elements: 2 and 3)"), Kind.SIZE, (1,)),
    "dtype": (disagree(f"{A}; {B} (the same call with another dtype: a and b; line 7 stands under `if x` (line 6), which ...)"),
              Kind.DTYPE, (1,)),
    "reduction": (disagree("rank 0: all-reduce of a (sum), 4 x float32; ranks 1 and 2: all-reduce of a (max), 4 x float32 "
                           "(the same call with another reduction: max and sum)"), Kind.REDUCTION, (0,)),
    "root": (disagree(f"{A}; {B} (the same call with another root: src 0 and src 1)"), Kind.ROOT, (1,)),
    "operation": (disagree(f"{A}; {B} (another operation on the same tensor: barrier and all-reduce)"), Kind.OPERATION, (1,)),
    "extra": (disagree(f"{A}; {B} (rank 1 made its last call a second time)"), Kind.EXTRA, (1,)),
    "handler": (disagree(f"{A}; {B} (rank 1: a collective in the handler of SIGUSR1)"), Kind.HANDLER, (1,)),
    "saving": (disagree("rank 0: exchange of facts of checkpoint in checkpoint, 1 x int64; ranks 1 and 2: all-reduce of a, 4 x float32 "
                        "(rank 0 alone saves or loads a checkpoint; line 7 stands under `if rank == 0` (line 6), which ...)"),
               Kind.SAVING, (0,)),
    "three kinds": (disagree("rank 0: barrier, 0 x float32; rank 1: broadcast of x, 2 x float32; rank 2: all-reduce of x, 2 x float32"),
                    Kind.ORDER, None),
    "absent": (told("rank 1 never arrived at barrier (collective number 3 of rank 0) within 4 s; rank 1 is at line 9 of x.py" + NEVER),
               Kind.MISSING, (1,)),
    "absent under an if": (told("ranks 1 and 2 never arrived at barrier (line 3 of the cell) within 4 s; rank 1 is outside of the program "
                                "(line 3 stands under `if rank == 0` (line 2), which was false on ranks 1 and 2)" + NEVER),
                           Kind.BRANCH, (1, 2)),
    "absent in a loop": (told("rank 1 never arrived at barrier (line 3 of x.py) within 4 s; rank 1 is at line 2 of x.py, in the loop "
                              "`while True` (line 1)" + NEVER), Kind.LOOP, (1,)),
    "absent from a save": (told("rank 1 never arrived at other of checkpoint (checkpoint) (number 0 of rank 0) within 2 s" + NEVER),
                           Kind.SAVING, (1,)),
    "raised": (told("rank 1 raised ValueError: boo at line 14 of x.py and never came to all-reduce of a (line 3 of x.py)" + NEVER),
               Kind.EXCEPTION, (1,)),
    "left": (told("rank 1 came to the end of its program and never came to barrier (line 3 of x.py)" + NEVER), Kind.EXIT, (1,)),
    "died": (told("rank 2 died while barrier (line 3 of x.py) was waiting; look at the last output of that rank", 1), Kind.SIGNAL, (2,)),
    "first forward": (told("rank 1 did not run the first forward of this model within 4 s, where the others wait to compare their units; "
                           "every rank must run it"), Kind.MISSING, (1,)),
    "deadlock": (told("the ranks disagree: rank 0 was in recv from rank 1 at line 1 of x.py, rank 1 was in recv from rank 0" + NEVER, 1),
                 Kind.DEADLOCK, (0, 1)),
    "operations late": (told("the ranks disagree: rank 0 was in all-gather of u (forward), rank 1 was in all-reduce of v" + NEVER, 1),
                        Kind.OPERATION, (0, 1)),
    "model": (Evidence({r: Raised("ConfigError", "the ranks shard different models: rank 1 has b, where rank 0 has a; build the same model")
                        for r in range(2)}), Kind.MODEL, (1,)),
    "seed": (Evidence({r: Raised("ConfigError", "rank 1 starts from other weights of up.weight than rank 0; call torch.manual_seed ...")
                       for r in range(2)}), Kind.SEED, (1,)),
    "exception": (Evidence({0: GLOO, 1: Raised("ValueError", "boo", "line 2 of the cell"), 2: Raised("RankError", "rank 1 never arrived")}),
                  Kind.EXCEPTION, (1,)),
    "memory": (Evidence({1: Raised("RuntimeError", "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you "
                                   "tried to allocate 9 bytes"), 0: GLOO}), Kind.MEMORY, (1,)),
    "python's memory": (Evidence({1: Raised("MemoryError", "")}), Kind.MEMORY, (1,)),
    "cuda's memory": (Evidence({1: Raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")}), Kind.MEMORY, (1,)),
    "killed": (Evidence({0: GLOO}, ended={1: -9}, pids=(10, 11)), Kind.SIGNAL, (1,)),
    "segfault": (Evidence(ended={1: -11, 0: -15}), Kind.SIGNAL, (1,)),
    "abort": (Evidence(ended={1: -6}, last_words="terminate called after throwing 'gloo::EnforceNotMet'\n what(): [enforce fail] a == b"),
              Kind.ABORT, (1,)),
    "os._exit": (Evidence({0: GLOO}, ended={1: 7}), Kind.EXIT, (1,)),
    "sys.exit": (Evidence({1: Raised("SystemExit", "0", "line 3 of the cell")}), Kind.EXIT, (1,)),
    "stuck in a loop": (Evidence(running={0: Running("line 2 of the cell", "barrier"), 1: Running("line 3 of the cell", "", "`while True` "
                                          "(line 2)")}, after=5), Kind.LOOP, (1,)),
    "stuck": (Evidence(running={1: Running("line 3 of the cell")}, finished=frozenset({0}), after=5), Kind.SLOW, (1,)),
    "never came": (Evidence(running={0: Running("line 2 of the cell", "barrier")}, finished=frozenset({1, 2}), after=5),
                   Kind.MISSING, (1, 2)),
    "send and recv": (Evidence(running={r: Running("line 2 of the cell", "recv") for r in (0, 1)}, after=5), Kind.DEADLOCK, (0, 1)),
    "interrupt": (Evidence(running={0: Running("line 2 of the cell", "barrier")}, interrupted=True, after=2), Kind.INTERRUPT, (0,)),
    "torch alone": (Evidence({0: GLOO}), Kind.UNKNOWN, (0,)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kind_and_the_ranks_at_fault(case):
    evidence, kind, ranks = CASES[case]
    found = diagnose(evidence)
    assert found.kind is kind and (ranks is None or found.ranks == ranks), found
    text = str(found)
    assert found.advice == ADVICE[kind] and text.endswith(ADVICE[kind]) and "  " not in text and ";;" not in text and ". ;" not in text
    assert NEVER not in text and END not in text, "the advice is told once"


def test_the_root_cause_comes_first_and_the_rest_is_folded():
    text = str(diagnose(CASES["exception"][0]))
    assert text.startswith("rank 1 raised ValueError: boo (at line 2 of the cell); ranks 0 and 2 then failed in a collective for want of "
                           "the others; mend that error first")
    killed = str(diagnose(CASES["killed"][0]))
    assert killed.startswith("rank 1 (pid 11) died with signal 9 (SIGKILL): killed from outside, or by the system when memory ran out; ")
    assert "EnforceNotMet" in str(diagnose(CASES["abort"][0]))
    waiting = diagnose(CASES["stuck in a loop"][0])
    assert waiting.sentence == ("rank 1 did not finish within 5 s (rank 1 is at line 3 of the cell, in the loop `while True` (line 2))")
    assert waiting.follow == "rank 0 waited for it (rank 0 is in barrier at line 2 of the cell)"


def test_all_ranks_with_one_error_are_told_once():
    found = diagnose(Evidence({rank: Raised("NameError", "name 'x' is not defined") for rank in range(4)}))
    assert found.sentence == "ranks 0, 1, 2 and 3 raised NameError: name 'x' is not defined" and found.ranks == (0, 1, 2, 3)


def test_every_kind_has_advice_and_every_phrase_is_another():
    assert set(ADVICE) == set(Kind) and len(set(PHRASES.values())) == len(PHRASES)
    assert {case[1] for case in CASES.values()} == set(Kind), "every kind has a case above"


@pytest.mark.parametrize(("name", "text", "expected"), [
    (GLOO.name, GLOO.text, True), ("RankError", "x", True), ("DistBackendError", "x", True), ("ValueError", "gloo", False),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False)])
def test_which_errors_come_from_a_collective(name, text, expected):
    assert is_group_error(name, text) is expected
