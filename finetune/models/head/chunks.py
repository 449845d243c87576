"""One chunk of the loss for torch.compile: the scores are read twice or three times, and only their gradient is written.

The eager version (head_chunks.py) writes and reads them in fp32 at every operation. Same equations here, without updates in place,
and with the label found by comparison: adding to a position would keep a compiler from fusing what is around it.
"""

import torch
from torch import Tensor

from finetune.constants import IGNORE_INDEX
from finetune.models.head_chunks import LogitTransform, widen


def compute_fused_chunk(
    scores: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    logits: LogitTransform,
    label_smoothing: float,
    grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """What `head_chunks.compute_chunk` computes."""
    transformed, capped = logits.forward(scores)
    transformed = transformed.to(widen(scores.dtype))
    total = torch.logsumexp(transformed, -1)
    trained, ids = (labels != IGNORE_INDEX).unsqueeze(1), labels.clamp(min=0).unsqueeze(1)
    of_labels = transformed.gather(1, ids).squeeze(1) - total
    if label_smoothing:
        of_labels = of_labels.lerp(transformed.mean(1) - total, label_smoothing)
    of_labels = torch.where(trained.squeeze(1), of_labels, 0.0)
    if grad_dtype is None:
        return of_labels, None
    is_label = torch.arange(scores.shape[1], device=scores.device) == ids
    probabilities = (transformed - total.unsqueeze(1)).exp()
    grad = probabilities - (1 - label_smoothing) * is_label.to(probabilities.dtype)
    if label_smoothing:
        grad = grad - label_smoothing / scores.shape[1]
    grad = torch.where(trained, logits.backward(grad, capped), 0.0)
    if token_weights is not None:
        grad = grad * token_weights.unsqueeze(1)
    return of_labels, grad.to(grad_dtype)
