"""The commit of prime-rl that this backend was written against.

Invariant: the contract rests on nothing but what is named here, so an
installation that agrees with this file agrees with the backend.
"""

from __future__ import annotations

from typing import Final

COMMIT: Final = "559b44772e471d1538537b8805cc77f3824a5e64"
INSTALL: Final = f"install prime-rl at commit {COMMIT[:9]} as docs/prime-rl.md says"

# The wire type's fields travel by position: an added one at the end is harmless,
# any other change corrupts batches without an error.
MICRO_BATCH_FIELDS: Final = (
    "input_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "position_ids",
    "sequence_lengths",
    "temperatures",
    "env_names",
    "seq_lens",
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)

# sha256 of the sources that the contract rests on, by path within the package.
SOURCES: Final = {
    "configs/monitors.py": "ae0896c0fe5a5bac82ddc7f48213dbe62a00501a789d7305291cb4cdc55a45f6",
    "configs/shared.py": "ce021eadd9d4334c77548f785ccae7fec5125a0706f0307e6e22fd1a7779c7d4",
    "configs/trainer.py": "8e9dfae7baf22c7eecd0238ddde47f2f2073763b6b9ef6315a0878f9d287c4d6",
    "monitors/file.py": "df66f1e31f603a13f240a31dc93c8c08c938ebfa77ba88bb2a13f12298707334",
    "trainer/ckpt.py": "013112a122466415ee01646781ba6d59fe9c6f8fba073b859cb36be30e4a9b8c",
    "trainer/lora.py": "e25cce9c253fbb9cf6ff9c69b2e5262b5f75375869af4ec97e145346100811d6",
    "trainer/rl/data.py": "ab458295e2e86f3d3c5d635e53bf8883223a6abb43f4c9a597b829478cf3156e",
    "trainer/rl/loss.py": "102b14539a2aa7e4b807967f9c9caeaaa974373391a21602ce45b24414fb7863",
    "trainer/rl/train.py": "84a75d465b3420bd1282369855e172100827013f1208577fdb80992ac6526f0d",
    "trainer/scheduler.py": "cb68d4150641914b306572e7f75ac642ad91e9118866f045f84809736879db0b",
    "trainer/utils.py": "e5a62270af6ec8eb031043c1d4037765ef91db75bba9d05bb620b740073282e1",
    "transports/rollouts/base.py": (
        "2c411cc70e676fca06c3ac453f3598d5b9f7ba3c42b197dba78dfd34138d5ea6"
    ),
    "transports/rollouts/filesystem.py": (
        "7b9a6a39bb2f6bd01c8cad4f1010a9d2526449981d0dd83848d4e43ceb2ac4cb"
    ),
    "transports/rollouts/types.py": (
        "9833e065d3accf4e1311e8218a0b5435e1c9bfce73314fd9927ee589c7c9a63b"
    ),
    "transports/weights/filesystem.py": (
        "817edc9e964821f1904534647b30e1c72b39f993459f08f6ab19ee2cc9cf9c53"
    ),
    "utils/pathing.py": "0166118feef1750c0d7baecc081ea237c321242df9f75f3add91a43f9416a8ce",
    "utils/weights.py": "2e9485059b8ce5a934dfedd0ca0a99c5c8fd759ae01d790e838f937b6c370076",
}
