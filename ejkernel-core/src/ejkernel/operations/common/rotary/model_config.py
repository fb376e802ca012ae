"""What the configuration of a public model says of its rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.errors import invalid


def rotation_of_layer(config: Mapping[str, Any], layer_type: str | None) -> tuple[dict[str, Any], float]:
    """Its scaling, and its base."""
    parameters: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    layers = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    local = config.get("rope_local_base_freq") or config.get("swa_rope_theta")
    if local is not None and not layers:  # Gemma 3 and MiMo before transformers 5
        layers = {"full_attention": parameters, "sliding_attention": {"rope_theta": local}}
    if layers:
        if layer_type is None or layer_type not in layers:
            raise invalid("layer_type", layer_type, f"one of {', '.join(layers)}: the configuration has a rotation for each")
        parameters = dict(layers[layer_type])
    elif layer_type is not None:
        raise invalid("layer_type", layer_type, "None: the configuration has one rotation for all layers")
    base = parameters.pop("rope_theta", None) or config.get("rope_theta") or config.get("rotary_emb_base")
    if base is None:
        remedy = "{**config, 'rope_theta': 10000.0} unless the model has another default"
        if "text_config" in config:
            remedy = "pass config['text_config']"
        raise invalid("config", "no rope_theta", "it, in rope_parameters or beside it", remedy=remedy)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    return parameters, base


def head_size_of(config: Mapping[str, Any], layer_type: str | None) -> int:
    names = ("global_head_dim",) if layer_type == "full_attention" else ()
    for name in (*names, "head_dim"):
        if config.get(name) is not None:
            return config[name]
    if config.get("hidden_size") is None or config.get("num_attention_heads") is None:
        raise invalid("head_size", None, "a number, or head_dim or hidden_size and num_attention_heads in config")
    return config["hidden_size"] // config["num_attention_heads"]
