"""The trainer's logprobs of the probe, computed beside a trainer that can't be asked.

Invariants:
- The adapter is loaded through PEFT's own loader from the very bytes that are
  published, so the probe proves those bytes.
- Every weight of the model's adapter comes from the files; none is left as PEFT
  made it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load as load_tensors

from rl.config import CampaignConfig
from rl.errors import TrainerError
from rl.learner.policy import load_base, probe_token_ids, token_logprobs
from rl.learner.prime.adapter import WEIGHTS
from rl.records import Probe


class ProbeModel:
    """Base weights and one adapter, on `trainer.prime.probe_device`."""

    def __init__(self, config: CampaignConfig, model_dir: Path) -> None:
        """Load the base.

        Raises:
            ConfigurationError: it can't be loaded.
        """
        if config.trainer.torch_device == "cpu":
            torch.set_num_threads(config.trainer.threads)
        # As a checkpoint is verified: one way of computing, one result.
        self._base: Any = load_base(model_dir, config, share_prefix=False)
        self._ids = probe_token_ids(int(self._base.config.vocab_size))
        self._base_logprobs = token_logprobs(self._base, self._ids)
        self._model: Any = None

    def probe(self, files: dict[str, bytes]) -> Probe:
        """Logprobs under base and adapter.

        Raises:
            TrainerError: the adapter has other weights than the model has layers for.
        """
        tensors = load_tensors(files[WEIGHTS])
        if self._model is None:
            self._model = self._wrapped(files)
        wanted = peft.get_peft_model_state_dict(self._model, save_embedding_layers=False)
        given = {name: tensor.shape for name, tensor in tensors.items()}
        if given != {name: tensor.shape for name, tensor in wanted.items()}:
            odd = sorted(set(given) ^ set(wanted)) or sorted(
                name for name in given if given[name] != wanted[name].shape
            )
            raise TrainerError(
                f"the broadcast adapter does not fit the model, at {odd[0]}",
                WEIGHTS,
                "the model's layers have other names in prime-rl; choose another model",
            )
        peft.set_peft_model_state_dict(self._model, tensors)
        return Probe(
            token_ids=self._ids,
            logprobs=token_logprobs(self._model, self._ids),
            base_logprobs=self._base_logprobs,
        )

    def _wrapped(self, files: dict[str, bytes]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return peft.PeftModel.from_pretrained(self._base, folder).eval()
