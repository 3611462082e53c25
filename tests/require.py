"""What a test needs of the machine it runs on. In CI, which has everything, a missing part is a failure; elsewhere the
test is skipped with the reason.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

IN_CI = os.environ.get("FOURFOLD_CI") == "1"
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # not on everybody's PATH


def require(*programs: str) -> None:
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        give_up(f"{', '.join(missing)} not installed here (.ci/run installs what the tests need)")


def require_module(name: str) -> None:
    if find_spec(name) is None:
        give_up(f"the Python module {name} is not installed here (make test installs it on Linux)")


def require_root() -> None:
    if os.geteuid():
        give_up("only root can do this")


def give_up(reason: str) -> None:
    if IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)
