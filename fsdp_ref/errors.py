"""Every error this package raises on purpose, in one small family.

Each message is one sentence that names the thing at fault and, after a semicolon, what to do about it. Commands print the
message alone (no traceback) and exit with `exit_code`; notebooks and scripts catch the class.
"""


class FsdpRefError(Exception):
    """The base of all errors that a user can act on."""

    exit_code = 2


class ConfigError(FsdpRefError):
    """An argument, a path or a combination of them that cannot work (nothing has been started or changed)."""


class DataError(FsdpRefError):
    """The training text is missing, empty or too small."""


class WorldError(FsdpRefError):
    """The ranks could not be brought together, or do not fit the mesh that was asked for."""


class RankError(FsdpRefError):
    """A collective failed because a rank died, never arrived or disagreed; the message names the rank where it is known.

    Attributes:
        sent: False when the ranks found out before anything was sent: all of them raise this, and the process group is as good as before.
    """

    exit_code = 3
    sent = True


class CheckpointError(FsdpRefError):
    """A checkpoint is missing, incomplete, damaged or does not fit the model; nothing has been changed in memory."""

    exit_code = 4


class CertificateError(FsdpRefError):
    """A certificate is forged, edited, of another course, or none at all."""

    exit_code = 5


class Preempted(FsdpRefError):
    """A signal asked the run to stop, and it has stopped: every rank saved the same step. The exit code is EX_TEMPFAIL, "try again"."""

    exit_code = 75
