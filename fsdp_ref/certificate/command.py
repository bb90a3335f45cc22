"""`fsdp-ref certificate keygen | issue | verify`."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

from .. import textfile
from ..errors import CertificateError, ConfigError
from ..train_options import Parser
from . import keys, record, results

EPILOG = """\
examples:
  fsdp-ref certificate keygen --out keys                                  once; publish keys/course.pub, keep keys/course.key to yourself
  fsdp-ref certificate issue scores.csv --key keys/course.key --course "FSDP from scratch" --out certificates
  fsdp-ref certificate verify certificates/ABCD-EFGH-IJKL-MNOP.json --public-key course.pub
  fsdp-ref certificate verify ABCD-EFGH-IJKL-MNOP --in certificates --public-key course.pub
  fsdp-ref certificate verify - --public-key course.pub < text-of-the-QR-code

exit codes: 0 done or valid, 2 a wrong argument or file, 5 not valid
"""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    p = Parser(prog="fsdp-ref certificate", description="Certificates of completion, signed with Ed25519.", epilog=EPILOG,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True, metavar="keygen|issue|verify")
    keygen = commands.add_parser("keygen", help="make the course's key pair; existing keys are never overwritten")
    keygen.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for course.key (mode 600) and course.pub")
    new = commands.add_parser("issue", help="sign a certificate for every learner who has passed")
    new.add_argument("results", type=Path, metavar="RESULTS", help="CSV or JSON with learner (or student), exercise, score, points")
    new.add_argument("--key", required=True, type=Path, metavar="FILE", help="the course's secret key")
    new.add_argument("--course", required=True, metavar="NAME", help="what the certificate calls the course")
    new.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for ID.json and the pages (made if need be)")
    new.add_argument("--learner", metavar="NAME", help="only this learner")
    new.add_argument("--names", type=Path, metavar="CSV", help="columns learner and name: what to print for each learner")
    new.add_argument("--pass", dest="needed", type=float, default=60.0, metavar="PERCENT", help="points needed (default: 60)")
    new.add_argument("--page", choices=("pdf", "png", "none"), default="pdf", help="the page to print (default: pdf)")
    new.add_argument("--date", metavar="YYYY-MM-DD", help="the day of issue (default: today, UTC)")
    check = commands.add_parser("verify", help="check a certificate with the course's public key")
    check.add_argument("certificate", metavar="FILE|ID|-", help="the JSON file, an id (with --in), or - for a QR code's text on stdin")
    check.add_argument("--public-key", required=True, type=Path, metavar="FILE", help="course.pub, as the course has published it")
    check.add_argument("--in", dest="folder", type=Path, metavar="DIR", help="where the course keeps ID.json")
    args = p.parse_args(argv)
    return {"keygen": _keygen, "issue": _issue, "verify": _verify}[args.command](args)


def _keygen(args: argparse.Namespace) -> int:
    secret, public = keys.generate(args.out)
    print(f"{secret}: secret, keep it to yourself and keep a copy\n{public}: publish it; its fingerprint is "
          f"{keys.fingerprint(keys.read_public(public))}")
    return 0


def _issue(args: argparse.Namespace) -> int:
    key, issued, course = keys.read_secret(args.key), _date(args.date), results.name(args.course, "--course")
    if not 0 <= args.needed <= 100:
        raise ConfigError(f"--pass {args.needed:g} is no percentage; give 0 to 100")
    everyone = results.read(args.results)
    printed = results.names(args.names) if args.names else {}
    chosen = [grades for grades in everyone if args.learner in (None, grades.learner)]
    if not chosen:
        raise ConfigError(f"{args.results} has no results of {args.learner!r:.60}; it has {len(everyone)} learners")
    made = 0
    for grades in chosen:
        if grades.points <= 0 or 100 * grades.score < args.needed * grades.points:
            print(f"{grades.learner}: {grades.score:g} of {grades.points:g} points, fewer than {args.needed:g} %; no certificate")
            continue
        certificate = record.issue(grades, printed.get(grades.learner, grades.learner), course, key, issued)
        print(f"{grades.learner}: {_write(certificate, args.out, args.page)}")
        made += 1
    print(f"{made} of {len(chosen)} learners have a certificate in {args.out}")
    return 0


def _write(certificate: record.Certificate, folder: Path, page: str) -> Path:
    """Files are named by the id alone: a learner's name is text, never a path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder} ({error.strerror}); choose another --out") from error
    path = textfile.write(folder / f"{certificate.id}.json", certificate.to_json(), "the certificate")
    if page != "none":
        from . import picture  # draws; needs matplotlib
        picture.save(certificate, folder / f"{certificate.id}.{page}")
    return path


def _date(text: str | None) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text) if text else datetime.datetime.now(datetime.UTC).date()
    except ValueError as error:
        raise ConfigError(f"--date {text!r:.20} is no day; write it as 2030-01-31") from error


def _verify(args: argparse.Namespace) -> int:
    key = keys.read_public(args.public_key)
    certificate = record.verify(_text(args.certificate, args.folder), key)
    if record.ID.fullmatch(args.certificate) and certificate.id != args.certificate:
        raise CertificateError(f"the file of {args.certificate} holds the certificate {certificate.id}; the files were swapped")
    print(f"valid: {certificate}")
    for each in certificate.exercises or ():
        print(f"  {each['id']}: {each['score']:g} of {each['points']:g}")
    return 0


def _text(what: str, folder: Path | None) -> str:
    """The certificate's text: from standard input, from a file, or from the file of an id."""
    if what == "-":
        return sys.stdin.read(record.LIMIT + 1).strip()
    path = Path(what)
    if record.ID.fullmatch(what):
        if folder is None:
            raise ConfigError(f"where is certificate {what}? Give --in DIR with the folder in which the course keeps its certificates")
        path = folder / f"{what}.json"
        if not path.is_file():
            raise CertificateError(f"{folder} has no certificate {what}; the course did not issue it, or keeps it elsewhere")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(record.LIMIT + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"cannot read {what} ({reason}); give the certificate's JSON file, its id with --in, or - and the QR code's "
                          "text") from error
