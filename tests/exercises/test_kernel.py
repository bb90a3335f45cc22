"""The kernel's walls by themselves, without the audit hook: what is refused, and what must go on working."""

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ref.lab.checks import inside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
FOLDER = Path(inside.__file__).parents[1]

PROGRAM = """
import ctypes, os, socket, sys, tempfile, threading
sys.path.insert(0, {folder!r})
from inside import kernel
home = tempfile.mkdtemp()
open(home + "/mine", "w").close()
libc = ctypes.CDLL(None, use_errno=True)
landlock = kernel.landlock([sys.base_prefix, "/usr", "/lib", "/lib64"], ["/etc"], home)
seccomp = kernel.seccomp()
if not (landlock and seccomp):
    print("not there"); sys.exit()

def refused(work):
    try:
        result = work()
    except OSError as error:
        return error.errno in (1, 13, 18)                     # EXDEV: Landlock refuses to link across what it knows
    return result == -1 and ctypes.get_errno() == 1

print("refused", {{
    "fork": refused(os.fork), "libc fork": refused(libc.fork), "vfork": refused(lambda: libc.syscall({vfork}) if {vfork} > 0 else -1),
    "exec": refused(lambda: os.execv("/bin/true", ["true"])), "socket": refused(socket.socket),
    "pair": refused(socket.socketpair), "kill": refused(lambda: os.kill(os.getppid(), 0)), "setsid": refused(os.setsid),
    "limit": refused(lambda: __import__("resource").prlimit(0, 0, (1, 1))), "read": refused(lambda: open("/etc/passwd")),
    "proc": refused(lambda: open("/proc/1/environ")), "write": refused(lambda: open("/tmp/never", "w")),
    "shm": refused(lambda: libc.shmget(0, 100, 0o1600)), "unshare": refused(lambda: libc.unshare(0x10000000)),
    "trace": refused(lambda: libc.ptrace(0, 0, 0, 0)), "link": refused(lambda: os.link("/etc/passwd", home + "/x"))}})
threading.Thread(target=print, args=("a thread",)).start()
os.kill(os.getpid(), 0)
open(home + "/mine", "w").write("x")
os.rename(home + "/mine", home + "/yours")
os.listdir("/etc")
print("limits can be read", bool(__import__("resource").getrlimit(0)))
os.remove(home + "/yours")
"""


def test_what_the_kernel_refuses_and_what_it_lets_through():
    import platform
    vfork = 58 if platform.machine() == "x86_64" else -1
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM.format(folder=str(FOLDER), vfork=vfork)], capture_output=True, text=True,
                          timeout=60)
    if done.stdout.strip() == "not there":
        pytest.skip("this kernel has no Landlock or no seccomp")
    assert done.returncode == 0, done.stderr
    table = eval(done.stdout.splitlines()[0].removeprefix("refused "))
    assert len(table) == 16
    assert all(table.values()), [name for name, refused in table.items() if not refused]
    assert "a thread" in done.stdout and "limits can be read True" in done.stdout
