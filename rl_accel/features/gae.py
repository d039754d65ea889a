"""Chunk-scan GAE in place of the token-by-token loop. Lossless."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE_AUTOMATIC, Feature, SlimeHooks, flag

BACKENDS = ("auto", "naive", "chunk", "numba", "triton")


@dataclass
class GaeFlags:
    """Flags of ``rl_accel.gae``."""

    enable: bool | None = flag(None, ENABLE_AUTOMATIC)
    backend: str = flag("auto", "kernel; auto is numba on CPU tensors and triton on CUDA tensors", choices=BACKENDS)
    chunk_size: int | None = flag(None, "tokens a chunk for backend=chunk; null chooses", minimum=1)
    threads: int | None = flag(None, "CPU threads of the numba kernel; null: usable cores, at most 16", minimum=1)


GAE = Feature(
    name="gae",
    summary="GAE as a scan instead of a loop over tokens",
    flags=GaeFlags,
    lossless=True,
    automatic=True,
    switches={"verl": ("rl_accel.patches.verl.gae",), "slime": ("rl_accel.patches.slime.gae",)},
    slime=SlimeHooks({"custom_megatron_init_path": "rl_accel.integrations.slime.hooks.megatron_init"}),
)
