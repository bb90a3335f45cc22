"""What a certificate says, how it is signed, and how it is checked.

    signed      format, id, course, learner, score, points, issued, key (the public key's fingerprint), exercises (a digest of the list)
    exercises   the list itself: id, score, points
    signature   Ed25519 over `signed`, in base64

The signature covers one spelling of `signed`: JSON with sorted keys and no spaces, in UTF-8, after a line that says what it is. The id is
made from the rest of `signed`, so no two certificates share one and an edited one loses its own. The QR code holds `signed` and
`signature`, so a printed page can be checked without any other file.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import json
import math
import re
from dataclasses import dataclass

from ..errors import CertificateError
from . import keys
from .results import Grades

FORMAT, VERSION = "fsdp_ref certificate", 1
FIELDS = {"format": str, "format_version": int, "id": str, "course": str, "learner": str, "score": float, "points": float, "issued": str,
          "key": str, "exercises": str}
EXERCISE = {"id": str, "score": float, "points": float}
ID = re.compile(r"[A-Z2-7]{4}(-[A-Z2-7]{4}){3}")
LIMIT = 1 << 20         # bytes of a certificate
SHORT_OF = "it was edited, forged, or signed with another key"


@dataclass(frozen=True)
class Certificate:
    """A certificate whose signature fits. `exercises` is None where only the QR code's text was at hand."""

    signed: dict
    exercises: list[dict] | None
    signature: str

    @property
    def id(self) -> str:
        """Four groups of four characters."""
        return self.signed["id"]

    def to_json(self) -> str:
        """The file: everything."""
        return json.dumps({"signed": self.signed, "exercises": self.exercises, "signature": self.signature}, indent=1, sort_keys=True,
                          ensure_ascii=False) + "\n"

    def short(self) -> str:
        """The QR code's text: without the list of exercises."""
        return canonical({"signed": self.signed, "signature": self.signature}).decode()

    def __str__(self) -> str:
        s = self.signed
        return (f"{s['learner']} has completed {s['course']} with {s['score']:g} of {s['points']:g} points "
                f"({100 * s['score'] / s['points']:.0f} %); issued on {s['issued']}, id {s['id']}, key {s['key']}")


def canonical(value: object) -> bytes:
    """The one spelling of a JSON value that is signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def issue(grades: Grades, learner: str, course: str, key, issued: datetime.date) -> Certificate:
    """Sign what a learner has reached. `key`: the course's secret key."""
    exercises = [{"id": name, "score": score, "points": points} for name, (score, points) in grades.exercises.items()]
    signed = {"format": FORMAT, "format_version": VERSION, "course": course, "learner": learner, "score": grades.score,
              "points": grades.points, "issued": issued.isoformat(), "key": keys.fingerprint(key.public_key()),
              "exercises": digest(exercises)}
    signed["id"] = make_id(signed)
    return Certificate(signed, exercises, base64.b64encode(key.sign(message(signed))).decode())


def message(signed: dict) -> bytes:
    """The bytes that are signed: a signature for something else can never be taken for one of these."""
    return f"{FORMAT} {VERSION}\n".encode() + canonical(signed)


def digest(exercises: list) -> str:
    """Of the list of exercises, for `signed`."""
    return hashlib.sha256(canonical(exercises)).hexdigest()


def make_id(signed: dict) -> str:
    """80 bits of the digest of everything but the id, in base32."""
    rest = canonical({key: value for key, value in signed.items() if key != "id"})
    text = base64.b32encode(hashlib.sha256(rest).digest()[:10]).decode()
    return "-".join(text[i : i + 4] for i in range(0, 16, 4))


def verify(text: str, key) -> Certificate:
    """Read a certificate (a file's text, or a QR code's) and check it with the course's public key.

    Raises:
        CertificateError: it is no certificate, or what it says is not what the course signed.
    """
    signed, exercises, signature = _parse(text)
    own = keys.fingerprint(key)
    if signed["key"] != own:
        raise CertificateError(f"the certificate names the key {signed['key']:.32} and yours is {own}; use the public key of its course, "
                               "published by the course itself")
    if not keys.fits(key, signature, message(signed)):
        raise CertificateError(f"the certificate is not valid: the signature does not fit what it says; {SHORT_OF}")
    if signed["id"] != make_id(signed):
        raise CertificateError(f"the certificate is not valid: its id is not that of what it says; {SHORT_OF}")
    if exercises is not None and digest(exercises) != signed["exercises"]:
        raise CertificateError("the certificate is not valid: its list of exercises is not the one that was signed; the list was edited")
    return Certificate(signed, exercises, base64.b64encode(signature).decode())


def _parse(text: str) -> tuple[dict, list | None, bytes]:
    """The parts, with their types checked; nothing is believed yet."""
    try:
        if len(text) > LIMIT:
            raise ValueError("it is too long")
        data = json.loads(text, parse_constant=_no_constant)
        if not isinstance(data, dict) or not {"signed", "signature"} <= set(data) <= {"signed", "signature", "exercises"}:
            raise ValueError("it has not the fields signed, signature and exercises")
        signed, exercises = data["signed"], data.get("exercises")
        if not isinstance(signed, dict) or set(signed) != set(FIELDS):
            raise ValueError("signed has not the fields of a certificate")
        _check_fields(signed, FIELDS)
        if (signed["format"], signed["format_version"]) != (FORMAT, VERSION) or not ID.fullmatch(signed["id"]) or not signed["points"] > 0:
            raise ValueError("it is of another format")
        if exercises is not None and not isinstance(exercises, list):
            raise ValueError("exercises is no list")
        for each in exercises or ():
            if not isinstance(each, dict) or set(each) != set(EXERCISE):
                raise ValueError("an exercise has not the fields id, score and points")
            _check_fields(each, EXERCISE)
        return signed, exercises, base64.b64decode(data["signature"], validate=True)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise CertificateError(f"this is no certificate ({error}); give the JSON file, or the text of the QR code") from error


def _check_fields(data: dict, fields: dict[str, type]) -> None:
    for name, kind in fields.items():
        value = data[name]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r:.40}")
        if kind is str and not value.isprintable():
            raise ValueError(f"{name} has characters that cannot be printed")
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{name} is no number")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
