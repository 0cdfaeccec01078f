"""A replica for one question: what an engine makes of a checkpoint's adapter.

Invariants:
- The engine is ended on every way out, an interrupt and a deadline included.
- The base model is asked before the adapter is loaded, as a replica does: later its
  answers may be mixed with the adapter's on CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.adapter_files import policy_name
from actors.engine_command import BASE_MODEL_NAME
from actors.replica import Replica
from rl.agent.client import EngineClient
from rl.errors import DeadlineExceeded
from rl.records import AdapterBytes
from rl.serving_config import ServingConfig


async def engine_logprobs(
    config: ServingConfig,
    model_dir: Path,
    adapter: AdapterBytes,
    prompts: Sequence[Sequence[int]],
    run_dir: Path,
    deadline_s: float,
    note: Callable[[str], None],
) -> tuple[list[list[float]], list[list[float]]]:
    """Logprobs of `prompts` by a replica of `config`: under the adapter, and without it.

    Args:
        config: whose engine and model sections count; `engine.probe_tolerance` is how far
            the engine may be off before it is refused instead of measured.
        model_dir: base weights.
        adapter: what is asked about.
        prompts: token ids; logprobs are of all but each prompt's first.
        run_dir: the engine's log goes below it.
        deadline_s: of everything together but the engine's end, s.
        note: told of each step.

    Raises:
        EngineError: the engine did not start, died, or does not serve the adapter.
        DeadlineExceeded: `deadline_s` is over.
    """
    replica = Replica(0, config, model_dir, run_dir)
    client = EngineClient(replica.api_key)
    limit = asyncio.timeout(deadline_s)
    began = time.monotonic()
    try:
        async with limit:
            note(f"starting a {config.engine.kind} replica on {config.engine.device} ...")
            url = await replica.start()
            note(f"it serves after {time.monotonic() - began:.0f} s; loading the adapter ...")

            async def ask(name: str) -> list[list[float]]:
                timeout = config.engine.control_timeout_s
                return [await client.logprobs(url, name, p, timeout) for p in prompts]

            base = await ask(BASE_MODEL_NAME)
            await replica.load(_unproven(adapter))
            return await ask(policy_name(adapter.version)), base
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(
            f"no answer within {deadline_s:g} s", repr(replica), "give it longer by --deadline"
        ) from None
    finally:
        await client.close()
        await asyncio.shield(replica.stop())


def _unproven(adapter: AdapterBytes) -> AdapterBytes:
    """The adapter without the trainer's base: that it changes nothing is told, not refused."""
    probe = adapter.probe.model_copy(update={"base_logprobs": []})
    return adapter.model_copy(update={"probe": probe})
