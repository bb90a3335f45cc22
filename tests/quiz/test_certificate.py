"""Certificates: what was signed is valid, everything else is not; keys stay secret and are never overwritten."""

import copy
import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from PIL import Image

from fsdp_ref import cli
from fsdp_ref.certificate import command, keys, picture, record, results
from fsdp_ref.errors import CertificateError, ConfigError
from tests.quiz.support import ROOT

SCORES = """student,exercise,score,points,properties,diagnosis,notes
ada,zero1_step,5,5,,,
ada,capstone,8.5,10,,,
bob,zero1_step,1,5,,,
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    keys.generate(folder)
    return folder


@pytest.fixture
def scores(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text(SCORES)
    return path


def issue(pair, scores, out, *more):
    return cli.main(["certificate", "issue", str(scores), "--key", str(pair / "course.key"), "--course", "FSDP from scratch",
                     "--out", str(out), "--date", "2030-01-31", *more])


@pytest.fixture
def issued(pair, scores, tmp_path):
    assert issue(pair, scores, tmp_path / "out", "--page", "none") == 0
    return next((tmp_path / "out").glob("*.json"))


def verify(pair, what, *more):
    return cli.main(["certificate", "verify", str(what), "--public-key", str(pair / "course.pub"), *more])


def test_issued_and_valid(pair, issued, capsys):
    capsys.readouterr()
    assert verify(pair, issued) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid: ada has completed FSDP from scratch with 13.5 of 15 points (90 %); issued on 2030-01-31, id ")
    assert "capstone: 8.5 of 10" in out and "zero1_step: 5 of 5" in out
    assert len(list(issued.parent.glob("*.json"))) == 1, "bob has 1 of 15 points: an exercise that he left out counts"


def test_an_oracle_agrees_that_the_signature_is_ed25519_over_the_canonical_text(pair, issued):
    """Checked with the library alone, from the words of the format."""
    import base64
    data = json.loads(issued.read_text())
    message = b"fsdp_ref certificate 1\n" + json.dumps(data["signed"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    key = serialization.load_pem_public_key((pair / "course.pub").read_bytes())
    assert isinstance(key, Ed25519PublicKey)
    key.verify(base64.b64decode(data["signature"]), message)


def leaves(data, path=()):
    """Every place in a JSON value where a text or a number stands."""
    if isinstance(data, dict | list):
        for key, value in (data.items() if isinstance(data, dict) else enumerate(data)):
            yield from leaves(value, (*path, key))
    else:
        yield path, data


def test_whatever_is_edited_makes_it_invalid(pair, issued):
    key, data = keys.read_public(pair / "course.pub"), json.loads(issued.read_text())
    assert record.verify(json.dumps(data), key).id == issued.stem
    places = list(leaves(data))
    assert len(places) == 10 + 6 + 1
    for path, value in places:
        forged = copy.deepcopy(data)
        target = forged
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value + 1 if isinstance(value, int | float) else value[:-3] + ("AAA" if value[-3:] != "AAA" else "BBB")
        with pytest.raises(CertificateError):
            record.verify(json.dumps(forged), key)


@pytest.mark.parametrize("change", [
    lambda d: d["exercises"].pop(), lambda d: d["exercises"].append(d["exercises"][0]), lambda d: d["exercises"].reverse(),
    lambda d: d["signed"].update(extra="x"), lambda d: d["signed"].pop("course"), lambda d: d.update(extra=1), lambda d: d.pop("signature"),
    lambda d: d["signed"].update(score="13"), lambda d: d["signed"].update(points=True), lambda d: d["signed"].update(learner="a\nb"),
    lambda d: d["exercises"][0].update(id="\ud800"), lambda d: d["exercises"].append(3), lambda d: d.update(exercises=5),
    lambda d: d.update(signature="%%%"), lambda d: d.update(signature=""), lambda d: d["signed"].update(id="../../x")])
def test_damaged_certificates(pair, issued, change):
    data = json.loads(issued.read_text())
    change(data)
    with pytest.raises(CertificateError):
        record.verify(json.dumps(data), keys.read_public(pair / "course.pub"))


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", "[" * 100_000, '{"signed": 1e999, "signature": ""}',
                                  "x" * (record.LIMIT + 1)])
def test_what_is_no_certificate(pair, text):
    with pytest.raises(CertificateError, match="this is no certificate .*; give the JSON file"):
        record.verify(text, keys.read_public(pair / "course.pub"))


def test_infinite_points_are_refused(pair, issued):
    text = issued.read_text().replace('"points": 15.0', '"points": 1e999')
    with pytest.raises(CertificateError, match="points is no number"):
        record.verify(text, keys.read_public(pair / "course.pub"))


def test_a_forger_with_a_key_of_their_own(pair, scores, tmp_path, capsys):
    other = tmp_path / "other"
    keys.generate(other)
    issue(other, scores, tmp_path / "forged", "--page", "none")
    forged = next((tmp_path / "forged").glob("*.json"))
    assert verify(pair, forged) == 5 and "yours is" in capsys.readouterr().err
    data = json.loads(forged.read_text())
    data["signed"]["key"] = keys.fingerprint(keys.read_public(pair / "course.pub"))
    data["signed"]["id"] = record.make_id(data["signed"])
    forged.write_text(json.dumps(data))
    assert verify(pair, forged) == 5 and "the signature does not fit" in capsys.readouterr().err


def test_by_id_and_from_the_text_of_the_code(pair, issued, capsys, monkeypatch):
    assert verify(pair, issued.stem, "--in", str(issued.parent)) == 0 and verify(pair, issued.stem) == 2
    assert "Give --in DIR" in capsys.readouterr().err
    assert verify(pair, "AAAA-BBBB-CCCC-DDDD", "--in", str(issued.parent)) == 5 and "did not issue it" in capsys.readouterr().err
    (issued.parent / "AAAA-BBBB-CCCC-DDDD.json").write_text(issued.read_text())
    assert verify(pair, "AAAA-BBBB-CCCC-DDDD", "--in", str(issued.parent)) == 5 and "swapped" in capsys.readouterr().err
    text = record.verify(issued.read_text(), keys.read_public(pair / "course.pub")).short()
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO(text + "\n"))
    assert verify(pair, "-") == 0 and "valid: ada" in capsys.readouterr().out
    assert verify(pair, issued.parent / "none.json") == 2


def test_the_code_on_the_page_is_the_signed_text(pair, scores, tmp_path):
    """Sample the picture at the middle of each module and compare with the code of the certificate's text."""
    issue(pair, scores, tmp_path / "out", "--page", "png")
    path = next((tmp_path / "out").glob("*.png"))
    certificate = record.verify(path.with_suffix(".json").read_text(), keys.read_public(pair / "course.pub"))
    pixels = np.asarray(Image.open(path).convert("L")) < 128
    height, width = pixels.shape
    left, bottom, wide, high = picture.CODE
    code = np.array(picture.matrix(certificate)) == 1
    count = len(code) + 2 * picture.QUIET
    side = min(wide * width, high * height)                          # imshow keeps modules square and centres them
    x0, y0 = left * width + (wide * width - side) / 2, (1 - bottom - high) * height + (high * height - side) / 2
    middles = (np.arange(count) + 0.5) * side / count
    seen = pixels[np.ix_((y0 + middles).astype(int), (x0 + middles).astype(int))]
    inner = slice(picture.QUIET, -picture.QUIET)
    assert (seen[inner, inner] == code).all() and seen.sum() == code.sum(), "and a white border around it"
    assert Image.open(path).info["Description"].startswith("ada has completed")
    assert Image.open(path).info["Description"].endswith(certificate.short())


