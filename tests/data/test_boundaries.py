"""What becomes of the places where one document ends: in the batch, and in what the model does with it."""

import numpy as np
import torch

from fourfold.data.loader import IGNORED_TARGET, Batch, Boundaries, build_batch
from fourfold.data.source import Spans
from tests.tiny import built, random_tokens, tiny_model

TOKENS = np.array([[11, 12, 13, 21, 22, 31, 32, 33, 34]])
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2]])


def batch(**asked: bool) -> Batch:
    return build_batch(Spans(TOKENS, DOCUMENTS), torch.zeros(1, dtype=torch.int64), Boundaries(**asked))


def test_nothing_is_added_unless_it_is_asked_for() -> None:
    found = batch()
    assert found.positions_bt is None and found.documents_bt is None
    assert found.targets_bt.tolist() == TOKENS[:, 1:].tolist()


def test_the_first_token_of_the_next_document_is_not_a_target() -> None:
    expected = [12, 13, IGNORED_TARGET, 22, IGNORED_TARGET, 32, 33, 34]
    assert batch(masks_loss=True).targets_bt.tolist() == [expected]


def test_positions_start_again_with_every_document() -> None:
    found = batch(resets_positions=True).positions_bt
    assert found is not None and found.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]


def test_documents_are_numbered_for_attention() -> None:
    found = batch(resets_attention=True).documents_bt
    assert found is not None and found.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]


def test_masked_targets_change_no_gradient() -> None:
    """As if those positions were not in the loss at all."""
    gpt, tokens = built(tiny_model()), random_tokens(1, 8, 97)
    masked, plain = batch(masks_loss=True).targets_bt, batch().targets_bt
    with torch.no_grad():
        left_out = [gpt(tokens, plain.where(torch.arange(8) == place, IGNORED_TARGET)) for place in (2, 4)]
        difference = gpt(tokens, plain) - gpt(tokens, masked)
    assert torch.allclose(difference, sum(left_out), atol=1e-4)  # type: ignore[arg-type]


def test_attention_within_documents_sees_what_each_document_alone_would_see() -> None:
    """With positions that start again, a row of documents is the documents one by one."""
    gpt = built(tiny_model()).eval()
    documents = [random_tokens(1, length, 97, seed=length) for length in (5, 3, 8)]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    numbers = torch.cat([torch.full((1, document.shape[1]), i) for i, document in enumerate(documents)], 1)
    with torch.no_grad():
        alone = torch.cat([gpt(document) for document in documents], 1)
        together = gpt(row, positions_bt=positions, documents_bt=numbers)
        leaking = gpt(row, positions_bt=positions)
        shifted = gpt(row, documents_bt=numbers)
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(leaking[:, 5:], alone[:, 5:], atol=1e-3)
    assert not torch.allclose(shifted[:, 5:], alone[:, 5:], atol=1e-3)
    assert torch.allclose(leaking[:, :5], alone[:, :5], atol=1e-5)


def test_one_document_is_plain_causal_attention() -> None:
    gpt, tokens = built(tiny_model()).eval(), random_tokens(2, 16, 97)
    with torch.no_grad():
        assert torch.allclose(gpt(tokens, documents_bt=torch.zeros_like(tokens)), gpt(tokens), atol=1e-6)
