"""The course's key pair: made once, the secret half readable by its owner alone and never overwritten."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from ..errors import ConfigError

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:
    raise ConfigError('certificates need the package cryptography; install it with pip install "fsdp-ref[lab]"') from error

SECRET, PUBLIC = "course.key", "course.pub"
LIMIT = 10_000          # bytes of a key file


def generate(folder: Path) -> tuple[Path, Path]:
    """Make a new pair in `folder` (made if need be); returns the paths of the secret and of the public key.

    Raises:
        ConfigError: one of the two files exists already, or the folder cannot be written.
    """
    secret, public = folder / SECRET, folder / PUBLIC
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (secret, public):
            if os.path.lexists(path):
                raise ConfigError(f"{path} exists already and is not overwritten: certificates that it signed could not be checked any "
                                  "more; choose another folder")
        _write_new(secret, pem, 0o600)
        pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        _write_new(public, pem, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write keys into {folder} ({error.strerror}); choose a folder of yours") from error
    return secret, public


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """O_EXCL: fails if anything is there, a link included; the mode holds from the first byte on, whatever the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_secret(path: Path) -> Ed25519PrivateKey:
    """The secret key in a file.

    Raises:
        ConfigError: it cannot be read, others may read it, or it is no such key.
    """
    data = _read(path, "secret")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} may be read by others (mode {mode:o}); run chmod 600 {path}, and make new keys if others had access")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no secret key of a course; give the {SECRET} that keygen made") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key of another kind; give the {SECRET} that keygen made")
    return key


def read_public(path: Path) -> Ed25519PublicKey:
    """The public key in a file.

    Raises:
        ConfigError: it cannot be read or is no such key.
    """
    try:
        key = serialization.load_pem_public_key(_read(path, "public"))
    except ValueError as error:
        raise ConfigError(f"{path} holds no public key of a course; give the {PUBLIC} that the course has published") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} holds a key of another kind; give the {PUBLIC} that the course has published")
    return key


def _read(path: Path, what: str) -> bytes:
    try:
        if path.stat().st_size > LIMIT:
            raise ConfigError(f"{path} is too large for a {what} key; give the file that keygen made")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} key {path} ({error.strerror}); give the file that keygen made") from error


def fingerprint(key: Ed25519PublicKey) -> str:
    """16 hex digits that name a public key."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def fits(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether the secret half of `key` signed `message`."""
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
