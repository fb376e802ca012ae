"""What jax (0.11, 0.12) says of its interpreters for Pallas in private modules alone. Nothing else here imports those."""

from __future__ import annotations


def gpu_interpreter_is_on() -> bool:
    """Whether kernels traced now run in the interpreter, as inside `mosaic_gpu.force_gpu_interpret_mode(...)`.

    TPU's interpreter is asked for through the same setting and is no answer here.
    """
    from jax._src import config

    setting = getattr(config, "pallas_tpu_interpret_mode_context_manager", None)
    return setting is not None and type(setting.value).__name__ == "InterpretGPUParams"


def gpu_races() -> bool:
    """Whether the last kernel that was interpreted with `detect_races` for a GPU had any."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def tpu_races() -> bool:
    """The same for a TPU."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found
