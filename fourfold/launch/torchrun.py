"""Starting the processes of a layout on this machine, through torchrun."""

import os
import subprocess
import sys


def local_command(processes: int, arguments: list[str]) -> list[str]:
    """`fourfold <arguments>` as `processes` workers that find each other on this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*torchrun, "-m", "fourfold", *arguments]


def local_environment() -> dict[str, str]:
    """What workers on one machine need set; anything already set wins."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # without it a restarted group reads the addresses of the dead one
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return defaults | dict(os.environ)


def run_local(processes: int, arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        local_command(processes, arguments), env=local_environment(), text=True, **options
    )
