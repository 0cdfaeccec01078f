"""The base model with its adapter: logprobs, probes and adapter files.

Invariants:
- A fresh adapter is the base model exactly: B = 0, A drawn from the campaign's
  seed without touching the process's random state.
- Adapter weights are float32 whatever the base's dtype: bfloat16 would round
  small updates away.
- The head runs only for positions that predict a sampled token, in chunks (see `head`).
- Exported files name the model, not a path of this machine, and depend on the
  weights alone: equal weights, equal bytes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config import CampaignConfig
from rl.errors import ConfigurationError, EvidenceError
from rl.learner import attention
from rl.learner.head import score
from rl.learner.packing import MicroBatch, TrainingSequence, pack
from rl.learner.sharding import shard_layers
from rl.records import Probe

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PROBE_TOKENS = 32
# Models pad their vocabulary beyond the tokenizer's; an engine refuses ids up there.
PROBE_VOCABULARY_SHARE = 0.9
# Rounding between the selected-position head and the model's own forward, nats.
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class TokenScores:
    """What the policy says about the predicted tokens of a micro-batch."""

    logprobs: Tensor  # (n,) float32, nats, at the given temperature, differentiable
    entropy: Tensor  # (n,) float32, nats, of the same distributions, detached


class Policy:
    """A causal language model with a LoRA adapter, on one device or in pieces on several."""

    def __init__(self, config: CampaignConfig, model_dir: Path, *, shard: bool = False) -> None:
        """Load the base from `model_dir` and give it a fresh adapter.

        Args:
            config: the campaign's.
            model_dir: base weights.
            shard: keep this rank's piece of them alone; see `sharding`.

        Raises:
            ConfigurationError: no loadable model there, or one whose logits are
                not its head applied to its decoder's output.
        """
        self.device = torch.device(config.trainer.torch_device)
        # Pieces are cut on the CPU: the whole may not fit into one device.
        base = load_base(model_dir, config, share_prefix=True, device="cpu" if shard else None)
        self.shares_prefixes = attention.supports_sharing(base.config)
        self._model = _with_adapter(base, config)
        self._base: Any = self._model.get_base_model()
        self._decoder: Any = self._base.get_decoder()
        self._head: Any = self._base.get_output_embeddings()
        self._probe_ids = probe_token_ids(int(base.config.vocab_size))
        self._probe_base: Probe | None = None
        if config.trainer.gradient_checkpointing:
            _checkpoint_gradients(self._base)
        if shard:
            shard_layers(self._decoder, self.device)
            self._model.to(self.device)
        self._check_head(model_dir)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's weights, in a fixed order."""
        return [weight for _, weight in self._named_parameters()]

    def scores(self, batch: MicroBatch, temperature: float) -> TokenScores:
        """Logprobs and entropies of the batch's targets, logits divided by `temperature`."""
        states = self._hidden(batch).index_select(0, batch.sources)
        return TokenScores(*score(states, batch.targets, self._head, temperature))

    def keep_step(self, backward_passes: int) -> None:
        """Take part in a pass of other ranks, with nothing to compute and nothing to add."""
        device = self.device
        row = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.set_grad_enabled(backward_passes > 0):
            hidden = self._decoder(
                input_ids=row.unsqueeze(0), position_ids=row.unsqueeze(0), use_cache=False
            ).last_hidden_state
        for _ in range(backward_passes):
            torch.autograd.grad(hidden.sum(), self.parameters, retain_graph=True, allow_unused=True)

    def probe(self) -> Probe:
        """Logprobs of the fixed probe tokens under base plus adapter, temperature 1."""
        return Probe(
            token_ids=self._probe_ids,
            logprobs=token_logprobs(self._model, self._probe_ids),
            base_logprobs=self.probe_base().logprobs,
        )

    def probe_base(self) -> Probe:
        """The same under the base alone, which never changes."""
        if self._probe_base is None:
            with self._model.disable_adapter():
                logprobs = token_logprobs(self._model, self._probe_ids)
            self._probe_base = Probe(token_ids=self._probe_ids, logprobs=logprobs)
        return self._probe_base

    def adapter_files(self) -> dict[str, bytes]:
        """The adapter as PEFT's own files."""
        with tempfile.TemporaryDirectory() as folder:
            # "auto" may ask the model hub whether the vocabulary was resized; it was not.
            self._model.save_pretrained(folder, save_embedding_layers=False)
            values = json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            weights = (Path(folder) / ADAPTER_WEIGHTS).read_bytes()
        # PEFT keeps the layers' names in a set, whose order changes between processes.
        values["target_modules"] = sorted(values["target_modules"])
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        return {ADAPTER_CONFIG: text.encode(), ADAPTER_WEIGHTS: weights}

    def load_adapter(self, files: dict[str, bytes]) -> None:
        """Replace the adapter's weights by those of `adapter_files`.

        Raises:
            EvidenceError: other layers or shapes than this adapter's; nothing is replaced.
        """
        given = load_tensors(files[ADAPTER_WEIGHTS])
        wanted: dict[str, Tensor] = peft.get_peft_model_state_dict(
            self._model, save_embedding_layers=False
        )
        if {k: v.shape for k, v in given.items()} != {k: v.shape for k, v in wanted.items()}:
            raise EvidenceError(
                "holds other layers or shapes than this model's adapter",
                ADAPTER_WEIGHTS,
                "resume with the model and trainer.lora that made it",
            )
        peft.set_peft_model_state_dict(self._model, given)

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        named: list[tuple[str, torch.nn.Parameter]] = sorted(
            self._model.named_parameters(), key=lambda item: item[0]
        )
        return [(name, weight) for name, weight in named if weight.requires_grad]

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Decoder output of the batch's row, shape (N, width)."""
        if not self.shares_prefixes:
            return self._hidden_by_rows(batch)
        output = self._decoder(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            tree=attention.TreeAttention(batch.segments, self.device),
            use_cache=False,
        )
        return output.last_hidden_state.squeeze(0)

    def _hidden_by_rows(self, batch: MicroBatch) -> Tensor:
        """The same for any kind of layer, if the batch's sequences share nothing.

        They become rows that are padded on the right: no token sees what comes after it,
        so no mask is needed.
        """
        lengths = [segment.stop - segment.start for segment in batch.segments]
        rows = pad_sequence(list(batch.token_ids.split(lengths)), batch_first=True)
        hidden = self._decoder(input_ids=rows, use_cache=False).last_hidden_state
        return torch.cat([row[:length] for row, length in zip(hidden, lengths, strict=True)])

    def _check_head(self, model_dir: Path) -> None:
        ids, unknown = self._probe_ids, [0.0] * (len(self._probe_ids) - 1)
        probe = TrainingSequence(ids, [*range(1, len(ids))], unknown, advantage=0.0)
        (batch,) = pack([probe], len(ids), share_prefix=False)
        batch = batch.to(self.device)
        with torch.no_grad():
            ours = self.scores(batch, temperature=1.0).logprobs
        own = torch.tensor(token_logprobs(self._model, self._probe_ids), device=self.device)
        largest = float((ours - own).abs().max())
        if not largest <= HEAD_TOLERANCE[self._base.dtype]:
            raise ConfigurationError(
                f"the model's logits are not its head applied to its decoder "
                f"(logprobs differ by {largest:.3g} nats)",
                str(model_dir),
                "this architecture scales or caps its logits; choose another model",
            )