def test_pages_are_the_same_bytes_each_time_and_hostile_names_are_text(pair, tmp_path):
    path = tmp_path / "scores.json"
    name = "$\\frac{1}{0}$ ../../etc/passwd {x} %s <b>"
    path.write_text(json.dumps([{"learner": name, "exercise": "e", "score": 1, "points": 1}]))
    for out in ("one", "two"):
        issue(pair, path, tmp_path / out)
    first, second = (sorted((tmp_path / out).iterdir()) for out in ("one", "two"))
    assert [p.name for p in first] == [p.name for p in second] and len(first) == 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert record.ID.fullmatch(first[0].stem) and first[1].suffix == ".pdf" and first[1].read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "scores.json", "two"]


def test_keys_are_secret_and_never_overwritten(tmp_path):
    old = os.umask(0)
    try:
        secret, public = keys.generate(tmp_path / "keys")
    finally:
        os.umask(old)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and "PRIVATE" in secret.read_text() and "PRIVATE" not in public.read_text()
    before = secret.read_bytes(), public.read_bytes()
    with pytest.raises(ConfigError, match="course.key exists already and is not overwritten"):
        keys.generate(tmp_path / "keys")
    secret.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="course.pub exists already"):
        keys.generate(tmp_path / "keys")
    assert not secret.exists() and ((tmp_path / "elsewhere").read_bytes(), public.read_bytes()) == before
    public.unlink()
    secret.symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="exists already"):
        keys.generate(tmp_path / "keys")
    assert not (tmp_path / "target").exists()


