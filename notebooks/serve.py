"""Serve the notebooks with JupyterLab: `make lab` runs this. It listens on this machine only and prints one address, with its token.

It must answer at once when a port is taken, and never listen on anything but the loopback interface.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT = 8888
READY = 60.0            # seconds JupyterLab may take to answer


def is_free(port: int) -> bool:
    """Whether a server may listen on this port of the loopback interface now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def choose_port(asked: str) -> int:
    """The port that was asked for, or the first free one from 8888 on. Raises SystemExit with one clear sentence."""
    if not asked:
        for port in range(FIRST_PORT, FIRST_PORT + 100):
            if is_free(port):
                return port
        raise SystemExit(f"ports {FIRST_PORT} to {FIRST_PORT + 99} are all in use; name a free one: make lab PORT=9999")
    if not asked.isdigit() or not 0 < int(asked) < 65536:
        raise SystemExit(f"PORT={asked} is not a port; give a number from 1 to 65535, or leave PORT out to take a free one")
    if not is_free(int(asked)):
        raise SystemExit(f"port {asked} is in use (or may not be used) on this machine; choose another "
                         f"(make lab PORT={suggestion(int(asked))}), or leave PORT out to take a free one")
    return int(asked)


def suggestion(port: int) -> int:
    """A free port near this one."""
    return next((other for other in range(max(port + 1, 1024), min(port + 200, 65535)) if is_free(other)), 9999)


def command(port: int) -> list[str]:
    """How JupyterLab is started. The token is not among the arguments, where other users of the machine could read it."""
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.ip={HOST}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
             "--ServerApp.open_browser=False", "--ServerApp.answer_yes=True", f"--ServerApp.root_dir={Path.cwd()}",
             "--ServerApp.log_level=WARN", "--LabApp.log_level=WARN",
             "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]    # no pop-up on the first visit
    if os.geteuid() == 0:
        words.append("--allow-root")                      # in a container the only user may be root
    return words


def wait_until_ready(server: subprocess.Popen, port: int) -> bool:
    """True once the server answers; False when it has ended or does not answer in time."""
    deadline = time.monotonic() + READY
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/api", timeout=2).close()
            return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.1)
    return False


def main(argv: list[str] | None = None) -> int:
    """Run JupyterLab until it ends or Ctrl-C is pressed; return its exit status."""
    parser = argparse.ArgumentParser(description="Serve the notebooks with JupyterLab on this machine.")
    parser.add_argument("notebook", type=Path, help="the notebook to open first")
    parser.add_argument("--port", default="", help="port to listen on; empty: the first free one from 8888 on")
    parser.add_argument("--browser", default="yes", help="yes: open a browser; no: print the address only")
    given = parser.parse_args(argv)
    port = choose_port(given.port)
    token = secrets.token_hex(24)
    server = subprocess.Popen(command(port), env={**os.environ, "JUPYTER_TOKEN": token})
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        if not wait_until_ready(server, port):
            server.terminate()
            print("JupyterLab did not start; its messages stand above. fsdp-ref doctor checks this machine.", file=sys.stderr)
            return server.wait(10) or 1
        place = f"lab/tree/{given.notebook.as_posix()}" if given.notebook.exists() else "lab"
        address = f"http://{HOST}:{port}/{place}?token={token}"
        print(f"\nJupyterLab is ready (Ctrl-C stops it). Open this address:\n\n    {address}\n", flush=True)
        if given.browser.lower() not in ("no", "0", "false"):
            webbrowser.open(address)
        return server.wait()
    except KeyboardInterrupt:                            # Ctrl-C reaches JupyterLab too, which then closes its kernels
        try:
            return server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            return 1


if __name__ == "__main__":
    sys.exit(main())