def load_base(
    model_dir: Path, config: CampaignConfig, share_prefix: bool, device: str | None = None
) -> Any:
    """The base model, frozen, without dropout.

    Args:
        model_dir: where it lies.
        config: the campaign's.
        share_prefix: with attention over token trees, if its layers allow it.
        device: None: `trainer.torch_device`; "auto": layers spread over all of its kind.

    Raises:
        ConfigurationError: no loadable model at `model_dir`.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigurationError(
            "no model directory", str(model_dir), "make it with `python -m rl.prepare model`"
        )
    attention.register()
    shape = AutoConfig.from_pretrained(str(model_dir))
    wanted = device or config.trainer.torch_device
    spread = wanted == "auto"
    split = share_prefix and attention.supports_sharing(shape)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=attention.ATTENTION if split else "sdpa",
            attention_dropout=0.0,
            device_map="auto" if spread else None,
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the model can't be loaded: {error}", str(model_dir)) from error
    model.requires_grad_(False)
    return model.eval() if spread else model.to(wanted).eval()


def probe_token_ids(vocabulary: int) -> list[int]:
    """`PROBE_TOKENS` ids spread evenly over the vocabulary, in a scattered order."""
    usable = max(1, int(vocabulary * PROBE_VOCABULARY_SHARE))
    stride = 11  # coprime to the number of tokens, so each slot occurs once
    slots = [(index * stride) % PROBE_TOKENS for index in range(PROBE_TOKENS)]
    return [(2 * slot + 1) * usable // (2 * PROBE_TOKENS) for slot in slots]


def token_logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """Logprobs of `token_ids[1:]` by the model's own forward, temperature 1, nats."""
    ids = torch.tensor([token_ids], device=model.device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:].unsqueeze(-1))
    return [float(value) for value in logprobs.squeeze(-1)]


def _with_adapter(base: Any, config: CampaignConfig) -> Any:
    lora = config.trainer.lora
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # a float works
        target_modules=lora.target,
        lora_dropout=0.0,
        bias="none",
    )
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(config.seed)
        # float32 adapters by request, not by PEFT's default.
        model: Any = peft.get_peft_model(base, settings, autocast_adapter_dtype=True)
    model.peft_config["default"].base_model_name_or_path = config.model.name
    return model.eval()


def _checkpoint_gradients(base: Any) -> None:
    """Recompute activations in the backward pass; transformers does so in train mode only."""
    base.activation_checkpointing_enable({"use_reentrant": False})
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    base.train()
