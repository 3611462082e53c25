"""How ranks tell each other what they are and what they measured, so that the first can report for all.

They meet in the store that torchrun, or the first rank, keeps. It answers where the process group does not, so that a
rank that cannot join still says why.
"""

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fourfold.checkpoint.paths import is_local, locate
from fourfold.errors import LaunchError
from fourfold.launch.doctor import (
    Diagnosis,
    Finding,
    first_of_machines,
    machine_findings,
    meeting_findings,
)
from fourfold.launch.facts import Facts, examine, nearest_folder
from fourfold.launch.measure import COLLECTIVE_S, DEADLINE_S, Plan, measure_in_time
from fourfold.launch.prognosis import measured_findings
from fourfold.mesh.environment import choose_environment
from fourfold.mesh.meeting import open_store, place_in
from fourfold.mesh.process import has_gpu

MEETING_S = 120.0
"""How long ranks may take to start."""
LEAVING_S = 10.0
"""How long the first rank keeps the store open for the others to read the verdict."""


class Council:
    def __init__(self) -> None:
        place = place_in(os.environ)
        self.rank, self.world_size = place.rank, place.world_size
        self.connection = open_store(place, MEETING_S)
        # a restarted group finds the words of the last one in torchrun's store
        self.prefix = f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self.store = dist.PrefixStore(self.prefix, self.connection)

    def group_store(self) -> dist.Store:
        """With a connection of its own, since a group that cannot be built may keep its one for ever."""
        return dist.PrefixStore(f"{self.prefix}/group", self.connection.clone())  # type: ignore[attr-defined]

    def tell(self, subject: str, what: object) -> None:
        """For whoever asks, if the store is still there."""
        with suppress(dist.DistError):
            self.store.set(f"{subject}/{self.rank}", pickle.dumps(what))  # type: ignore[arg-type]  # it takes bytes too

    def hear(self, subject: str, rank: int, within_s: float) -> Any:
        """What a rank has told, or None when the time is over."""
        key = f"{subject}/{rank}"
        try:
            self.store.wait([key], timedelta(seconds=max(within_s, 0.1)))
            return pickle.loads(self.store.get(key))
        except RuntimeError:
            return None

    def hear_all(self, subject: str, within_s: float) -> list[Any]:
        end_s = time.monotonic() + within_s
        return [self.hear(subject, rank, end_s - time.monotonic()) for rank in range(self.world_size)]


def consult(device: str, output_dir: str, known: list[Finding], report: Callable[[Diagnosis], object]) -> bool:
    """As one of several ranks. The first reports; all learn whether a run would fail."""
    choose_environment(os.environ, device != "cpu" and has_gpu())  # as a run does before it meets the others
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    facts = examine(output_dir)
    try:
        council = Council()
    except LaunchError as error:
        if facts.local_rank == 0:  # nobody can speak for it
            report(Diagnosis([facts], [], [Finding("fails", str(error)), *known]))
        return True
    council.tell("facts", facts)
    if council.rank != 0:
        follow(council, device)
        verdict = council.hear("verdict", 0, DEADLINE_S + LEAVING_S)
        council.tell("left", True)
        return verdict is None or bool(verdict)
    diagnosis = preside(council, device, output_dir)
    diagnosis.findings.extend(known)
    report(diagnosis)
    council.tell("verdict", diagnosis.would_fail)
    council.tell("left", True)
    if len(diagnosis.ranks) == council.world_size and None not in diagnosis.measured:
        council.hear_all("left", LEAVING_S)
    return diagnosis.would_fail


def preside(council: Council, device: str, output_dir: str) -> Diagnosis:
    """The first rank's part: hear all, decide whether to measure, take part in it, judge."""
    heard = council.hear_all("facts", MEETING_S)
    ranks: list[Facts] = [each for each in heard if each is not None]
    findings = meeting_findings(ranks, device)
    if len(ranks) < council.world_size:
        missing = ", ".join(str(rank) for rank, each in enumerate(heard) if each is None)
        sentence = f"rank {missing} did not come within {MEETING_S:.0f} s"
        findings.append(Finding("fails", sentence, "start it, or look on its machine for why it ended"))
    is_possible = all(each.level != "fails" for each in findings)
    findings.extend(machine_findings(ranks))
    with ExitStack() as stack:
        token = ""
        if is_local(locate(output_dir)) and not ranks[0].output_error:
            folder = nearest_folder(output_dir)
            token = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".fourfold-doctor-", dir=folder)).name
        plan = Plan(is_possible, [each.rank for each in first_of_machines(ranks)], token)
        council.tell("plan", plan)
        if not is_possible:
            return Diagnosis(ranks, [], findings)
        mine = measure_in_time(council.group_store(), device, plan)
        council.tell("measured", mine)
        # once it has failed here, it will soon have failed everywhere
        measured = council.hear_all("measured", (COLLECTIVE_S if mine.error else DEADLINE_S) + LEAVING_S)
    findings.extend(measured_findings(ranks, measured))
    return Diagnosis(ranks, measured, findings)


def follow(council: Council, device: str) -> None:
    """Any other rank's part."""
    plan = council.hear("plan", 0, 2 * MEETING_S)
    if plan is not None and plan.is_possible:
        council.tell("measured", measure_in_time(council.group_store(), device, plan))