def test_keys_that_cannot_be_used(pair, tmp_path, scores, capsys):
    loose = tmp_path / "loose.key"
    loose.write_bytes((pair / "course.key").read_bytes())
    loose.chmod(0o644)
    with pytest.raises(ConfigError, match="may be read by others .mode 644.; run chmod 600"):
        keys.read_secret(loose)
    rsa = generate_private_key(65537, 2048).private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                                          serialization.NoEncryption())
    loose.write_bytes(rsa)
    loose.chmod(0o600)
    with pytest.raises(ConfigError, match="key of another kind"):
        keys.read_secret(loose)
    with pytest.raises(ConfigError, match="holds no secret key"):
        (tmp_path / "pub.key").write_bytes((pair / "course.pub").read_bytes())
        (tmp_path / "pub.key").chmod(0o600)
        keys.read_secret(tmp_path / "pub.key")
    with pytest.raises(ConfigError, match="holds no public key"):
        keys.read_public(pair / "course.key")
    with pytest.raises(ConfigError, match="cannot read the public key"):
        keys.read_public(tmp_path / "none")
    with pytest.raises(ConfigError, match="too large"):
        (tmp_path / "large").write_bytes(b"x" * 20_000)
        keys.read_public(tmp_path / "large")
    assert issue(tmp_path, scores, tmp_path / "out") == 2 and "cannot read the secret key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "words"), [
    ("", "holds no results"), ("a,b\n1,2\n", "result 1: learner is missing; give the columns"),
    ("learner,exercise,score,points\nada,e,x,1\n", "result 1: score is 'x'; write a number"),
    ("learner,exercise,score,points\nada,e,nan,1\n", "score is 'nan'"), ("learner,exercise,score,points\nada,e,-1,1\n", "score is '-1'"),
    ("learner,exercise,score,points\nada,e,2,1\n", "the score 2 is more than the 1 points"),
    ("learner,exercise,score,points\nada,e,1,1\nada,e,1,1\n", "result 2: ada has two results for e; leave the one"),
    ("learner,exercise,score,points\nada,e,1,1\nbob,e,1,2\n", "e has 2 points here and 1 above"),
    ('learner,exercise,score,points\n"a\nb",e,1,1\n', "is no name; write one line"),
    (f"learner,exercise,score,points\n{'x' * 101},e,1,1\n", "is no name")])
def test_results_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        results.read(path)


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read as results"), ("3", "holds no list of results"),
                                             ("[3]", "no list of results"), ("[" * 100_000, "cannot be read")])
def test_json_results_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        results.read(path)
    with pytest.raises(ConfigError, match="cannot read the results"):
        results.read(tmp_path / "none.csv")


def test_results_as_json_say_the_same(tmp_path, scores):
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"results": [{"learner": "ada", "exercise id": "zero1_step", "score": 5, "points": 5},
                                            {"learner": "ada", "exercise_id": "capstone", "score": 8.5, "points": 10},
                                            {"student": "bob", "exercise": "zero1_step", "score": 1, "points": 5}]}))
    assert results.read(path) == results.read(scores)
    bob = results.read(path)[1]
    assert (bob.score, bob.points) == (1, 15)


def test_who_gets_one(pair, scores, tmp_path, capsys):
    assert issue(pair, scores, tmp_path / "a", "--page", "none", "--pass", "90") == 0 and "1 of 2 learners" in capsys.readouterr().out
    assert issue(pair, scores, tmp_path / "b", "--page", "none", "--pass", "90.1") == 0 and "0 of 2 learners" in capsys.readouterr().out
    assert issue(pair, scores, tmp_path / "c", "--page", "none", "--pass", "0", "--learner", "bob") == 0
    assert "bob: " in capsys.readouterr().out and len(list((tmp_path / "c").iterdir())) == 1
    names = tmp_path / "names.csv"
    names.write_text("learner,name\nada,Ada Lovelace\n")
    assert issue(pair, scores, tmp_path / "d", "--page", "none", "--names", str(names)) == 0
    assert json.loads(next((tmp_path / "d").iterdir()).read_text())["signed"]["learner"] == "Ada Lovelace"
    for wrong, words in ((["--learner", "eve"], "no results of 'eve'"), (["--pass", "101"], "no percentage"),
                         (["--date", "today"], "no day"), (["--out", str(scores)], "cannot make")):
        assert issue(pair, scores, tmp_path / "e", *wrong) == 2 and words in capsys.readouterr().err
    assert command.main(["keygen", "--out", str(tmp_path / "new")]) == 0


def test_the_instructors_page_can_be_followed(tmp_path, monkeypatch, scores, capsys):
    page = (ROOT / "docs" / "instructors.md").read_text()
    lines = page.split("\n## Certificates\n")[1].split("```\n")[1].splitlines()
    monkeypatch.chdir(tmp_path)
    assert [line.split()[:2] for line in lines] == [["fsdp-ref", "certificate"]] * 4
    for line in lines:
        name = next((path.stem for path in Path("certificates").glob("*.json")), "") if Path("certificates").exists() else ""
        arguments = [word.replace("ID", name) for word in shlex.split(line, comments=True)[1:]]
        assert cli.main(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("valid: ada") == 2


def test_the_command_needs_no_torch_and_no_lab():
    code = ("import sys; from fsdp_ref.certificate import command, picture; "
            "sys.exit(any(name in sys.modules for name in ('torch', 'ipywidgets', 'fsdp_ref.lab', 'matplotlib.pyplot')))")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
