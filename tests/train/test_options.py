"""Options: what is given wins, a resumed run brings its own, what cannot work is one sentence. No torch anywhere near."""

import math
import subprocess
import sys

import pytest

from fsdp_ref import cli, train_options
from fsdp_ref.errors import ConfigError
from fsdp_ref.train_options import Options, complete, learning_rate, parse


def test_nothing_given_is_the_default():
    assert complete(parse([])) == Options()


def test_given_then_saved_then_default():
    saved = {"dim": 64, "heads": 2, "steps": 7, "batch": 8, "ranks": 2, "ledger": True, "out": "elsewhere", "unknown": 1}
    options = complete(parse(["--steps", "9", "--resume", "auto", "--out", "here"]), saved)
    assert (options.steps, options.dim, options.heads, options.batch, options.out) == (9, 64, 2, 8, "here")
    assert not options.ledger                                 # about one start, not about the run


@pytest.mark.parametrize("argv, named", [
    (["--ranks", "0"], "--ranks is 0"), (["--ranks", "-2"], "--ranks is -2"), (["--steps", "0"], "--steps is 0"),
    (["--batch", "30"], "--batch 30 .* 4 ranks.*such as 32"), (["--batch", "2"], "such as 4"), (["--ranks", "3"], "multiple of 3"),
    (["--dim", "100", "--heads", "3"], "--dim 100 .* 3 equal heads"), (["--dropout", "1"], "--dropout is 1.0"),
    (["--dropout", "nan"], "--dropout is nan"), (["--lr", "0"], "--lr is 0.0"), (["--lr", "inf"], "--lr is inf"),
    (["--seed", "-1"], "--seed is -1"), (["--seed", str(2**31)], "--seed"), (["--context", "0"], "--context is 0"),
    (["--accumulate", "3"], "--accumulate 3 does not divide the 8 windows .*--batch 12"), (["--timeout", "0"], "--timeout is 0.0"),
    (["--save-every", "auto"], "--save-every auto .*--mtbf"), (["--max-restarts", "-1"], "--max-restarts is -1"),
    (["--save-every", "-1"], "--save-every is -1"), (["--keep-last", "-1"], "--keep-last")])
def test_what_cannot_work_is_named(argv, named):
    with pytest.raises(ConfigError, match=named):
        complete(parse(argv))


@pytest.mark.parametrize("argv, named", [
    (["--rank", "4"], "unrecognized arguments: --rank"), (["--steps", "many"], "invalid int value: 'many'"),
    (["--mtbf", "soon"], "'soon' is no time"), (["--mtbf=-3h"], "'-3h' is no time"), (["--mtbf", ""], "'' is no time"),
    (["--save-every", "often"], "'often' is neither"), (["--strategy", "zero9"], "invalid choice: 'zero9'"), (["extra"], "extra")])
def test_a_mistyped_option_is_one_sentence_that_names_the_help(argv, named):
    with pytest.raises(ConfigError, match=f"{named}.*; see fsdp-ref train --help"):
        parse(argv)


@pytest.mark.parametrize("name", train_options.FIXED)
def test_a_resumed_run_cannot_change_what_its_weights_depend_on(name):
    value = getattr(Options(), name)
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} is {value + 8} and the run to resume has {value}"):
        complete(parse([flag, str(value + 8)]), train_options.as_dict(Options()))
    assert getattr(complete(parse([flag, str(value)]), {name: value}), name) == value


def test_times_have_units():
    assert [parse(["--mtbf", text])["mtbf"] for text in ("45", "45s", "90m", "1.5h", "2d")] == [45, 45, 5400, 5400, 172800]


def test_restarts_are_of_one_start_and_not_inherited():
    saved = train_options.as_dict(complete(parse(["--max-restarts", "3", "--accumulate", "2", "--timeout", "9"])))
    options = complete(parse(["--resume", "auto", "--out", "x"]), saved)
    assert (options.max_restarts, options.accumulate, options.timeout) == (0, 2, 9.0)


def test_windows_is_told_about_wsl2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="WSL2"):
        parse([])
    assert cli.main(["doctor"]) == 2
    assert "WSL2" in capsys.readouterr().err


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    options = Options(steps=110, warmup=10, lr=1.0)
    assert [learning_rate(step, options) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(60, options) == pytest.approx(0.55)              # half way: between 1 and a tenth
    assert learning_rate(110, options) == pytest.approx(0.1)
    assert learning_rate(35, options) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(500, options) == pytest.approx(0.1)
    assert learning_rate(1, Options(steps=1, warmup=0, lr=1.0)) == pytest.approx(0.1)


# -- the command line -----------------------------------------------------------------------------------------------------------


def test_help_and_wrong_arguments_do_not_load_torch():
    code = ("import sys\nfrom fsdp_ref import cli\n"
            "for argv in (['--help'], ['train', '--help'], ['checkpoint', '--help'], ['checkpoint', 'show', '--help'], ['show', '--help'],"
            " ['bench', '--help']):\n"
            "    try: cli.main(argv)\n"
            "    except SystemExit as end: assert not end.code, argv\n"
            "assert cli.main(['train', '--batch', '30']) == 2\n"
            "assert cli.main(['train', '--data', '/no/such/text']) == 2\n"
            "assert 'torch' not in sys.modules, 'torch was imported'\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for text in ("train", "show", "checkpoint", "bench", "doctor", "--ranks", "--resume", "exit codes", "STEP_DIR", "verify"):
        assert text in done.stdout


@pytest.mark.parametrize("argv, named", [([], "COMMAND"), (["fly"], "fly"), (["checkpoint"], "show|verify"), (["show", "run"], "--out"),
                                         (["checkpoint", "read", "x"], "read"), (["bench", "nothing"], "nothing")])
def test_a_wrong_command_is_one_line_and_exit_code_2(argv, named, capsys):
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and named in error and error.startswith("fsdp-ref: ")


def test_a_checkpoint_that_is_not_there_is_one_line_and_exit_code_4(tmp_path, capsys):
    for action in ("show", "verify"):
        assert cli.main(["checkpoint", action, str(tmp_path / "step-00000001")]) == 4
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "step-00000001" in error


def test_show_without_a_ledger_says_how_to_record_one(tmp_path, capsys):
    assert cli.main(["show", str(tmp_path), "--out", str(tmp_path / "pictures")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--ledger" in error
    assert not (tmp_path / "pictures").exists()
