"""The command line."""

import os
import sys

from flower_app import refuse_shadowing_files

for _descriptor in (0, 1, 2):
    # The next opened file would get a closed descriptor's number, and child programs would read and write that file.
    try:
        os.fstat(_descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (it stays open as long as the process)
sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
try:
    # Check before the commands import modules that a file of the user may shadow.
    refuse_shadowing_files()
except ImportError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2) from error
