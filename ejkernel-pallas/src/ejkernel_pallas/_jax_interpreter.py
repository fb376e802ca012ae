"""State of JAX's Pallas interpreters, from private modules of jax 0.11 and 0.12. Nothing else here imports those.

Both interpreters are imported when they are asked for races: they import Mosaic, and Mosaic GPU takes a second.
"""

from __future__ import annotations

from jax._src import config


def gpu_interpreter_is_on() -> bool:
    """Whether kernels traced now run in the interpreter, as inside `mosaic_gpu.force_gpu_interpret_mode(...)`.

    The TPU interpreter uses the same setting and does not count.
    """
    setting = getattr(config, "pallas_tpu_interpret_mode_context_manager", None)
    return setting is not None and type(setting.value).__name__ == "InterpretGPUParams"


def gpu_races() -> bool:
    """Whether the last kernel interpreted for a GPU with `detect_races` had a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def tpu_races() -> bool:
    """Whether the last kernel interpreted for a TPU with `detect_races` had a race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found
