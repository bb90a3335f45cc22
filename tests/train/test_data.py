"""The text and its loader: which bytes, in which order, on which rank, and what happens after a stop."""

import json
import math
import os
import sysconfig
from collections import Counter

import numpy as np
import pytest

from fsdp_ref import data
from fsdp_ref.data import Corpus, Loader
from fsdp_ref.errors import DataError


def numbers(n, source="numbers"):
    """A text in which every window is different: 7-byte counters."""
    return Corpus(np.frombuffer(b"".join(b"%06d " % i for i in range(-(-n // 7)))[:n], dtype=np.uint8), source, 1)


def windows_of(loader, batches):
    """The windows that the next `batches` batches take, as (input, target) byte pairs in their order."""
    rows = []
    for _ in range(batches):
        inputs, targets = loader.next()
        rows += [(bytes(x.astype(np.uint8)), bytes(y.astype(np.uint8))) for x, y in zip(inputs, targets, strict=True)]
    return rows


# -- the text -----------------------------------------------------------------------------------------------------------------


def test_the_default_text_is_this_pythons_library_without_tests():
    corpus = data.load()
    text = bytes(corpus.data)
    home = sysconfig.get_path("stdlib")
    assert corpus.files > 100 and not corpus.cut and len(text) <= data.LIMIT
    for name, inside in (("ast.py", True), ("json/decoder.py", True), ("encodings/cp437.py", False), ("pydoc_data/topics.py", False)):
        path = os.path.join(home, name)
        if os.path.exists(path):
            assert (open(path, "rb").read() in text) is inside, name
    assert data.load().digest == corpus.digest
    assert 2.5 < data.unigram_entropy(corpus.held_out) < 4.0


def test_a_folder_is_read_in_order_of_path_without_binary_and_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "two.txt").write_bytes(b"2" * 50)
    (tmp_path / "a.txt").write_bytes(b"1" * 50)
    (tmp_path / "c.txt").write_bytes(b"3" * 50)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    corpus = data.load(tmp_path)
    assert bytes(corpus.data) == b"1" * 50 + b"2" * 50 + b"3" * 50
    assert corpus.files == 3


def test_the_held_out_part_is_the_end_and_is_never_trained_on():
    corpus = numbers(2000)
    assert bytes(corpus.train) + bytes(corpus.held_out) == bytes(corpus.data)
    assert len(corpus.held_out) == 100
    loader = Loader(corpus, context=10, batch=7)
    seen = {row for row in windows_of(loader, 2 * loader.windows)}
    tail = bytes(corpus.held_out)
    assert not any(x in tail or y in tail for x, y in seen)


def test_a_long_text_is_cut_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LIMIT", 150)
    (tmp_path / "a").write_bytes(b"a" * 100)
    (tmp_path / "b").write_bytes(b"b" * 100)
    corpus = data.load(tmp_path)
    assert bytes(corpus.data) == b"a" * 100 + b"b" * 50 and corpus.cut
    monkeypatch.setattr(data, "LIMIT", 200)
    assert not data.load(tmp_path).cut


def test_unigram_entropy_against_the_definition():
    text = b"the quick brown fox" * 3 + bytes(range(256))
    counts = Counter(text)
    assert data.unigram_entropy(text) == pytest.approx(-sum(c / len(text) * math.log(c / len(text)) for c in counts.values()))
    assert data.unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert data.unigram_entropy(b"aaaa") == 0.0


# -- the order ----------------------------------------------------------------------------------------------------------------


def test_a_windows_target_is_the_byte_after_each_input():
    corpus = numbers(1000)
    text = bytes(corpus.train)
    for x, y in windows_of(Loader(corpus, context=10, batch=5), 4):
        at = text.index(x)
        assert at % 10 == 0 and text[at + 1:at + 11] == y


@pytest.mark.parametrize("batch", [5, 7, 64, 300])
def test_each_epoch_has_each_window_once_also_when_the_batch_does_not_divide_it(batch):
    loader = Loader(numbers(1500), context=10, batch=batch, seed=3)
    n = loader.windows
    assert n % batch
    rows = windows_of(loader, -(-3 * n // batch))
    for epoch in range(3):
        assert len(set(rows[epoch * n:(epoch + 1) * n])) == n
    assert rows[:n] != rows[n:2 * n]                          # another order each time


def test_the_order_depends_on_the_seed_alone():
    one, two, other = (Loader(numbers(1500), context=10, batch=8, seed=seed) for seed in (1, 1, 2))
    np.random.seed(0)
    first = windows_of(one, 30)
    np.random.seed(99)
    assert first == windows_of(two, 30) != windows_of(other, 30)


def test_the_order_stays_what_it_was_when_it_was_written_down():
    """A numpy, or an edit, that changed it would break every old checkpoint."""
    assert data.order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert data.order(5, 2, 12).tolist() == [4, 7, 9, 6, 0, 8, 1, 11, 5, 10, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(ranks):
    corpus = numbers(1500)
    alone = Loader(corpus, context=10, batch=12)
    shared = [Loader(corpus, context=10, batch=12, rank=r, ranks=ranks) for r in range(ranks)]
    for _ in range(25):                                       # more than two epochs
        assert windows_of(alone, 1) == [row for loader in shared for row in windows_of(loader, 1)]


# -- stopping and going on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 13, 20, 35])
@pytest.mark.parametrize("ranks", [1, 4])
def test_three_epochs_stopped_anywhere_go_on_with_the_next_window(stop, ranks):
    corpus = numbers(1500)
    straight = Loader(corpus, context=10, batch=12)
    steps = -(-3 * straight.windows // 12)
    whole = windows_of(straight, steps)
    first = Loader(corpus, context=10, batch=12)
    begun = windows_of(first, stop)
    state = json.loads(json.dumps(first.state_dict()))        # as a checkpoint keeps it
    rest = [Loader(corpus, context=10, batch=12, rank=r, ranks=ranks) for r in range(ranks)]
    for loader in rest:
        loader.load_state_dict(state)
    for _ in range(steps - stop):
        begun += [row for loader in rest for row in windows_of(loader, 1)]
    assert begun == whole
    assert rest[0].state_dict() == straight.state_dict()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_b17_three_epochs_of_ten_samples_stopped_and_resumed_with_batches_made_ahead(monkeypatch, prefetch):
    """huggingface/accelerate#2016, huggingface/datasets#7447: what was made ahead and not asked for is not lost."""
    monkeypatch.setattr(data, "HELD_OUT", 0.25)
    corpus = numbers(140)                                    # 105 bytes to train on: 10 windows of 10 and the byte after
    straight = Loader(corpus, context=10, batch=1)
    assert straight.windows == 10
    whole = windows_of(straight, 30)
    assert all(len(set(whole[epoch:epoch + 10])) == 10 for epoch in (0, 10, 20)) and whole[:10] != whole[10:20]
    for stop in (0, 9, 10, 11, 19, 20):
        first = Loader(corpus, context=10, batch=1, prefetch=prefetch)
        begun = windows_of(first, stop)
        state = first.state_dict()
        assert (state["epoch"], state["index"]) == divmod(stop, 10)
        rest = Loader(corpus, context=10, batch=1, prefetch=prefetch)
        rest.next()                                          # has batches of its own ahead, which must not come
        rest.load_state_dict(state)
        assert begun + windows_of(rest, 30 - stop) == whole


def test_another_batch_size_goes_on_at_the_same_window():
    corpus = numbers(1500)
    straight = windows_of(Loader(corpus, context=10, batch=1), 60)
    first, then = Loader(corpus, context=10, batch=4), Loader(corpus, context=10, batch=10)
    begun = windows_of(first, 5)
    then.load_state_dict(first.state_dict())
    assert begun + windows_of(then, 4) == straight


@pytest.mark.parametrize("change, named", [
    ({"digest": "0" * 32}, "another text"), ({"context": 11}, "context 11"), ({"seed": 8}, "seed 8"), ({"format": 2}, "format 1"),
    ({"index": -1}, "index -1"), ({"index": 10**9}, "index"), ({"index": 1.0}, "index 1.0"), ({"index": True}, "index True"),
    ({"epoch": -1}, "epoch -1"), ({"surplus": 1}, "not the position")])
def test_a_position_that_does_not_fit_is_refused_and_changes_nothing(change, named):
    loader = Loader(numbers(1500), context=10, batch=4)
    loader.next()
    before = loader.state_dict()
    with pytest.raises(DataError, match=named):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


def test_the_position_in_another_text_is_refused_by_its_bytes():
    state = Loader(numbers(1500), context=10, batch=4).state_dict()
    changed = numbers(1500).data.copy()
    changed[700] ^= 1
    with pytest.raises(DataError, match="another text than changed"):
        Loader(Corpus(changed, "changed", 1), context=10, batch=4).load_state_dict(state)


# -- held-out windows ---------------------------------------------------------------------------------------------------------


def test_held_out_windows_are_spread_out_and_the_same_every_time():
    corpus = numbers(20000)
    few = data.held_out_windows(corpus, 10, 8)
    assert few == data.held_out_windows(corpus, 10, 8) and len(set(few)) == 8
    assert few[0] == 0 and max(few) > 80
    every = data.held_out_windows(corpus, 10, 10**6)
    assert every == list(range((len(corpus.held_out) - 1) // 10))
    x, y = data.cut_windows(corpus.held_out, every, 10)
    assert x.shape == y.shape == (len(every), 10) and (x[:, 1:] == y[:, :-1]).all()


# -- wrong input --------------------------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.*No such file.*--data"):
        data.load(tmp_path / "nowhere")


def test_an_empty_text_is_named(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    for path in (tmp_path / "empty.txt", tmp_path):
        with pytest.raises(DataError, match=f"no text in {path}"):
            data.load(path)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        data.load(tmp_path / "pipe")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_bytes(b"x" * 100)
    real = open

    def refuse(path, *args, **kwargs):                        # a mode bit would not stop a test that runs as root
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match="secret.txt.*Permission denied"):
        data.load(tmp_path)


@pytest.mark.parametrize("size, part", [(5, "training"), (150, "held-out")])
def test_a_text_too_small_for_one_window_names_the_part(size, part):
    with pytest.raises(DataError, match=f"its {part} part has .* one window takes 11.*--context"):
        Loader(numbers(size), context=10, batch=1)


def test_a_failure_in_the_thread_is_raised_where_the_batch_is_asked_for(monkeypatch):
    loader = Loader(numbers(1500), context=10, batch=5, prefetch=2)
    loader.next()
    monkeypatch.setattr(data, "cut_windows", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        for _ in range(4):
            loader.next()
    with pytest.raises(DataError, match="prefetch is -1"):
        Loader(numbers(1500), context=10, batch=5, prefetch=-1)


def test_a_batch_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(DataError, match="batch of 10 windows.*4 ranks"):
        Loader(numbers(1500), context=10, batch=10, ranks=4)
