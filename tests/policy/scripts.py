# Runs a Python script as a program of its own, forked from the server of ranks.py, which has PyTorch and the package:
# to import them takes longer than most scripts do. Not for scripts whose imports are tested.
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import ranks  # noqa: F401  sets what the server imports


def _main(script, arguments, environment, folder):
    for descriptor, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(script, run_name="__main__")


def run_script(script, *arguments, env, timeout=300):
    """As subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True) does."""
    command = str(script), *map(str, arguments)
    with tempfile.TemporaryDirectory() as folder:
        given = command[0], command[1:], dict(env), folder
        process = multiprocessing.get_context("forkserver").Process(target=_main, args=given)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, error = (Path(folder, name).read_text() for name in ("out", "error"))
    return subprocess.CompletedProcess(command, process.exitcode, out, error)
