"""Batches on their way to the device beside what it computes.

The loop is always a step ahead of a GPU: it takes the next batch while the step before is being computed. A copy on a
stream of its own does not queue behind that step and is over before the batch is needed, so nothing is taken from the
loader before its time.
"""

from collections.abc import Callable

import torch

from fourfold.data.loader import Batch
from fourfold.train.step import to_device


def build_sender(device: torch.device) -> Callable[[Batch], Batch]:
    """What brings a pinned batch to the device; on a CPU it is there already."""
    if device.type != "cuda":
        return lambda batch: batch
    aside = torch.cuda.Stream(device)

    def send(batch: Batch) -> Batch:
        # the pinned memory may be let go of at once: its allocator knows of the copy and waits for it
        with torch.cuda.stream(aside):
            sent = to_device(batch, device)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(aside)
        for tensor in sent:
            if tensor is not None:
                # it belongs to the other stream, which must not have its memory again before this one is done with it
                tensor.record_stream(computing)
        return sent

    return send
