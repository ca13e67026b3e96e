"""The fork server behind tests survives clients that are killed while they ask it."""

from __future__ import annotations

import subprocess
import sys

from tests.support.forkserver import ROOT

ASKED = """
import multiprocessing, os, socket
from multiprocessing import forkserver

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload({preload})
    forkserver.ensure_running()
    address = vars(forkserver._forkserver)["_forkserver_address"]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)  # and dies before it sends its files
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_client_that_dies_while_it_asks_ends_nobody_elses_process() -> None:
    def exit_code(preload: list[str]) -> str:
        script = ASKED.format(preload=preload)
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    assert exit_code([]) != "0"  # as Python has it
    assert exit_code(["tests.support.patient_forkserver"]) == "0"
