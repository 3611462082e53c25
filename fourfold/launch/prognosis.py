"""What stands in the way of a run, judged from what the ranks measured together, or could not."""

import statistics
from collections.abc import Iterator

from fourfold.launch.doctor import GIB, Finding, names_of
from fourfold.launch.facts import Facts
from fourfold.launch.measure import Measured

MOST_SKEW_S = 5.0
SLOW = 1.5
"""So many times slower than the median is worth a word."""
LEAST_FABRIC_BYTES_PER_S = 5e9
"""Any InfiniBand of the last ten years is faster."""


def measured_findings(ranks: list[Facts], measured: list[Measured | None]) -> Iterator[Finding]:
    names = names_of(ranks)
    yield from failed_findings(ranks, measured)
    for facts, each in zip(ranks, measured, strict=True):
        if each is None:
            continue
        where = f"rank {facts.rank} on {names[facts.machine]}"
        if each.matmul_error:
            yield Finding(
                "fails", f"{where} could not multiply matrices: {each.matmul_error}", "check it with nvidia-smi"
            )
        if each.output_problem:
            yield Finding(
                "fails",
                f"output_dir = {facts.output_dir} {each.output_problem} by {where}",
                "write a folder that all hosts share, or an address such as s3://bucket/run",
            )
        total = facts.gpus[facts.local_rank].memory_bytes if each.device_free_bytes is not None else 0
        if each.device_free_bytes is not None and each.device_free_bytes < 0.9 * total:
            yield Finding(
                "warns",
                f"{(total - each.device_free_bytes) / GIB:.1f} of {total / GIB:.1f} GiB are taken on the GPU of "
                f"{where}",
                "nvidia-smi shows by whom",
            )
    yield from clock_findings(ranks, measured[0])
    yield from speed_findings(ranks, measured)


def failed_findings(ranks: list[Facts], measured: list[Measured | None]) -> Iterator[Finding]:
    """Ranks that did not come through, those with the same reason in one sentence; those that are gone first."""
    names = names_of(ranks)
    failed: dict[tuple[str, str], list[Facts]] = {}
    for facts, each in zip(ranks, measured, strict=True):
        if each is None:
            failed.setdefault(("answer", ""), []).append(facts)
        elif each.error:
            failed.setdefault((each.stage, each.error), []).append(facts)
    for (stage, error), where in sorted(failed.items(), key=lambda each: each[0][0] != "answer"):
        hosts = ", ".join(dict.fromkeys(names[each.machine] for each in where))
        numbers = ", ".join(str(each.rank) for each in where)
        sentence = f"rank {numbers} on {hosts} could not {stage}{': ' * bool(error)}{error}"
        yield Finding("fails", sentence, remedy_of(stage, where[0].main_interface, len(names) > 1))


def remedy_of(stage: str, interface: str, is_several: bool) -> str:
    if stage == "answer":
        return "look in its log and in its host's dmesg for what ended it"
    if "nccl" not in stage and not stage.startswith("join"):  # until then all could talk to each other
        return "look for a rank that is gone or hangs, and for what else runs on its host"
    variable = "NCCL_SOCKET_IFNAME" if "nccl" in stage else "GLOO_SOCKET_IFNAME"
    steps = [f"export {variable}={interface or 'INTERFACE'} there, and check firewalls"] if is_several else []
    return "; ".join([*steps, "NCCL_DEBUG=INFO says more"] if "nccl" in stage else steps)


def clock_findings(ranks: list[Facts], first: Measured | None) -> Iterator[Finding]:
    names = names_of(ranks)
    for clock in first.clocks if first else ():
        if abs(clock.ahead_s) - clock.error_s > MOST_SKEW_S:
            direction = "ahead of" if clock.ahead_s > 0 else "behind"
            yield Finding(
                "warns",
                f"the clock of {names[ranks[clock.rank].machine]} is {abs(clock.ahead_s):.1f} s {direction} that of "
                f"{ranks[0].host}",
                "have chrony or ntpd set it: logs and file times of the hosts will not match",
            )


def speed_findings(ranks: list[Facts], measured: list[Measured | None]) -> Iterator[Finding]:
    names = names_of(ranks)
    speeds: dict[str, list[float]] = {}
    for facts, each in zip(ranks, measured, strict=True):
        if each and each.matmul_flops:
            # processes on the same cores are compared as one, each GPU by itself
            gpu = f", GPU {facts.local_rank}" if each.device != "cpu" else ""
            speeds.setdefault(names[facts.machine] + gpu, []).append(each.matmul_flops)
    means = {name: statistics.mean(each) for name, each in speeds.items()}
    median = statistics.median(means.values()) if means else 0.0
    for name, mean in means.items():
        if mean * SLOW < median:
            yield Finding(
                "warns",
                f"{name} multiplies matrices at {mean / 1e12:.3g} TFLOP/s, {median / mean:.1f} times slower than the "
                f"median of all, {median / 1e12:.3g}",
                "look for other programs there, for heat and for power limits; a run is as fast as its slowest rank",
            )
    all_reduce = measured[0].all_reduce if measured[0] else None
    if all_reduce is None:
        return
    if any(each and each.all_reduce and not each.all_reduce.is_right for each in measured):
        yield Finding(
            "fails",
            f"an all-reduce over {all_reduce.backend} gave wrong sums",
            "export NCCL_P2P_DISABLE=1 and measure again: if that mends it, GPUs cannot reach each other's memory "
            "directly here (often the IOMMU)",
        )
    is_slow = all_reduce.bus_bytes_per_s < LEAST_FABRIC_BYTES_PER_S
    if len(names) > 1 and all_reduce.backend == "nccl" and is_slow and all(each.infiniband for each in ranks):
        yield Finding(
            "warns",
            f"all-reduce over NCCL reaches {all_reduce.bus_bytes_per_s / 1e9:.1f} GB/s, though all hosts have "
            f"InfiniBand ({', '.join(ranks[0].infiniband)})",
            "unset NCCL_IB_DISABLE; NCCL_DEBUG=INFO says what NCCL uses, NCCL_IB_HCA chooses it",
        )
